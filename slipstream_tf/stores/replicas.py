"""Replicas of rows that other ranks own: those of a batch, and read-only ones of hot rows.

In: the tables of a store whose rows are spread over ranks, and a budget of bytes. Out: a native
store of replicas, of which lookups make plans and which defers gradients; or, for lookups that are
not ours, a set of read-only rows in front of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf.config import Retention, Table
from slipstream_tf.errors import invalid, require_integer
from slipstream_tf.memory import require_room
from slipstream_tf.ops import table as table_ops
from slipstream_tf.ops import update_policy
from slipstream_tf.ops.key_map import KeyMap
from slipstream_tf.ops.update_policy import READ_ONLY, SATURATED
from slipstream_tf.optimizers import SparseOptimizer, rule_of
from slipstream_tf.stores.access_counts import CountingStore
from slipstream_tf.stores.native import CollectingStore, NativeStore

# Of a replica, beside its values and slots: index entry, time of use, flags.
_OVERHEAD = 64
# Share of the budget that read-only rows may take; a batch's rows need the rest.
_READ_ONLY_SHARE = 0.5


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


def most_accessed(
    hot: Mapping[str, tuple[np.ndarray, np.ndarray]], table: str, most: int, least_accesses: float
) -> np.ndarray:
    """Returns int64 [n], the keys of a table that are to have a replica on every rank.

    Args:
        hot: table -> keys int64 [n] and access counts float32 [n] over all ranks, by count
            descending; tables that are not named have no such keys.
        table: name of the table.
        most: keys at most.
        least_accesses: that pay for sending a row to everybody.
    """
    keys, counts = hot.get(table, (np.empty(0, np.int64), np.empty(0, np.float32)))
    return keys[:most][counts[:most] >= least_accesses]


class Replicas(CountingStore):
    """A rank's replicas. The least recently used leave; read-only ones stay until flags are set.

    Attributes:
        most_flagged: rows of a table that may be read-only, or withheld.
        read_only: table -> rows that are read-only in this window.
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
        self.most_flagged = int(rows * _READ_ONLY_SHARE)
        self.read_only = {table.name: 0 for table in self.tables}

    def withhold(self, table: str, keys: np.ndarray, flags: np.ndarray) -> np.ndarray:
        """Flags replicas of saturated keys; none of the table's is read-only then.

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
        self.read_only[table] = 0
        return withheld

    def choose_read_only(
        self, table: str, hot: Mapping[str, tuple[np.ndarray, np.ndarray]], least_accesses: float
    ) -> np.ndarray:
        """Returns what `most_accessed` does of as many keys as may be, and counts them."""
        keys = most_accessed(hot, table, self.most_flagged, least_accesses)
        self.read_only[table] = keys.size
        return keys


class ReplicatingStore(CollectingStore):
    """Base of stores that look rows of other ranks up in replicas of theirs."""

    is_spread = True
    has_read_only_replicas = True
    has_replicas = True
    _replicas: Replicas

    @property
    def _collector(self) -> NativeStore:
        return self._replicas

    def read_only_keys(self, table: str) -> int:
        """Returns how many keys of a table have read-only replicas in this window."""
        return self._replicas.read_only[self._require(table)]

    def export_copies(self, table: str) -> dict[str, np.ndarray]:
        """Returns this rank's replicas, with its own accesses; see `ops.table.export_replicas`.

        Values of those that lookups request anew are left out. Gradients stay deferred.
        """
        return table_ops.export_replicas(self._collector._handle_of(table))

    def import_copies(
        self, table: str, contents: Mapping[str, Any], takes_flags: bool = True
    ) -> None:
        """Replaces this rank's replicas by those of `export_copies`.

        Read-only ones are as old as they were. Call it in the midst of a window, after
        `set_row_flags` and `set_read_only`, and before `import_deferred`: deferred gradients leave
        without a trace. Where flags are not taken, or there are none, replicas keep those of now,
        but none is read-only until the next `set_read_only`.
        """
        rows = dict(contents)
        keys, flags = rows["keys"], rows.pop("marks", None)
        for name in ("rows", "slots"):
            values = rows[name]
            if len(values) != len(keys):  # The others' are requested before they are read.
                rows[name] = np.zeros((len(keys), values.shape[1]), np.float32)
                rows[name][(flags & READ_ONLY) > 0] = values
        if flags is None or not takes_flags:
            flags = self._replicas.row_flags(table, keys) & ~READ_ONLY
            self._replicas.read_only[table] = 0
        self._replicas.import_table(table, rows)
        self._replicas.set_row_flags(table, keys, flags)


class ReadOnlyRows:
    """Replicas of some rows of a table; replacing them retraces nothing."""

    def __init__(self, dim: int, device: str):
        """Has no row.

        Args:
            dim: values per row.
            device: where they lie.
        """
        self._index_of = KeyMap(device)
        with tf.device(device):
            # Of changing size.
            self._rows = tf.Variable(tf.zeros([0, dim]), trainable=False, shape=[None, dim])

    @property
    def size(self) -> int:
        """Number of rows (eager only)."""
        return int(tf.shape(self._rows)[0])

    def assign(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Replaces all rows.

        Args:
            keys: int64 [n], each once.
            rows: float32 [n, dim].
        """
        self._index_of.assign(keys)
        self._rows.assign(rows)

    def look_up(self, keys: tf.Tensor, lookup: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Returns float32 [n, dim], rows of keys; no gradient flows to replicas.

        Args:
            keys: int64 [n].
            lookup: of keys int64 [m] without a replica; called once, with no key if all have one.
        """
        probed = self._index_of.probe(keys)
        fetched = lookup(tf.gather(keys, probed.misses))
        replicas = tf.gather(self._rows.read_value(), tf.gather(probed.indices, probed.hits))
        # Not stitched together: that reads the positions on the host.
        rows = tf.zeros([tf.size(keys), replicas.shape[1]], replicas.dtype)
        rows = tf.tensor_scatter_nd_update(rows, probed.hits[:, None], tf.stop_gradient(replicas))
        return tf.tensor_scatter_nd_update(rows, probed.misses[:, None], fetched)
