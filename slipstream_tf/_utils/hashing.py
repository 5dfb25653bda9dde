"""SplitMix64 in Python: the hash of `cc_ops/core/base/hash.h`, by which rows find their rank.

In: uint64 NumPy arrays or tensors, of any shape. Out: such of the same shape; all sums and products
are modulo 2**64. Fast splittable pseudorandom number generators, Steele, Lea and Flood 2014.
"""

import hashlib
from typing import Any

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""What the states of a SplitMix64 stream are apart: 2**64 by the golden ratio, odd."""


def finalise(values: Any) -> Any:
    """Scrambles values one to one: SplitMix64's finaliser. 0 stays 0."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ _shifted(values, shift)) * np.uint64(factor)
    return values ^ _shifted(values, 31)


def mix64(values: Any) -> Any:
    """Scrambles values one to one, 0 too: `Mix64` of the core, by which it hashes keys."""
    return finalise(values + GOLDEN)


def stream(seeds: Any, counters: Any) -> Any:
    """Returns number `counters` of the SplitMix64 streams that start at `seeds`; they broadcast."""
    return finalise(counters * GOLDEN + seeds)


def hash_keys(keys: np.ndarray) -> np.ndarray:
    """Returns uint64 [n], the core's hash of keys, int64 [n]."""
    return mix64(np.asarray(keys, np.int64).view(np.uint64))


def hash_text(text: str) -> int:
    """Returns a number of a text, -2**63 to 2**63 - 1, the same on every machine."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shifted(values: Any, bits: int) -> Any:
    if isinstance(values, (np.ndarray, np.generic)):
        return values >> np.uint64(bits)
    import tensorflow as tf  # Whoever has a tensor has it; others need not wait for it.

    return tf.bitwise.right_shift(values, np.uint64(bits))
