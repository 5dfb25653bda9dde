"""Gradients collected on one rank and applied on another match single-process updates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf._utils.comm import WIRE_DTYPES
from slipstream_tf.config import Table
from slipstream_tf.ops import exchange, features, table
from slipstream_tf.ops.exchange import SendBuffer
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.ops.update_policy import UpdatePolicy, flush, set_policy, update_counts

TABLES = [Table("a", 3), Table("b", 2)]
SPECS = [FeatureSpec("a", "a"), FeatureSpec("b", "b")]
LAYOUT = table.LookupLayout((0, 1), ("sum", "sum"), (3, 2), False)
KEYS = {"a": np.array([5, 7, 5, 9]), "b": np.array([1, 1, 1, 2])}
RATE = 0.1


def make_tables(rule=None):
    return [table.create(config, rule or optimizers.Adagrad(RATE)) for config in TABLES]


def plan_of(handles, keys=KEYS):
    inputs = {name: np.asarray(values, np.int64) for name, values in keys.items()}
    return table.lookup(handles, features.pack(inputs, SPECS), LAYOUT)[1]


def gradients_of(keys=KEYS, seed=0):
    random = np.random.default_rng(seed)
    return [
        tf.constant(random.normal(size=(len(keys[config.name]), config.dim)), tf.float32)
        for config in TABLES
    ]


def send_buffer(sizes, keys, values) -> SendBuffer:
    return SendBuffer(
        tf.constant(sizes, tf.int64), tf.constant(keys, tf.int64), tf.constant(values, tf.float32)
    )


def assert_same_tables(first, second):
    for one, other in zip(first, second, strict=True):
        one, other = table.export_table(one), table.export_table(other)
        for name in ("keys", "rows", "slots"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-6, err_msg=name)


def test_pull_without_ranks_raises():
    nobody = send_buffer(np.zeros((0, 2)), [], [])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="entries for 0 ranks; expected at least 1 rank"
    ):
        exchange.pull_rows(make_tables(), nobody.sizes, nobody.keys, True, True)


def test_collected_rows_are_sums_per_key():
    handles, gradients = make_tables(), gradients_of()
    got = exchange.collect_gradients(plan_of(handles), gradients, RATE)
    assert got.sizes.numpy().tolist() == [[3, 2]]
    assert sorted(got.keys.numpy()[:3]) == [5, 7, 9] and sorted(got.keys.numpy()[3:]) == [1, 2]
    rows = dict(
        zip(got.keys.numpy()[:3].tolist(), got.values.numpy()[:9].reshape(3, 3), strict=True)
    )
    np.testing.assert_allclose(rows[5], gradients[0][0] + gradients[0][2], rtol=1e-6)
    np.testing.assert_array_equal(rows[9], gradients[0][3])
    assert got.values.shape == (3 * 3 + 2 * 2,)


def test_collecting_and_applying_equals_update():
    exchanged, updated = make_tables(), make_tables()
    for seed in range(3):
        gradients = gradients_of(seed=seed)
        rows = exchange.collect_gradients(plan_of(exchanged), gradients, RATE)
        exchange.apply_rows(exchanged, rows, RATE)
        table.apply_gradients(plan_of(updated), gradients, RATE)
    assert_same_tables(exchanged, updated)


def test_every_key_has_one_owner_in_send_buffer():
    keys = {"a": np.arange(200), "b": np.arange(200)}
    handles, gradients = make_tables(), gradients_of(keys)
    plan = plan_of(handles, keys)
    everything = exchange.collect_gradients(plan, gradients, RATE)
    split = exchange.collect_gradients(plan, gradients, RATE, ranks=3)
    sizes = split.sizes.numpy()
    assert sizes.shape == (3, 2) and (sizes > 30).all()
    np.testing.assert_array_equal(sizes.sum(0), everything.sizes.numpy()[0])
    bounds = np.cumsum(sizes.ravel())[:-1]
    owned = np.split(split.keys.numpy(), bounds)
    assert sorted(np.concatenate(owned[0::2])) == list(range(200))
    for rank in range(3):  # A key has the same owner in every table.
        assert sorted(owned[2 * rank]) == sorted(owned[2 * rank + 1])
    applied, wanted = make_tables(), make_tables()
    exchange.apply_rows(applied, split, RATE)
    exchange.apply_rows(wanted, everything, RATE)
    assert_same_tables(applied, wanted)


def test_duplicate_rows_are_summed_and_scaled_before_update():
    twice, once = make_tables(), make_tables()
    several = send_buffer([[1, 0], [1, 0]], [5, 5], [1, 2, 3, 3, 2, 1])
    exchange.apply_rows(twice, several, RATE, scale=[0.5, 7.0])
    exchange.apply_rows(once, send_buffer([[1, 0]], [5], [2, 2, 2]), RATE)
    assert_same_tables(twice, once)


@pytest.mark.parametrize(
    "scale, message",
    [
        ([1.0, np.nan], r"scale\[1\] is nan for table 'b'; expected a finite number"),
        ([np.inf, 1.0], r"scale\[0\] is inf for table 'a'"),
        ([1.0], "scale has 1 values; expected 0 or 2, a value per table"),
    ],
)
def test_invalid_scale_changes_nothing(scale, message):
    handles = make_tables()
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        exchange.apply_rows(handles, send_buffer([[1, 0]], [5], [1, 2, 3]), RATE, scale=scale)
    assert table.statistics(handles[0]).rows == 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_squares_equal_squared_norms_of_collected_rows(ranks):
    handles = make_tables()
    keys = {"a": np.arange(200), "b": np.arange(200)}
    got = exchange.collect_gradients(plan_of(handles, keys), gradients_of(keys), RATE, ranks)
    widths = got.sizes.numpy().reshape(-1) * np.tile([3, 2], ranks)
    parts = np.split(got.values.numpy().astype(np.float64), np.cumsum(widths)[:-1])
    want = [np.sum(part**2) for part in parts]
    np.testing.assert_allclose(got.squares.numpy().reshape(-1), want, rtol=1e-6)


@pytest.mark.parametrize("create_missing", [True, False])
def test_missing_rows_are_created_or_counted(create_missing):
    handles = make_tables()
    exchange.apply_rows(
        handles, send_buffer([[1, 0]], [5], [1, 1, 1]), RATE, create_missing=create_missing
    )
    statistics = table.statistics(handles[0])
    assert (statistics.rows, statistics.dropped_updates) == ((1, 0) if create_missing else (0, 1))
    assert table.hot_keys(handles[0], 9)[0].shape == (0,)  # No lookup happened on this table.


def test_flush_keeps_exchanged_deferred_gradients():
    handles = make_tables(optimizers.SGD(RATE))
    policy = UpdatePolicy("defer", movement=1e9, max_age=100, max_rows=1000, is_exchanged=True)
    for handle in handles:
        set_policy(handle, policy)
    gradients = gradients_of()
    collected = exchange.collect_gradients(plan_of(handles), gradients, RATE)
    assert collected.sizes.numpy().tolist() == [[0, 0]]
    flush(handles[0])
    assert update_counts(handles[0]).deferred_now == 3
    with pytest.raises(tf.errors.FailedPreconditionError):
        set_policy(handles[0], UpdatePolicy())
    deferred = exchange.collect_deferred(handles)
    assert deferred.sizes.numpy().tolist() == [[3, 2]]
    assert update_counts(handles[0]).deferred_now == 0
    exchange.apply_rows(handles, deferred, RATE)
    updated = make_tables(optimizers.SGD(RATE))
    table.apply_gradients(plan_of(updated), gradients, RATE)
    assert_same_tables(handles, updated)


@pytest.mark.parametrize("ranks", [1, 3])
def test_empty_batch_and_empty_buffer(ranks):
    handles, keys = make_tables(), {"a": np.empty(0), "b": np.empty(0)}
    plan = plan_of(handles, keys)
    for got in (
        exchange.collect_gradients(plan, gradients_of(keys), RATE, ranks),
        exchange.collect_deferred(handles, ranks),
    ):
        assert got.sizes.numpy().tolist() == [[0, 0]] * ranks
        assert got.keys.shape == got.values.shape == (0,)
        exchange.apply_rows(handles, got, RATE)
    assert table.statistics(handles[0]).rows == 0


def test_nonfinite_gradients_are_refused_at_sender_and_owner():
    handles = make_tables()
    bad = [gradients_of()[0], tf.fill([4, 2], np.nan)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="finite"):
        exchange.collect_gradients(plan_of(handles), bad, RATE)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"the gradient of key 8 of table 'a' is not"
    ):
        exchange.apply_rows(handles, send_buffer([[1, 0]], [8], [1, np.inf, 1]), RATE)
    two_ranks = send_buffer([[1, 0], [1, 0]], [8, 8], [1, 1, 1, 1, np.inf, 1])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"received gradient of key 8 of table 'a' is not"
    ):
        exchange.apply_rows(handles, two_ranks, RATE)
    assert 8 not in table.export_table(handles[0])["keys"]


def test_gradients_of_two_ranks_that_overflow_together_are_refused():
    handles = make_tables()
    values = np.repeat([3e38, 3e38], 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="key 8 of table 'a' overflows"):
        exchange.apply_rows(handles, send_buffer([[1, 0], [1, 0]], [8, 8], values), RATE)
    assert 8 not in table.export_table(handles[0])["keys"]


def test_merged_rows_that_overflow_are_refused_by_the_update():
    handles = make_tables()
    merged = exchange.merge_rows(send_buffer([[2, 0]], [8, 8], np.repeat([3e38, 3e38], 3)), [3, 2])
    assert np.isposinf(merged.values).all() and np.isposinf(merged.squares[0, 0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="key 8 of table 'a' is not finite"):
        exchange.apply_rows(handles, merged, RATE)


def test_nonfinite_gradients_pass_if_allowed():
    handles = make_tables()
    policy = UpdatePolicy("defer", "movement", 1e9, max_age=9, max_rows=640, is_exchanged=True)
    set_policy(handles[1], policy)
    exchange.collect_gradients(plan_of(handles), gradients_of(), RATE)
    bad = [tf.fill([4, 3], np.inf), gradients_of()[1]]
    got = exchange.collect_gradients(plan_of(handles), bad, RATE, passes_non_finite=True)
    assert got.sizes.numpy().tolist() == [[3, 0]] and np.all(np.isnan(got.values))
    assert np.all(np.isnan(got.squares))
    # The non-finite batch changes no deferred sum, as if its gradients were zero.
    deferred = exchange.collect_deferred(handles)
    sums = [tf.reduce_sum(gradients_of()[1][:3], 0), gradients_of()[1][3]]
    np.testing.assert_allclose(tf.reshape(deferred.values, [2, 2]), sums, rtol=1e-6)


@pytest.mark.parametrize(
    "bad, message",
    [
        (send_buffer([[1, 0]], [5], [1, 2]), r"sizes\[0, 0\] is 1 rows of table 'a'"),
        (send_buffer([[-1, 0]], [5], [1, 2, 3]), r"sizes\[0, 0\] is -1"),
        (
            send_buffer([[1, 0]], [5, 6], [1, 2, 3]),
            "sizes adds up to 1 keys and 3 values; expected 2 keys and 3 values",
        ),
        (send_buffer([[1, 0, 0]], [5], [1, 2, 3]), r"sizes has shape \[1,3\]; expected \[\?,2\]"),
        (send_buffer([1, 0], [5], [1, 2, 3]), "sizes has shape"),
        (send_buffer(np.zeros((0, 2)), [], []), "entries for 0 ranks; expected at least 1 rank"),
        (send_buffer([[1, 0]], [5], [[1, 2, 3]]), r"values has shape \[1,3\]"),
    ],
)
def test_invalid_send_buffer_changes_nothing(bad, message):
    handles = make_tables()
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        exchange.apply_rows(handles, bad, RATE)
    assert table.statistics(handles[0]).rows == 0


def test_shapes_are_checked_at_graph_construction():
    handles = make_tables()

    @tf.function
    def collect():
        got = exchange.collect_deferred(handles, ranks=3)
        assert got.sizes.shape.as_list() == [3, None]
        assert got.keys.shape.rank == got.values.shape.rank == 1
        with pytest.raises(ValueError, match="rank"):
            exchange.apply_rows(handles, send_buffer([1, 0], [5], [1, 2, 3]), RATE)
        return got.keys

    assert collect().shape == (0,)


RULES = [optimizers.SGD(RATE), optimizers.Adagrad(RATE), optimizers.Adam(RATE)]


def route(replicas, keys):
    """Plans the lookup of one example, with a bag per table.

    Returns:
        (the packed batch, its plan).
    """
    bags = {
        name: tf.RaggedTensor.from_row_lengths(tf.constant(bag, tf.int64), [len(bag)])
        for name, bag in keys.items()
    }
    packed = features.pack(bags, SPECS)
    return packed, exchange.route_keys(replicas, packed, LAYOUT, ranks=1)


def store(replicas, packed, routed, message):
    """Looks up the batch for training, which stores its rows as replicas."""
    return exchange.look_up_pulled(replicas, packed, LAYOUT, routed, message, training=True)


def pulled_and_stored(rule, with_summary, wire_dtype):
    """Pulls and stores the rows of four keys after one step.

    Keys 5, 7 and 1 had a gradient in the step. Key 9 is new.

    Returns:
        (tables of the owners, tables of the replicas, bytes of the sent rows).
    """
    owners, replicas = make_tables(rule), make_tables(rule)
    table.apply_gradients(plan_of(owners), gradients_of(), RATE)
    packed, routed = route(replicas, {"a": [5, 7], "b": [1, 9]})
    message, lengths, row_bytes = exchange.pull_rows(
        owners, routed.sizes, routed.keys, True, with_summary, wire_dtype
    )
    assert lengths.numpy().tolist() == [message.shape[0]]
    store(replicas, packed, routed, message)
    return owners, replicas, int(row_bytes[0])


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
@pytest.mark.parametrize("with_summary", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_pulled_rows_are_stored_with_slots_only_on_request(rule, with_summary, dtype):
    wire_dtype = WIRE_DTYPES.index(dtype)
    owners, replicas, row_bytes = pulled_and_stored(rule, with_summary, wire_dtype)
    slot_bytes = 2 * (with_summary and rule.slots_per_row(1) > 0)
    # One byte of row bits per table. Key 9 adds no values because its row has its initial values.
    values = (4, 2, 2, 1)[wire_dtype] * (2 * 3 + 2) + (3 * 4 if dtype == "int8" else 0)
    assert row_bytes == 2 + values + 3 * slot_bytes
    for config, owner, replica in zip(TABLES, owners, replicas, strict=True):
        own, copied = table.export_table(owner), table.export_table(replica)
        place = np.searchsorted(own["keys"], copied["keys"])
        wanted = own["rows"][place]
        largest = abs(wanted).max(1, keepdims=True)
        assert (abs(copied["rows"] - wanted) <= largest * (wire_dtype > 0) / 253).all()
        # Only the slots that scale a movement matter. Adam's first moment does not.
        slots, of_copy = own["slots"][place][:, -config.dim :], copied["slots"][:, -config.dim :]
        minimum = slots.min(1, initial=np.inf, keepdims=True) if with_summary else 0.0
        minimum = np.broadcast_to(minimum, of_copy.shape)
        assert (of_copy <= minimum).all()
        np.testing.assert_allclose(of_copy, minimum, rtol=2**-7)


def test_wire_settings_change_without_retracing():
    handles, replicas = make_tables(), make_tables()
    exchange.apply_rows(handles, send_buffer([[2, 1]], [5, 7, 1], np.ones(8)), RATE)
    with_summary, wire_dtype = tf.Variable(False), tf.Variable(0)
    traces = []

    @tf.function
    def serve_and_store():
        traces.append(1)
        packed, routed = route(replicas, {"a": [5, 7], "b": [1]})
        message, _, row_bytes = exchange.pull_rows(
            handles,
            routed.sizes,
            routed.keys,
            False,
            with_summary.read_value(),
            wire_dtype.read_value(),
        )
        store(replicas, packed, routed, message)
        return row_bytes[0]

    assert serve_and_store() == 1 + 2 * 3 * 4 + 1 + 2 * 4
    with_summary.assign(True)
    assert serve_and_store() == 1 + 2 * (3 * 4 + 2) + 1 + 2 * 4 + 2
    wire_dtype.assign(1)
    assert serve_and_store() == 1 + 2 * (3 * 2 + 2) + 1 + 2 * 2 + 2
    wire_dtype.assign(3)
    assert serve_and_store() == 1 + 2 * (3 + 4 + 2) + 1 + (2 + 4) + 2
    assert len(traces) == 1


def test_initial_rows_are_not_sent():
    handles, replicas = make_tables(), make_tables()
    packed, routed = route(replicas, {"a": [5, 7], "b": [1]})
    message, _, row_bytes = exchange.pull_rows(handles, routed.sizes, routed.keys, True, True)
    assert row_bytes.numpy().tolist() == [2] and message.numpy()[32:].tolist() == [0] * 992
    store(replicas, packed, routed, message)
    for own, replica in zip(handles, replicas, strict=True):
        np.testing.assert_array_equal(
            table.export_table(own)["rows"], table.export_table(replica)["rows"]
        )


@pytest.mark.parametrize("counts", [(9, 0), (0, 1), (8, 17), (0, 0)])
def test_external_rows_are_stored_like_pulled_rows(counts):
    replicas, random = make_tables(), np.random.default_rng(3)
    wanted = [
        random.normal(size=(count, config.dim)).astype(np.float32)
        for count, config in zip(counts, TABLES, strict=True)
    ]
    inputs = dict(zip("ab", map(np.arange, counts), strict=True))
    packed, routed = route(replicas, inputs)
    specs = [tf.TensorSpec([None, config.dim], tf.float32) for config in TABLES]
    requested = tf.split(routed.keys, routed.sizes[0], num=len(TABLES))
    rows = [tf.gather(of, keys) for of, keys in zip(wanted, requested, strict=True)]
    store(replicas, packed, routed, tf.function(exchange.pack_rows, input_signature=[specs])(rows))
    for count, replica, values in zip(counts, replicas, wanted, strict=True):
        copied = table.export_table(replica)
        np.testing.assert_array_equal(copied["keys"], np.arange(count))
        np.testing.assert_array_equal(copied["rows"], values)


def test_empty_pull_stores_nothing():
    handles = make_tables()
    packed = features.pack({name: np.empty(0, np.int64) for name in "ab"}, SPECS)
    routed = exchange.route_keys(handles, packed, LAYOUT, ranks=3)
    messages, lengths, row_bytes = exchange.pull_rows(
        handles, routed.sizes, routed.keys, True, True
    )
    assert row_bytes.numpy().tolist() == [0, 0, 0] and lengths.numpy().tolist() == [1024] * 3
    store(handles, packed, routed, messages)
    assert table.statistics(handles[0]).rows == 0


def test_message_that_does_not_match_request_raises():
    handles, owners = make_tables(), make_tables()
    packed, routed = route(handles, {"a": [5], "b": []})
    sizes, keys = routed.sizes, routed.keys
    exchange.apply_rows(owners, send_buffer([[1, 0]], [5], [1, 2, 3]), RATE)
    message, *_ = exchange.pull_rows(owners, sizes, keys, True, True)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"has 0 bytes left for .*; expected at least 1"
    ):
        store(handles, *route(handles, {"a": [5], "b": [6]}), message)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="rank 0 has a header with length 1024, 15"
    ):
        store(handles, packed, routed, message[:-8])
    for wrong in ({"with_summary": [True]}, {"wire_dtype": [0]}, {"wire_dtype": 4}):
        with pytest.raises(tf.errors.InvalidArgumentError, match=next(iter(wrong))):
            exchange.pull_rows(owners, sizes, keys, True, **{"with_summary": True, **wrong})
    assert table.statistics(handles[0]).rows == 0
    store(handles, packed, routed, message)
    assert table.statistics(handles[0]).rows == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("count", [0, 4])
def test_pulled_lookup_equals_direct_lookup(training, count):
    owners, replicas, plain = make_tables(), make_tables(), make_tables()
    for handles in (owners, plain):
        exchange.apply_rows(handles, send_buffer([[2, 1]], [5, 7, 1], np.ones(8)), RATE)
    bags = tf.RaggedTensor.from_row_splits(
        tf.constant([1, 1, 9][: 3 * count], tf.int64), tf.constant([0, 2, 2, 3, 3][: count + 1])
    )
    single = tf.constant([5, 7, 5, 6][:count], tf.int64)
    packed = features.pack({"a": single, "b": bags}, SPECS)
    layout = dataclasses.replace(LAYOUT, combiners=("sum", "mean"))
    routed = exchange.route_keys(replicas, packed, layout, 1)
    message, *_ = exchange.pull_rows(owners, routed.sizes, routed.keys, training, False)
    pooled, plan = exchange.look_up_pulled(replicas, packed, layout, routed, message, training)
    wanted, own = table.lookup(plain, packed, layout)
    for one, other in zip(pooled, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    gradients = [tf.ones_like(vectors) for vectors in pooled]
    if training:
        ours, theirs = (exchange.collect_gradients(p, gradients, RATE) for p in (plan, own))
        for name in ("sizes", "keys", "values", "squares"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    else:
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="expected the plan of a training lookup"
        ):
            exchange.collect_gradients(plan, gradients, RATE)
    assert (table.statistics(replicas[0]).rows > 0) == (training and count > 0)


def test_rows_are_merged_at_owner_of_key():
    given = send_buffer([[2, 1], [1, 1]], [7, 5, 9, 5, 9], [1, 2, 3, 4, 5, 6, 1, 2, 7, 8, 9, 3, 4])
    dims = [config.dim for config in TABLES]
    merged = exchange.merge_rows(given, dims)
    assert merged.sizes.numpy().tolist() == [[2, 1]]
    assert merged.keys.numpy().tolist() == [5, 7, 9]
    assert merged.values.numpy().tolist() == [11, 13, 15, 1, 2, 3, 4, 6]
    assert merged.squares.numpy().tolist() == [[11**2 + 13**2 + 15**2 + 14, 52]]
    spread = exchange.merge_rows(given, dims, ranks=3)
    assert spread.sizes.shape == (3, 2) and sorted(spread.keys.numpy()) == [5, 7, 9]
    nothing = exchange.merge_rows(send_buffer([[0, 0]], [], []), dims, ranks=2)
    assert nothing.sizes.numpy().tolist() == [[0, 0], [0, 0]] and not nothing.keys.shape[0]
    with pytest.raises(tf.errors.InvalidArgumentError, match="at most the remaining 0 keys"):
        exchange.merge_rows(send_buffer([[1, 0]], [], []), dims)
