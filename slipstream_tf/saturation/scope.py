"""Which tables the engine follows. In: a store's tables, settings, features. Out: the tables."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream_tf.config import SaturationConfig, TableConfig
from slipstream_tf.errors import invalid
from slipstream_tf.memory import require_room
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.saturation import hot_set


def tables_to_track(
    tables: Sequence[TableConfig],
    config: SaturationConfig,
    specs: Sequence[FeatureSpec],
    ranks: int,
) -> list[TableConfig]:
    """Returns the tables that a feature uses and the settings do not exempt, in their order.

    Args:
        tables: of the store.
        config: settings.
        specs: features of an input.
        ranks: number of ranks.

    Raises:
        ValueError: there is no feature, a feature's table is not in the store, a setting names a
            table that no feature uses, a budget is too small for one row, or no table is left.
    """
    if not specs:
        raise invalid("specs", specs, "SaturationTracker", "one feature or more")
    known = [table.name for table in tables]
    for spec in specs:
        if spec.table not in known:
            allowed = "a table of the store: " + ", ".join(known)
            raise invalid("table", spec.table, f"feature {spec.name!r}", allowed)
    used = {spec.table for spec in specs}
    for setting in ("exempt_tables", "table_hot_budget_bytes"):
        for name in getattr(config, setting):
            if name not in used:
                allowed = "tables that a feature uses: " + ", ".join(sorted(used))
                raise invalid(setting, name, "SaturationConfig", allowed)
    if config.simulated_ranks > 1 and ranks > 1:
        where = f"SaturationConfig on {ranks} ranks"
        raise invalid("simulated_ranks", config.simulated_ranks, where, "1: they are real")
    tracked = [t for t in tables if t.name in used and t.name not in config.exempt_tables]
    if not tracked:
        allowed = "fewer than all tables: one must be left to track"
        raise invalid("exempt_tables", config.exempt_tables, "SaturationConfig", allowed)
    needed = min(hot_set.snapshot_bytes(table.dim) for table in tracked)
    if config.hot_budget_bytes < needed:
        allowed = f"at least {needed}: the snapshot of one row takes that many bytes"
        raise invalid("hot_budget_bytes", config.hot_budget_bytes, "SaturationConfig", allowed)
    snapshots = f"snapshots of {', '.join(repr(table.name) for table in tracked[:3])}"
    snapshots += ", ..." if len(tracked) > 3 else ""
    budgets = {"hot_budget_bytes": (config.hot_budget_bytes, snapshots)}
    if config.defers_gradients:
        held = "gradient sums that are held back"
        budgets["defer_budget_bytes"] = (config.defer_budget_bytes, held)
    for table, budget in config.table_hot_budget_bytes.items():
        budgets[f"table_hot_budget_bytes[{table!r}]"] = (budget, f"snapshots of {table!r}")
    for setting, (budget, what) in budgets.items():
        require_room(setting, budget, budget, what, "SaturationConfig")
    return tracked
