"""Masking and deferring in the native store, compared with plain training."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from all_rules import ALL_RULES, name_of
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf import optimizers
from slipstream_tf.config import Table
from slipstream_tf.ops import features
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy, deferred_row_bytes
from slipstream_tf.policies import DeferGradients, Movement
from slipstream_tf.policies.base import Tables
from slipstream_tf.tables import NativeStore

DIM, RATE = 3, 0.1
SPECS = [FeatureSpec("f", "t")]


def make_store(optimizer=None):
    return NativeStore([Table("t", DIM)], optimizer or optimizers.SGD(RATE))


def train(store, keys, gradients):
    """Trains one step with keys int64 [batch] and gradients float32 [batch, DIM]."""
    packed = features.pack({"f": np.asarray(keys, np.int64)}, SPECS, None)
    _, plan = store.lookup(packed, True)
    store.apply_gradients(plan, [tf.constant(gradients, tf.float32)])


def rows_of(store, keys):
    return store.gather("t", np.asarray(keys, np.int64))[0].numpy()


def state_of(store):
    exported = store.export_table("t")
    return np.concatenate([exported["rows"], exported["slots"]], axis=1)


steps_strategy = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.integers(-100, 100)), min_size=1, max_size=6),
    min_size=1,
    max_size=25,
)


@settings(max_examples=40)
@given(
    steps=steps_strategy,
    movement=st.floats(0.001, 1.0),
    max_age=st.integers(1, 8),
    max_rows=st.sampled_from([0, 64, 1000]),
    ranks=st.sampled_from([1, 3]),
    trigger=st.sampled_from(["movement", "interval"]),
)
def test_no_gradient_is_lost(steps, movement, max_age, max_rows, ranks, trigger):
    store = make_store()
    initial = rows_of(store, range(6))
    policy = UpdatePolicy(
        "defer", trigger, movement, max_age=max_age, max_rows=max_rows, ranks=ranks
    )
    total = np.zeros((6, DIM))
    train(store, range(6), np.zeros((6, DIM)))
    store.set_update_policy("t", policy)
    store.set_row_flags("t", [0, 2, 4], np.full(3, SATURATED))
    for step in steps:
        keys = np.array([key for key, _ in step])
        gradients = np.outer([g / 50 for _, g in step], [1.0, -0.5, 2.0])
        np.add.at(total, keys, gradients)
        train(store, keys, gradients)
    store.flush()
    np.testing.assert_allclose(rows_of(store, range(6)), initial - RATE * total, atol=2e-5)
    counts = store.update_counts("t")
    assert counts.deferred_now == 0
    assert counts.deferred + counts.sent >= counts.offered


def test_export_and_evaluation_include_deferred_gradients():
    store = make_store()
    store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=100, max_rows=1000))
    before = rows_of(store, [7])
    train(store, [7], np.ones((1, DIM)))
    assert store.update_counts("t").deferred_now == 1
    # gather reads the rows without their deferred gradients.
    np.testing.assert_array_equal(rows_of(store, [7]), before)
    packed = features.pack({"f": np.array([7])}, SPECS, None)
    pooled, _ = store.lookup(packed, False)
    np.testing.assert_allclose(pooled[0], before - RATE, rtol=1e-6)
    train(store, [7], np.ones((1, DIM)))
    exported = store.export_table("t")
    np.testing.assert_allclose(exported["rows"], before - 2 * RATE, rtol=1e-6)
    assert store.update_counts("t").flushed == 2


def test_import_drops_sums_of_replaced_rows():
    store = make_store()
    train(store, [7], np.ones((1, DIM)))
    saved = store.export_table("t")
    store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=100, max_rows=1000))
    train(store, [7], np.ones((1, DIM)))
    store.import_table("t", saved)
    assert store.update_counts("t").deferred_now == 0
    np.testing.assert_array_equal(store.export_table("t")["rows"], saved["rows"])


@pytest.mark.parametrize("rule", ALL_RULES, ids=name_of)
def test_masked_rows_and_slots_are_unchanged(rule):
    store = make_store(rule)
    train(store, [1, 2], np.ones((2, DIM)))
    store.set_update_policy("t", UpdatePolicy("mask"))
    store.set_row_flags("t", [1, 99], np.full(2, SATURATED))
    before = state_of(store)
    train(store, [1, 2, 1], np.ones((3, DIM)))
    after = state_of(store)
    np.testing.assert_array_equal(after[0], before[0])
    assert (after[1, :DIM] != before[1, :DIM]).all()
    counts = store.update_counts("t")
    assert (counts.offered, counts.sent, counts.masked) == (4, 3, 1)


def test_mode_change_applies_deferred_gradients():
    store = make_store()
    before = rows_of(store, [1])
    store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=100, max_rows=1000))
    train(store, [1], np.ones((1, DIM)))
    store.set_update_policy("t", UpdatePolicy())
    np.testing.assert_allclose(rows_of(store, [1]), before - RATE, rtol=1e-6)


def test_limit_change_keeps_deferred_gradients():
    store = make_store()
    store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=100, max_rows=1000))
    train(store, [1], np.ones((1, DIM)))
    store.set_update_policy("t", UpdatePolicy("defer", movement=1e8, max_age=50, max_rows=1000))
    assert store.update_counts("t").deferred_now == 1


def test_empty_flags_and_keys_are_accepted():
    store = make_store()
    store.set_row_flags("t", np.empty(0, np.int64), np.empty(0, np.uint8))
    assert store.row_flags("t", np.empty(0, np.int64)).shape == (0,)


def test_deferred_gradients_use_documented_bytes():
    store = make_store()
    store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=100, max_rows=10**6))
    train(store, np.arange(5000), np.ones((5000, DIM)))
    counts = store.update_counts("t")
    assert counts.deferred_now == 5000
    assert counts.deferred_bytes <= 5000 * deferred_row_bytes(DIM) + 64 * 128


@pytest.mark.parametrize("max_rows", [1, 63, 64, 100])
@pytest.mark.parametrize("ranks", [1, 3])
def test_deferred_sums_stay_within_limit(max_rows, ranks):
    store = make_store()
    policy = UpdatePolicy("defer", movement=1e9, max_age=100, max_rows=max_rows, ranks=ranks)
    store.set_update_policy("t", policy)
    train(store, np.tile(np.arange(5000), ranks), np.ones((5000 * ranks, DIM)))
    counts = store.update_counts("t")
    assert counts.deferred_now == max_rows
    assert counts.deferred_bytes <= max_rows * (deferred_row_bytes(DIM) + 128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "hide"}, "`mode`: 'hide'"),
        ({"mode": "defer", "trigger": "never"}, "`trigger`: 'never'"),
        ({"mode": "defer", "movement": -1.0}, "`movement`: -1.0"),
        ({"mode": "defer", "movement": float("nan")}, "`movement`: nan"),
        ({"mode": "defer", "max_age": 0}, "`max_age`: 0"),
        ({"mode": "defer", "max_rows": -1}, "`max_rows`: -1"),
        ({"ranks": 65}, "`ranks`: 65"),
    ],
)
def test_invalid_policies_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        UpdatePolicy(**arguments)


def test_flags_of_wrong_length_raise():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"flags of table '.*' has shape"):
        make_store().set_row_flags("t", [1, 2], np.full(1, SATURATED))


@pytest.mark.parametrize("num_rows", [3, 8, 28, 500])
def test_memory_of_small_table_fits_all_rows(num_rows):
    table = Table("t", DIM)
    acted_on = Tables(
        [table, Table("large", 64)],
        {"t": None, "large": None},
        {"t": num_rows, "large": 10**8},
    )
    rule = DeferGradients(Movement(1e9)).update_policy_of(table, acted_on)
    store, keys = make_store(), np.arange(num_rows) * 7919
    train(store, keys, np.zeros((num_rows, DIM)))
    store.set_update_policy("t", rule)
    train(store, keys, np.ones((num_rows, DIM)))
    counts = store.update_counts("t")
    assert (counts.over_budget, counts.deferred) == (0, num_rows)
