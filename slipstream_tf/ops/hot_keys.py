"""The most accessed keys among any number of them, in a fixed amount of memory.

In: the keys of batches. Out: the hottest, with estimated access counts. A count-min sketch (Cormode
and Muthukrishnan, 2005) whose counters each remember the hottest key that came to them. CPU and
GPU; graph or eager.
"""

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import require_integer, require_number
from slipstream_tf.ops import _loader

_LARGEST_LOG2_WIDTH = 30
# What an access adds: decayed counts are rounded down to a 256th of an access.
_UNIT = 256
# Stands for no key.
_NOBODY = np.int64(np.iinfo(np.int64).min)


class HotKeySketch:
    """Access counts of any number of keys, and which are the hottest: estimates.

    A count is never too low, but for decays; it is too high by the accesses of keys that share all
    four counters of a key. With w counters a row, and n accesses in all, it is too high by more
    than 2.7 n / w for fewer than 2 keys in 100. Of keys that are accessed well above n / w times,
    the r-th hottest is forgotten with a probability of about (r / w) ^ 4; rarer ones cannot be told
    apart. int64's lowest number is counted, but never found.

    Results depend on the batches only, bit for bit. The C++ resource lives as long as this object
    or a `tf.function` that uses it. Counting waits for nothing and has no gradient.

    Attributes:
        handle: scalar resource handle, for the ops.
    """

    def __init__(self, width: int, device: str | None = None):
        """Starts with counts of 0.

        Args:
            width: counters a row, at least, from 2 to 2^30: four rows of the next power of two,
                24 bytes each.
            device: where keys will be counted. None: where TensorFlow would place an op.

        Raises:
            ValueError: the width is out of range.
            tf.errors.ResourceExhaustedError: there is no memory for so many counters.
        """
        require_integer("width", width, 2, 1 << _LARGEST_LOG2_WIDTH, "HotKeySketch")
        with tf.init_scope(), tf.device(device):
            self.handle = _loader.library().slipstream_hot_keys(log2_width=(width - 1).bit_length())

    def count(self, keys: tf.Tensor, counts: tf.Tensor | None = None) -> tf.Operation | None:
        """Counts a batch's accesses.

        Args:
            keys: int64 [n]; one that is given twice counts twice.
            counts: bool [n], whether a key counts; None: all do.

        Raises:
            tf.errors.InvalidArgumentError: shapes do not fit.
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
        """Returns float64 [n], the estimated accesses of keys int64 [n]."""
        found = _loader.library().slipstream_estimate_accesses(handle=self.handle, keys=keys)
        return tf.cast(found, tf.float64) / _UNIT

    def hottest(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the at most k hottest keys (eager only).

        Returns:
            keys int64 [m] and counts float32 [m], by count descending, then key ascending; keys
            with a count of 0 are left out.
        """
        require_integer("k", k, 0, None, "HotKeySketch.hottest")
        # A key stands for each of the counters that remember it.
        keys = tf.sort(_loader.library().slipstream_hot_key_candidates(handle=self.handle))
        is_first = tf.concat([[True], keys[1:] != keys[:-1]], 0) & (keys != _NOBODY)
        found = _loader.library().slipstream_estimate_accesses(handle=self.handle, keys=keys)
        # Of equal counts, top_k takes the lower index first.
        top = tf.math.top_k(tf.where(is_first, found, 0), min(k, int(tf.size(keys))))
        counts = top.values.numpy()
        is_accessed = counts > 0
        hottest = tf.gather(keys, top.indices).numpy()[is_accessed]
        return hottest, (counts[is_accessed] / _UNIT).astype(np.float32)


tf.no_gradient("SlipstreamCountAccesses")
tf.no_gradient("SlipstreamEstimateAccesses")
