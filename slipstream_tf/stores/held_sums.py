"""Gradient sums of a variable's rows that are held back until they are due.

In: a step's gradients, one row per key. Out: the rows to apply now; the others stay in a buffer of
as many sums as the budget allows. TensorFlow ops only: eager, in a `tf.function`, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.stores.key_index import KeyIndex


class HeldCounts(NamedTuple):
    """What became of gradient rows; see `ops.update_policy.UpdateCounts`.

    Attributes:
        held: were added to a sum that stayed.
        due_by_movement: left because of their sum.
        due_by_age: sums that left because of their age.
        flushed: sums that left because all were let go.
        refused: found no room.
        left_alone: sums that left in a step without a gradient for their key.
    """

    held: int
    due_by_movement: int
    due_by_age: int
    flushed: int
    refused: int
    left_alone: int


class HeldSums:
    """The held sums of one variable, and the policy that they are held by.

    Nothing is allocated while no policy defers. Then: a sum, its key and the step it was begun in
    for each sum that may be held; and, beside the budget of sums, an index to find sums by. A step
    looks at the keys and ages of all sums.
    """

    def __init__(self, index: KeyIndex, dim: int, device: str):
        """Holds nothing, by a policy that applies everything.

        Args:
            index: of the rows' keys.
            dim: values per row.
            device: of the variable.
        """
        self._index, self._dim = index, dim
        self._policy = UpdatePolicy()
        with tf.device(device):
            # Of changing size: a policy must not retrace anything.
            self._keys = _resizable(tf.int64, [None])
            self._since = _resizable(tf.int64, [None])
            self._sums = _resizable(tf.float32, [None, dim])
        with tf.device("CPU:0"):
            self._is_active = _scalar(False, tf.bool)
            self._defers = _scalar(False, tf.bool)
            self._is_shadow = _scalar(False, tf.bool)
            self._goes_by_movement = _scalar(True, tf.bool)
            self._lets_go = _scalar(False, tf.bool)
            self._movement = _scalar(0.0, tf.float32)
            self._max_age = _scalar(1, tf.int64)
            self._max_rows = _scalar(0, tf.int64)
            self._step = _scalar(0, tf.int64)
            self._counts = tf.Variable(
                tf.zeros([len(HeldCounts._fields)], tf.int64), trainable=False
            )

    @property
    def is_active(self) -> tf.Variable:
        """Scalar bool: whether gradients must go through `take`."""
        return self._is_active

    @property
    def holds(self) -> bool:
        """Whether sums may be held that are still to be applied."""
        is_shadow = self._policy.is_shadow and not self._lets_go
        return bool(self._is_active.numpy()) and not is_shadow

    def configure(self, policy: UpdatePolicy, marked: np.ndarray) -> None:
        """Sets the policy; sums held by one of another kind leave with the next step.

        Args:
            policy: of any mode; but for "defer", nothing is held.
            marked: int64 [n], the saturated rows.
        """
        before, self._policy = self._policy, policy
        if not policy.keeps_sums_of(before):
            self._let_go(before.is_shadow)
        defers = policy.mode == "defer"
        if defers or not (self._lets_go or self._is_active):
            most = policy.max_rows if self._index.num_keys is None else self._index.num_keys
            self._resize(min(policy.max_rows, most) if defers else 0)
        by_interval = defers and policy.trigger == "interval"
        self._index.mark(marked if by_interval else marked[:0])
        self._defers.assign(defers)
        self._is_shadow.assign(policy.is_shadow)
        self._goes_by_movement.assign(not by_interval)
        self._movement.assign(policy.movement)
        self._max_age.assign(policy.max_age)
        self._max_rows.assign(policy.max_rows)
        # Until the next step, whatever this rank holds: all ranks must see the same.
        self._is_active.assign(defers or bool(self._is_active))

    def let_go(self) -> None:
        """Makes all sums leave with the next step; those of shadow mode are dropped at once."""
        self._let_go(self._policy.is_shadow)

    def _let_go(self, is_shadow: bool) -> None:
        pending = self.pending()
        # What is on its way out was held in earnest, whatever the policy is now.
        if not is_shadow or self._lets_go:
            self._lets_go.assign(pending > 0)
        elif pending:
            self._index.replace(np.empty(0, np.int64), is_used=True)
            self._keys.assign(tf.fill(tf.shape(self._keys), _FREE))
            self._count(HeldCounts(0, 0, 0, pending, 0, pending))

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
        # A step whose data has ended runs what does not wait for its gradients. Of a copy: nothing
        # waits within a branch of a condition for what was computed outside.
        with tf.control_dependencies([tf.identity(slices.values)]):
            return self._take(slices, movement)

    def _take(
        self, slices: tf.IndexedSlices, movement: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    ) -> tf.IndexedSlices:
        keys = tf.cast(slices.indices, tf.int64)
        step = self._step.assign_add(1, read_value=True)
        lets_go, is_shadow = tf.identity(self._lets_go), tf.identity(self._is_shadow)
        may_hold = self._defers & ~lets_go
        place = self._index.find(keys)
        is_held = place >= 0
        sums = tf.gather(self._sums, tf.maximum(place, 0))
        sums = slices.values + tf.where(is_held[:, None], sums, 0.0)
        since = tf.gather(self._since, tf.maximum(place, 0))
        is_old = is_held & (step - since >= self._max_age)
        # A damaged sum is the optimizer's matter at once.
        is_sound = tf.reduce_all(tf.math.is_finite(sums), axis=1)
        may_wait = tf.cond(
            self._goes_by_movement,
            lambda: movement(keys, sums) < self._movement,
            lambda: self._index.are_marked(keys),
        )
        waits = may_wait & is_sound & ~is_old & may_hold
        stays, wants_room, leaves = waits & is_held, waits & ~is_held, is_held & ~waits

        self._free(_of(place, leaves), _of(keys, leaves))
        self._sums.scatter_update(tf.IndexedSlices(_of(sums, stays), _of(place, stays)))
        is_due = (self._keys != _FREE) & ((step - self._since >= self._max_age) | lets_go)
        due = tf.where(is_due)[:, 0]
        due_keys, due_sums = tf.gather(self._keys, due), tf.gather(self._sums, due)
        self._free(due, due_keys)
        starts = self._start(keys, sums, wants_room, step)
        passes = ~stays & ~starts

        by_movement = ~waits & ~is_old & self._goes_by_movement & may_hold
        num_due = tf.size(due, tf.int64)
        self._count(
            HeldCounts(
                held=_number(stays | starts),
                due_by_movement=_number(by_movement),
                due_by_age=_number(is_old) + tf.where(lets_go, _ZERO, num_due),
                flushed=tf.where(lets_go, num_due, _ZERO),
                refused=_number(wants_room & ~starts),
                left_alone=num_due,
            )
        )
        self._lets_go.assign(False)
        self._is_active.assign(self._defers)
        out_keys = tf.concat([_of(keys, passes), due_keys], 0)
        out_sums = tf.concat([_of(sums, passes), due_sums], 0)
        order = tf.argsort(out_keys)
        out_keys = tf.cast(tf.gather(out_keys, order), slices.indices.dtype)
        out_sums = tf.gather(out_sums, order)
        # What was held before shadow mode began is let go for good.
        is_shadow = is_shadow & ~lets_go
        return tf.IndexedSlices(
            tf.cond(is_shadow, lambda: slices.values, lambda: out_sums),
            tf.cond(is_shadow, lambda: slices.indices, lambda: out_keys),
            slices.dense_shape,
        )

    def export(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns what is held (eager only): keys int64 [n], by age; ages int64 [n], in steps,
        the oldest first; and sums float32 [n, dim]."""
        keys, since = self._keys.numpy(), self._since.numpy()
        held = np.flatnonzero(keys != _FREE)
        held = held[np.lexsort((keys[held], since[held]))]
        return keys[held], int(self._step.numpy()) - since[held], self._sums.numpy()[held]

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
        total = np.zeros((merged.size, self._dim), np.float32)
        np.add.at(total, place.ravel(), sums)
        oldest = np.zeros(merged.size, np.int64)
        np.maximum.at(oldest, place.ravel(), ages)
        capacity = max(int(tf.size(self._keys)), merged.size)
        places = np.full(capacity, _FREE), np.zeros(capacity, np.int64)
        values = np.zeros((capacity, self._dim), np.float32)
        places[0][: merged.size] = merged
        places[1][: merged.size] = int(self._step.numpy()) - oldest
        values[: merged.size] = total
        self._index.replace(merged, is_used=bool(capacity))
        self._keys.assign(places[0])
        self._since.assign(places[1])
        self._sums.assign(values)

    def pending(self) -> int:
        """Returns how many sums are held (eager only)."""
        return int(_number(self._keys != _FREE))

    def counts(self) -> HeldCounts:
        """Returns what became of the gradients so far (eager only)."""
        return HeldCounts(*(int(count) for count in self._counts.numpy()))

    def buffer_bytes(self) -> int:
        """Returns the bytes of the buffers, of those that are empty, too (eager only)."""
        buffers = (self._keys, self._since, self._sums)
        sums = sum(int(tf.size(buffer)) * buffer.dtype.size for buffer in buffers)
        return sums + self._index.nbytes()

    def _start(
        self, keys: tf.Tensor, sums: tf.Tensor, wants_room: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """Begins sums as long as there is room; returns bool [n], whose."""
        is_free = self._keys == _FREE
        free = tf.where(is_free)[:, 0]
        room = tf.minimum(tf.size(free, tf.int64), self._max_rows - _number(~is_free))
        starts = wants_room & (tf.cumsum(tf.cast(wants_room, tf.int64)) <= room)
        places, keys = free[: _number(starts)], _of(keys, starts)
        self._keys.scatter_update(tf.IndexedSlices(keys, places))
        self._since.scatter_update(tf.IndexedSlices(tf.fill(tf.shape(keys), step), places))
        self._sums.scatter_update(tf.IndexedSlices(_of(sums, starts), places))
        self._index.put(keys, places)
        return starts

    def _free(self, places: tf.Tensor, keys: tf.Tensor) -> None:
        nothing = tf.fill(tf.shape(keys), _FREE)
        self._keys.scatter_update(tf.IndexedSlices(nothing, places))
        self._index.drop(keys)

    def _count(self, counts: HeldCounts) -> None:
        with tf.device("CPU:0"):
            self._counts.assign_add(tf.stack([tf.cast(count, tf.int64) for count in counts]))

    def _resize(self, capacity: int) -> None:
        """Makes room for so many sums; those that are held stay, if they are more."""
        held = np.flatnonzero(self._keys.numpy() != _FREE)
        is_used = bool(capacity or held.size or self._policy.mode == "defer")
        if is_used:
            # One place at least, so that there is one to look at.
            capacity = max(capacity, held.size, 1)
        if capacity == int(tf.size(self._keys)):
            return
        keys, since = np.full(capacity, _FREE), np.zeros(capacity, np.int64)
        sums = np.zeros((capacity, self._dim), np.float32)
        keys[: held.size] = self._keys.numpy()[held]
        since[: held.size] = self._since.numpy()[held]
        sums[: held.size] = self._sums.numpy()[held]
        self._index.replace(keys[: held.size], is_used)
        self._keys.assign(keys)
        self._since.assign(since)
        self._sums.assign(sums)


_ZERO = np.int64(0)
# The key of a place without a sum.
_FREE = np.int64(np.iinfo(np.int64).min)


def _resizable(dtype: tf.DType, shape: list[int | None]) -> tf.Variable:
    empty = tf.zeros([size or 0 for size in shape], dtype)
    return tf.Variable(empty, trainable=False, shape=tf.TensorShape(shape))


def _scalar(value: Any, dtype: tf.DType) -> tf.Variable:
    return tf.Variable(value, trainable=False, dtype=dtype)


def _of(values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    return tf.boolean_mask(values, mask)


def _number(mask: tf.Tensor) -> tf.Tensor:
    return tf.math.count_nonzero(mask)
