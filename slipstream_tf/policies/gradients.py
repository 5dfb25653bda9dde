"""Policies for gradient rows: `DeferGradients` with error feedback, and `MaskGradients`."""

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
from slipstream_tf.policies.base import DEFAULT_FRACTION, Policy, Tables, WindowStart

# AUC loss if deferring postpones a movement of one learning rate. The measured range is 0.002 to
# 0.006 (Adagrad on the news clicks of globo, learning rates 0.05 and 0.1, movements of 0.05 to 0.2
# learning rates, 4 simulated ranks). The upper limit is doubled for safety.
MIN_AUC_LOSS_PER_RATE = 0.002
AUC_LOSS_PER_RATE = 0.012

# Default maximum movement that is postponed, as a multiple of the learning rate. On globo (Adagrad,
# learning rate 0.1) the AUC loss was within the spread of the seeds. A movement of 1 learning rate
# cost 0.005 AUC on generated examples (Adagrad, learning rate 0.005).
RATES_TO_DEFER = 0.05
MOVEMENT_OF_UNKNOWN_RATE = 0.005


@dataclasses.dataclass(frozen=True)
class Movement:
    """Defers a row's gradients until their sum would move it far enough.

    This is error feedback with a bound: as long as the optimizer would change each value of the row
    by less than `distance`, the sum stays deferred.

    Example:

    >>> slip.Movement(distance=0.005)
    Movement(distance=0.005, max_age=200)

    Args:
        distance: The sum is applied when it would change any value of the row by this much, in the
            unit of the row values, above 0. Defaults to 0.05 times the learning rate of the rows,
            or 0.005 if the store does not report a learning rate.
        max_age: The sum is applied at this age at the latest, in steps, at least 1.
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
        """Returns the distance for rows with a given learning rate.

        Args:
            learning_rate: Learning rate of the rows, or None if unknown.
            max_auc_loss: Maximum AUC loss of deferring, or None for no bound. If the learning rate
                is known and not 0, the bound determines the distance instead of `distance`.
        """
        if max_auc_loss is not None and learning_rate:
            return movement_for_auc_loss(max_auc_loss, learning_rate)
        if self.distance is not None:
            return self.distance
        return RATES_TO_DEFER * learning_rate if learning_rate else MOVEMENT_OF_UNKNOWN_RATE


def movement_for_auc_loss(max_auc_loss: float, learning_rate: float) -> float:
    """Returns the movement that deferring may postpone for a maximum AUC loss.

    Note: this is an empirical rule, not a guaranteed bound. It assumes that the loss is
    proportional to the postponed movement in units of the learning rate. Only Adagrad was measured.

    Args:
        max_auc_loss: Maximum AUC loss of deferring, above 0.
        learning_rate: Learning rate of the rows.

    Returns:
        A distance in the unit of the rows.
    """
    return learning_rate * max_auc_loss / AUC_LOSS_PER_RATE


def auc_loss_of_movement(movement: float, learning_rate: float) -> tuple[float, float]:
    """Returns the AUC loss that deferring may cause.

    It uses the empirical rule of `movement_for_auc_loss`, which is the inverse of the maximum.

    Args:
        movement: Movement that deferring postpones, in the unit of the rows.
        learning_rate: Learning rate of the rows, above 0.

    Returns:
        (minimum, maximum) AUC loss: the smallest measured loss, and twice the largest.
    """
    rates = movement / learning_rate
    return rates * MIN_AUC_LOSS_PER_RATE, rates * AUC_LOSS_PER_RATE


def _fraction_of(policy: Any) -> float | None:
    """Returns the validated fraction of an `Interval` or a `MaskGradients`."""
    if policy.fraction is None:
        return None
    return require_number("fraction", policy.fraction, 0.0, 1.0, type(policy).__name__, True)


@dataclasses.dataclass(frozen=True)
class Interval:
    """Defers gradients of saturated keys for a number of steps.

    Use it only with stores that cannot compute how far an update would move a row, for example
    tables in SOK (NVIDIA's Sparse Operation Kit) and variables under Adam. Native tables reject it,
    because `Interval` cost 0.0171 AUC on a changing stream on which `Movement(0.005)` cost 0.0007
    (benchmarks/results/stream.md).

    Example:

    >>> slip.Interval(steps=10).steps
    10

    Args:
        steps: Maximum number of steps for which a gradient is deferred, at least 1.
        fraction: Fraction of the hot examples (examples with only tracked keys) that should have
            only saturated keys, in (0, 1]. The threshold T follows from it. Defaults to 0.3, unless
            `Saturation(threshold=)` sets T.
    """

    steps: int = 20
    fraction: float | None = None

    def __post_init__(self) -> None:
        require_integer("steps", self.steps, 1, None, "Interval")
        object.__setattr__(self, "fraction", _fraction_of(self))


@dataclasses.dataclass(frozen=True)
class DeferGradients(Policy):
    """Defers gradients and applies their sum per row as one gradient.

    With multiple ranks, gradients are deferred before the exchange, so that fewer rows are sent. No
    gradient is lost, but updates are applied later. Exception: a row that a bounded table evicts
    loses its deferred gradient.

    Example:

    >>> policy = slip.DeferGradients(until=slip.Movement(distance=0.005), memory="16MiB")
    >>> policy.until.distance
    0.005
    >>> policy.memory
    '16MiB'

    Args:
        until: When a deferred gradient is applied. A `Movement` defers gradients of any row,
            whatever its drift. An `Interval` defers gradients of saturated keys, for stores that
            cannot compute how far an update would move a row.
        memory: Maximum memory for all deferred gradients, in bytes or as text such as "64MB". When
            it is full, gradients of further rows are applied immediately.
    """

    until: Movement | Interval = dataclasses.field(default_factory=Movement)
    memory: int | str = "64MiB"
    acts_on = "gradients"
    verb = "deferred"
    columns = ("rows", "sent", "sent fraction")

    def __post_init__(self) -> None:
        if not isinstance(self.until, (Movement, Interval)):
            allowed = "slipstream_tf.Movement(...) or slipstream_tf.Interval(...)"
            raise invalid("until", self.until, "DeferGradients", allowed)
        parse_bytes("memory", self.memory, "DeferGradients")

    @property
    def filters_saturated(self) -> bool:  # type: ignore[override]
        return isinstance(self.until, Interval)

    @property
    def revisit_every(self) -> int | None:  # type: ignore[override]
        return 10 if self.filters_saturated else None

    @property
    def steered_by(self) -> str:  # type: ignore[override]
        return "fraction" if self.filters_saturated else "movement"

    @property
    def key_fraction(self) -> float | None:
        if isinstance(self.until, Movement):
            return None
        return DEFAULT_FRACTION if self.until.fraction is None else self.until.fraction

    @property
    def sets_key_fraction(self) -> bool:  # type: ignore[override]
        return isinstance(self.until, Interval) and self.until.fraction is not None

    def require_fit(self, tables: Tables) -> None:
        """Raises ValueError if the tables do not support these settings.

        Native tables reject `Interval`. The memory must hold at least one deferred row of the
        widest table. `distance` and `max_auc_loss` cannot be combined. For other tables with
        `Interval` a warning about the AUC loss is logged.
        """
        if isinstance(self.until, Interval):
            if tables.are_native:
                allowed = (
                    "slipstream_tf.Movement(...), because native tables can compute how far an "
                    "update moves a row"
                )
                raise invalid("until", self.until, "DeferGradients on native tables", allowed)
            logging.warning(
                "DeferGradients(until=Interval(...)) lost 0.0171 AUC on a changing stream on which "
                "Movement(0.005) lost 0.0007 (benchmarks/results/stream.md). Use Interval only if "
                "the store cannot compute how far the optimizer moves rows."
            )
        needed = max(deferred_row_bytes(t.dim) for t in tables.tables)
        budget = parse_bytes("memory", self.memory)
        if budget < needed:
            allowed = f"at least {needed} bytes, the size of a deferred row of the widest table"
            raise invalid("memory", self.memory, "DeferGradients", allowed)
        require_room("memory", budget, budget, "deferred gradients", "DeferGradients")
        given = self.until.distance if isinstance(self.until, Movement) else None
        if given is not None and tables.max_auc_loss is not None:
            allowed = "None, because `max_auc_loss` determines the distance"
            raise invalid("distance", given, "Movement with max_auc_loss", allowed)

    def update_policy_of(self, table: Table, tables: Tables) -> UpdatePolicy:
        max_rows = self._max_rows(table.name, tables)
        if isinstance(self.until, Interval):
            return UpdatePolicy("defer", "interval", max_age=self.until.steps, max_rows=max_rows)
        movement = self.until.of(tables.rates[table.name], tables.max_auc_loss)
        return UpdatePolicy("defer", "movement", movement, self.until.max_age, max_rows)

    def auc_loss(self, tables: Tables) -> tuple[float, float] | None:
        """Returns the estimated AUC loss of deferring by movement.

        Returns:
            (minimum, maximum) of the table with the largest loss. None with an `Interval`, or if a
            learning rate is unknown or 0.
        """
        rates = [rate for rate in tables.rates.values() if rate]
        if not isinstance(self.until, Movement) or len(rates) < len(tables.rates):
            return None
        until = self.until
        losses = [auc_loss_of_movement(until.of(r, tables.max_auc_loss), r) for r in rates]
        return max(losses, key=lambda loss: loss[1])

    def report_text(self, rows: UpdateCounts) -> str:
        return (
            f"{rows.due_by_movement:,} by movement, {rows.due_by_age:,} by age, "
            f"{rows.flushed:,} flushed, {rows.over_budget:,} over budget"
        )

    def _max_rows(self, table: str, tables: Tables) -> int:
        """Returns the maximum number of rows of a table with deferred gradients.

        The memory is divided among the tables. Small tables together use at most half of the memory
        and may defer every row. The other tables share the rest in proportion to their bytes. As
        long as all tables are empty, each table may defer the same number of rows.
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
    """Returns the limit at which every row may be deferred.

    A native table divides the limit evenly among its shards, but keys fill the shards unevenly.
    Therefore the limit allows each shard its mean number of rows plus four standard deviations,
    plus four rows for very small tables. More rows in a shard are very unlikely.
    """
    if not num_rows:
        return 0
    mean = num_rows / NUM_SHARDS
    return math.ceil(NUM_SHARDS * (mean + 4 * math.sqrt(mean) + 4))


@dataclasses.dataclass(frozen=True)
class MaskGradients(Policy):
    """Masks the gradients of saturated keys before they are applied or exchanged.

    Masked gradients are lost. Use `DeferGradients` if every gradient must be applied.

    Example:

    >>> slip.MaskGradients(fraction=0.2).fraction
    0.2

    Args:
        fraction: Fraction of the hot examples (examples with only tracked keys) that should have
            only saturated keys, in (0, 1]. The threshold T follows from it. Defaults to 0.3, unless
            `Saturation(threshold=)` sets T.
        decay_moments: Whether moments and velocities of rows with a masked gradient decay, as with
            a gradient of 0. The values of such a row do not change.
    """

    fraction: float | None = None
    decay_moments: bool = False
    acts_on = "gradients"
    filters_saturated = True
    revisit_every = 10
    steered_by = "fraction"
    loses_gradients = True
    verb = "masked"
    columns = ("rows", "masked", "masked fraction")

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", _fraction_of(self))
        if not isinstance(self.decay_moments, bool):
            raise invalid("decay_moments", self.decay_moments, "MaskGradients", "True or False")

    @property
    def key_fraction(self) -> float:
        return DEFAULT_FRACTION if self.fraction is None else self.fraction

    @property
    def sets_key_fraction(self) -> bool:  # type: ignore[override]
        return self.fraction is not None

    def classifier_settings(self, state: Any, start: WindowStart) -> dict[str, Any] | None:
        """Returns a rule that counts skippable examples but drops none.

        The counts serve the estimate of the AUC loss.
        """
        return {"mode": "drift", "threshold": start.threshold, "shadow": True}

    def update_policy_of(self, table: Table, tables: Tables) -> UpdatePolicy:
        return UpdatePolicy(mode="mask", decay_skipped=self.decay_moments)
