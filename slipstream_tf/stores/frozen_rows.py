"""Read-only copies of rows in front of a lookup: their keys never reach it.

In: keys. Out: their rows, from the copies where there is one and from the lookup for the others.
TensorFlow ops only: eager or in a `tf.function`, with gradients through the lookup.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf


class FrozenRows:
    """Copies of some rows of a table; replacing them retraces nothing."""

    def __init__(self, dim: int, device: str):
        """Has no copy.

        Args:
            dim: values per row.
            device: where the copies lie.
        """
        with tf.device(device):
            # Ascending; of changing size.
            self._keys = _resizable(tf.int64, [None])
            self._rows = _resizable(tf.float32, [None, dim])

    @property
    def size(self) -> int:
        """Number of copies (eager only)."""
        return int(tf.size(self._keys))

    def assign(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Replaces all copies.

        Args:
            keys: int64 [n], each once.
            rows: float32 [n, dim].
        """
        order = np.argsort(keys)
        self._keys.assign(keys[order])
        self._rows.assign(rows[order])

    def serve(self, keys: tf.Tensor, lookup: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Returns float32 [n, dim], rows of keys; no gradient flows to copies.

        Args:
            keys: int64 [n].
            lookup: of keys int64 [m] without a copy; called once, with no key if all have one.
        """
        held, rows = self._keys.read_value(), self._rows.read_value()
        count = tf.size(held)
        place = tf.searchsorted(held, keys)
        # A last one that is never a copy: there may be none, or the place behind them.
        padded = tf.concat([held, [0]], 0)
        is_frozen = (place < count) & (tf.gather(padded, place) == keys)
        others, frozen = tf.where(~is_frozen)[:, 0], tf.where(is_frozen)[:, 0]
        fetched = lookup(tf.gather(keys, others))
        copies = tf.stop_gradient(tf.gather(rows, tf.gather(place, frozen)))
        places = [tf.cast(others, tf.int32), tf.cast(frozen, tf.int32)]
        return tf.dynamic_stitch(places, [fetched, copies])


def _resizable(dtype: tf.DType, shape: list[int | None]) -> tf.Variable:
    empty = tf.zeros([size or 0 for size in shape], dtype)
    return tf.Variable(empty, trainable=False, shape=tf.TensorShape(shape))
