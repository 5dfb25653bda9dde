"""Which rows ranks read from replicas in a window, where tables are sharded.

In: the tracked tables and the access counts that ranks found together. Out: keys for the store.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream_tf.saturation.tracked_table import TrackedTable


class RowReplicas:
    """Chooses the rows that have replicas, of two kinds, and keeps what they are chosen by.

    Args:
        read_only: a store that keeps read-only replicas of other ranks' rows; None: none are used.
        refreshed: a store whose ranks keep refreshed replicas of hot rows; None: they do not.
        read_only_drift: drift over a window below which a saturated row may be read-only.
    """

    def __init__(self, read_only: Any, refreshed: Any, read_only_drift: float) -> None:
        self._read_only, self._refreshed = read_only, refreshed
        self._most_drift = read_only_drift
        # Of each table, keys and counts: with several ranks the most accessed key first.
        self._accesses: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def are_used(self) -> bool:
        """Whether any rows have replicas."""
        return bool(self._read_only or self._refreshed)

    @property
    def least_accesses(self) -> float:
        """Accesses of a window below which a replica does not pay."""
        return (self._read_only or self._refreshed).least_accesses

    @property
    def read_only_drift(self) -> float:
        """T where states of keys decide on read-only replicas alone; 0 without any."""
        return self._most_drift if self._read_only else 0.0

    def note_accesses(self, table: str, keys: np.ndarray, counts: np.ndarray) -> None:
        """Takes a table's hottest keys, int64 [n], and their access counts over all ranks."""
        self._accesses[table] = keys, counts

    def choose(self, tables: Sequence[TrackedTable], is_active: bool) -> None:
        """Tells the store which rows have replicas in the window that begins.

        Args:
            tables: the tracked tables, as they are in that window.
            is_active: whether the warm-up is over; before, none are.
        """
        chosen = tables if is_active else ()
        if self._read_only is not None:
            self._read_only.set_read_only(
                {t.name: self._accesses_of(t, t.slowest_keys(self._most_drift)) for t in chosen}
            )
        if self._refreshed is not None:
            # The most accessed first: owners remember no more than they have room for.
            self._refreshed.set_replicated(
                {t.name: self._accesses_of(t, t.states.keys)[0] for t in chosen}
            )

    def read_only_keys(self, tables: Sequence[TrackedTable]) -> int:
        """Returns how many read-only replicas there are."""
        if self._read_only is None:
            return 0
        return sum(self._read_only.read_only_keys(table.name) for table in tables)

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
