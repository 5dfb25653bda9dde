"""Arrays along keys, looked up and added up. Pure NumPy."""

from __future__ import annotations

import numpy as np


def counts_of(among: np.ndarray, keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns float32 [m], the counts of some keys; 0 of those that were not accessed.

    Args:
        among: int64 [m], ascending.
        keys: int64 [n], ascending; those that are not `among` them are passed over.
        counts: float32 [n].
    """
    found = np.zeros(among.size, np.float32)
    is_there = np.isin(keys, among)
    found[np.searchsorted(among, keys[is_there])] = counts[is_there]
    return found


def added_up(
    keys: np.ndarray, ages: np.ndarray, sums: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Adds up the sums of each key.

    Args:
        keys: int64 [..., n]; a column is a key.
        ages: int64 [n].
        sums: float32 [n, dim].

    Returns:
        The different keys, ascending; of each, the largest age and the total.
    """
    merged, index = np.unique(keys, axis=-1, return_inverse=True)
    total = np.zeros((merged.shape[-1], sums.shape[1]), np.float32)
    np.add.at(total, index.ravel(), sums)
    oldest = np.zeros(merged.shape[-1], np.int64)
    np.maximum.at(oldest, index.ravel(), ages)
    return merged, oldest, total
