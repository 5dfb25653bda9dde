"""Since when keys have not changed: of those whose gradients are masked without a break."""

from __future__ import annotations

import numpy as np


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
