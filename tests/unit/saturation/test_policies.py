"""saturation.policies: what the configuration means for each table's gradients."""

from __future__ import annotations

import pytest

from slipstream_tf.config import SaturationConfig, Table
from slipstream_tf.ops.update_policy import NUM_SHARDS, UpdatePolicy, deferred_row_bytes
from slipstream_tf.saturation.policies import UpdatePolicies

TABLES = [Table("user", 16), Table("item", 4), Table("shop", 1)]
SIZES = {"user": 1000, "item": 100, "shop": 3}


def policies(tables=TABLES, **settings):
    return UpdatePolicies(SaturationConfig(**settings), tables)


@pytest.mark.parametrize("skip", ["none", "inputs", "gradients", "defer", "both"])
@pytest.mark.parametrize("shadow", [False, True])
def test_everything_is_applied_while_warming_up(skip, shadow):
    policy = policies(skip=skip, shadow=shadow, simulated_ranks=4).of("user", SIZES, False)
    assert policy == UpdatePolicy(ranks=4)


@pytest.mark.parametrize("skip", ["none", "inputs"])
def test_skipping_inputs_leaves_gradients_alone(skip):
    assert policies(skip=skip, shadow=True).of("user", SIZES, True) == UpdatePolicy()


@pytest.mark.parametrize("skip", ["gradients", "inputs+gradients"])
@pytest.mark.parametrize("decay_skipped", [False, True])
def test_mask(skip, decay_skipped):
    policy = policies(skip=skip, decay_skipped=decay_skipped, simulated_ranks=2)
    assert policy.of("item", SIZES, True) == UpdatePolicy(
        mode="mask", decay_skipped=decay_skipped, ranks=2
    )


@pytest.mark.parametrize("skip", ["defer", "both"])
@pytest.mark.parametrize("trigger, max_age", [("movement", 50), ("interval", 5)])
def test_defer(skip, trigger, max_age):
    settings = {"defer_movement": 0.25, "defer_max_age": 50, "defer_steps": 5, "shadow": True}
    policy = policies(skip=skip, defer_trigger=trigger, **settings).of("item", SIZES, True)
    assert (policy.mode, policy.trigger, policy.max_age) == ("defer", trigger, max_age)
    assert (policy.movement, policy.is_shadow) == (0.25, True)


@pytest.mark.parametrize("budget", [1000, 12_345, 1 << 20])
@pytest.mark.parametrize(
    "sizes", [SIZES, {"user": 0, "item": 7, "shop": 0}, dict.fromkeys(SIZES, 0)]
)
def test_deferred_gradients_stay_within_the_budget(budget, sizes):
    made = policies(skip="defer", defer_budget_bytes=budget)
    rows = {table.name: made.of(table.name, sizes, True).max_rows for table in TABLES}
    deferred_bytes = sum(rows[table.name] * deferred_row_bytes(table.dim) for table in TABLES)
    assert deferred_bytes <= budget
    if any(sizes.values()):
        assert deferred_bytes > budget - sum(deferred_row_bytes(table.dim) for table in TABLES)
        assert all(rows[name] == 0 for name in sizes if not sizes[name])
    else:
        assert len(set(rows.values())) == 1, "nothing is known of the sizes"


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_budget_smaller_than_a_row_of_every_rank(ranks):
    needed = ranks * deferred_row_bytes(16)
    settings = {"skip": "defer", "simulated_ranks": ranks}
    policies(defer_budget_bytes=needed, **settings)
    with pytest.raises(ValueError, match=rf"Invalid `defer_budget_bytes`.*at least {needed}"):
        policies(defer_budget_bytes=needed - 1, **settings)
    policies(skip="gradients", defer_budget_bytes=1)  # not read where nothing is deferred


def test_small_tables_beside_a_large_one_hold_every_row():
    sizes = {"user": 1_000_000, "item": 8, "shop": 28}
    made = policies(skip="defer", simulated_ranks=4, defer_budget_bytes=8 << 20)
    rows = {table.name: made.of(table.name, sizes, True).max_rows for table in TABLES}
    assert sum(rows[table.name] * deferred_row_bytes(table.dim) for table in TABLES) <= 8 << 20
    # Four rows of each rank in any one shard, at least.
    assert min(rows["item"], rows["shop"]) >= 4 * 4 * NUM_SHARDS
    assert rows["user"] * deferred_row_bytes(16) > 7 << 20


@pytest.mark.parametrize(
    "rate, given, movement",
    [(0.1, None, 0.005), (0.005, None, 0.00025), (None, None, 0.005), (0.1, 0.25, 0.25)],
)
def test_the_default_movement_goes_by_the_learning_rate(rate, given, movement):
    config = SaturationConfig(skip="defer", defer_movement=given)
    policy = UpdatePolicies(config, TABLES, rate).of("item", SIZES, True)
    assert policy.movement == pytest.approx(movement)
