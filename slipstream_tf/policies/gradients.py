"""Policies for gradients of rows: deferred with error feedback, or masked."""

import dataclasses
import math
from typing import Any

from absl import logging

from slipstream_tf._utils.errors import invalid, require_integer, require_number
from slipstream_tf._utils.memory import require_room
from slipstream_tf.config import Table, parse_bytes
from slipstream_tf.ops.update_policy import (
    NUM_SHARDS,
    UpdateCounts,
    UpdatePolicy,
    deferred_row_bytes,
)
from slipstream_tf.policies.base import DEFAULT_SHARE, Begins, Policy, Tables

# AUC lost per learning rate's worth of movement. Measured with Adagrad on globo clicks (rates
# 0.05 and 0.1, movements of 0.05 to 0.2 rates, 4 simulated ranks): 0.002 to 0.006; doubled.
LEAST_AUC_LOSS_PER_RATE = 0.002
AUC_LOSS_PER_RATE = 0.012

# Movement left undone by default, in learning rates: cost no AUC beyond the spread of seeds on
# globo (Adagrad 0.1). A whole rate cost 0.005 on generated examples (Adagrad 0.005).
RATES_TO_DEFER = 0.05
MOVEMENT_OF_UNKNOWN_RATE = 0.005


@dataclasses.dataclass(frozen=True)
class Movement:
    """Until applying what is deferred would move a row: error feedback with a bound.

    Attributes:
        distance: of any value of a row, in the unit of the rows, above 0. None: a twentieth of the
            rows' learning rate; 0.005 where the store does not know it.
        max_age: of a deferred gradient, in steps, at least 1.
    """

    distance: float | None = None
    max_age: int = 200

    def __post_init__(self) -> None:
        place = "Movement"
        if self.distance is not None:
            distance = require_number(
                "distance", self.distance, 0.0, place=place, open_minimum=True
            )
            object.__setattr__(self, "distance", distance)
        require_integer("max_age", self.max_age, 1, None, place)

    def of(self, learning_rate: float | None, max_auc_loss: float | None = None) -> float:
        """Returns the distance for rows of a learning rate.

        Args:
            learning_rate: of the rows; None: not known.
            max_auc_loss: maximum AUC that deferring may cost; it sets the distance where the rate
                is known.
        """
        if max_auc_loss is not None and learning_rate:
            return movement_for_auc_loss(max_auc_loss, learning_rate)
        if self.distance is not None:
            return self.distance
        return RATES_TO_DEFER * learning_rate if learning_rate else MOVEMENT_OF_UNKNOWN_RATE


def movement_for_auc_loss(max_auc_loss: float, learning_rate: float) -> float:
    """Returns the movement that deferring may leave undone for a maximum AUC loss.

    An empirical rule, not a bound: rows move in units of the learning rate, and what is deferred
    of a row costs in proportion. Rules other than Adagrad were not measured.

    Args:
        max_auc_loss: maximum AUC that deferring may cost, above 0.
        learning_rate: of the rows.

    Returns:
        A distance, in the unit of the rows.
    """
    return learning_rate * max_auc_loss / AUC_LOSS_PER_RATE


def auc_loss_of_movement(movement: float, learning_rate: float) -> tuple[float, float]:
    """Returns the quality that deferring may cost, by the same empirical rule.

    Args:
        movement: that deferring leaves undone, in the unit of the rows.
        learning_rate: of the rows, above 0.

    Returns:
        (least, most) AUC: the least that was measured, and twice the most.
    """
    rates = movement / learning_rate
    return rates * LEAST_AUC_LOSS_PER_RATE, rates * AUC_LOSS_PER_RATE


def _share_of(policy: Any) -> float | None:
    """Returns the checked share of an `Interval` or a `MaskGradients`."""
    if policy.share is None:
        return None
    return require_number("share", policy.share, 0.0, 1.0, type(policy).__name__, True)


