"""Tests that variable stores defer gradients like the native store."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import DeferGradients, Interval, Slipstream, Table, Window, optimizers
from slipstream_tf.distributed import (
    DistributedGradientTape,
    DistributedOptimizer,
    ReplicatedStore,
    ShardedStore,
    SingleProcess,
    flush_deferred,
)
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.engine.tracker import SaturationTracker
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables import NativeStore, VariableStore

ROWS, DIM, STEPS, FLAGGED = 40, 3, 30, 15
MOVEMENT = UpdatePolicy("defer", "movement", movement=0.15, max_age=8, max_rows=1000)
INTERVAL = UpdatePolicy("defer", "interval", max_age=6, max_rows=1000)
BY_INTERVAL = DeferGradients(Interval())
RULES = {
    "sgd": (lambda: keras.optimizers.SGD(0.1), optimizers.SGD(0.1)),
    "adagrad": (
        lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.2, epsilon=1e-3),
        optimizers.Adagrad(0.1, 0.2, 1e-3),
    ),
}
COUNTS = ("offered", "sent", "deferred", "due_by_movement", "due_by_age", "flushed", "over_budget")


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns repeated rows and their gradients for each step."""
    random = np.random.default_rng(4)
    sizes = random.integers(0, 25, STEPS)
    return [
        (random.integers(0, ROWS, n), random.normal(size=(n, DIM)).astype(np.float32))
        for n in sizes
    ]


def train(optimizer, policy, is_graph=False, is_wrapped=False, flushes=True):
    """Trains one variable.

    Returns:
        Its rows, the store, and the number of traces of the step.
    """
    variable = keras.Variable(np.zeros((ROWS, DIM), np.float32))
    store = VariableStore({"t": variable}, optimizer)
    if is_wrapped:
        optimizer = DistributedOptimizer(optimizer, SingleProcess(), store)
    optimizer.build([variable])
    store.set_row_flags("t", np.arange(FLAGGED), np.full(FLAGGED, SATURATED))
    store.set_update_policy("t", policy)
    traces = []

    def step(keys, gradients):
        traces.append(1)
        tape = tf.GradientTape()
        with tape if is_wrapped else DistributedGradientTape(tape, store) as tape:
            loss = tf.reduce_sum(tf.gather(variable.value, keys) * gradients)
        optimizer.apply(tape.gradient(loss, [variable.value]), [variable])

    if is_graph:
        shapes = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM], tf.float32)]
        step = tf.function(step, input_signature=shapes)
    for keys, gradients in batches():
        step(tf.constant(keys), tf.constant(gradients))
    assert int(optimizer.iterations) == STEPS
    if flushes:
        flush_deferred(store, optimizer)
        assert int(optimizer.iterations) == STEPS
        assert store.update_counts("t").deferred_now == 0 and store.deferred_rows() == {"t": 0}
    return variable.numpy(), store, len(traces)


def train_native(rule, policy):
    """Trains a native table with the same gradients from zero rows."""
    zeros = np.zeros(ROWS * DIM, np.float32)
    store = NativeStore([Table("t", dim=DIM)], rule)
    specs = [FeatureSpec("t", "t")]

    def update(keys, gradients):
        keys = tf.constant(keys)[:, None]
        _, plan = store.lookup(pack({"t": keys}, specs), training=True)
        store.apply_gradients(plan, [tf.constant(gradients)])

    update(np.arange(ROWS), np.zeros((ROWS, DIM), np.float32))
    contents = store.export_table("t")
    contents["rows"] = zeros.reshape(ROWS, DIM)
    store.import_table("t", contents)
    store.set_row_flags("t", np.arange(FLAGGED), np.full(FLAGGED, SATURATED))
    store.set_update_policy("t", policy)
    before = store.update_counts("t")
    for keys, gradients in batches():
        update(keys, gradients)
    store.flush()
    after = store.update_counts("t")
    counts = {name: getattr(after, name) - getattr(before, name) for name in COUNTS}
    return store.export_table("t")["rows"], counts


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", [MOVEMENT, INTERVAL], ids=["movement", "interval"])
@pytest.mark.parametrize("is_graph, is_wrapped", [(False, False), (True, False), (True, True)])
def test_deferred_gradients_equal_native_store(rule, policy, is_graph, is_wrapped):
    make, native_rule = RULES[rule]
    rows, store, traces = train(make(), policy, is_graph, is_wrapped)
    native_rows, native_counts = train_native(native_rule, policy)
    counts = store.update_counts("t")
    assert {name: getattr(counts, name) for name in COUNTS} == native_counts
    assert counts.deferred > 0 and counts.flushed > 0 and counts.masked == 0
    np.testing.assert_allclose(rows, native_rows, rtol=1e-5, atol=1e-6)
    assert traces == (1 if is_graph else STEPS)


