"""Tests that decay="all" penalizes and decays all rows of a table."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from all_rules import ALL_RULES, SPECS, name_of, train, train_on_ranks

from slipstream_tf import (
    Table,
    optimizers,
)
from slipstream_tf.ops.features import pack
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables import NativeStore

ROWS, STEPS = 12, 20
L2 = 0.05


def draw(seed=0):
    """Returns rows, and batches that contain only some of their keys."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(ROWS, 5)).astype(np.float32)
    batches = [random.integers(0, ROWS, 3) for _ in range(STEPS)]
    gradients = [random.normal(size=(3, 5)).astype(np.float32) for _ in range(STEPS)]
    return rows, batches, gradients


def dense(optimizer, l2, rows, batches, gradients):
    """Trains all rows as one Keras variable with an L2 penalty."""
    variable = keras.Variable(rows)
    for keys, gradient in zip(batches, gradients, strict=True):
        summed = 2 * l2 * variable.numpy()
        np.add.at(summed, keys, gradient)
        optimizer.apply([summed], [variable])
    return variable.numpy()


@pytest.mark.parametrize(
    ("ours", "keras_optimizer"),
    [
        (optimizers.SGD(0.05), keras.optimizers.SGD(0.05)),
        (optimizers.SGD(0.05, momentum=0.5), keras.optimizers.SGD(0.05, momentum=0.5)),
        (
            optimizers.Adagrad(0.05, initial_accumulator_value=0.1),
            keras.optimizers.Adagrad(0.05, initial_accumulator_value=0.1),
        ),
        (optimizers.Adam(0.01), keras.optimizers.Adam(0.01)),
        (
            optimizers.Ftrl(0.05, initial_accumulator_value=0.1),
            keras.optimizers.Ftrl(0.05, initial_accumulator_value=0.1),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_penalty_of_all_rows_equals_dense_table(ours, keras_optimizer) -> None:
    rule = type(ours)(**{**vars(ours), "l2": L2, "decay": "all"})
    case = draw()
    expected = dense(keras_optimizer, L2, *case)
    np.testing.assert_allclose(train(rule, *case), expected, rtol=1e-5, atol=2e-6)
    of_batch = train(type(ours)(**{**vars(ours), "l2": L2}), *case)
    assert np.abs(of_batch - expected).max() > 1e-2


def test_decay_of_all_rows_equals_keras_with_schedule() -> None:
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 0.2)
    rule = optimizers.SGD(schedule, weight_decay=0.2, decay="all")
    expected = dense(keras.optimizers.SGD(schedule, weight_decay=0.2), 0.0, *draw())
    np.testing.assert_allclose(train(rule, *draw()), expected, rtol=1e-5, atol=1e-6)


def test_sgd_decay_needs_no_pass_over_rows() -> None:
    assert optimizers.SGD(l2=0.1, weight_decay=0.2, decay="all").op_transforms() == (
        *(0.0, 0.0, 0.0, 0.4, 0.0),
        1.0,
    )
    assert optimizers.SGD(l2=0.1, clip_norm=1.0, decay="all").op_transforms()[0] == 0.1
    assert optimizers.SGD(momentum=0.9, l2=0.1, decay="all").op_transforms()[0] == 0.1


@pytest.mark.parametrize("name", ["l2", "weight_decay"])
def test_read_rows_include_decay(name) -> None:
    store = NativeStore([Table("t", 2)], optimizers.SGD(0.5, **{name: 0.25}, decay="all"))
    store.write_rows("t", np.array([1, 2]), np.ones((2, 2), np.float32))
    kept = 1 - 0.5 * 0.25 * (2 if name == "l2" else 1)
    for _ in range(3):
        _, plan = store.lookup(pack({"f": [1]}, SPECS), training=True)
        store.apply_gradients(plan, [np.zeros((1, 2), np.float32)])
    keys, expected = [1, 2], np.full((2, 2), kept**3, np.float32)
    looked_up, _ = store.lookup(pack({"f": [1, 2]}, SPECS), training=False)
    np.testing.assert_allclose(looked_up[0], expected, rtol=1e-6)
    np.testing.assert_allclose(store.gather("t", keys)[0], expected, rtol=1e-6)
    rows, _, drift = store.measure("t", keys, np.ones((2, 2), np.float32), "linf")
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    np.testing.assert_allclose(drift, np.full(2, 1 - kept**3), rtol=1e-5)
    other = NativeStore([Table("t", 2)], optimizers.SGD(0.5, **{name: 0.25}, decay="all"))
    other.import_table("t", store.export_table("t"))
    np.testing.assert_array_equal(other.gather("t", keys)[0], store.gather("t", keys)[0])
    new, _ = store.lookup(pack({"f": [9]}, SPECS), training=True)
    fresh, _ = other.lookup(pack({"f": [9]}, SPECS), training=False)
    np.testing.assert_allclose(new[0], fresh[0], rtol=1e-6)


@pytest.mark.parametrize("kind", ["ReplicatedStore", "ShardedStore"])
@pytest.mark.parametrize("rule", ALL_RULES, ids=name_of)
def test_ranks_equal_single_process(run_as_ranks, kind, rule) -> None:
    chosen = {"l2": L2, "decay": "all"}
    if not isinstance(rule, optimizers.Ftrl):
        chosen["weight_decay"] = 0.1
    rule = type(rule)(**{**vars(rule), **chosen})
    (alone,) = run_as_ranks(1, lambda comm: train_on_ranks(comm, kind, rule, 10, 30))
    for keys, rows in run_as_ranks(2, lambda comm: train_on_ranks(comm, kind, rule, 10, 30)):
        np.testing.assert_allclose(rows, alone[1][np.searchsorted(alone[0], keys)], atol=5e-5)


def test_masked_rows_decay_without_penalty() -> None:
    store = NativeStore([Table("t", 2)], optimizers.Adam(0.1, weight_decay=0.5, decay="all"))
    store.set_update_policy("t", UpdatePolicy("mask"))
    store.write_rows("t", np.array([1, 2]), np.ones((2, 2), np.float32))
    store.set_row_flags("t", [1], [SATURATED])
    _, plan = store.lookup(pack({"f": [1, 2]}, SPECS), training=True)
    store.apply_gradients(plan, [np.ones((2, 2), np.float32)])
    rows = store.gather("t", [1, 2])[0].numpy()
    np.testing.assert_allclose(rows[0], [0.95, 0.95], rtol=1e-6)
    np.testing.assert_allclose(rows[1], [0.85, 0.85], rtol=1e-5)
    swept = NativeStore([Table("t", 2)], optimizers.Adam(0.1, l2=0.5, decay="all"))
    with pytest.raises(ValueError, match=r"'MaskGradients'.*Adam\(l2=0.5, decay='all'\)"):
        swept.set_update_policy("t", UpdatePolicy("mask"))


def test_invalid_decay_settings_raise() -> None:
    with pytest.raises(
        ValueError, match=r"`decay`: 'all' for Adam without `l2` and `weight_decay`"
    ):
        optimizers.Adam(decay="all")
    with pytest.raises(ValueError, match="`decay`: 'none'"):
        optimizers.Adam(l2=0.1, decay="none")
    store = NativeStore([Table("t", 2)], optimizers.SGD(5.0, weight_decay=0.2, decay="all"))
    _, plan = store.lookup(pack({"f": [1]}, SPECS), training=True)
    with pytest.raises(Exception, match=r"of table 't' is 1\.0+; expected a product below 1"):
        store.apply_gradients(plan, [np.zeros((1, 2), np.float32)])
    with pytest.raises(ValueError, match="DeferGradients"):
        store.set_update_policy("t", UpdatePolicy("defer", movement=1.0))
