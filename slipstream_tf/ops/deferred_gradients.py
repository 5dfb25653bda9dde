"""Deferred gradients of rows, which wait until they are due: the two halves of a step.

In: a step's gradients, one row per key. Out: the rows to apply now. Between the halves the caller
decides which sums may wait. CPU and GPU; graph or eager.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from slipstream_tf.ops import _loader
from slipstream_tf.ops.mask import KeySet
from slipstream_tf.ops.update_policy import UpdatePolicy


class DeferredCounts(NamedTuple):
    """What became of gradient rows; see `ops.update_policy.UpdateCounts`.

    Attributes:
        deferred: were added to a sum that stayed.
        due_by_movement: left because of their movement.
        due_by_age: sums that left because of their age.
        flushed: sums that left because of a flush.
        over_budget: found no room.
        without_gradient: sums that left in a step without a gradient for their key.
    """

    deferred: int
    due_by_movement: int
    due_by_age: int
    flushed: int
    over_budget: int
    without_gradient: int


class DeferredState(NamedTuple):
    """What `DeferredGradients.state` returns.

    Attributes:
        counts: of all steps so far.
        num_deferred: sums that are deferred.
        nbytes: of the buffers, of those that are empty, too.
        flushes: whether all leave with the next step.
    """

    counts: DeferredCounts
    num_deferred: int
    nbytes: int
    flushes: bool


class AddedSums(NamedTuple):
    """What `DeferredGradients.add` returns.

    Attributes:
        indices: int64 [n], for `DeferredGradients.take_due`.
        sums: float32 [n, dim], each gradient and what is deferred of its key, added.
        by_movement: bool scalar, whether `take_due` goes by `may_wait`.
    """

    indices: tf.Tensor
    sums: tf.Tensor
    by_movement: tf.Tensor


class DueSums(NamedTuple):
    """What `DeferredGradients.take_due` returns.

    Attributes:
        keys: int64 [due], ascending, each once.
        sums: float32 [due, dim].
        is_shadow: bool scalar, whether to apply the step's own gradients instead.
        defers: bool scalar, whether anything will be deferred from now on.
    """

    keys: tf.Tensor
    sums: tf.Tensor
    is_shadow: tf.Tensor
    defers: tf.Tensor


class DeferredGradients:
    """Deferred gradients of a variable's rows, and the rule that steps read at run time.

    Another rule retraces nothing.

    The C++ resource lives as long as this object or a `tf.function` that uses it. Steps have no
    gradient. On a GPU a step does not wait for the device, and takes memory for as many rows as
    there are gradients and room for deferred ones besides.

    Attributes:
        handle: scalar resource handle, for the ops.
    """

    def __init__(self, dim: int, device: str | None = None):
        """Has no room, and defers nothing.

        Args:
            dim: values per row.
            device: where the gradients are, e.g. a variable's `device`. None: where TensorFlow
                would place an op.
        """
        self._dim = dim
        with tf.init_scope(), tf.device(device):
            self.handle = _loader.library().slipstream_deferred_gradients(dim=dim)

    def configure(self, policy: UpdatePolicy, capacity: int) -> None:
        """Sets how gradients are deferred from the next step on; those deferred stay (eager only).

        Args:
            policy: of any mode; but for "defer", nothing more is deferred.
            capacity: sums to make room for; there is more if more are deferred.

        Raises:
            tf.errors.InvalidArgumentError: the capacity is negative, or more than a GPU can hold.
            tf.errors.ResourceExhaustedError: there is no memory for so many.
        """
        with tf.device("CPU:0"):
            sizes = {"capacity": capacity, "max_rows": policy.max_rows, "max_age": policy.max_age}
            numbers = {name: tf.constant(size, tf.int64) for name, size in sizes.items()}
        _loader.library().slipstream_deferred_gradients_configure(
            handle=self.handle,
            defers=policy.mode == "defer",
            by_movement=policy.mode != "defer" or policy.trigger == "movement",
            is_shadow=policy.is_shadow,
            **numbers,
        )

    def flush(self, drops: bool = False) -> None:
        """Makes all sums leave with the next step, in which nothing is deferred.

        Args:
            drops: whether they are dropped at once instead, unless they are on their way out.
        """
        _loader.library().slipstream_deferred_gradients_flush(handle=self.handle, drops=drops)

    def state(self) -> DeferredState:
        """Returns what is deferred, and what became of the gradients so far (eager only)."""
        found = _loader.library().slipstream_deferred_gradients_state(handle=self.handle)
        counts = DeferredCounts(*(int(count) for count in found.counts.numpy()))
        nbytes = int(found.capacity) * (16 + 4 * self._dim)
        return DeferredState(counts, int(found.num_deferred), nbytes, bool(found.flushes))

    def export(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns what is deferred (eager only).

        Returns:
            Keys int64 [n], the oldest first; ages int64 [n], in steps; sums float32 [n, dim].
        """
        found = _loader.library().slipstream_deferred_gradients_export(handle=self.handle)
        return found.keys.numpy(), found.ages.numpy(), found.sums.numpy()

    def replace(self, keys: np.ndarray, ages: np.ndarray, sums: np.ndarray) -> None:
        """Defers these sums instead of those that are deferred (eager only).

        Args:
            keys: int64 [n], each once.
            ages: int64 [n], in steps, from 0.
            sums: float32 [n, dim].

        Raises:
            tf.errors.InvalidArgumentError: a key comes twice, an age is negative, shapes do not
                fit, or there are more than a GPU can hold.
            tf.errors.ResourceExhaustedError: there is no memory for so many.
        """
        with tf.device("CPU:0"):
            columns = tf.constant(keys, tf.int64), tf.constant(ages, tf.int64)
            rows = tf.reshape(tf.constant(sums, tf.float32), [len(keys), self._dim])
        _loader.library().slipstream_deferred_gradients_import(
            handle=self.handle, keys=columns[0], ages=columns[1], sums=rows
        )

    def add(self, keys: tf.Tensor, gradients: tf.Tensor) -> AddedSums:
        """First half of a step: what the sums would be; changes nothing.

        Args:
            keys: int64 [n], each once.
            gradients: float32 [n, dim].

        Raises:
            tf.errors.InvalidArgumentError: shapes do not fit; or a key is given twice (on a CPU).
        """
        op = _loader.library().slipstream_add_deferred
        return AddedSums(*op(handle=self.handle, keys=keys, gradients=gradients))

    def take_due(
        self, saturated: KeySet, keys: tf.Tensor, added: AddedSums, may_wait: tf.Tensor
    ) -> DueSums:
        """Second half of a step: keeps the sums that may wait and takes out those that are due.

        Args:
            saturated: rows that may wait, unless the rule goes by movement; on the same device.
            keys: int64 [n], as `add` got them.
            added: what `add` returned, in the same step.
            may_wait: bool [n], which sums may wait if the rule goes by movement.

        Raises:
            tf.errors.InvalidArgumentError: shapes do not fit; or indices are none of the keys' (on
                a CPU).
        """
        due = DueSums(
            *_loader.library().slipstream_take_due(
                handle=self.handle,
                saturated=saturated.handle,
                keys=keys,
                indices=added.indices,
                sums=added.sums,
                may_wait=may_wait,
            )
        )
        due.sums.set_shape([None, self._dim])
        return due


tf.no_gradient("SlipstreamAddDeferred")
tf.no_gradient("SlipstreamTakeDue")
