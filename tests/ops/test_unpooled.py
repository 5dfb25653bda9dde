"""Lookups of features without a combiner match a NumPy reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf import initializers, optimizers
from slipstream_tf.config import Table
from slipstream_tf.ops import _loader, features
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables import NativeStore

DIM, RATE = 3, 0.5
PADDING = -1
# Three features of one table: two sequences and a pooled bag.
SPECS = [
    FeatureSpec("seen", "t", None),
    FeatureSpec("bag", "t", "sum"),
    FeatureSpec("bought", "t", None),
]


def make_store():
    start = initializers.RandomNormal(0.0, 1.0, seed=4)
    return NativeStore([Table("t", DIM, initializer=start)], optimizers.SGD(RATE))


def padded(bags, width):
    return np.array([[*bag, *[PADDING] * (width - len(bag))] for bag in bags], np.int64).reshape(
        len(bags), width
    )


def ragged(bags):
    splits = np.cumsum([0, *map(len, bags)])
    return tf.RaggedTensor.from_row_splits(np.array(list(itertools.chain(*bags)), np.int64), splits)


def rows_of(store, keys):
    keys = np.asarray(keys, np.int64)
    rows = store.gather("t", keys.ravel())[0].numpy().reshape(*keys.shape, DIM)
    return np.where((keys == PADDING)[..., None], np.float32(0), rows)


bags = st.lists(st.integers(0, 6), max_size=4)


@settings(max_examples=60)
@given(
    batch=st.lists(st.tuples(bags, bags, bags), max_size=6),
    is_graph=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_and_updates_equal_reference(batch, is_graph, seed):
    store = make_store()
    seen, bag, bought = ([example[part] for example in batch] for part in range(3))
    inputs = {"seen": padded(seen, 5), "bag": ragged(bag), "bought": ragged(bought)}
    positions = [inputs["seen"].ravel(), bag, np.array(list(itertools.chain(*bought)), np.int64)]
    sums = [rows_of(store, np.array(keys, np.int64)).sum(0) for keys in bag]
    expected = [
        rows_of(store, positions[0]),
        np.array(sums, np.float32).reshape(-1, DIM),
        rows_of(store, positions[2]),
    ]
    rng = np.random.default_rng(seed)
    gradients = [rng.normal(size=rows.shape).astype(np.float32) for rows in expected]
    step = {key: np.zeros(DIM) for key in range(7)}
    for keys, given_ in ((positions[0], gradients[0]), (positions[2], gradients[2])):
        for key, gradient in zip(keys.tolist(), given_, strict=True):
            if key != PADDING:
                step[key] += gradient
    for keys, gradient in zip(bag, gradients[1], strict=True):
        for key in keys:
            step[key] += gradient
    before = rows_of(store, np.arange(7))

    def train():
        packed = features.pack(inputs, SPECS)
        evaluated, _ = store.lookup(packed, training=False)
        rows, plan = store.lookup(packed, training=True)
        with tf.control_dependencies(evaluated):
            store.apply_gradients(plan, gradients)
        return evaluated, rows

    for found in (tf.function(train) if is_graph else train)():
        for rows, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(rows, reference, rtol=1e-5, atol=1e-6)
    after = before - RATE * np.array(list(step.values()))
    np.testing.assert_allclose(rows_of(store, np.arange(7)), after, rtol=1e-4, atol=1e-5)
    contents = store.export_table("t")
    used = [key for example in batch for part in example for key in part]
    assert contents["keys"].tolist() == sorted(set(used))
    assert contents["counts"].tolist() == [used.count(key) for key in sorted(set(used))]


def test_unpooled_single_keys_equal_pooled_bitwise():
    keys = {"x": np.array([3, PADDING, 5, 3])}
    found = []
    for combiner in ("sum", None):
        store, specs = make_store(), [FeatureSpec("x", "t", combiner)]
        rows, plan = store.lookup(features.pack(keys, specs), training=True)
        store.apply_gradients(plan, [tf.reshape(tf.range(12.0), [4, DIM])])
        found.append((rows[0].numpy().tobytes(), store.export_table("t")["rows"].tobytes()))
    assert found[0] == found[1]


def test_weights_scale_rows_and_gradients():
    store, specs = make_store(), [FeatureSpec("x", "t", None)]
    before = rows_of(store, [1, 2])
    weights = {"x": np.array([[2.0, 3.0, 9.0]])}
    packed = features.pack({"x": np.array([[1, 2, PADDING]])}, specs, weights)
    rows, plan = store.lookup(packed, training=True)
    scales = np.array([[2.0], [3.0], [0.0]])
    np.testing.assert_allclose(rows[0], scales * [*before, np.zeros(DIM)], rtol=1e-6)
    store.apply_gradients(plan, [tf.ones([3, DIM])])
    np.testing.assert_allclose(rows_of(store, [1, 2]), before - RATE * scales[:2], rtol=1e-5)


@pytest.mark.parametrize("is_training", [True, False])
def test_graph_shapes_are_inferred(is_training):
    store = make_store()

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 5], tf.int64),
            tf.RaggedTensorSpec([2, None], tf.int64),
            tf.TensorSpec([2, 4], tf.int64),
        ]
    )
    def shapes(seen, bag, bought):
        packed = features.pack({"seen": seen, "bag": bag, "bought": bought}, SPECS)
        rows, _ = store.lookup(packed, is_training)
        assert [row.shape.as_list() for row in rows] == [[None, DIM], [2, DIM], [8, DIM]]

    shapes.get_concrete_function()


def test_empty_batch_returns_empty_rows():
    store = make_store()
    inputs = {"seen": np.zeros((0, 5), int), "bag": ragged([]), "bought": ragged([])}
    rows, plan = store.lookup(features.pack(inputs, SPECS), training=True)
    assert [row.shape for row in rows] == [(0, DIM)] * 3
    store.apply_gradients(plan, rows)
    assert store.size("t") == 0


def test_gradients_of_wrong_shape_raise():
    store = make_store()
    inputs = {"seen": padded([[1]], 5), "bag": ragged([[1]]), "bought": ragged([[1, 2]])}
    rows, plan = store.lookup(features.pack(inputs, SPECS), training=True)
    message = r"feature 0 has shape \[1,3\].*\[5,3\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        store.apply_gradients(plan, [rows[0][:1], *rows[1:]])
    bad = tf.tensor_scatter_nd_update(rows[2], [[1, 0]], [np.nan])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"feature 2.*example 1, element 0"):
        store.apply_gradients(plan, [*rows[:2], bad])
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature 'bag' has 2 examples"):
        wrong = {**inputs, "bag": ragged([[1], [2]])}
        store.lookup(features.pack(wrong, SPECS), training=True)


@pytest.mark.parametrize("is_training", [True, False])
def test_stacked_requires_combiners(is_training):
    library = _loader.library()
    op = library.SlipstreamLookup if is_training else library.SlipstreamEvaluationLookup
    packed = features.pack({"seen": np.array([1])}, SPECS[:1])
    layout = {"feature_table": [0], "table_dims": [DIM], "is_stacked": True, "num_outputs": 1}
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="feature 0 has combiner 'none'; expected pooled"
    ):
        op(handles=make_store()._handles, combiners=["none"], **layout, **packed.arguments())


def test_simulated_ranks_split_keys_of_batch():
    """Two simulated ranks defer the gradients of half of the examples each."""
    store, specs = make_store(), [FeatureSpec("x", "t", None)]
    policy = UpdatePolicy("defer", movement=1e9, max_age=100, max_rows=1 << 20, ranks=2)
    store.set_update_policy("t", policy)
    keys = {"x": np.array([[1, 1], [1, 2]])}
    _, plan = store.lookup(features.pack(keys, specs), training=True)
    store.apply_gradients(plan, [tf.ones([4, DIM])])
    deferred = store.export_deferred("t")
    found = zip(
        *(deferred[part].tolist() for part in ("ranks", "keys")),
        deferred["sums"][:, 0],
        strict=True,
    )
    assert sorted(found) == [(0, 1, 2.0), (1, 1, 1.0), (1, 2, 1.0)]