@pytest.mark.parametrize("maximum", [0, 1, 7, 1000])
@pytest.mark.parametrize("policy", [MOVEMENT, INTERVAL], ids=["movement", "interval"])
def test_no_gradient_is_lost_within_any_budget(policy, maximum):
    policy = UpdatePolicy("defer", policy.trigger, policy.movement, policy.max_age, maximum)
    rows, store, _ = train(keras.optimizers.SGD(0.1), policy, is_graph=True)
    plain, _, _ = train(keras.optimizers.SGD(0.1), UpdatePolicy())
    np.testing.assert_allclose(rows, plain, atol=1e-6)
    counts = store.update_counts("t")
    assert (counts.over_budget > 0) == (maximum < 1000)
    assert (counts.deferred > 0) == (maximum > 0)
    # A gradient row is applied at once or added to a sum. A sum is applied together with a new
    # gradient row or by a flush.
    assert 0 <= counts.offered - counts.deferred <= counts.sent <= counts.offered
    assert counts.flushed <= maximum
    # A sum has 3 values, a key and a step. Each row of the variable has 8 bytes of index.
    assert counts.deferred_bytes <= max(1, min(maximum, ROWS)) * (4 * DIM + 16) + 9 * ROWS


def test_deferred_sums_stay_within_limit():
    policy = UpdatePolicy("defer", "interval", max_age=100, max_rows=5)
    _, store, _ = train(keras.optimizers.SGD(0.1), policy, flushes=False)
    assert store.update_counts("t").deferred_now == 5


def test_shadow_mode_counts_and_passes_all_gradients():
    shadow = UpdatePolicy("defer", "interval", max_age=6, max_rows=1000, is_shadow=True)
    rows, store, _ = train(keras.optimizers.Adagrad(0.1), shadow, flushes=False)
    plain, _, _ = train(keras.optimizers.Adagrad(0.1), UpdatePolicy())
    np.testing.assert_array_equal(rows, plain)
    _, real, _ = train(keras.optimizers.Adagrad(0.1), INTERVAL, flushes=False)
    assert store.update_counts("t") == real.update_counts("t")
    assert store.deferred_rows() == {"t": 0}, "nothing is to be applied"
    assert store.update_counts("t").deferred_now > 0
    store.set_update_policy("t", UpdatePolicy())
    assert store.update_counts("t").deferred_now == 0
    assert store.update_counts("t").flushed > 0


def test_policy_change_applies_sums_with_next_step():
    variable = tf.Variable(tf.zeros([ROWS, DIM]))
    store = VariableStore({"t": variable})
    store.set_saturated("t", [1, 2, 3])
    store.set_update_policy("t", INTERVAL)

    def offer(*keys):
        ones = tf.ones([len(keys), DIM])
        slices = tf.IndexedSlices(ones, tf.constant(keys, tf.int32), tf.constant([ROWS, DIM]))
        passed = store.filter_gradient("t", slices)
        assert passed.indices.dtype == tf.int32
        return dict(zip(passed.indices.numpy().tolist(), passed.values.numpy()[:, 0], strict=True))

    assert offer(5, 1, 2) == {5: 1.0}
    assert offer(1, 4) == {4: 1.0}
    store.set_update_policy("t", UpdatePolicy("mask"))
    assert offer(3, 1, 6) == {1: 2.0, 2: 1.0, 6: 1.0}, "masked now, but no sum is lost"
    assert offer(1, 6) == {6: 1.0}
    store.set_update_policy("t", INTERVAL)
    assert offer(1, 6) == {6: 1.0}
    store.set_saturated("t", [2])
    assert offer(1) == {1: 2.0}, "no longer saturated"
    assert offer(2) == {}
    store.flush_with_next_gradients()
    assert offer(2, 6) == {2: 2.0, 6: 1.0}
    assert store.update_counts("t").deferred_now == 0
    assert offer(2) == {}


def test_nonfinite_gradients_are_not_deferred():
    optimizer = keras.optimizers.SGD(0.1)
    store = VariableStore({"t": tf.Variable(tf.zeros([ROWS, DIM]))}, optimizer)
    store.set_saturated("t", [0, 1])
    for policy in (MOVEMENT, INTERVAL):
        store.set_update_policy("t", policy)
        values = tf.constant([[np.nan] * DIM, [0.1] * DIM])
        slices = tf.IndexedSlices(values, tf.constant([0, 1]), tf.constant([ROWS, DIM]))
        store.flush_with_next_gradients()
        store.filter_gradient("t", slices)
        assert store.filter_gradient("t", slices).indices.numpy().tolist() == [0]


