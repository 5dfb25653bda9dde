"""Typed wrappers of the ops that mask or defer gradients.

A policy determines which gradient rows are applied, masked or deferred. A gradient row is the
gradient of one key in one update on one simulated rank. Row flags mark saturated rows. Counts
report the decisions. `handle` is the handle of a table from `ops.table.create`.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import require_choice, require_integer, require_number
from slipstream_tf.ops import _loader

SATURATED = np.uint8(1)
MODES = ("apply", "mask", "defer")
TRIGGERS = ("movement", "interval")
# Number of shards of a native table. Each shard may hold an equal part of `max_rows`.
NUM_SHARDS = 64
# Bytes per deferred gradient in addition to its values: key, age and the list ordered by age; and
# the index at its lowest load.
_NODE_BYTES, _INDEX_BYTES = 30, 40


@dataclasses.dataclass(frozen=True)
class UpdatePolicy:
    """Determines which gradients of a table are applied, masked or deferred.

    The sum of deferred gradients is applied as one gradient. With SGD, the row is the same as after
    the single gradients. Adagrad adds the square of the sum instead of the sum of the squares to
    its accumulator, which is more if the gradients agree and less if they cancel. Adam updates its
    moments once for the sum instead of once per gradient.

    Attributes:
        mode: "apply", "mask" (drops the gradients of saturated rows, without changing their slots)
            or "defer" (sums gradients per row and applies them later).
        trigger: "movement" defers the sum of any row until applying it would move a value of the
            row by `movement`. "interval" defers sums of saturated rows only. In both cases a sum is
            applied when its age is `max_age`.
        movement: Maximum movement in the unit of the rows. For Adam, the movement is estimated
            without the damping of the moments, as learning rate * |sum| / sqrt(second moment).
        max_age: Maximum age of a sum, in updates of the table.
        max_rows: Maximum number of deferred sums. Gradients of further rows are applied
            immediately.
        decay_skipped: Whether masking the gradient of a row decays its moments (Adam).
        ranks: Number of simulated ranks. Each rank gets an equal part of every batch and has
            separate sums.
        is_shadow: Whether to apply all gradients and only count, for one key in 16, which gradients
            would be masked or deferred.
        is_exchanged: Whether the functions of `ops.exchange` collect the sums for other processes,
            so that the table never applies them itself.
    """

    mode: str = "apply"
    trigger: str = "movement"
    movement: float = 0.0
    max_age: int = 1
    max_rows: int = 0
    decay_skipped: bool = False
    ranks: int = 1
    is_shadow: bool = False
    is_exchanged: bool = False

    def __post_init__(self) -> None:
        place = "UpdatePolicy"
        require_choice("mode", self.mode, MODES, place)
        require_choice("trigger", self.trigger, TRIGGERS, place)
        require_number("movement", self.movement, 0.0, place=place)
        require_integer("max_age", self.max_age, 1, None, place)
        require_integer("max_rows", self.max_rows, 0, None, place)
        require_integer("ranks", self.ranks, 1, 64, place)

    def keeps_sums_of(self, before: "UpdatePolicy") -> bool:
        """Returns whether sums deferred under another policy may stay deferred.

        If not, they must be applied before the policy changes.
        """
        own, old = ((p.mode, p.trigger, p.is_shadow) for p in (self, before))
        return before.mode != "defer" or own == old


@dataclasses.dataclass(frozen=True)
class UpdateCounts:
    """Counts of the gradient rows of a table so far.

    A gradient row is the gradient of one key in one update on one rank. In shadow mode the counts
    are extrapolated from one key in 16.

    Attributes:
        offered: Number of gradient rows.
        sent: Gradient rows that were applied or exchanged, including deferred sums.
        masked: Gradient rows that were dropped.
        deferred: Gradient rows that were added to a sum that stayed deferred.
        due_by_movement, due_by_age, flushed, over_budget: Parts of `sent`, by the reason: the sum
            would move the row far enough, the sum was too old, an evaluation or export needed the
            sum, or no memory was left to defer it.
        evicted: Sums that were lost because their row was evicted.
        deferred_now: Present number of deferred sums.
        deferred_bytes: Bytes of the buffers of deferred sums.
        rows_evicted, rows_expired: Rows that were removed because the table was full, or because
            they were not accessed for a long time.
        not_admitted: Accesses of keys that are too rare to get a row. A key counts once per batch.
    """

    offered: int = 0
    sent: int = 0
    masked: int = 0
    deferred: int = 0
    due_by_movement: int = 0
    due_by_age: int = 0
    flushed: int = 0
    over_budget: int = 0
    evicted: int = 0
    deferred_now: int = 0
    deferred_bytes: int = 0
    rows_evicted: int = 0
    rows_expired: int = 0
    not_admitted: int = 0


def deferred_row_bytes(dim: int) -> int:
    """Returns the maximum bytes of a deferred gradient of `dim` values.

    Spare capacity is included. Each shard with deferred gradients takes up to 128 bytes more (8
    index entries).
    """
    return math.ceil(1.25 * (4 * dim + _NODE_BYTES)) + _INDEX_BYTES


def set_policy(handle: tf.Tensor, policy: UpdatePolicy) -> None:
    """Sets the policy of a table, from its next update on.

    If the mode, trigger, `ranks`, `is_shadow` or `is_exchanged` changes, all deferred sums are
    applied first, or dropped if the current policy has `is_shadow`.

    Raises:
        tf.errors.FailedPreconditionError: The sums cannot be applied, because the current policy
            has `is_exchanged` (call `ops.exchange.collect_deferred` first), or because no update
            has set a learning rate (update the table first).
    """
    settings = dataclasses.asdict(policy)  # the fields are named like the op's arguments
    _loader.library().slipstream_table_set_policy(handle=handle, **settings)


def set_row_flags(handle: tf.Tensor, keys: Any, flags: Any, create_missing: bool = False) -> None:
    """Replaces the flags of all rows of a table.

    Args:
        handle: The table.
        keys: int64 [n].
        flags: uint8 [n], SATURATED or 0.
        create_missing: Whether to create rows for keys that get a flag. If not, keys without a row
            are ignored.

    Raises:
        tf.errors.InvalidArgumentError: The lengths differ.
    """
    _loader.library().slipstream_table_set_row_flags(
        handle=handle,
        keys=tf.convert_to_tensor(keys, tf.int64),
        flags=tf.convert_to_tensor(flags, tf.uint8),
        create_missing=create_missing,
    )


def row_flags(handle: tf.Tensor, keys: Any) -> np.ndarray:
    """Returns the row flags of keys int64 [n], uint8 [n] (eager only).

    The flag is 0 for a key without a row. Note: a row that is evicted and created again loses its
    flag.
    """
    keys = tf.convert_to_tensor(keys, tf.int64)
    return _loader.library().slipstream_table_row_flags(handle=handle, keys=keys).numpy()


def update_counts(handle: tf.Tensor) -> UpdateCounts:
    """Returns the counts of a table since its creation (eager only)."""
    values = _loader.library().slipstream_table_update_counts(handle=handle).numpy()
    return UpdateCounts(*(int(v) for v in values))


def flush(handle: tf.Tensor) -> tf.Operation | None:
    """Applies all deferred gradients of a table."""
    return _loader.library().slipstream_table_flush(handle=handle)
