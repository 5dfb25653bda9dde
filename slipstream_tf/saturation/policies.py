"""What the configuration means for each table's gradients: policies for the store. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf.config import SaturationConfig, Table
from slipstream_tf.errors import invalid
from slipstream_tf.ops.update_policy import NUM_SHARDS, UpdatePolicy, deferred_row_bytes

# AUC lost per learning rate's worth of `movement`. Measured with Adagrad on globo clicks (rates
# 0.05 and 0.1, movements of 0.05 to 0.2 rates, 4 simulated ranks): 0.002 to 0.006; doubled.
LEAST_AUC_LOSS_PER_RATE = 0.002
AUC_LOSS_PER_RATE = 0.012

# Movement left undone by default, in learning rates: cost no AUC beyond the spread of seeds on
# globo (Adagrad 0.1). A whole rate cost 0.005 on generated inputs (Adagrad 0.005).
RATES_TO_DEFER = 0.05
MOVEMENT_OF_UNKNOWN_RATE = 0.005

# Drift over a window up to which replicas of a row may be read by default, in learning rates.
READ_ONLY_RATES = 0.25
READ_ONLY_DRIFT_OF_UNKNOWN_RATE = 0.025


def read_only_drift(config: SaturationConfig, learning_rate: float | None) -> float:
    """The drift over a window below which a saturated row may be read from a read-only replica.

    Args:
        config: the engine's settings.
        learning_rate: of the rows, or None.
    """
    otherwise = READ_ONLY_DRIFT_OF_UNKNOWN_RATE
    return _given_or_of_rate(config.freeze_drift, READ_ONLY_RATES, learning_rate, otherwise)


def movement_for_budget(max_auc_loss: float, learning_rate: float) -> float:
    """The movement that deferring may leave undone within a budget of quality.

    An empirical rule, not a bound: rows move in units of the learning rate, and what is deferred
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
    """Policies of the tracked tables, which share the budget of deferred gradients by size."""

    def __init__(
        self,
        config: SaturationConfig,
        tables: Sequence[Table],
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
        self._movement = _given_or_of_rate(
            config.defer_movement, RATES_TO_DEFER, learning_rate, MOVEMENT_OF_UNKNOWN_RATE
        )
        if config.max_auc_loss is not None and learning_rate:
            budget = config.budget_share * config.max_auc_loss
            self._movement = movement_for_budget(budget, learning_rate)
        needed = config.simulated_ranks * max(self._row_bytes.values())
        if config.defers_gradients and config.defer_budget_bytes < needed:
            allowed = f"at least {needed}: a deferred row of the widest table takes {needed} bytes"
            budget = config.defer_budget_bytes
            raise invalid("defer_budget_bytes", budget, "SaturationConfig", allowed)

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
        if not is_active or not (config.masks_gradients or config.defers_gradients):
            return UpdatePolicy(ranks=config.simulated_ranks)
        common: dict[str, Any] = {"ranks": config.simulated_ranks, "is_shadow": config.shadow}
        if config.masks_gradients:
            return UpdatePolicy(mode="mask", decay_skipped=config.decay_skipped, **common)
        is_interval = config.defer_trigger == "interval"
        return UpdatePolicy(
            mode="defer",
            trigger=config.defer_trigger,
            movement=self._movement,
            max_age=config.defer_steps if is_interval else config.defer_max_age,
            max_rows=self._most_rows(table, sizes),
            **common,
        )

    def _most_rows(self, table: str, sizes: Mapping[str, int]) -> int:
        """Rows of a table that may have deferred gradients: its part of the budget.

        Small tables may defer every row, in at most half of the budget; the others share the rest
        by their bytes. A store splits a table's part evenly over its shards, which keys fill
        unevenly.
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


def _given_or_of_rate(
    given: float | None, rates: float, learning_rate: float | None, otherwise: float
) -> float:
    """A setting, or so many learning rates where it is not given; `otherwise` without a rate."""
    if given is not None:
        return given
    return rates * learning_rate if learning_rate else otherwise


def _rows_with_slack(num_rows: int) -> int:
    """Sums a table may be allowed so that no shard is over budget with its rows.

    A shard has its even part of them; four standard deviations more rows, and four for the smallest
    tables, are not to be expected in any.
    """
    if not num_rows:
        return 0
    mean = num_rows / NUM_SHARDS
    return math.ceil(NUM_SHARDS * (mean + 4 * math.sqrt(mean) + 4))
