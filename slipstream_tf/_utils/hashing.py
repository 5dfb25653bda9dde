"""SplitMix64 hashes in Python, equal to `cc_ops/core/base/hash.h`.

The hash of a key determines its rank. Functions take and return uint64 NumPy arrays or tensors of
any shape. Arithmetic is modulo 2**64.

References:
    Steele, Lea & Flood, 2014, fast splittable pseudorandom number generators.
"""

import hashlib
from typing import Any

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Increment of SplitMix64's state: 2**64 divided by the golden ratio, rounded to odd."""


def finalise(values: Any) -> Any:
    """Applies the finalizer of SplitMix64, a bijection that maps 0 to 0."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ _shifted(values, shift)) * np.uint64(factor)
    return values ^ _shifted(values, 31)


def mix64(values: Any) -> Any:
    """Hashes values with a bijection that does not map 0 to 0.

    Equal to `Mix64` of the C++ core, which hashes keys with it.
    """
    return finalise(values + GOLDEN)


def stream(seeds: Any, counters: Any) -> Any:
    """Returns element `counters` of the SplitMix64 streams with seeds `seeds`.

    The arguments broadcast.
    """
    return finalise(counters * GOLDEN + seeds)


def hash_keys(keys: np.ndarray) -> np.ndarray:
    """Returns the C++ core's hashes of keys, uint64 [n].

    Args:
        keys: int64 [n].
    """
    return mix64(np.asarray(keys, np.int64).view(np.uint64))


def hash_text(text: str) -> int:
    """Returns a platform-independent int64 hash of a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shifted(values: Any, bits: int) -> Any:
    if isinstance(values, (np.ndarray, np.generic)):
        return values >> np.uint64(bits)
    # Imported here so that callers without tensors need not load TensorFlow.
    import tensorflow as tf

    return tf.bitwise.right_shift(values, np.uint64(bits))
