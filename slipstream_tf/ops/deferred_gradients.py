"""Deferred gradients of a variable's rows, on CPU or GPU.

A step has two halves. `add` computes the sums of the new gradients and the deferred gradients. The
caller decides which sums may wait, and `take_due` stores these and returns the sums to apply now.
Both halves work in graph and eager mode.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from slipstream_tf.ops import _loader
from slipstream_tf.ops.mask import KeySet
from slipstream_tf.ops.update_policy import UpdatePolicy


class DeferredCounts(NamedTuple):
    """Counts of gradient rows; see `ops.update_policy.UpdateCounts`.

    Attributes:
        deferred: Gradients that were added to a sum that was not applied.
        due_by_movement: Sums that were applied because of their movement.
        due_by_age: Sums that were applied because of their age.
        flushed: Sums that were applied because of a flush.
        over_budget: Gradients that were applied because no memory was left.
        without_gradient: Sums that were applied in a step without a gradient for their key.
    """

    deferred: int
    due_by_movement: int
    due_by_age: int
    flushed: int
    over_budget: int
    without_gradient: int


class DeferredState(NamedTuple):
    """Result of `DeferredGradients.state`.

    Attributes:
        counts: Counts of all steps so far.
        num_deferred: Present number of deferred sums.
        nbytes: Bytes of the buffers, including free space.
        flushes: Whether all sums will be applied in the next step.
    """

    counts: DeferredCounts
    num_deferred: int
    nbytes: int
    flushes: bool


class AddedSums(NamedTuple):
    """Result of `DeferredGradients.add`.

    Attributes:
        indices: int64 [n], position of each key's deferred sum in the buffers, or -1. An argument
            of `DeferredGradients.take_due`.
        sums: float32 [n, dim], the gradient of each key plus its deferred sum.
        by_movement: bool scalar, whether `take_due` uses `may_wait`. If not, it uses `saturated`.
    """

    indices: tf.Tensor
    sums: tf.Tensor
    by_movement: tf.Tensor


class DueSums(NamedTuple):
    """Result of `DeferredGradients.take_due`.

    Attributes:
        keys: int64 [due], ascending and unique.
        sums: float32 [due, dim].
        is_shadow: bool scalar, whether to apply the original gradients of the step instead.
        defers: bool scalar, whether further gradients will be deferred.
    """

    keys: tf.Tensor
    sums: tf.Tensor
    is_shadow: tf.Tensor
    defers: tf.Tensor


class DeferredGradients:
    """Deferred gradients of a variable's rows and the policy for deferring.

    A `tf.function` reads the policy at run time, so that a new policy needs no retracing. The C++
    resource is released with the last object or `tf.function` that uses it. The ops have no
    gradient. On a GPU, ops that depend on the due sums wait until the device has counted them, and
    no thread of TensorFlow is blocked. In addition to the deferred gradients, a step needs memory
    for its gradients and for the sums that may be due. In a flush, in the first step after an
    import, and after a change of the maximum age, these are all deferred gradients.

    Attributes:
        handle: Scalar resource handle, for the ops.
    """

    def __init__(self, dim: int, device: str | None = None):
        """Creates an empty object without capacity that defers no gradient.

        Args:
            dim: Number of values per row.
            device: Device of the gradients, for example the `device` of a variable. None means the
                default placement of TensorFlow.
        """
        self._dim = dim
        with tf.init_scope(), tf.device(device):
            self.handle = _loader.library().slipstream_deferred_gradients(dim=dim)

    def configure(self, policy: UpdatePolicy, capacity: int) -> None:
        """Sets the policy from the next step on (eager only).

        Gradients that are already deferred stay deferred.

        Args:
            policy: The policy. With a mode other than "defer", no further gradient is deferred.
            capacity: Number of sums to allocate memory for. More memory is allocated if more sums
                are deferred at present.

        Raises:
            tf.errors.InvalidArgumentError: The capacity is negative or exceeds the maximum of a
                GPU.
            tf.errors.ResourceExhaustedError: There is not enough memory.
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
        """Applies all deferred sums in the next step, which defers no gradient.

        Args:
            drops: Whether to drop the sums immediately instead, except for sums that are already
                being applied.
        """
        _loader.library().slipstream_deferred_gradients_flush(handle=self.handle, drops=drops)

    def state(self) -> DeferredState:
        """Returns the counts and the current size (eager only)."""
        found = _loader.library().slipstream_deferred_gradients_state(handle=self.handle)
        counts = DeferredCounts(*(int(count) for count in found.counts.numpy()))
        nbytes = int(found.capacity) * (16 + 4 * self._dim)
        return DeferredState(counts, int(found.num_deferred), nbytes, bool(found.flushes))

    def export(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the deferred gradients (eager only).

        Returns:
            Keys int64 [n], oldest first; ages int64 [n], in steps; sums float32 [n, dim].
        """
        found = _loader.library().slipstream_deferred_gradients_export(handle=self.handle)
        return found.keys.numpy(), found.ages.numpy(), found.sums.numpy()

    def replace(self, keys: np.ndarray, ages: np.ndarray, sums: np.ndarray) -> None:
        """Replaces the deferred gradients (eager only).

        Args:
            keys: int64 [n], unique.
            ages: int64 [n], in steps, at least 0.
            sums: float32 [n, dim].

        Raises:
            tf.errors.InvalidArgumentError: A key occurs twice, an age is negative, the shapes do
                not fit, or the number of sums exceeds the maximum of a GPU.
            tf.errors.ResourceExhaustedError: There is not enough memory.
        """
        with tf.device("CPU:0"):
            columns = tf.constant(keys, tf.int64), tf.constant(ages, tf.int64)
            rows = tf.reshape(tf.constant(sums, tf.float32), [len(keys), self._dim])
        _loader.library().slipstream_deferred_gradients_import(
            handle=self.handle, keys=columns[0], ages=columns[1], sums=rows
        )

    def add(self, keys: tf.Tensor, gradients: tf.Tensor) -> AddedSums:
        """Returns the sums of new and deferred gradients: a step's first half.

        The stored sums stay unchanged.

        Args:
            keys: int64 [n], unique.
            gradients: float32 [n, dim].

        Raises:
            tf.errors.InvalidArgumentError: The shapes do not fit, or a key occurs twice. On a GPU,
                `take_due` raises the error for repeated keys.
        """
        op = _loader.library().slipstream_add_deferred
        return AddedSums(*op(handle=self.handle, keys=keys, gradients=gradients))

    def take_due(
        self, saturated: KeySet, keys: tf.Tensor, added: AddedSums, may_wait: tf.Tensor
    ) -> DueSums:
        """Stores the sums that may wait and returns the due sums.

        This is the second half of a step.

        Args:
            saturated: Keys with sums that may wait if the policy's trigger is "interval". Must be
                on the same device.
            keys: int64 [n], as passed to `add`.
            added: Result of `add` in the same step.
            may_wait: bool [n], the sums that may wait if the trigger of the policy is "movement".

        Raises:
            tf.errors.InvalidArgumentError: The shapes do not fit, the indices do not belong to the
                keys, or (on a GPU) a key occurs twice. No sum changes then.
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
