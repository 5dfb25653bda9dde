"""Tests of update policies per table and the memory for deferred gradients."""

from __future__ import annotations

import pytest

from slipstream_tf.baselines import RowDrift
from slipstream_tf.config import Table
from slipstream_tf.ops.update_policy import NUM_SHARDS, UpdatePolicy, deferred_row_bytes
from slipstream_tf.policies import (
    DeferGradients,
    Interval,
    MaskGradients,
    Movement,
    SkipExamples,
)
from slipstream_tf.policies.base import Tables
from slipstream_tf.policies.gradients import auc_loss_of_movement, movement_for_auc_loss

TABLES = [Table("user", 16), Table("item", 4), Table("shop", 1)]
SIZES = {"user": 1000, "item": 100, "shop": 3}


def acted_on(sizes=SIZES, rate=None, **others):
    """Returns the tables in the form that policies receive."""
    return Tables(TABLES, dict.fromkeys(SIZES, rate), sizes, **others)


def rules(policy, *arguments, **others):
    """Returns table name -> update policy."""
    tables = acted_on(*arguments, **others)
    return {table.name: policy.update_policy_of(table, tables) for table in TABLES}


def test_example_policies_have_no_gradient_rule():
    assert set(rules(SkipExamples(RowDrift())).values()) == {None}


@pytest.mark.parametrize("decay_moments", [False, True])
def test_mask_rule_follows_policy(decay_moments):
    policy = MaskGradients(decay_moments=decay_moments)
    assert rules(policy)["item"] == UpdatePolicy("mask", decay_skipped=decay_moments)


def test_defer_rule_follows_policy():
    by_movement = rules(DeferGradients(Movement(0.25, max_age=50)))["item"]
    assert (by_movement.mode, by_movement.trigger) == ("defer", "movement")
    assert (by_movement.movement, by_movement.max_age) == (0.25, 50)
    by_interval = rules(DeferGradients(Interval(5)), are_native=False)["item"]
    assert (by_interval.mode, by_interval.trigger, by_interval.max_age) == ("defer", "interval", 5)


@pytest.mark.parametrize("memory", [1000, 12_345, "1MiB"])
@pytest.mark.parametrize(
    "sizes", [SIZES, {"user": 0, "item": 7, "shop": 0}, dict.fromkeys(SIZES, 0)]
)
def test_deferred_gradients_stay_within_memory(memory, sizes):
    found = rules(DeferGradients(memory=memory), sizes)
    rows = {name: rule.max_rows for name, rule in found.items()}
    deferred_bytes = sum(rows[table.name] * deferred_row_bytes(table.dim) for table in TABLES)
    nbytes = 1 << 20 if memory == "1MiB" else memory
    assert deferred_bytes <= nbytes
    if any(sizes.values()):
        assert deferred_bytes > nbytes - sum(deferred_row_bytes(table.dim) for table in TABLES)
        assert all(rows[name] == 0 for name in sizes if not sizes[name])
    else:
        assert len(set(rows.values())) == 1, "nothing is known of the sizes"


def test_memory_smaller_than_row_raises():
    needed, tables = deferred_row_bytes(16), acted_on()
    DeferGradients(memory=needed).require_fit(tables)
    with pytest.raises(ValueError, match=rf"Invalid `memory`.*DeferGradients.*at least {needed}"):
        DeferGradients(memory=needed - 1).require_fit(tables)


def test_small_tables_fit_every_row_next_to_large_table():
    sizes = {"user": 1_000_000, "item": 8, "shop": 28}
    found = rules(DeferGradients(memory="2MiB"), sizes)
    rows = {name: rule.max_rows for name, rule in found.items()}
    assert sum(rows[table.name] * deferred_row_bytes(table.dim) for table in TABLES) <= 2 << 20
    # Every shard has room for at least four rows.
    assert min(rows["item"], rows["shop"]) >= 4 * NUM_SHARDS
    assert rows["user"] * deferred_row_bytes(16) > 7 << 18


@pytest.mark.parametrize(
    "rate, given, movement",
    [(0.1, None, 0.005), (0.005, None, 0.00025), (None, None, 0.005), (0.1, 0.25, 0.25)],
)
def test_default_movement_is_proportional_to_learning_rate(rate, given, movement):
    rule = rules(DeferGradients(Movement(given)), rate=rate)["item"]
    assert rule.movement == pytest.approx(movement)


def test_each_table_uses_movement_of_its_rate():
    rates = {"user": 0.1, "item": 0.01, "shop": None}
    tables = Tables(TABLES, rates, SIZES)
    found = [DeferGradients().update_policy_of(table, tables).movement for table in TABLES]
    assert found == pytest.approx([0.005, 0.0005, 0.005])


def test_max_auc_loss_sets_movement_if_rate_is_known():
    policy = DeferGradients()
    rule = rules(policy, rate=0.1, max_auc_loss=0.001)["item"]
    assert rule.movement == movement_for_auc_loss(0.001, 0.1)
    minimum, maximum = policy.auc_loss(acted_on(rate=0.1, max_auc_loss=0.001))
    assert maximum == pytest.approx(0.001) and 0.0 < minimum < maximum
    assert rules(policy, max_auc_loss=0.001)["item"].movement == rules(policy)["item"].movement
    with pytest.raises(
        ValueError, match=r"Invalid `distance`: 0.25 for Movement with max_auc_loss"
    ):
        DeferGradients(Movement(0.25)).require_fit(acted_on(max_auc_loss=0.001))


def test_deferring_cost_is_unknown_without_rate_or_by_interval():
    assert DeferGradients().auc_loss(acted_on()) is None
    assert DeferGradients(Interval()).auc_loss(acted_on(rate=0.1)) is None
    found = DeferGradients(Movement(0.01)).auc_loss(acted_on(rate=0.1))
    assert found == auc_loss_of_movement(0.01, 0.1)
