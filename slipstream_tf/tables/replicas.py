"""Access counts and replicas for tables with rows on other devices.

The rows are on other ranks or on a GPU. Access counts are exact in host memory, or estimated on the
GPU. A replica is a local copy of such a row. Replicas are stored in a native store of bounded size,
which looks up batches, and masks and defers gradients.
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
from slipstream_tf.optimizers import SGD, SparseOptimizer, optimizer_of
from slipstream_tf.tables.base import table_contents
from slipstream_tf.tables.native import CollectingStore, NativeStore


def counts_of(among: np.ndarray, keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the counts of the keys `among`, float32 [m].

    The count of a key that is not in `keys` is 0.

    Args:
        among: int64 [m], ascending, the keys to look up.
        keys: int64 [n], ascending, the counted keys. Keys outside `among` are ignored.
        counts: float32 [n], the counts of `keys`.
    """
    found = np.zeros(among.size, np.float32)
    is_present = np.isin(keys, among)
    found[np.searchsorted(among, keys[is_present])] = counts[is_present]
    return found


class CountingStore(NativeStore):
    """Native tables that serve only for their access counts."""

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """Replaces the keys and counts of a table.

        Rows are set to zero, and deferred gradients are removed.

        Args:
            table: Name of the table. Its optimizer must have no slots.
            accesses: Result of `export_accesses`. If it has more keys than the table's capacity,
                the keys with the lowest counts are dropped.
        """
        config = self.tables[self.index_of(table)]
        keys, counts = accesses["keys"], accesses["counts"]
        if config.capacity is not None and keys.size > config.capacity:
            kept = np.sort(np.lexsort((keys, -counts))[: config.capacity])
            keys, counts = keys[kept], counts[kept]
        rows = np.zeros((keys.size, config.dim), np.float32)
        self.import_table(table, table_contents(keys, rows, counts=counts))


class ExactCounts(CountingStore):
    """Exact access counts in host memory.

    If a table is full, the least accessed keys are evicted for new keys.
    """

    def __init__(self, tables: Iterable[str], counted_keys: int):
        """Creates empty counters.

        Args:
            tables: Names of the tables.
            counted_keys: Maximum number of counted keys per table. Must be at least the number of
                keys in a batch.
        """
        bounds: Any = {"initializer": Zeros(), "retention": Retention(counted_keys, "lfu")}
        super().__init__([Table(name, dim=1, **bounds) for name in tables], SGD())

    def count(self, packed: PackedFeatures) -> None:
        """Counts the keys of a batch, from `features.pack`."""
        tables = [self.index_of(spec.table) for spec in packed.specs]
        table_ops.count_accesses(self._handles, packed, tables)