@pytest.mark.parametrize(
    "optimizer, message",
    [
        (None, r"with no optimizer. Expected Interval\("),
        (keras.optimizers.Adam(), "with Adam"),
        (keras.optimizers.SGD(0.1, momentum=0.9), "with SGD with momentum"),
        (keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=2), "gradient_accumulation"),
        (tf.compat.v1.train.AdagradOptimizer(0.1), "with AdagradOptimizer"),
    ],
)
def test_unknown_movement_raises(optimizer, message):
    store = VariableStore({"t": tf.Variable(tf.zeros([ROWS, DIM]))}, optimizer)
    with pytest.raises(ValueError, match=rf"`until`: 'Movement'.*{message}"):
        store.set_update_policy("t", MOVEMENT)
    with pytest.raises(ValueError, match="`until`: 'Movement'"):
        Slipstream(store, DeferGradients())
    if message != "gradient_accumulation":
        Slipstream(store, BY_INTERVAL)
        store.set_update_policy("t", INTERVAL)
    known = VariableStore({"t": tf.Variable(tf.zeros([ROWS, DIM]))}, keras.optimizers.SGD())
    known.set_update_policy("t", MOVEMENT)
    with pytest.raises(ValueError, match="`until`: 'Movement'"):
        known.use_optimizer(optimizer)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        NativeStore,
        lambda tables: ReplicatedStore(tables, None, SingleProcess()),
        lambda tables: ShardedStore(tables, None, SingleProcess()),
    ],
    ids=["native", "replicated", "sharded"],
)
def test_native_tables_refuse_interval(make, dry_run):
    store, settings = make([Table("t", DIM)]), EngineSettings(BY_INTERVAL, dry_run=dry_run)
    with pytest.raises(ValueError, match=r"Invalid `until`: Interval\(.*Movement\("):
        SaturationTracker(store, settings, [FeatureSpec("t", "t")])


def test_interval_on_variables_warns_once_about_cost(caplog):
    store = VariableStore({"t": tf.Variable(tf.zeros([ROWS, DIM]))}, keras.optimizers.Adam())
    slipstream = Slipstream(store, BY_INTERVAL, window=Window(steps=2, warmup=0))
    for _ in range(6):
        slipstream.step()
    (said,) = [record.getMessage() for record in caplog.records if "Interval" in record.message]
    assert ".0171 AUC" in said and ".0007" in said and "stream.md" in said


def test_deferring_with_accumulating_optimizer_raises():
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    store = VariableStore({"t": tf.Variable(tf.zeros([ROWS, DIM]))}, optimizer)
    with pytest.raises(ValueError, match="`gradient_accumulation_steps`: 2 for table 't'"):
        store.set_update_policy("t", INTERVAL)


def test_movement_after_step_traced_without_optimizer_raises():
    variable = tf.Variable(tf.zeros([ROWS, DIM]))
    store = VariableStore({"t": variable})
    gradients = tf.IndexedSlices(tf.ones([1, DIM]), tf.constant([3]), tf.constant([ROWS, DIM]))
    tf.function(lambda: store.filter_gradient("t", gradients).values)()
    store.use_optimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="received after a step had been traced"):
        store.set_update_policy("t", MOVEMENT)


def test_optimizer_without_state_raises():
    variable = keras.Variable(np.zeros((ROWS, DIM), np.float32))
    store = VariableStore({"t": variable}, keras.optimizers.Adagrad())
    store.set_update_policy("t", MOVEMENT)
    slices = tf.IndexedSlices(tf.ones([1, DIM]), tf.constant([0]), tf.constant([ROWS, DIM]))
    with pytest.raises(ValueError, match=r"optimizer.build\(model.trainable_variables\)"):
        store.filter_gradient("t", slices)


def test_flush_with_accumulating_optimizer_raises():
    variable = keras.Variable(np.zeros((ROWS, DIM), np.float32))
    store = VariableStore({"t": variable})
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    assert flush_deferred(store, optimizer) == 0
    store.set_update_policy("t", INTERVAL)
    with pytest.raises(ValueError, match="`gradient_accumulation_steps`: 2 for flush_deferred"):
        flush_deferred(store, optimizer)


