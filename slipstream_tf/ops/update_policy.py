"""Typed wrappers of the ops that mask or defer a table's gradients.

A policy says what becomes of the gradient rows (one per key, update and simulated rank) of a
native table; the row flags say which rows are saturated; the counts tell what happened.
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
# Of a native table; each shard may hold an even part of `max_rows`.
NUM_SHARDS = 64
# Beside the values of a deferred gradient: its key, age and entry in the order of age, a quarter of
# which may be free; the index at its emptiest.
_NODE_BYTES, _INDEX_BYTES = 30, 40


@dataclasses.dataclass(frozen=True)
class UpdatePolicy:
    """What becomes of gradients before a table's update rule sees them.

    A sum of deferred gradients is applied as one gradient. Under SGD that gives the row
    that the single gradients would have given. Adagrad adds the square of the sum, not the sum of
    the squares, to its accumulator: more where the gradients agree, less where they cancel. Adam
    takes one step of its moments for the sum where it would have taken one per gradient.

    Attributes:
        mode: "apply", "mask" (gradients of saturated rows are thrown away; their slots stay) or
            "defer" (gradients are summed per row and applied later).
        trigger: "movement": any row's sum is deferred until applying it would move one of the row's
            values by `movement`; "interval": only saturated rows' sums are deferred. Both:
            never longer than `max_age`.
        movement: in the unit of the rows. For Adam the moments' damping is left out: it is
            learning rate * |sum| / root of the second moment.
        max_age: in updates of the table.
        max_rows: sums deferred at most; gradients of further rows are applied at once.
        decay_skipped: whether masking a row's gradient decays its moments (Adam).
        ranks: simulated ranks: each has an even part of every batch and sums of its own.
        is_shadow: apply everything, and count for one key in 16 what would have been done.
        is_exchanged: sums leave by `ops.exchange` only, to be exchanged with other processes.
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
        """Whether sums deferred under another policy may stay; else they leave first."""
        own, old = ((p.mode, p.trigger, p.is_shadow) for p in (self, before))
        return before.mode != "defer" or own == old


@dataclasses.dataclass(frozen=True)
class UpdateCounts:
    """Gradient rows of a table so far; a row is one key's gradient in one update on one rank.

    In shadow mode: what would have been, extrapolated from one key in 16.

    Attributes:
        offered: came in.
        sent: were applied (ranks: exchanged), deferred ones included.
        masked: were thrown away.
        deferred: were added to a sum that stayed.
        due_by_movement, due_by_age, flushed, over_budget: of those sent, the ones whose sum would
            have moved the row far enough, came of age, was needed by an evaluation or export, or
            found no room.
        evicted: sums that left with their row.
        deferred_now: sums that are deferred now.
        deferred_bytes: bytes of the buffers that they are in.
        rows_evicted, rows_expired: rows of the table that left a full one, or were not accessed for
            long.
        not_admitted: accesses of keys that are too rare to have a row, each batch's of a key once.
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
    """Bytes that a deferred gradient of `dim` values takes at most, room to grow included.

    Each shard of a table that has any takes up to 128 bytes more (8 entries of an index).
    """
    return math.ceil(1.25 * (4 * dim + _NODE_BYTES)) + _INDEX_BYTES


def set_policy(handle: tf.Tensor, policy: UpdatePolicy) -> None:
    """Sets a table's policy; sums deferred under one of another kind are applied first.

    Raises:
        tf.errors.FailedPreconditionError: there are such sums, but they are to be exchanged.
    """
    settings = dataclasses.asdict(policy)  # They have the names of the op's arguments.
    _loader.library().slipstream_table_set_policy(handle=handle, **settings)


def set_row_flags(handle: tf.Tensor, keys: Any, flags: Any, create_missing: bool = False) -> None:
    """Replaces the flags of all rows of a table.

    Args:
        handle: the table.
        keys: int64 [n].
        flags: uint8 [n], SATURATED or 0.
        create_missing: whether keys without a row that get a flag get a row; else they are skipped.

    Raises:
        tf.errors.InvalidArgumentError: the lengths differ.
    """
    _loader.library().slipstream_table_set_row_flags(
        handle=handle,
        keys=tf.convert_to_tensor(keys, tf.int64),
        flags=tf.convert_to_tensor(flags, tf.uint8),
        create_missing=create_missing,
    )


def row_flags(handle: tf.Tensor, keys: Any) -> np.ndarray:
    """Returns uint8 [n], the flags of the rows of keys int64 [n]; 0 without a row (eager only).

    A row that left the table and came back has none, whatever `set_row_flags` said before.
    """
    keys = tf.convert_to_tensor(keys, tf.int64)
    return _loader.library().slipstream_table_row_flags(handle=handle, keys=keys).numpy()


def update_counts(handle: tf.Tensor) -> UpdateCounts:
    """Returns the counts of a table since it was made (eager only)."""
    values = _loader.library().slipstream_table_update_counts(handle=handle).numpy()
    return UpdateCounts(*(int(v) for v in values))


def flush(handle: tf.Tensor) -> tf.Operation | None:
    """Applies all deferred gradients of a table, each as one."""
    return _loader.library().slipstream_table_flush(handle=handle)
