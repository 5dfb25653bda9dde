"""Copies of rows that other ranks own, in a native table: those of a batch, and frozen ones.

In: the tables of a store whose rows are spread over ranks, and a budget of bytes. Out: a store of
copies, of which lookups make plans and which defers gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from slipstream_tf.config import TableConfig
from slipstream_tf.errors import invalid, require_integer
from slipstream_tf.memory import require_room
from slipstream_tf.ops import update_policy
from slipstream_tf.ops.update_policy import REFRESHED, SATURATED
from slipstream_tf.optimizers import SparseOptimizer
from slipstream_tf.stores.access_counts import CountingStore
from slipstream_tf.stores.native import NativeStore

# Of a copy, beside its values and slots: index entry, time of use, mark.
_OVERHEAD = 64
# Share of the budget that frozen rows may take; a batch's rows need the rest.
_FROZEN_SHARE = 0.5


def copy_bytes(table: TableConfig, rule: SparseOptimizer) -> int:
    """Returns the bytes of a copy of a table's row, with its slots."""
    return 4 * (table.dim + rule.slots_per_row(table.dim)) + _OVERHEAD


def rows_within(
    cache_bytes: int, tables: Sequence[TableConfig], rule: SparseOptimizer, place: str
) -> int:
    """Returns how many copies of each table's rows a budget has room for.

    Args:
        cache_bytes: of all copies.
        tables: of the store.
        rule: whose slots copies have.
        place: the store, for errors.

    Raises:
        ValueError: the budget holds no row, or the machine does not have it.
    """
    require_integer("cache_bytes", cache_bytes, 1, None, place)
    require_room("cache_bytes", cache_bytes, cache_bytes, "copies of rows", place)
    least = 2 * sum(copy_bytes(table, rule) for table in tables)
    if cache_bytes < least:
        raise invalid("cache_bytes", cache_bytes, place, f"{least} or more")
    return cache_bytes // (least // 2)


class CopiedRows(CountingStore):
    """A rank's copies. The least recently used leave; frozen ones stay until rows are marked.

    Attributes:
        most_frozen: rows of a table that may be frozen, or withheld.
        frozen: table -> rows that are frozen in this window.
    """

    def __init__(self, tables: Sequence[TableConfig], rule: SparseOptimizer, rows: int):
        """Has no copy.

        Args:
            tables: whose rows they are.
            rule: whose slots copies have.
            rows: of each table at most, from `rows_within`.
        """
        bounded = [dataclasses.replace(t, capacity=rows, eviction="lru") for t in tables]
        super().__init__(bounded, rule)
        self.most_frozen = int(rows * _FROZEN_SHARE)
        self.frozen = {table.name: 0 for table in self.tables}

    def withhold(self, table: str, keys: np.ndarray, marks: np.ndarray) -> np.ndarray:
        """Marks copies of saturated keys, and ends what is frozen of a table.

        Args:
            table: name of the table.
            keys: int64 [n].
            marks: uint8 [n], of which SATURATED counts.

        Returns:
            int64 [m], the keys whose gradients are masked or deferred by interval: those that there
            is room for.
        """
        withheld = keys[(marks & SATURATED) > 0]
        if withheld.size > self.most_frozen:
            logging.warning(
                "%d of %d saturated keys of table %r are not withheld: cache_bytes has no room for "
                "their marks.",
                withheld.size - self.most_frozen,
                withheld.size,
                table,
            )
            withheld = withheld[: self.most_frozen]
        # Copies may come later in the window: what is to be withheld then is marked now.
        of_copies = np.full(withheld.size, SATURATED)
        handle = self._handles[self._index_of(table)]
        update_policy.set_row_flags(handle, withheld, of_copies, create_missing=True)
        self.frozen[table] = 0
        return withheld

    def choose_frozen(
        self, table: str, hot: Mapping[str, tuple[np.ndarray, np.ndarray]], least_accesses: float
    ) -> np.ndarray:
        """Returns int64 [n], the keys of a table that are to be frozen, and counts them as such.

        Args:
            table: name of the table.
            hot: table -> keys int64 [n] and access counts float32 [n] over all ranks, by count
                descending; tables not named freeze nothing.
            least_accesses: that pay for sending a row to everybody.
        """
        keys, counts = hot.get(table, (np.empty(0, np.int64), np.empty(0, np.float32)))
        keys = keys[: self.most_frozen][counts[: self.most_frozen] >= least_accesses]
        self.frozen[table] = keys.size
        return keys

    def replace(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the copies of a table by those of `export_copies`, in the midst of a window.

        Where the contents have no marks, copies keep those that they have; no copy is kept then.
        """
        rows = dict(contents)
        keys, marks = rows["keys"], rows.pop("marks", None)
        if marks is None:
            marks = self.marks(table, keys) & ~REFRESHED
        self.import_table(table, rows)
        self.mark_rows(table, keys, marks)


def export_copies(holder: NativeStore, table: str) -> dict[str, np.ndarray]:
    """Returns what a native table has, as `NativeStore.export_table`, with deferred gradients held.

    Beside these: marks uint8 [n], of rows that are frozen or withheld in this window.
    """
    contents = NativeStore.export_table(holder, table, flush=False)
    return {**contents, "marks": NativeStore.marks(holder, table, contents["keys"])}
