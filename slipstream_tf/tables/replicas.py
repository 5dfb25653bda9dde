"""Access counts and replicas of tables whose rows are on other ranks or on a GPU.

Access counts are exact in host memory, or estimated on the GPU. Replicas are a native store within
a budget of bytes: lookups make plans of it, and it masks and defers gradients.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf._utils.memory import require_room
from slipstream_tf.config import Retention, Table
from slipstream_tf.initializers import Zeros
from slipstream_tf.ops import table as table_ops
from slipstream_tf.ops import update_policy
from slipstream_tf.ops.features import PackedFeatures
from slipstream_tf.ops.hot_keys import HotKeySketch
from slipstream_tf.ops.update_policy import SATURATED
from slipstream_tf.optimizers import SGD, SparseOptimizer, rule_of
from slipstream_tf.tables.base import table_contents
from slipstream_tf.tables.native import CollectingStore, NativeStore


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


class CountingStore(NativeStore):
    """Native tables that are there for their access counts, whatever their rows are."""

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """Replaces all of a table by keys and counts; its rows are zeros, nothing is deferred.

        Args:
            table: its name; the rule has no slots.
            accesses: as `export_accesses` gave them. Of more keys than the table has room for,
                those of the lowest counts are left out.
        """
        config = self.tables[self.index_of(table)]
        keys, counts = accesses["keys"], accesses["counts"]
        if config.capacity is not None and keys.size > config.capacity:
            most = np.sort(np.lexsort((keys, -counts))[: config.capacity])
            keys, counts = keys[most], counts[most]
        rows = np.zeros((keys.size, config.dim), np.float32)
        self.import_table(table, table_contents(keys, rows, counts=counts))


class ExactCounts(CountingStore):
    """Counts in host memory, exact; the least accessed of the counted keys makes room for new."""

    def __init__(self, tables: Iterable[str], counted_keys: int):
        """Counts nothing yet.

        Args:
            tables: their names.
            counted_keys: of a table, at most; at least those of a batch.
        """
        bounds: Any = {"initializer": Zeros(), "retention": Retention(counted_keys, "lfu")}
        super().__init__([Table(name, dim=1, **bounds) for name in tables], SGD())

    def count(self, packed: PackedFeatures) -> None:
        """Counts a batch: the keys, from `features.pack`."""
        self.lookup(packed, training=True)


class EstimatedCounts:
    """Counts on the tables' devices, where keys already are: estimates; see `HotKeySketch`."""

    def __init__(self, devices: Mapping[str, str], counted_keys: int):
        """Counts nothing yet.

        Args:
            devices: table name -> device.
            counted_keys: counters a row, of each table; the next power of two.
        """
        self._width = max(counted_keys, 2)
        self._sketches = {
            name: HotKeySketch(self._width, device) for name, device in devices.items()
        }

    def count(self, packed: PackedFeatures) -> None:
        """See `ExactCounts.count`."""
        for feature, spec in enumerate(packed.specs):
            keys, counts = tf.reshape(packed.of(feature)[0], [-1]), packed.is_key(feature)
            counts = None if counts is None else tf.reshape(counts, [-1])
            self._sketches[spec.table].count(keys, counts)

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `TrackedStore.hot_keys`."""
        return self._sketches[table].hottest(k)

    def decay_counts(self, factor: float) -> None:
        """See `TrackedStore.decay_counts`."""
        for sketch in self._sketches.values():
            sketch.decay(factor)

    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        """See `CountingStore.export_accesses`; of the keys that are known to be hot."""
        keys, counts = self._sketches[table].hottest(self._width)
        order = np.argsort(keys)
        return {"keys": keys[order], "counts": counts[order]}

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """Starts anew: keys of a sketch cannot be told from those that share their counters."""
        self._sketches[table].decay(0.0)
        if accesses["keys"].size:
            logging.warning(
                "Estimated access counts of table %r start anew; the next hot set is chosen by "
                "fewer accesses.",
                table,
            )


AccessCounts = ExactCounts | EstimatedCounts


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
        dim = self._replicas.tables[self._replicas.index_of(table)].dim
        slots = self._replicas.rule_of(table).slots_per_row(dim)
        rows["rows"] = np.zeros((len(keys), dim), np.float32)
        rows["slots"] = np.zeros((len(keys), slots), np.float32)
        self._replicas.import_table(table, rows)
        self._replicas.set_row_flags(table, keys, flags)