def test_tensorflow_1_optimizers_can_flush():
    variable = tf.Variable(tf.zeros([ROWS, DIM]))
    store = VariableStore({"t": variable})
    store.set_saturated("t", [3])
    store.set_update_policy("t", INTERVAL)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    slices = tf.IndexedSlices(tf.ones([1, DIM]), tf.constant([3]), tf.constant([ROWS, DIM]))
    store.filter_gradient("t", slices)
    assert flush_deferred(store, optimizer) == 1
    np.testing.assert_array_equal(variable.numpy()[3], [-0.5] * DIM)
    assert flush_deferred(store, optimizer) == 0


def defer_one(variable, optimizer=None):
    """Returns a store that defers a gradient of ones for row 3."""
    store = VariableStore({"t": variable}, optimizer)
    store.set_saturated("t", [3])
    store.set_update_policy("t", INTERVAL)
    slices = tf.IndexedSlices(tf.ones([1, DIM]), tf.constant([3]), tf.constant([ROWS, DIM]))
    store.filter_gradient("t", slices)
    assert store.deferred_rows() == {"t": 1}
    return store


def test_tensorflow_1_optimizers_with_slots_flush_keras_variables():
    variable = keras.Variable(np.zeros((ROWS, DIM), np.float32))
    store = defer_one(variable)
    assert flush_deferred(store, tf.compat.v1.train.AdagradOptimizer(0.5, 3.0)) == 1
    np.testing.assert_allclose(variable.numpy()[3], [-0.25] * DIM)


def test_optimizer_without_variable_keeps_deferred_gradients():
    variable = keras.Variable(np.zeros((ROWS, DIM), np.float32))
    store = defer_one(variable)
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([keras.Variable(np.zeros((2, 2), np.float32))])
    with pytest.raises(ValueError, match="`optimizer`: 'SGD' for flush_deferred"):
        flush_deferred(store, optimizer)
    assert store.deferred_rows() == {"t": 1}
    assert flush_deferred(store, keras.optimizers.SGD(0.5)) == 1
    np.testing.assert_array_equal(variable.numpy()[3], [-0.5] * DIM)


def test_optimizer_of_other_ranks_raises():
    class TwoRanks(SingleProcess):
        size = 2

    store = defer_one(tf.Variable(tf.zeros([ROWS, DIM])))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.5), TwoRanks())
    with pytest.raises(ValueError, match=r"`comm`: '1 rank\(s\)'.* has 2 rank"):
        flush_deferred(store, optimizer, SingleProcess())
    assert store.deferred_rows() == {"t": 1}


@pytest.mark.parametrize("then", [(), (INTERVAL,)])
def test_earlier_deferred_gradients_are_applied_in_dry_run(then):
    variable = keras.Variable(np.zeros((ROWS, DIM), np.float32))
    store = defer_one(variable)
    for policy in (dataclasses.replace(INTERVAL, is_shadow=True), *then):
        store.set_update_policy("t", policy)
    assert flush_deferred(store, keras.optimizers.SGD(0.5)) == 1
    np.testing.assert_array_equal(variable.numpy()[3], [-0.5] * DIM)


def test_need_for_collective_flush_is_independent_of_deferred_gradients():
    deferring = []
    for has_deferred in (False, True):
        store = VariableStore({"t": tf.Variable(tf.zeros([ROWS, DIM]))})
        if has_deferred:
            store = defer_one(tf.Variable(tf.zeros([ROWS, DIM])))
        else:
            store.set_update_policy("t", INTERVAL)
        store.set_update_policy("t", UpdatePolicy())
        deferring.append(bool(store.is_deferring("t")))
        slices = tf.IndexedSlices(tf.ones([1, DIM]), tf.constant([5]), tf.constant([ROWS, DIM]))
        indices = store.filter_gradient("t", slices).indices.numpy().tolist()
        assert indices == ([3, 5] if has_deferred else [5])
        assert not store.is_deferring("t").numpy()
    assert deferring == [True, True]


def test_step_after_end_of_data_changes_nothing():
    variable = keras.Variable(np.zeros((ROWS, DIM), np.float32))
    store = defer_one(variable)
    store.set_update_policy("t", UpdatePolicy())

    @tf.function
    def step(iterator):
        keys = next(iterator)
        slices = tf.IndexedSlices(tf.ones([1, DIM]), keys, tf.constant([ROWS, DIM], tf.int64))
        return store.filter_gradient("t", slices).indices

    data = tf.data.Dataset.from_tensors(tf.constant([5], tf.int64)).filter(lambda _: False)
    for _ in range(3):
        with pytest.raises(tf.errors.OutOfRangeError):
            step(iter(data))
    assert store.is_deferring("t").numpy()
    assert flush_deferred(store, keras.optimizers.SGD(0.5)) == 1
    np.testing.assert_array_equal(variable.numpy()[3], [-0.5] * DIM)
