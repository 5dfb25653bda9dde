"""What becomes of one table's gradients on their way to an optimizer that is not the store's.

In: a step's gradients. Out: the rows to apply now; those of saturated rows are masked, or deferred
in a buffer of as many sums as the budget allows. Eager or in a `tf.function`, on its device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from slipstream_tf.ops.deferred_gradients import DeferredGradients
from slipstream_tf.ops.mask import KeySet, mask_gradients
from slipstream_tf.ops.update_policy import UpdateCounts, UpdatePolicy
from slipstream_tf.stores.by_key import added_up

# Of keys int64 [n] and sums float32 [n, dim]: float32 [n], how far each sum would move its row.
Movement = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class WatchedGradients:
    """The policy of one table, its saturated rows and its deferred gradients.

    Nothing is allocated for deferred gradients while no policy defers. Then: a sum, its key and the
    step it was begun in for each that there may be. A step looks at the keys and ages of all sums.

    Attributes:
        policy: as last configured.
        saturated: int64 [n], the saturated keys; replaced by whoever marks rows.
        masked: the rows whose gradients are masked.
        is_active: scalar bool variable: whether gradients may be, or were, deferred.
        offered_rows: int64 scalar variable: gradient rows, one per key and step, before masking.
        masked_rows: int64 scalar variable: those of them that were left out.
    """

    def __init__(self, name: str, dim: int, device: str):
        """Masks nothing yet, and nothing is deferred.

        Args:
            name: of the table.
            dim: values per row.
            device: of the table.
        """
        self.policy, self.saturated = UpdatePolicy("mask"), np.empty(0, np.int64)
        self.masked, self._nothing, self._marked = (KeySet(device) for _ in range(3))
        self._buffer = DeferredGradients(dim, device)
        with tf.device("CPU:0"):
            self._only_counts = tf.Variable(False, trainable=False)
            self.is_active = tf.Variable(False, trainable=False)
            self._movement = tf.Variable(0.0, trainable=False)
            self.offered_rows, self.masked_rows = (
                tf.Variable(0, trainable=False, dtype=tf.int64, name=f"{name}_{kind}_rows")
                for kind in ("offered", "masked")
            )

    @property
    def masks(self) -> bool:
        """Whether gradients of saturated rows are thrown away."""
        return self.policy.mode == "mask" and not self.policy.is_shadow

    @property
    def holds(self) -> bool:
        """Whether sums may be held that are still to be applied."""
        is_shadow = self.policy.is_shadow and not self.is_leaving
        return bool(self.is_active.numpy()) and not is_shadow

    @property
    def is_leaving(self) -> bool:
        """Whether all sums that are held leave with the next step (eager only)."""
        return self._buffer.state().flushes

    def configure(self, policy: UpdatePolicy, rows: np.ndarray, most: int) -> None:
        """Sets the policy; sums held by one of another kind leave with the next step.

        Args:
            policy: of any mode; but for "defer", nothing is held.
            rows: int64 [n], the saturated rows as gradients name them.
            most: sums that there may be, of whatever policy.
        """
        before, self.policy = self.policy, policy
        if not policy.keeps_sums_of(before):
            self._buffer.flush(drops=before.is_shadow)
        is_mask, defers = policy.mode == "mask", policy.mode == "defer"
        self._only_counts.assign(policy.is_shadow and is_mask)
        self.masked.assign(rows if is_mask else rows[:0])
        limited = dataclasses.replace(policy, max_rows=min(policy.max_rows, most))
        self._buffer.configure(limited, limited.max_rows if defers else 0)
        self._marked.assign(rows if defers and policy.trigger == "interval" else rows[:0])
        self._movement.assign(policy.movement)
        # Until the next step, whatever this rank holds: all ranks must see the same.
        self.is_active.assign(defers or bool(self.is_active))

    def let_go(self, even_shadow: bool = False) -> None:
        """Makes all sums leave with the next step.

        Args:
            even_shadow: those of shadow mode, too; else they are dropped at once.
        """
        self._buffer.flush(drops=self.policy.is_shadow and not even_shadow)

    def take(self, gradients: tf.IndexedSlices, movement: Movement) -> tf.IndexedSlices:
        """Sums the rows of each key, and returns what is to be applied now.

        Args:
            gradients: values float32 [n, dim].
            movement: under the optimizer.

        Returns:
            Slices with ascending indices, each once, and the same `dense_shape`.
        """
        result = mask_gradients(gradients, self.masked)
        with tf.device("CPU:0"):
            self.offered_rows.assign_add(result.offered)
            self.masked_rows.assign_add(result.masked)
        # Conditions are tensors': the policy may change without retracing.
        kept = tf.cond(
            self._only_counts,
            lambda: _parts(mask_gradients(gradients, self._nothing).slices),
            lambda: _parts(result.slices),
        )
        indices, values = tf.cond(
            self.is_active, lambda: self._defer(kept[0], kept[1], movement), lambda: kept
        )
        return tf.IndexedSlices(values, indices, gradients.dense_shape)

    def _defer(
        self, indices: tf.Tensor, values: tf.Tensor, movement: Movement
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds a step's gradients to the sums; gives the sums that are due.

        In shadow mode gives what came in.
        """
        keys = tf.cast(indices, tf.int64)
        added = self._buffer.add(keys, values)
        may_wait = tf.cond(
            added.by_movement,
            lambda: movement(keys, added.sums) < self._movement,
            lambda: tf.zeros_like(keys, tf.bool),
        )
        due = self._buffer.take_due(self._marked, keys, added, may_wait)
        # A step whose data has ended runs what does not wait for its gradients: whatever changes
        # here needs a result of them.
        self.is_active.assign(due.defers)
        return tf.cond(
            due.is_shadow,
            lambda: (indices, values),
            lambda: (tf.cast(due.keys, indices.dtype), due.sums),
        )

    def export(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns what is held (eager only): keys int64 [n], by age; ages int64 [n], in steps,
        the oldest first; and sums float32 [n, dim]."""
        return self._buffer.export()

    def replace(self, keys: np.ndarray, ages: np.ndarray, sums: np.ndarray) -> None:
        """Holds what `export` gave instead of what is held (eager only).

        Raises:
            RuntimeError: there is something to hold, but the policy defers nothing.
        """
        if keys.size and self.policy.mode != "defer":
            raise RuntimeError(
                f"{keys.size} gradient sums are to be held back, but the policy defers nothing. "
                "Set a policy that does first."
            )
        self._buffer.replace(*added_up(keys, ages, sums))

    def pending(self) -> int:
        """Returns how many sums are held (eager only)."""
        return self._buffer.state().num_deferred

    def counts(self) -> UpdateCounts:
        """Returns what became, or in shadow mode would have become, of gradient rows."""
        offered, masked, state = int(self.offered_rows), int(self.masked_rows), self._buffer.state()
        counts = state.counts
        return UpdateCounts(
            offered=offered,
            sent=offered - masked - counts.deferred + counts.without_gradient,
            masked=masked,
            held=counts.deferred,
            due_by_movement=counts.due_by_movement,
            due_by_age=counts.due_by_age,
            flushed=counts.flushed,
            refused=counts.over_budget,
            pending=state.num_deferred,
            pending_bytes=state.nbytes,
        )


def _parts(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    return slices.indices, slices.values
