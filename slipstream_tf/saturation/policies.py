"""What the configuration means for each table's gradients: policies for the store. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from slipstream_tf.config import SaturationConfig, TableConfig
from slipstream_tf.errors import invalid
from slipstream_tf.ops.update_policy import NUM_SHARDS, UpdatePolicy, deferred_row_bytes

# AUC lost per learning rate's worth of `movement`. Measured with Adagrad on globo clicks (rates
# 0.05 and 0.1, movements of 0.05 to 0.2 rates, 4 simulated ranks): 0.002 to 0.006; doubled.
LEAST_AUC_LOSS_PER_RATE = 0.002
AUC_LOSS_PER_RATE = 0.012

# Movement left undone by default, in learning rates: cost no AUC that seeds tell on globo (Adagrad
# 0.1). A whole rate cost 0.005 on generated inputs (Adagrad 0.005).
RATES_TO_HOLD = 0.05
MOVEMENT_OF_UNKNOWN_RATE = 0.005

# Drift over a window up to which copies of a row may be read by default, in learning rates.
RATES_TO_FREEZE = 0.25
FREEZE_DRIFT_OF_UNKNOWN_RATE = 0.025


def freeze_drift(config: SaturationConfig, learning_rate: float | None) -> float:
    """The drift over a window below which a saturated row may be read from a copy.

    Args:
        config: the engine's settings.
        learning_rate: of the rows, or None.
    """
    if config.freeze_drift is not None:
        return config.freeze_drift
    return RATES_TO_FREEZE * learning_rate if learning_rate else FREEZE_DRIFT_OF_UNKNOWN_RATE


def movement_for_budget(max_auc_loss: float, learning_rate: float) -> float:
    """The movement that deferring may leave undone within a budget of quality.

    An empirical rule, not a bound: rows move in units of the learning rate, and what is held back
    of a row costs in proportion. Rules other than Adagrad were not measured.

    Args:
        max_auc_loss: the budget, above 0.
        learning_rate: of the rows.

    Returns:
        `defer_movement`, in the unit of the rows.
    """
    return learning_rate * max_auc_loss / AUC_LOSS_PER_RATE


def auc_loss_of_movement(movement: float, learning_rate: float) -> tuple[float, float]:
    """The quality that deferring may cost, by the same empirical rule.

    Args:
        movement: that deferring leaves undone, in the unit of the rows.
        learning_rate: of the rows, above 0.

    Returns:
        (least, most) AUC: the least that was measured, and twice the most.
    """
    rates = movement / learning_rate
    return rates * LEAST_AUC_LOSS_PER_RATE, rates * AUC_LOSS_PER_RATE


class UpdatePolicies:
    """Policies of the tracked tables; the budget of held sums is shared out by their sizes."""

    def __init__(
        self,
        config: SaturationConfig,
        tables: Sequence[TableConfig],
        learning_rate: float | None = None,
    ):
        """Checks the budget.

        Args:
            config: the engine's settings.
            tables: the tracked tables.
            learning_rate: of the rows; with `max_auc_loss` it decides what is deferred. None: not
                known.

        Raises:
            ValueError: gradients are deferred and the budget is smaller than one row's sum.
        """
        self._config = config
        self._learning_rate = learning_rate
        self._row_bytes = {table.name: deferred_row_bytes(table.dim) for table in tables}
        self._movement = _movement(config, learning_rate)
        if config.max_auc_loss is not None and learning_rate:
            budget = config.budget_share * config.max_auc_loss
            self._movement = movement_for_budget(budget, learning_rate)
        needed = config.simulated_ranks * max(self._row_bytes.values())
        if config.defers_gradients and config.defer_budget_bytes < needed:
            raise invalid(
                "defer_budget_bytes",
                config.defer_budget_bytes,
                "SaturationConfig",
                f"at least {needed}: a held row of the widest table takes {needed} bytes",
            )

    @property
    def auc_loss(self) -> tuple[float, float] | None:
        """What deferring by movement may cost, (least, most); None where no rule tells."""
        if not self._config.defers_by_movement or not self._learning_rate:
            return None
        return auc_loss_of_movement(self._movement, self._learning_rate)

    def of(self, table: str, sizes: Mapping[str, int], is_active: bool) -> UpdatePolicy:
        """Returns a table's policy.

        Args:
            table: its name.
            sizes: tracked table -> rows that it has now.
            is_active: whether the warm-up is over; before that, all is applied.
        """
        config = self._config
        policy = UpdatePolicy(ranks=config.simulated_ranks, is_shadow=config.shadow)
        if config.masks_gradients and is_active:
            return dataclasses.replace(policy, mode="mask", decay_skipped=config.decay_skipped)
        if not config.defers_gradients or not is_active:
            return dataclasses.replace(policy, is_shadow=False)
        is_interval = config.defer_trigger == "interval"
        return dataclasses.replace(
            policy,
            mode="defer",
            trigger=config.defer_trigger,
            movement=self._movement,
            max_age=config.defer_steps if is_interval else config.defer_max_age,
            max_rows=self._most_rows(table, sizes),
        )

    def _most_rows(self, table: str, sizes: Mapping[str, int]) -> int:
        """Rows of a table that may be held: its part of the budget.

        Small tables may hold every row, in at most half of the budget; the others share the rest by
        their bytes. A store splits a table's part evenly over its shards, which keys fill unevenly.
        """
        budget, row_bytes = self._config.defer_budget_bytes, self._row_bytes
        if not any(sizes[name] for name in row_bytes):
            return budget // sum(row_bytes.values())
        ranks = self._config.simulated_ranks
        needed = {
            name: ranks * _rows_with_slack(sizes[name]) * row_bytes[name] for name in row_bytes
        }
        small = {name for name in needed if needed[name] <= budget // (2 * len(needed))}
        if len(small) == len(needed):
            small.clear()
        elif table in small:
            return needed[table] // row_bytes[table]
        budget -= sum(needed[name] for name in small)
        shared = sum(sizes[name] * row_bytes[name] for name in needed if name not in small)
        return budget * sizes[table] // shared


def _movement(config: SaturationConfig, learning_rate: float | None) -> float:
    if config.defer_movement is not None:
        return config.defer_movement
    return RATES_TO_HOLD * learning_rate if learning_rate else MOVEMENT_OF_UNKNOWN_RATE


def _rows_with_slack(num_rows: int) -> int:
    """Sums a table may be allowed so that no shard has to refuse one of its rows.

    A shard has its even part of them; four standard deviations more rows, and four for the smallest
    tables, are not to be expected in any.
    """
    if not num_rows:
        return 0
    mean = num_rows / NUM_SHARDS
    return math.ceil(NUM_SHARDS * (mean + 4 * math.sqrt(mean) + 4))
