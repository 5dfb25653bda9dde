"""Gradient sums of a variable's rows that are held back until they are due, by a policy.

In: a step's gradients, one row per key. Out: the rows to apply now; the others stay in a buffer of
as many sums as the budget allows. Eager or in a `tf.function`, on the variable's device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from slipstream_tf.ops.deferred_gradients import DeferredCounts, DeferredGradients
from slipstream_tf.ops.mask import KeySet
from slipstream_tf.ops.update_policy import UpdatePolicy


class HeldSums:
    """The held sums of one variable, and the policy that they are held by.

    Nothing is allocated while no policy defers. Then: a sum, its key and the step it was begun in
    for each sum that may be held. A step looks at the keys and ages of all sums.
    """

    def __init__(self, dim: int, device: str, num_keys: int | None = None):
        """Holds nothing, by a policy that applies everything.

        Args:
            dim: values per row.
            device: of the variable.
            num_keys: how many keys there may be; None: any number.
        """
        self._num_keys = num_keys
        self._policy = UpdatePolicy()
        self._buffer, self._marked = DeferredGradients(dim, device), KeySet(device)
        with tf.device("CPU:0"):
            self._is_active = tf.Variable(False, trainable=False)
            self._movement = tf.Variable(0.0, trainable=False)

    @property
    def is_active(self) -> tf.Variable:
        """Scalar bool: whether gradients must go through `take`."""
        return self._is_active

    @property
    def holds(self) -> bool:
        """Whether sums may be held that are still to be applied."""
        is_shadow = self._policy.is_shadow and not self._buffer.state().flushes
        return bool(self._is_active.numpy()) and not is_shadow

    def configure(self, policy: UpdatePolicy, marked: np.ndarray) -> None:
        """Sets the policy; sums held by one of another kind leave with the next step.

        Args:
            policy: of any mode; but for "defer", nothing is held.
            marked: int64 [n], the saturated rows.
        """
        before, self._policy = self._policy, policy
        if not policy.keeps_sums_of(before):
            self._buffer.flush(drops=before.is_shadow)
        defers = policy.mode == "defer"
        most = policy.max_rows
        if self._num_keys is not None:
            most = min(most, self._num_keys)
        self._buffer.configure(policy, most if defers else 0)
        by_interval = defers and policy.trigger == "interval"
        self._marked.assign(marked if by_interval else marked[:0])
        self._movement.assign(policy.movement)
        # Until the next step, whatever this rank holds: all ranks must see the same.
        self._is_active.assign(defers or bool(self._is_active))

    def let_go(self) -> None:
        """Makes all sums leave with the next step; those of shadow mode are dropped at once."""
        self._buffer.flush(drops=self._policy.is_shadow)

    @property
    def is_leaving(self) -> bool:
        """Whether all sums that are held leave with the next step (eager only)."""
        return self._buffer.state().flushes

    def let_go_of_all(self) -> None:
        """Makes all sums leave with the next step, those that shadow mode would drop, too."""
        self._buffer.flush()

    def take(
        self, slices: tf.IndexedSlices, movement: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    ) -> tf.IndexedSlices:
        """Adds a step's gradients to the sums; returns the sums that are due.

        Args:
            slices: indices [n], each once; values float32 [n, dim].
            movement: of keys int64 [n] and sums float32 [n, dim]: float32 [n].

        Returns:
            Slices with ascending indices, each once; in shadow mode those that came in.
        """
        keys = tf.cast(slices.indices, tf.int64)
        added = self._buffer.add(keys, slices.values)
        may_wait = tf.cond(
            added.by_movement,
            lambda: movement(keys, added.sums) < self._movement,
            lambda: tf.zeros_like(keys, tf.bool),
        )
        due = self._buffer.take_due(self._marked, keys, added, may_wait)
        # A step whose data has ended runs what does not wait for its gradients: whatever changes
        # here needs a result of them.
        self._is_active.assign(due.defers)
        return tf.IndexedSlices(
            tf.cond(due.is_shadow, lambda: slices.values, lambda: due.sums),
            tf.cond(
                due.is_shadow,
                lambda: slices.indices,
                lambda: tf.cast(due.keys, slices.indices.dtype),
            ),
            slices.dense_shape,
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
        if keys.size and self._policy.mode != "defer":
            raise RuntimeError(
                f"{keys.size} gradient sums are to be held back, but the policy defers nothing. "
                "Set a policy that does first."
            )
        merged, place = np.unique(keys, return_inverse=True)
        total = np.zeros((merged.size, sums.shape[1]), np.float32)
        np.add.at(total, place.ravel(), sums)
        oldest = np.zeros(merged.size, np.int64)
        np.maximum.at(oldest, place.ravel(), ages)
        self._buffer.replace(merged, oldest, total)

    def pending(self) -> int:
        """Returns how many sums are held (eager only)."""
        return self._buffer.state().num_deferred

    def counts(self) -> DeferredCounts:
        """Returns what became of the gradients so far (eager only)."""
        return self._buffer.state().counts

    def buffer_bytes(self) -> int:
        """Returns the bytes of the buffers, of those that are empty, too (eager only)."""
        return self._buffer.state().nbytes