@dataclasses.dataclass(frozen=True)
class Interval:
    """Defers gradients of saturated keys for a number of steps.

    For stores that do not know how far an update would move a row, for example tables in SOK and
    variables under Adam. Native tables refuse it: on a changing stream it cost .0171 AUC where
    `Movement(0.005)` cost .0007 (benchmarks/results/stream.md).

    Attributes:
        steps: that a gradient is deferred at most, at least 1.
        share: of the hot examples, whose keys are to be saturated, 0 to 1. None: 0.3, or what
            `Saturation(threshold=)` makes of it.
    """

    steps: int = 20
    share: float | None = None

    def __post_init__(self) -> None:
        require_integer("steps", self.steps, 1, None, "Interval")
        object.__setattr__(self, "share", _share_of(self))


@dataclasses.dataclass(frozen=True)
class DeferGradients(Policy):
    """Defers gradients, summed per row, and applies each sum as one gradient.

    With several ranks sums are deferred before the exchange, so that fewer rows are sent.

    Attributes:
        until: a `Movement` (of any row, whatever its drift), or an `Interval` (of saturated keys)
            where the store does not know how far an update would move a row.
        memory: bytes of all deferred gradients, or a text such as "64MB"; gradients of further rows
            are applied at once.
    """

    until: Movement | Interval = dataclasses.field(default_factory=Movement)
    memory: int | str = "64MiB"
    acts_on = "gradients"
    verb = "deferred"
    columns = ("rows", "sent", "sent share")

    def __post_init__(self) -> None:
        if not isinstance(self.until, (Movement, Interval)):
            allowed = "slipstream_tf.Movement(...) or slipstream_tf.Interval(...)"
            raise invalid("until", self.until, "DeferGradients", allowed)
        parse_bytes("memory", self.memory, "DeferGradients")

    @property
    def withholds_saturated(self) -> bool:  # type: ignore[override]
        return isinstance(self.until, Interval)

    @property
    def probes_every(self) -> int | None:  # type: ignore[override]
        return 10 if self.withholds_saturated else None

    @property
    def steered_by(self) -> str:  # type: ignore[override]
        return "share" if self.withholds_saturated else "movement"

    @property
    def key_share(self) -> float | None:
        if isinstance(self.until, Movement):
            return None
        return DEFAULT_SHARE if self.until.share is None else self.until.share

    @property
    def gives_key_share(self) -> bool:  # type: ignore[override]
        return isinstance(self.until, Interval) and self.until.share is not None

    def require_fit(self, tables: Tables) -> None:
        """Raises ValueError if native tables would defer by interval, or the memory is too small.

        Warns of the cost where other tables defer by interval.
        """
        if isinstance(self.until, Interval):
            if tables.are_native:
                allowed = (
                    "slipstream_tf.Movement(...): native tables know how far an update moves a row"
                )
                raise invalid("until", self.until, "DeferGradients on native tables", allowed)
            logging.warning(
                "DeferGradients(until=Interval(...)) cost .0171 AUC on a changing stream where "
                "Movement(0.005) cost .0007 (benchmarks/results/stream.md). Use Interval only "
                "where the store does not know how far the optimizer moves rows."
            )
        needed = max(deferred_row_bytes(t.dim) for t in tables.tables)
        budget = parse_bytes("memory", self.memory)
        if budget < needed:
            allowed = f"at least {needed}: a deferred row of the widest table takes {needed} bytes"
            raise invalid("memory", self.memory, "DeferGradients", allowed)
        require_room("memory", budget, budget, "deferred gradients", "DeferGradients")
        given = self.until.distance if isinstance(self.until, Movement) else None
        if given is not None and tables.max_auc_loss is not None:
            allowed = "None: the bound sets it"
            raise invalid("distance", given, "Movement with max_auc_loss", allowed)

    def gradient_rule(self, table: Table, tables: Tables) -> UpdatePolicy:
        max_rows = self._most_rows(table.name, tables)
        if isinstance(self.until, Interval):
            return UpdatePolicy("defer", "interval", max_age=self.until.steps, max_rows=max_rows)
        movement = self.until.of(tables.rates[table.name], tables.max_auc_loss)
        return UpdatePolicy("defer", "movement", movement, self.until.max_age, max_rows)

    def auc_loss(self, tables: Tables) -> tuple[float, float] | None:
        """Returns what deferring by movement may cost; None where no rule tells."""
        rates = [rate for rate in tables.rates.values() if rate]
        if not isinstance(self.until, Movement) or len(rates) < len(tables.rates):
            return None
        until = self.until
        losses = [auc_loss_of_movement(until.of(r, tables.max_auc_loss), r) for r in rates]
        return max(losses, key=lambda loss: loss[1])

    def told(self, rows: UpdateCounts) -> str:
        return (
            f"{rows.due_by_movement:,} by movement, {rows.due_by_age:,} by age, "
            f"{rows.flushed:,} flushed, {rows.over_budget:,} over budget"
        )

    def _most_rows(self, table: str, tables: Tables) -> int:
        """Rows of a table that may have deferred gradients: its part of the memory.

        Small tables may defer every row, in at most half of the memory; the others share the rest
        by their bytes. A store splits a table's part evenly over its shards, which keys fill
        unevenly.
        """
        budget, sizes = parse_bytes("memory", self.memory), tables.rows
        row_bytes = {t.name: deferred_row_bytes(t.dim) for t in tables.tables}
        if not any(sizes[name] for name in row_bytes):
            return budget // sum(row_bytes.values())
        needed = {name: _rows_with_slack(sizes[name]) * row_bytes[name] for name in row_bytes}
        small = {name for name in needed if needed[name] <= budget // (2 * len(needed))}
        if len(small) == len(needed):
            small.clear()
        elif table in small:
            return needed[table] // row_bytes[table]
        budget -= sum(needed[name] for name in small)
        shared = sum(sizes[name] * row_bytes[name] for name in needed if name not in small)
        return budget * sizes[table] // shared


def _rows_with_slack(num_rows: int) -> int:
    """Sums a table may be allowed so that no shard is over budget with its rows.

    A shard has its even part of them; four standard deviations more rows, and four for the smallest
    tables, are not to be expected in any.
    """
    if not num_rows:
        return 0
    mean = num_rows / NUM_SHARDS
    return math.ceil(NUM_SHARDS * (mean + 4 * math.sqrt(mean) + 4))


@dataclasses.dataclass(frozen=True)
class MaskGradients(Policy):
    """Masks the gradients of saturated keys before they are applied or exchanged.

    Attributes:
        share: of the hot examples, whose keys are to be saturated, 0 to 1. None: 0.3, or what
            `Saturation(threshold=)` makes of it.
        decay_moments: whether moments, and velocities, of rows with a masked gradient decay.
    """

    share: float | None = None
    decay_moments: bool = False
    acts_on = "gradients"
    withholds_saturated = True
    probes_every = 10
    steered_by = "share"
    loses_gradients = True
    verb = "masked"
    columns = ("rows", "masked", "masked share")

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", _share_of(self))
        if not isinstance(self.decay_moments, bool):
            raise invalid("decay_moments", self.decay_moments, "MaskGradients", "True or False")

    @property
    def key_share(self) -> float:
        return DEFAULT_SHARE if self.share is None else self.share

    @property
    def gives_key_share(self) -> bool:  # type: ignore[override]
        return self.share is not None

    def example_rule(self, state: Any, begins: Begins) -> dict[str, Any] | None:
        """Counts the examples that could be skipped, for the estimate of their worth."""
        return {"mode": "drift", "threshold": begins.threshold, "shadow": True}

    def gradient_rule(self, table: Table, tables: Tables) -> UpdatePolicy:
        return UpdatePolicy(mode="mask", decay_skipped=self.decay_moments)
