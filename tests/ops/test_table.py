"""Ops of the native store match a NumPy reference.

Covers lookups, combiners, update rules, access counts and errors.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from all_rules import ALL_RULES, name_of
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf import initializers, optimizers
from slipstream_tf.config import Retention, Storage, Table
from slipstream_tf.ops import _loader, features
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.tables import NativeStore

NORMAL = initializers.RandomNormal(0.0, 1.0)


def make_store(dims=(4,), optimizer=None, **table):
    tables = [
        Table(f"t{i}", dim, initializer=initializers.RandomNormal(0.0, 1.0, i), **table)
        for i, dim in enumerate(dims)
    ]
    return NativeStore(tables, optimizer or optimizers.SGD(0.1))


def one_table(combiner="sum"):
    return [FeatureSpec("f", "t0", combiner)]


def lookup(store, inputs, specs, training=True, stacked=False, weights=None):
    packed = features.pack(inputs, specs, weights)
    return store.lookup(packed, training, stacked)


def row_of(store, table, key):
    return store.gather(table, [key])[0].numpy()[0]


def reference_pool(store, table, bags, weights, combiner, dim):
    """Pools bags (lists of keys) in float64."""
    pooled = np.zeros((len(bags), dim))
    for i, (keys, factors) in enumerate(zip(bags, weights, strict=True)):
        factors = np.asarray(factors, np.float64)
        total = sum((w * row_of(store, table, k) for k, w in zip(keys, factors, strict=True)), 0.0)
        divisor = {"sum": 1.0, "mean": factors.sum(), "sqrtn": np.sqrt((factors**2).sum())}
        pooled[i] = total / divisor[combiner] if keys and divisor[combiner] else 0.0
    return pooled


bags_strategy = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0.25, 4.0, width=32)), min_size=0, max_size=5),
    min_size=0,
    max_size=8,
)


@settings(max_examples=40)
@given(
    bags=bags_strategy, combiner=st.sampled_from(["sum", "mean", "sqrtn"]), weighted=st.booleans()
)
def test_ragged_and_padded_bags_equal_numpy(bags, combiner, weighted):
    store = make_store()
    keys = [[k for k, _ in bag] for bag in bags]
    weights = [[w if weighted else 1.0 for _, w in bag] for bag in bags]
    specs = one_table(combiner)
    ragged = tf.ragged.constant(keys, dtype=tf.int64, ragged_rank=1)
    ragged_weights = tf.ragged.constant(weights, dtype=tf.float32, ragged_rank=1)
    given_weights = {"f": ragged_weights} if weighted else None
    (pooled,), _ = lookup(store, {"f": ragged}, specs, weights=given_weights)
    expected = reference_pool(store, "t0", keys, weights, combiner, 4)
    np.testing.assert_allclose(pooled.numpy(), expected, rtol=2e-5, atol=2e-5)

    padded_weights = {"f": ragged_weights.to_tensor(0.0)} if weighted else None
    padded = ragged.to_tensor(features.PADDING_KEY)
    for training in (False, True):
        (again,), _ = lookup(store, {"f": padded}, specs, training, weights=padded_weights)
        np.testing.assert_allclose(again.numpy(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_key_matrix_has_one_feature_per_column(stacked):
    store = make_store(dims=(3, 3))
    specs = [FeatureSpec("a", "t0"), FeatureSpec("b", "t1"), FeatureSpec("c", "t0")]
    keys = np.array([[1, 2, 3], [4, 2, 1]])
    pooled, _ = lookup(store, keys, specs, stacked=stacked)
    columns = [pooled[0][:, f] for f in range(3)] if stacked else pooled
    for column, spec, values in zip(columns, specs, keys.T, strict=True):
        for vector, key in zip(column.numpy(), values, strict=True):
            np.testing.assert_array_equal(vector, row_of(store, spec.table, int(key)))
    assert store.size("t0") == 3
    assert store.export_table("t0")["counts"].tolist() == [2.0, 1.0, 1.0]


def reference_update(optimizer, row, slots, gradient, step):
    """Updates one row in float64 and returns the new row and slots."""
    lr = optimizer.learning_rate
    if isinstance(optimizer, optimizers.RowWiseAdagrad):
        slots = slots + np.mean(gradient**2)
        return row - lr * gradient / np.sqrt(slots + optimizer.epsilon), slots
    if isinstance(optimizer, optimizers.Adagrad):
        slots = slots + gradient**2
        return row - lr * gradient / np.sqrt(slots + optimizer.epsilon), slots
    if isinstance(optimizer, optimizers.Adam):
        m, v = np.split(slots[: 2 * row.size], 2)
        m = optimizer.beta_1 * m + (1 - optimizer.beta_1) * gradient
        v = optimizer.beta_2 * v + (1 - optimizer.beta_2) * gradient**2
        shares = slots[2 * row.size :]
        if optimizer.bias_correction == "row":
            betas = np.array([optimizer.beta_1, optimizer.beta_2])
            shares = 1 - betas * (1 - shares)
            rate = lr * np.sqrt(shares[1]) / shares[0]
        else:
            rate = lr * np.sqrt(1 - optimizer.beta_2**step) / (1 - optimizer.beta_1**step)
        slots = np.concatenate([m, v, shares])
        return row - rate * m / (np.sqrt(v) + optimizer.epsilon), slots
    if isinstance(optimizer, optimizers.RowWiseAdam):
        m, v = slots[:-1], slots[-1:]
        m = optimizer.beta_1 * m + (1 - optimizer.beta_1) * gradient
        v = optimizer.beta_2 * v + (1 - optimizer.beta_2) * np.mean(gradient**2)
        rate = lr * np.sqrt(1 - optimizer.beta_2**step) / (1 - optimizer.beta_1**step)
        return row - rate * m / (np.sqrt(v) + optimizer.epsilon), np.concatenate([m, v])
    if isinstance(optimizer, optimizers.Ftrl):
        total, linear = np.split(slots, 2)
        after = total + gradient**2
        linear = linear + gradient - (np.sqrt(after) - np.sqrt(total)) / lr * row
        return -linear / (np.sqrt(after) / lr), np.concatenate([after, linear])
    if optimizer.momentum:
        slots = optimizer.momentum * slots - lr * gradient
        if optimizer.nesterov:
            return row + optimizer.momentum * slots - lr * gradient, slots
        return row + slots, slots
    return row - lr * gradient, slots


@pytest.mark.parametrize("optimizer", ALL_RULES, ids=name_of)
def test_rules_sum_duplicates_then_update_once(optimizer):
    dim, batch = 5, 64
    store = make_store((dim,), optimizer)
    specs = one_table()
    rng = np.random.default_rng(0)
    rows = {k: row_of(store, "t0", k).astype(np.float64) for k in range(20)}
    slots = {k: optimizer.initial_slots(dim).astype(np.float64) for k in range(20)}
    for step in range(1, 6):
        keys = rng.integers(0, 20, batch)
        gradient = rng.normal(size=(batch, dim)).astype(np.float32)
        _, plan = lookup(store, {"f": keys}, specs)
        store.apply_gradients(plan, [tf.constant(gradient)])
        for k in np.unique(keys):
            total = gradient[keys == k].astype(np.float64).sum(axis=0)
            rows[k], slots[k] = reference_update(optimizer, rows[k], slots[k], total, step)
    exported = store.export_table("t0")
    np.testing.assert_allclose(
        exported["rows"], [rows[k] for k in exported["keys"]], rtol=2e-4, atol=2e-5
    )
    np.testing.assert_allclose(
        exported["slots"], [slots[k] for k in exported["keys"]], rtol=2e-4, atol=2e-5
    )
    assert exported["steps"].tolist() == [5, 5]


def test_bag_gradients_include_weight_and_combiner():
    store = make_store((2,))
    specs = one_table("mean")
    before = {k: row_of(store, "t0", k) for k in (1, 2)}
    bags = tf.ragged.constant([[1, 2, 1], [], [2]], dtype=tf.int64)
    weights = tf.ragged.constant([[1.0, 2.0, 1.0], [], [3.0]], dtype=tf.float32)
    _, plan = lookup(store, {"f": bags}, specs, weights={"f": weights})
    gradient = np.array([[1.0, -1.0], [100.0, 100.0], [10.0, 0.0]], np.float32)
    store.apply_gradients(plan, [tf.constant(gradient)])
    expected_1 = before[1] - 0.1 * (2 / 4) * gradient[0]
    expected_2 = before[2] - 0.1 * ((2 / 4) * gradient[0] + gradient[2])
    np.testing.assert_allclose(row_of(store, "t0", 1), expected_1, rtol=1e-6)
    np.testing.assert_allclose(row_of(store, "t0", 2), expected_2, rtol=1e-6)


@settings(max_examples=25)
@given(
    batches=st.lists(st.lists(st.integers(-50, 50), max_size=30), min_size=1, max_size=6),
    factor=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_access_counts_are_exact_and_decay(batches, factor):
    store = make_store()
    counts: dict[int, float] = {}
    for keys in batches:
        specs = [FeatureSpec("f", "t0", padding_key=None)]
        lookup(store, {"f": np.array(keys, np.int64)}, specs)
        lookup(store, {"f": np.array(keys, np.int64)}, specs, training=False)
        for key in keys:
            counts[key] = counts.get(key, 0.0) + 1.0
        store.decay_counts(factor)
        counts = {key: count * factor for key, count in counts.items()}
    keys, values = store.hot_keys("t0", 1000)
    expected = sorted((-c, k) for k, c in counts.items() if c > 0)
    assert list(zip((-values).tolist(), keys.tolist(), strict=True)) == expected
    for k in (0, 7, 1000):
        keys, values = store.hot_keys("t0", k, by_key=True)
        by_key = sorted((key, -count) for count, key in expected[:k])
        assert list(zip(keys.tolist(), values.tolist(), strict=True)) == by_key


def test_statistics_report_size_and_load():
    store = make_store()
    assert store.statistics("t0").rows == store.statistics("t0").index_places == 0
    for count in (100, 20_000):
        lookup(store, {"f": np.arange(count)}, one_table())
        found = store.statistics("t0")
        assert found.rows == count
        # The index is at most 80% full. Small shards double and larger shards grow by a quarter.
        assert found.rows / 0.8 <= found.index_places <= 4 * found.rows
        assert found.allocated_bytes >= found.rows * 4 * 4 + found.index_places * 16


def test_measure_returns_rows_and_drifts():
    store = make_store()
    _, plan = lookup(store, {"f": [1, 2]}, one_table())
    snapshot, _ = store.gather("t0", [1, 2, 3])
    store.apply_gradients(plan, [tf.constant([[1.0, -2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])])
    for metric, expected in (("linf", 0.2), ("l2", 0.1 * 5**0.5)):
        rows, found, drift = store.measure("t0", [1, 2, 3], snapshot, metric)
        np.testing.assert_array_equal(rows, store.gather("t0", [1, 2, 3])[0])
        np.testing.assert_array_equal(found, [True, True, False])
        np.testing.assert_allclose(drift, [expected, 0.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize("metric", ["linf", "l2"])
def test_measure_without_keys_is_empty(metric):
    store = make_store()
    rows, found, drift = store.measure("t0", np.empty(0, np.int64), tf.zeros([0, 4]), metric)
    assert (rows.shape, found.shape, drift.shape) == ((0, 4), (0,), (0,))


def test_measure_rejects_invalid_arguments():
    store = make_store()
    with pytest.raises(tf.errors.InvalidArgumentError, match="keys of table 't0' has shape"):
        store.measure("t0", [[1, 2]], tf.zeros([2, 4]), "linf")
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"'t0' has shape \[2,3\]; expected \[2,4\]"
    ):
        store.measure("t0", [1, 2], tf.zeros([2, 3]), "linf")
    with pytest.raises(ValueError, match=r"'cosine'.*'linf', 'l2'"):
        store.measure("t0", [1], tf.zeros([1, 4]), "cosine")


@pytest.mark.parametrize("eviction", ["lfu", "lru"])
def test_bounded_table_stays_within_its_capacity(eviction):
    store = make_store(retention=Retention(50, eviction))
    rng = np.random.default_rng(1)
    for _ in range(40):
        keys = rng.integers(0, 500, 30)
        (pooled,), plan = lookup(store, {"f": keys}, one_table())
        present, found = store.gather("t0", keys)
        assert found.numpy().all(), "a key of the batch was evicted"
        np.testing.assert_array_equal(pooled.numpy(), present.numpy())
        store.apply_gradients(plan, [tf.ones([30, 4])])
        assert store.size("t0") <= 50
    assert store.statistics("t0").evicted_rows > 0
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"'t0'.*capacity is 50"):
        lookup(store, {"f": np.arange(51)}, one_table())


def test_export_and_import_round_trip():
    rule = optimizers.Adam(0.05)
    first, second = make_store(optimizer=rule), make_store(optimizer=rule)

    def train(store, step):
        _, plan = lookup(store, {"f": np.arange(step, step + 10)}, one_table())
        store.apply_gradients(plan, [tf.ones([10, 4])])

    train(first, 0)
    train(first, 1)
    saved = first.export_table("t0")
    second.import_table("t0", saved)
    for store in (first, second):
        train(store, 2)
    a, b = first.export_table("t0"), second.export_table("t0")
    assert all(np.array_equal(a[name], b[name]) for name in a)
    broken = {**saved, "rows": saved["rows"][:, :3]}
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"'t0' has shape"):
        second.import_table("t0", broken)
    with pytest.raises(ValueError, match=r"slots"):
        second.import_table("t0", {k: v for k, v in saved.items() if k != "slots"})


def test_function_accepts_any_batch_size_without_retracing():
    store = make_store()
    specs = one_table()
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(keys):
        traces.append(1)
        (pooled,), plan = lookup(store, {"f": keys}, specs)
        store.apply_gradients(plan, [pooled])
        return pooled

    for n in (3, 0, 7):
        assert step(tf.range(n, dtype=tf.int64)).shape == (n, 4)
    assert len(traces) == 1
    assert store.size("t0") == 7


def bad_inputs():
    ragged = tf.RaggedTensor.from_row_splits(
        tf.constant([1, 2, 3], tf.int64), tf.constant([0, 2, 1, 3], tf.int64), validate=False
    )
    negative = tf.RaggedTensor.from_row_splits(
        tf.constant([1, 2], tf.int64), tf.constant([-1, 2], tf.int64), validate=False
    )
    beyond = tf.RaggedTensor.from_row_splits(
        tf.constant([1, 2], tf.int64), tf.constant([0, 5], tf.int64), validate=False
    )
    op_error = tf.errors.InvalidArgumentError
    return [
        (
            "decreasing splits",
            {"f": ragged},
            None,
            op_error,
            r"splits\[2\] .*'f' is 1; expected at least 2",
        ),
        ("negative splits", {"f": negative}, None, op_error, r"splits\[0\] .*'f' is -1"),
        ("splits beyond", {"f": beyond}, None, op_error, r"splits\[1\] .*'f' is 5; expected 2"),
        (
            "float keys",
            {"f": np.array([1.0])},
            None,
            ValueError,
            "float64.*'f'.*integers or strings",
        ),
        ("rank 3", {"f": np.zeros((1, 1, 1), np.int64)}, None, ValueError, "'f'"),
        (
            "short weights",
            {"f": np.array([[1, 2]])},
            {"f": np.array([[1.0]])},
            op_error,
            r"\[1,1\].*\[1,2\]",
        ),
        ("another feature", {"g": np.array([1])}, None, ValueError, "'g'"),
        ("missing feature", {}, None, ValueError, "missing features: 'f'"),
    ]


@pytest.mark.parametrize("case", bad_inputs(), ids=lambda case: case[0])
@pytest.mark.parametrize("training", [True, False])
def test_invalid_input_raises_clear_error(case, training):
    _, inputs, weights, error, message = case
    store = make_store()
    with pytest.raises(error, match=message):
        lookup(store, inputs, one_table(), training, weights=weights)
    assert store.size("t0") == 0


def test_different_batch_sizes_raise():
    store = make_store()
    specs = [FeatureSpec("f", "t0"), FeatureSpec("g", "t0")]
    inputs = {"f": np.arange(3), "g": np.arange(4)}
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="'g' has 4 examples; expected 3, as in feature 'f'"
    ):
        lookup(store, inputs, specs)


def test_nan_gradient_error_names_position_and_changes_nothing():
    store = make_store()
    _, plan = lookup(store, {"f": np.array([5, 6])}, one_table())
    before = store.export_table("t0")["rows"]
    gradient = np.ones((2, 4), np.float32)
    gradient[1, 2] = np.nan
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"table 't0'\) is nan in example 1, element 2"
    ):
        store.apply_gradients(plan, [tf.constant(gradient)])
    np.testing.assert_array_equal(store.export_table("t0")["rows"], before)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"shape \[2,3\]"):
        store.apply_gradients(plan, [tf.ones([2, 3])])


ADAGRAD = optimizers.Adagrad(0.1)


@pytest.mark.parametrize(
    ("optimizer", "settings", "weights", "gradient", "message"),
    [
        (optimizers.SGD(0.1), {}, np.nan, 0.0, r"weight of the key in .* example 1, .* is nan"),
        (optimizers.SGD(0.1), {}, np.inf, 1.0, r"weight of the key in .* example 1, .* is inf"),
        (ADAGRAD, {}, 1e30, 1e10, r"times the gradient 1\d+\.0+ overflows"),
        (optimizers.SGD(0.1), {}, 1.0, 3e38, r"sum of the gradients of its 2 uses.* overflows"),
        (optimizers.SGD(10.0), {}, 1.0, 1e38, r"value 0 becomes -inf"),
        (ADAGRAD, {}, 1.0, 1e20, r"optimizer slot 0 becomes inf"),
        (optimizers.Adam(0.1), {}, 1.0, 1e20, r"optimizer slot 4 becomes inf"),
        (
            optimizers.SGD(1.0),
            {"storage": Storage(dtype="float16")},
            1.0,
            4e4,
            r"at most 65504 \(float16\)",
        ),
        (
            optimizers.SGD(1.0),
            {"storage": Storage(dtype="bfloat16")},
            1.0,
            1.7e38,
            r"at most 3.38e38 \(bfloat16\)",
        ),
        (optimizers.Adagrad(0.1, l2=0.1, decay="all"), {}, 1.0, 1e20, r"slot 0 becomes inf"),
    ],
)
def test_update_that_overflows_raises_and_changes_nothing(
    optimizer, settings, weights, gradient, message
):
    store = make_store(optimizer=optimizer, **settings)
    keys = np.array([[5, 6], [5, 7]])
    factors = tf.constant([[1.0, 1.0], [weights, 1.0]])
    _, plan = lookup(store, {"f": keys}, one_table(), weights={"f": factors})
    before = store.export_table("t0")
    match = r"key 5 of table 't0' .*" + message + ".*No row was updated"
    with pytest.raises(tf.errors.InvalidArgumentError, match=match):
        store.apply_gradients(plan, [tf.fill([2, 4], np.float32(gradient))])
    after = store.export_table("t0")
    for part in ("keys", "rows", "slots", "steps"):
        np.testing.assert_array_equal(after[part], before[part])
    # The next update succeeds.
    _, plan = lookup(store, {"f": keys}, one_table())
    store.apply_gradients(plan, [tf.fill([2, 4], np.float32(0.5))])
    assert np.isfinite(store.export_table("t0")["rows"]).all()


def test_evaluation_with_nan_weight_returns_nan():
    store = make_store()
    pooled, _ = lookup(store, {"f": np.array([[5]])}, one_table(), False, weights={"f": [[np.nan]]})
    assert np.isnan(pooled[0]).all()


def test_unknown_table_error_names_table():
    store = make_store()
    with pytest.raises(ValueError, match=r"'x'.*'t0'"):
        lookup(store, {"f": np.array([1])}, [FeatureSpec("f", "x")])
    with pytest.raises(ValueError, match=r"'x'"):
        store.size("x")
    with pytest.raises(ValueError, match=r"distinct"):
        NativeStore([Table("a", 2), Table("a", 2)], optimizers.SGD())
    with pytest.raises(ValueError, match=r"slipstream_tf.optimizers"):
        NativeStore([Table("a", 2)], "rmsprop")


def test_rows_and_updates_do_not_depend_on_threads(tmp_path):
    """Trains in child processes, because thread pools are created once."""
    import subprocess
    import sys

    program = tmp_path / "train.py"
    program.write_text(
        "import sys\n"
        "import numpy as np, tensorflow as tf\n"
        "tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))\n"
        "from slipstream_tf import optimizers\n"
        "from slipstream_tf.config import Table\n"
        "from slipstream_tf.ops import features\n"
        "from slipstream_tf.tables import NativeStore\n"
        "specs = [features.FeatureSpec(n, n) for n in 'ab']\n"
        "store = NativeStore([Table(n, 7) for n in 'ab'], optimizers.Adagrad(0.1))\n"
        "rng = np.random.default_rng(0)\n"
        "for _ in range(4):\n"
        "    packed = features.pack(rng.integers(0, 99, (301, 2)), specs)\n"
        "    rows, plan = store.lookup(packed, True, True)\n"
        "    store.apply_gradients(plan, [rows[0] * rows[0] + 1.0])\n"
        "np.savez(sys.argv[2], **{n: store.export_table(n)['rows'] for n in 'ab'})\n"
    )
    results = []
    for threads in (1, 2):
        out = tmp_path / f"{threads}.npz"
        subprocess.run([sys.executable, str(program), str(threads), str(out)], check=True)
        with np.load(out) as arrays:
            results.append({name: arrays[name].tobytes() for name in arrays})
    assert results[0] == results[1]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_outputs": 1}, "num_outputs is 1; expected 2"),
        ({"num_outputs": 3}, "num_outputs is 3; expected 2"),
        ({"num_outputs": 2, "is_stacked": True}, "num_outputs is 2; expected 1 if is_stacked"),
        ({"num_outputs": 1, "is_stacked": True}, "have dims 3 and 2; expected equal dims"),
        ({"table_dims": [3]}, "table_dims has 1 entries; expected 2, "),
        ({"combiners": ["sum"]}, "combiners has 1 entries; expected 2, "),
        ({"has_padding": [True]}, "has_padding 1; expected 2 each"),
        ({"padding_keys": [0] * 3}, "padding_keys has 3 entries"),
    ],
)
def test_invalid_layout_raises_in_eager_mode(is_training, changes, message):
    """Eager calls skip the shape functions, which reject this layout in graphs."""
    library = _loader.library()
    op = library.SlipstreamLookup if is_training else library.SlipstreamEvaluationLookup
    handles = [library.SlipstreamTable(table_name="t", dim=dim) for dim in (3, 2)]
    layout = {"table_dims": [3, 2], "combiners": ["sum"] * 2, "is_stacked": False, "num_outputs": 2}
    features = {"feature_keys": [0, 0], "feature_column": [-1, -1], "feature_splits": [-1, -1]}
    features |= {"feature_weights": [-1, -1], "feature_table": [0, 1]}
    features |= {"padding_keys": [-1, -1], "has_padding": [True, True]}
    keys = {"keys": [tf.constant([5, 7], tf.int64)], "row_splits": [], "weights": []}
    op(handles=handles, **keys, **features, **layout)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        op(handles=handles, **keys, **{**features, **layout, **changes})


@pytest.mark.parametrize("count", [0, 2])
def test_nonscalar_handle_of_unknown_shape_raises(count):
    """Otherwise TensorFlow would read the first element of an empty tensor."""
    library = _loader.library()
    handle = library.SlipstreamTable(table_name="t", dim=2)

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int32)])
    def call(place):
        return library.SlipstreamTableStatistics(handle=tf.gather(tf.stack([handle]), place))

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int32)])
    def call_of_several(place):
        return library.SlipstreamCollectDeferred(handles=[tf.gather(tf.stack([handle]), place)])[0]

    for function in (call, call_of_several):
        function(tf.constant(0))
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=rf"handle.* has shape \[{count}\]"
        ):
            function(tf.zeros([count], tf.int32))
