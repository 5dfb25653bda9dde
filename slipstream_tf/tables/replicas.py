"""Replicas of rows that other ranks own, with a rank's access counts and deferred gradients.

In: the tables of a store whose rows are spread over ranks, and a budget of bytes. Out: a native
store of replicas that lookups make plans of, and that masks and defers gradients.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf._utils.memory import require_room
from slipstream_tf.config import Retention, Table
from slipstream_tf.ops import table as table_ops
from slipstream_tf.ops import update_policy
from slipstream_tf.ops.update_policy import SATURATED
from slipstream_tf.optimizers import SparseOptimizer, rule_of
from slipstream_tf.tables.access_counts import CountingStore
from slipstream_tf.tables.native import CollectingStore, NativeStore

# Of a replica, beside its values and slots: index entry, time of use, flags.
_OVERHEAD = 64
# Share of the replicas that may be flagged; a batch's rows need the rest.
_FLAGGED_SHARE = 0.5


def copy_bytes(table: Table, rule: SparseOptimizer) -> int:
    """Returns the bytes of a copy of a table's row, with its slots."""
    return 4 * (table.dim + rule.slots_per_row(table.dim)) + _OVERHEAD


def rows_within(
    cache_bytes: int, tables: Sequence[Table], optimizer: SparseOptimizer | None, place: str
) -> int:
    """Returns how many copies of each table's rows a budget has room for.

    Args:
        cache_bytes: of all copies.
        tables: of the store.
        optimizer: whose slots copies have, of tables without one of their own.
        place: the store, for errors.

    Raises:
        ValueError: the budget holds no row, or the machine does not have it.
    """
    require_integer("cache_bytes", cache_bytes, 1, None, place)
    require_room("cache_bytes", cache_bytes, cache_bytes, "copies of rows", place)
    least = 2 * sum(copy_bytes(table, rule_of(table, optimizer)) for table in tables)
    if cache_bytes < least:
        raise invalid("cache_bytes", cache_bytes, place, f"{least} or more")
    return cache_bytes // (least // 2)


class Replicas(CountingStore):
    """A rank's replicas, of which the least recently used are evicted.

    Attributes:
        most_flagged: maximum number of rows of a table whose gradients are masked or deferred by
            interval.
    """

    def __init__(self, tables: Sequence[Table], optimizer: SparseOptimizer, rows: int):
        """Has no replica.

        Args:
            tables: whose rows they are.
            optimizer: whose slots replicas have, of tables without one of their own.
            rows: of each table at most, from `rows_within`.
        """
        retention = Retention(rows, "lru")
        bounded = [
            dataclasses.replace(t, retention=retention, storage=t.storage.in_memory())
            for t in tables
        ]
        super().__init__(bounded, optimizer)
        self.most_flagged = int(rows * _FLAGGED_SHARE)

    def withhold(self, table: str, keys: np.ndarray, flags: np.ndarray) -> np.ndarray:
        """Flags replicas of saturated keys.

        Args:
            table: name of the table.
            keys: int64 [n].
            flags: uint8 [n], of which SATURATED counts.

        Returns:
            int64 [m], the keys whose gradients are masked or deferred by interval: those that there
            is room for.
        """
        withheld = keys[(flags & SATURATED) > 0]
        if withheld.size > self.most_flagged:
            logging.warning(
                "%d of %d saturated keys of table %r are not withheld: cache_bytes has no room for "
                "their flags.",
                withheld.size - self.most_flagged,
                withheld.size,
                table,
            )
            withheld = withheld[: self.most_flagged]
        # Replicas may come later in the window: what is to be withheld then is flagged now.
        saturated = np.full(withheld.size, SATURATED)
        handle = self._handle_of(table)
        update_policy.set_row_flags(handle, withheld, saturated, create_missing=True)
        return withheld


class ReplicatingStore(CollectingStore):
    """Base of stores that look up rows of other ranks in replicas."""

    is_spread = True
    has_replicas = True
    _replicas: Replicas

    @property
    def _collector(self) -> NativeStore:
        return self._replicas

    def export_copies(self, table: str) -> dict[str, np.ndarray]:
        """Returns this rank's replicas, with its own accesses; see `ops.table.export_replicas`.

        Their values are left out, because lookups request them again. Gradients stay deferred.
        """
        return table_ops.export_replicas(self._collector._handle_of(table))

    def import_copies(
        self, table: str, contents: Mapping[str, Any], takes_flags: bool = True
    ) -> None:
        """Replaces this rank's replicas by those of `export_copies`.

        Call it in the midst of a window, after `set_row_flags` and before `import_deferred`:
        deferred gradients are lost. If `takes_flags` is false, or the contents have no flags,
        replicas keep their present flags.
        """
        rows = dict(contents)
        keys, flags = rows["keys"], rows.pop("marks", None)
        if flags is None or not takes_flags:
            flags = self._replicas.row_flags(table, keys)
        # Lookups request the values before they are read.
        dim = self._replicas.tables[self._replicas._index_of(table)].dim
        slots = self._replicas.rule_of(table).slots_per_row(dim)
        rows["rows"] = np.zeros((len(keys), dim), np.float32)
        rows["slots"] = np.zeros((len(keys), slots), np.float32)
        self._replicas.import_table(table, rows)
        self._replicas.set_row_flags(table, keys, flags)
