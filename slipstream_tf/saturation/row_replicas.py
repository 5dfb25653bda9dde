"""Which rows ranks read from replicas in a window, where tables are sharded.

In: the tracked tables and the access counts that ranks found together. Out: keys for the store.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream_tf.saturation.tracked_table import TrackedTable


class RowReplicas:
    """Chooses the rows that have read-only replicas, and keeps what they are chosen by.

    Args:
        store: that keeps replicas of other ranks' rows; None: none are used.
        most_drift: drift over a window below which a saturated row may have them.
    """

    def __init__(self, store: Any, most_drift: float) -> None:
        self._store, self._most_drift = store, most_drift
        # Of each table, keys and counts: with several ranks the most accessed key first.
        self._accesses: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def are_used(self) -> bool:
        """Whether any rows have replicas."""
        return self._store is not None

    @property
    def least_accesses(self) -> float:
        """Accesses of a window below which a replica does not pay."""
        return float(self._store.least_accesses)

    @property
    def read_only_drift(self) -> float:
        """T where states of keys decide on read-only replicas alone; 0 without any."""
        return self._most_drift if self.are_used else 0.0

    def note_accesses(self, table: str, keys: np.ndarray, counts: np.ndarray) -> None:
        """Takes a table's hottest keys, int64 [n], and their access counts over all ranks."""
        self._accesses[table] = keys, counts

    def choose(self, tables: Sequence[TrackedTable], is_active: bool) -> None:
        """Tells the store which rows have replicas in the window that begins.

        Args:
            tables: the tracked tables, as they are in that window.
            is_active: whether the warm-up is over; before, none are.
        """
        if self._store is None:
            return
        chosen = tables if is_active else ()
        self._store.set_read_only(
            {t.name: self._accesses_of(t, t.slowest_keys(self._most_drift)) for t in chosen}
        )

    def read_only_keys(self, tables: Sequence[TrackedTable]) -> int:
        """Returns how many read-only replicas there are."""
        if self._store is None:
            return 0
        return sum(self._store.read_only_keys(table.name) for table in tables)

    def state(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the accesses: table -> {"keys", "counts"}, the most accessed first."""
        state = {}
        for name, (keys, counts) in self._accesses.items():
            order = np.lexsort((keys, -counts))
            state[name] = {"keys": keys[order], "counts": counts[order]}
        return state

    def restore(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Goes on from what `state` gave."""
        self._accesses = {name: (of["keys"], of["counts"]) for name, of in state.items()}

    def _accesses_of(self, table: TrackedTable, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those of some keys over all ranks, with the counts; the most accessed first."""
        keys, counts = self._accesses.get(table.name, (np.empty(0, np.int64), np.empty(0)))
        is_among = np.isin(keys, among)
        return keys[is_among], counts[is_among]