class EstimatedCounts:
    """Estimated access counts on the tables' devices.

    Keys are already on these devices, so counting copies nothing to the host. See
    `HotKeySketch`.
    """

    def __init__(self, devices: Mapping[str, str], counted_keys: int):
        """Creates empty sketches.

        Args:
            devices: Device of each table, by name.
            counted_keys: Number of counters in each of the four arrays of a table's sketch; rounded
                up to a power of two.
        """
        self._width = max(counted_keys, 2)
        self._sketches = {
            name: HotKeySketch(self._width, device) for name, device in devices.items()
        }

    def count(self, packed: PackedFeatures) -> None:
        """Counts the keys of a batch, from `features.pack`."""
        for feature, spec in enumerate(packed.specs):
            keys, counts = tf.reshape(packed.of(feature)[0], [-1]), packed.is_key(feature)
            counts = None if counts is None else tf.reshape(counts, [-1])
            self._sketches[spec.table].count(keys, counts)

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the most accessed keys; see `TrackedStore.hot_keys`."""
        return self._sketches[table].hottest(k)

    def decay_counts(self, factor: float) -> None:
        """Multiplies the access counts of all tables by `factor`."""
        for sketch in self._sketches.values():
            sketch.decay(factor)

    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        """Returns the keys that the sketch lists as hot, and their counts.

        See `TrackedStore.export_accesses`.
        """
        keys, counts = self._sketches[table].hottest(self._width)
        order = np.argsort(keys)
        return {"keys": keys[order], "counts": counts[order]}

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """Resets the counts, because a sketch cannot be restored from keys.

        Keys share counters, so the counters of a sketch do not follow from the counts of its
        keys.
        """
        self._sketches[table].decay(0.0)
        if accesses["keys"].size:
            logging.warning(
                "The estimated access counts of table %r restart from zero, because a sketch "
                "cannot be restored. The next hot set is chosen from fewer accesses.",
                table,
            )


AccessCounts = ExactCounts | EstimatedCounts


# Bytes per replica in addition to values and slots: index entry, time of use, flags.
_OVERHEAD = 64
# Maximum fraction of flagged replicas. The rows of a batch need the rest.
_FLAGGED_FRACTION = 0.5


def copy_bytes(table: Table, optimizer: SparseOptimizer) -> int:
    """Returns the bytes of one replica, including its optimizer slots.

    Args:
        table: The table.
        optimizer: The optimizer of the table's replicas.
    """
    return 4 * (table.dim + optimizer.slots_per_row(table.dim)) + _OVERHEAD


def rows_within(
    cache_bytes: int, tables: Sequence[Table], optimizer: SparseOptimizer | None, place: str
) -> int:
    """Returns the number of replicas per table that fit in a budget.

    Args:
        cache_bytes: Budget for the replicas of all tables, in bytes.
        tables: The tables of the store.
        optimizer: Sparse optimizer of tables that have no `optimizer` setting. Replicas have its
            slots.
        place: Name of the store, for error messages.

    Raises:
        ValueError: The budget is smaller than two rows per table, or larger than the machine's
            memory.
    """
    require_integer("cache_bytes", cache_bytes, 1, None, place)
    require_room("cache_bytes", cache_bytes, cache_bytes, "replicas of rows", place)
    minimum = 2 * sum(copy_bytes(table, optimizer_of(table, optimizer)) for table in tables)
    if cache_bytes < minimum:
        allowed = f"an integer >= {minimum}, the size of two rows per table"
        raise invalid("cache_bytes", cache_bytes, place, allowed)
    return cache_bytes // (minimum // 2)


class Replicas(CountingStore):
    """A rank's replicas; the least recently used replicas are evicted.

    Attributes:
        max_flagged: Maximum number of rows of a table whose gradients are masked, or deferred by
            interval.
    """

    def __init__(self, tables: Sequence[Table], optimizer: SparseOptimizer, rows: int):
        """Creates empty tables for replicas.

        Args:
            tables: The tables whose rows are replicated.
            optimizer: Sparse optimizer of tables that have no `optimizer` setting. Replicas have
                its slots.
            rows: Maximum number of replicas per table, from `rows_within`.
        """
        retention = Retention(rows, "lru")
        bounded = [
            dataclasses.replace(t, retention=retention, storage=t.storage.in_memory())
            for t in tables
        ]
        super().__init__(bounded, optimizer)
        self.max_flagged = int(rows * _FLAGGED_FRACTION)

    def set_saturated(self, table: str, keys: np.ndarray, flags: np.ndarray) -> np.ndarray:
        """Flags replicas of saturated keys.

        Args:
            table: Name of the table.
            keys: int64 [n].
            flags: uint8 [n]. Only the bit `SATURATED` is read.

        Returns:
            int64 [m], the flagged keys. Their gradients are masked, or deferred by interval. If
            there are more than `max_flagged` saturated keys, only the first are flagged.
        """
        saturated_keys = keys[(flags & SATURATED) > 0]
        if saturated_keys.size > self.max_flagged:
            logging.warning(
                "The gradients of %d of %d saturated keys of table %r are not masked or deferred, "
                "because cache_bytes has no room for their flags. Increase cache_bytes.",
                saturated_keys.size - self.max_flagged,
                saturated_keys.size,
                table,
            )
            saturated_keys = saturated_keys[: self.max_flagged]
        # Some of these replicas are created later in the window. Their flags must exist by then.
        saturated = np.full(saturated_keys.size, SATURATED)
        handle = self._handle_of(table)
        update_policy.set_row_flags(handle, saturated_keys, saturated, create_missing=True)
        return saturated_keys


class ReplicatingStore(CollectingStore):
    """Base of stores that look up rows of other ranks in replicas."""

    is_spread = True
    has_replicas = True
    _replicas: Replicas

    @property
    def _collector(self) -> NativeStore:
        return self._replicas

    def export_copies(self, table: str) -> dict[str, np.ndarray]:
        """Returns the keys, access counts and flags of this rank's replicas.

        Row values and slots are omitted, because lookups request them again. Deferred gradients are
        not applied. See `ops.table.export_replicas` for the arrays.
        """
        return table_ops.export_replicas(self._collector._handle_of(table))

    def import_copies(
        self, table: str, contents: Mapping[str, Any], takes_flags: bool = True
    ) -> None:
        """Replaces this rank's replicas by the result of `export_copies`.

        If `takes_flags` is False, or the contents have no flags, replicas keep their current flags.

        Note: call it only in the middle of a window, after `set_row_flags` and before
        `import_deferred`, because it discards deferred gradients.
        """
        rows = dict(contents)
        keys, flags = rows["keys"], rows.pop("marks", None)
        if flags is None or not takes_flags:
            flags = self._replicas.row_flags(table, keys)
        # The zeros are never read, because each lookup first requests the values.
        dim = self._replicas.tables[self._replicas.index_of(table)].dim
        slots = self._replicas.optimizer_of(table).slots_per_row(dim)
        rows["rows"] = np.zeros((len(keys), dim), np.float32)
        rows["slots"] = np.zeros((len(keys), slots), np.float32)
        self._replicas.import_table(table, rows)
        self._replicas.set_row_flags(table, keys, flags)
