"""Finds the most accessed keys in a fixed amount of memory.

The method is a count-min sketch (Cormode and Muthukrishnan, 2005) in which each counter also
remembers the most accessed of its keys. It works on CPU and GPU, in graph and eager mode.
"""

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import require_integer, require_number
from slipstream_tf.ops import _loader

_LARGEST_LOG2_WIDTH = 30
# Increment of a counter per access. Counters are integers, therefore decay rounds them down to a
# multiple of 1/256 access.
_UNIT = 256
# Marks a counter without a key.
_NO_OWNER = np.int64(np.iinfo(np.int64).min)


class HotKeySketch:
    """Estimates access counts and finds the most accessed ("hottest") keys.

    The sketch consists of four arrays of w counters. A hash function per array assigns each key to
    a counter, and the smallest of its four counters is the estimate. Without decay, an estimate is
    never too low. It is too high if other keys share all four counters. With n accesses in total,
    the error exceeds 2.7 n / w for fewer than 2 in 100 keys. The r-th hottest key is missed with a
    probability of about (r / w)^4 if it has far more than n / w accesses. Keys with fewer accesses
    cannot be distinguished. Note: the minimum int64 value is counted, but never returned as a hot
    key.

    The results depend only on the batches and are bitwise reproducible. The C++ resource is
    released with the last object or `tf.function` that uses it. Counting does not synchronize with
    the device and has no gradient.

    Attributes:
        handle: Scalar resource handle, for the ops.
    """

    def __init__(self, width: int, device: str | None = None):
        """Creates a sketch with counts of 0.

        Args:
            width: Number of counters per array (w), from 2 to 2^30, rounded up to a power of two.
                The sketch has four arrays, and a counter takes 24 bytes.
            device: Device on which keys are counted. None means the default placement of
                TensorFlow.

        Raises:
            ValueError: The width is out of range.
            tf.errors.ResourceExhaustedError: There is not enough memory.
        """
        require_integer("width", width, 2, 1 << _LARGEST_LOG2_WIDTH, "HotKeySketch")
        with tf.init_scope(), tf.device(device):
            self.handle = _loader.library().slipstream_hot_keys(log2_width=(width - 1).bit_length())

    def count(self, keys: tf.Tensor, counts: tf.Tensor | None = None) -> tf.Operation | None:
        """Counts the accesses of a batch.

        Args:
            keys: int64 [n]. A key that occurs twice counts twice.
            counts: bool [n], whether each key counts. None means that all keys count.

        Raises:
            tf.errors.InvalidArgumentError: The shapes do not fit.
        """
        if counts is None:
            counts = tf.ones_like(keys, tf.bool)
        return _loader.library().slipstream_count_accesses(
            handle=self.handle, keys=keys, counts=counts, unit=_UNIT
        )

    def decay(self, factor: float) -> None:
        """Multiplies all counts by `factor`, 0 to 1."""
        require_number("factor", factor, 0.0, 1.0, "HotKeySketch.decay")
        with tf.device("CPU:0"):
            factor = tf.constant(factor, tf.float64)
        _loader.library().slipstream_decay_accesses(handle=self.handle, factor=factor)

    def accesses(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the estimated access counts of keys int64 [n], float64 [n]."""
        found = _loader.library().slipstream_estimate_accesses(handle=self.handle, keys=keys)
        return tf.cast(found, tf.float64) / _UNIT

    def hottest(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns up to k hottest keys and their counts (eager only).

        Args:
            k: Maximum number of keys.

        Returns:
            keys int64 [m] and counts float32 [m], sorted by descending count, then by ascending
            key. Keys with a count of 0 are omitted.
        """
        require_integer("k", k, 0, None, "HotKeySketch.hottest")
        # A key occurs once for each counter that remembers it.
        keys = tf.sort(_loader.library().slipstream_hot_key_candidates(handle=self.handle))
        is_first = tf.concat([[True], keys[1:] != keys[:-1]], 0) & (keys != _NO_OWNER)
        found = _loader.library().slipstream_estimate_accesses(handle=self.handle, keys=keys)
        # For equal counts, top_k returns the lower index first, which is the smaller key.
        top = tf.math.top_k(tf.where(is_first, found, 0), min(k, int(tf.size(keys))))
        counts = top.values.numpy()
        is_accessed = counts > 0
        hottest = tf.gather(keys, top.indices).numpy()[is_accessed]
        return hottest, (counts[is_accessed] / _UNIT).astype(np.float32)


tf.no_gradient("SlipstreamCountAccesses")
tf.no_gradient("SlipstreamEstimateAccesses")
