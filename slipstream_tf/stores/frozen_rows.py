"""Read-only copies of rows in front of a lookup: their keys never reach it.

In: keys. Out: their rows, from the copies where there is one and from the lookup for the others.
Eager or in a `tf.function`, with gradients through the lookup; on a GPU the host reads counts only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from slipstream_tf.ops.key_map import KeyMap


class FrozenRows:
    """Copies of some rows of a table; replacing them retraces nothing."""

    def __init__(self, dim: int, device: str):
        """Has no copy.

        Args:
            dim: values per row.
            device: where the copies lie.
        """
        self._places = KeyMap(device)
        with tf.device(device):
            # Of changing size.
            self._rows = _resizable(tf.float32, [None, dim])

    @property
    def size(self) -> int:
        """Number of copies (eager only)."""
        return int(tf.shape(self._rows)[0])

    def assign(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Replaces all copies.

        Args:
            keys: int64 [n], each once.
            rows: float32 [n, dim].
        """
        self._places.assign(keys)
        self._rows.assign(rows)

    def serve(self, keys: tf.Tensor, lookup: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Returns float32 [n, dim], rows of keys; no gradient flows to copies.

        Args:
            keys: int64 [n].
            lookup: of keys int64 [m] without a copy; called once, with no key if all have one.
        """
        probed = self._places.probe(keys)
        fetched = lookup(tf.gather(keys, probed.misses))
        copies = tf.gather(self._rows.read_value(), tf.gather(probed.indices, probed.hits))
        # Not stitched together: that reads the positions on the host.
        rows = tf.zeros([tf.size(keys), copies.shape[1]], copies.dtype)
        rows = tf.tensor_scatter_nd_update(rows, probed.hits[:, None], tf.stop_gradient(copies))
        return tf.tensor_scatter_nd_update(rows, probed.misses[:, None], fetched)


def _resizable(dtype: tf.DType, shape: list[int | None]) -> tf.Variable:
    empty = tf.zeros([size or 0 for size in shape], dtype)
    return tf.Variable(empty, trainable=False, shape=tf.TensorShape(shape))
