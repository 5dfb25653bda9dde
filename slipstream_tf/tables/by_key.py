"""Arrays along keys: looked up, added up, and remembered from one time to the next. Pure NumPy."""

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


class UnchangedKeys:
    """Keys that nothing updates, each with the time from which on."""

    def __init__(self) -> None:
        """Has no key."""
        self._keys = np.empty(0, np.int64)
        self._since = np.empty(0)

    def replace(self, keys: np.ndarray, now: float) -> None:
        """Says which keys nothing updates from now on; those that were among them keep their time.

        Args:
            keys: int64 [n], each once.
            now: seconds.
        """
        since = np.full(keys.size, now)
        _, here, before = np.intersect1d(keys, self._keys, return_indices=True)
        since[here] = self._since[before]
        self._keys, self._since = keys, since

    def forget(self) -> None:
        """Drops all keys: they may be updated."""
        self._keys, self._since = np.empty(0, np.int64), np.empty(0)

    def since(self, time: float) -> np.ndarray:
        """Returns int64 [n], the keys that nothing has updated after a time, in seconds."""
        return self._keys[self._since <= time]
