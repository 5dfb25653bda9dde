"""Tests of gradient transforms: settings, configurations, and equal results in all stores."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from all_rules import ALL_RULES, name_of, train_on_ranks

from slipstream_tf import Table, optimizers
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.optimizers.base import TRANSFORMS
from slipstream_tf.tables import NativeStore

ALL = {"l2": 0.1, "clip_value": 1.5, "clip_norm": 3.0, "weight_decay": 0.1, "max_norm": 2.0}


SPECS = [FeatureSpec("f", "t", "sum")]


def all_of(rule):
    """Returns all transforms that an update rule supports."""
    return ALL | ({"weight_decay": None} if isinstance(rule, optimizers.Ftrl) else {})


def test_transforms_are_empty_by_default() -> None:
    assert optimizers.Adagrad().op_transforms() == ()
    assert optimizers.Adagrad(**ALL).op_transforms() == (0.1, 1.5, 3.0, 0.1, 2.0, 0.0)
    assert optimizers.AdamW().op_transforms() == (0.0, 0.0, 0.0, 0.004, 0.0, 0.0)
    assert optimizers.AdamW(weight_decay=None).op_transforms() == ()


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), "much"])
def test_invalid_values_raise(name, value) -> None:
    with pytest.raises((ValueError, TypeError), match=f"`{name}`.*Adagrad"):
        optimizers.Adagrad(**{name: value})


@pytest.mark.parametrize("rule", [*ALL_RULES, optimizers.AdamW()], ids=name_of)
def test_config_round_trip(rule) -> None:
    rule = dataclasses.replace(rule, **all_of(rule))
    assert optimizers.get(optimizers.serialize(rule)) == rule
    table = Table("t", 4, optimizer=rule)
    assert Table.from_config(table.get_config()).optimizer == rule


@pytest.mark.parametrize("name", ["l2", "clip_value", "clip_norm", "weight_decay"])
def test_deferring_with_decay_or_penalty_raises(name) -> None:
    store = NativeStore([Table("t", 4)], optimizers.SGD(0.1, **{name: 0.1}))
    with pytest.raises(ValueError, match=rf"`policies`: 'DeferGradients'.*SGD\({name}=0.1\)"):
        store.set_update_policy("t", UpdatePolicy("defer", movement=1.0))
    store.set_update_policy("t", UpdatePolicy("mask"))
    bounded = NativeStore([Table("t", 4)], optimizers.SGD(0.1, max_norm=1.0))
    bounded.set_update_policy("t", UpdatePolicy("defer", movement=1.0))


def test_decay_stops_at_zero() -> None:
    store, specs = NativeStore([Table("t", 2)], optimizers.SGD(50.0, weight_decay=0.1)), SPECS
    store.write_rows("t", np.array([1]), np.ones((1, 2), np.float32))
    _, plan = store.lookup(pack({"f": [1]}, specs), training=True)
    store.apply_gradients(plan, [np.zeros((1, 2), np.float32)])
    np.testing.assert_array_equal(store.gather("t", [1])[0], np.zeros((1, 2)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optimizers.Ftrl(follow=True), "`follow`: True for Ftrl"),
        (lambda: optimizers.Ftrl(weight_decay=0.1), "`weight_decay`: 0.1 for Ftrl"),
        (lambda: optimizers.Ftrl(initial_accumulator_value=1e-50), "rounding to float32"),
        (lambda: optimizers.Adam(beta_1=1 - 1e-9), "`beta_1`.*rounding to float32"),
        (lambda: optimizers.Adagrad(epsilon=1e-50), "`epsilon`.*rounding to float32"),
        (lambda: optimizers.SGD(nesterov=True), "`nesterov`: True for SGD without momentum"),
        (lambda: optimizers.Adam(bias_correction="none"), "`bias_correction`: 'none'"),
    ],
)
def test_invalid_settings_raise(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", ["ReplicatedStore", "ShardedStore"])
@pytest.mark.parametrize("rule", ALL_RULES, ids=name_of)
def test_ranks_equal_single_process(run_as_ranks, kind, rule) -> None:
    rule = dataclasses.replace(rule, **all_of(rule))
    (alone,) = run_as_ranks(1, lambda comm: train_on_ranks(comm, kind, rule))
    ranks = run_as_ranks(2, lambda comm: train_on_ranks(comm, kind, rule))
    for found in (alone, *ranks):
        assert not isinstance(found, BaseException), found
    plain = run_as_ranks(
        1, lambda comm: train_on_ranks(comm, kind, dataclasses.replace(rule, l2=None))
    )
    assert np.abs(plain[0][1] - alone[1]).max() > 1e-4
    for keys, rows in ranks:
        np.testing.assert_allclose(rows, alone[1][np.searchsorted(alone[0], keys)], atol=2e-5)
    assert set(np.concatenate([keys for keys, _ in ranks])) == set(alone[0])
