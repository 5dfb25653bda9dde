"""Where the held sum of a key is, and which keys are marked: for keys in a range, and for any keys.

In: int64 keys. Out: places. Eager or in a `tf.function`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import tensorflow as tf

from slipstream_tf.ops.key_map import KeyMap
from slipstream_tf.ops.update_policy import SATURATED

_NOWHERE = np.int64(-1)


class KeyIndex(Protocol):
    """Places of keys, and marks.

    Attributes:
        num_keys: how many keys there may be; None: any number.
    """

    num_keys: int | None

    def find(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns int64 [n], the places of keys int64 [n]; -1: none."""
        ...

    def put(self, keys: tf.Tensor, places: tf.Tensor) -> None:
        """Sets the places of keys, each once."""
        ...

    def drop(self, keys: tf.Tensor) -> None:
        """Takes keys out, each once."""
        ...

    def replace(self, keys: np.ndarray, is_used: bool) -> None:
        """Gives place i to key i, and none to others (eager only).

        Args:
            keys: int64 [n].
            is_used: whether keys will be put in; if not, memory may be let go.
        """
        ...

    def mark(self, keys: np.ndarray) -> None:
        """Replaces the marked keys (eager only)."""
        ...

    def are_marked(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns bool [n]; called only while some are marked."""
        ...

    def nbytes(self) -> int:
        """Returns the bytes that it takes (eager only)."""
        ...


class RangeIndex:
    """Places of keys 0 to `num_keys` - 1: 8 bytes for each of them, while any has one."""

    def __init__(self, num_keys: int, device: str):
        """Has no key.

        Args:
            num_keys: of the range.
            device: where the index lies.
        """
        self.num_keys: int | None = num_keys
        self._size = num_keys
        with tf.device(device):
            # Of changing size: a policy must not retrace anything.
            self._places = _resizable(tf.int64)
            self._is_marked = _resizable(tf.bool)

    def find(self, keys: tf.Tensor) -> tf.Tensor:
        """See `KeyIndex.find`."""
        return tf.gather(self._places, keys)

    def put(self, keys: tf.Tensor, places: tf.Tensor) -> None:
        """See `KeyIndex.put`."""
        self._places.scatter_update(tf.IndexedSlices(places, keys))

    def drop(self, keys: tf.Tensor) -> None:
        """See `KeyIndex.drop`."""
        self.put(keys, tf.fill(tf.shape(keys), _NOWHERE))

    def replace(self, keys: np.ndarray, is_used: bool) -> None:
        """See `KeyIndex.replace`."""
        places = np.full(self._size if is_used else 0, _NOWHERE)
        places[keys] = np.arange(keys.size)
        self._places.assign(places)

    def mark(self, keys: np.ndarray) -> None:
        """See `KeyIndex.mark`."""
        is_marked = np.zeros(self._size if keys.size else 0, bool)
        is_marked[keys] = True
        self._is_marked.assign(is_marked)

    def are_marked(self, keys: tf.Tensor) -> tf.Tensor:
        """See `KeyIndex.are_marked`."""
        return tf.cond(
            tf.size(self._is_marked) > 0,
            lambda: tf.gather(self._is_marked, keys),
            lambda: tf.zeros_like(keys, tf.bool),
        )

    def nbytes(self) -> int:
        """See `KeyIndex.nbytes`."""
        return 8 * int(tf.size(self._places)) + int(tf.size(self._is_marked))


class HashedIndex:
    """Places of any keys: a hash table of those that have one, on the CPU."""

    num_keys: int | None = None

    def __init__(self, device: str) -> None:
        """Has no key.

        Args:
            device: where marks are looked up.
        """
        with tf.init_scope(), tf.device("CPU:0"):
            self._places = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, _NOWHERE)
        self._marks, self._num_marks = KeyMap(device), 0

    def find(self, keys: tf.Tensor) -> tf.Tensor:
        """See `KeyIndex.find`."""
        return tf.ensure_shape(self._places.lookup(keys), keys.shape)

    def put(self, keys: tf.Tensor, places: tf.Tensor) -> None:
        """See `KeyIndex.put`."""
        self._places.insert(keys, places)

    def drop(self, keys: tf.Tensor) -> None:
        """See `KeyIndex.drop`."""
        self._places.remove(keys)

    def replace(self, keys: np.ndarray, is_used: bool) -> None:
        """See `KeyIndex.replace`."""
        del is_used
        self._places.remove(self._places.export()[0])
        self._places.insert(tf.constant(keys, tf.int64), tf.range(keys.size, dtype=tf.int64))

    def mark(self, keys: np.ndarray) -> None:
        """See `KeyIndex.mark`."""
        self._marks.assign(keys, np.full(keys.size, SATURATED))
        self._num_marks = keys.size

    def are_marked(self, keys: tf.Tensor) -> tf.Tensor:
        """See `KeyIndex.are_marked`."""
        return self._marks.states(keys) == SATURATED

    def nbytes(self) -> int:
        """See `KeyIndex.nbytes`; keys, places and marks alone."""
        return 16 * (int(self._places.size()) + self._num_marks)


def _resizable(dtype: tf.DType) -> tf.Variable:
    return tf.Variable(tf.zeros([0], dtype), trainable=False, shape=tf.TensorShape([None]))
