"""Access counts of tables whose rows are elsewhere: exact in host memory, or estimated on a GPU.

In: the packed keys of batches. Out: the most accessed keys of a table, and counts for checkpoints.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf.config import Retention, Table
from slipstream_tf.initializers import Zeros
from slipstream_tf.ops.features import FeatureSpec, PackedFeatures
from slipstream_tf.ops.hot_keys import HotKeySketch
from slipstream_tf.optimizers import SGD
from slipstream_tf.tables.base import table_contents
from slipstream_tf.tables.native import NativeStore


class CountingStore(NativeStore):
    """Native tables that are there for their access counts, whatever their rows are."""

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """Replaces all of a table by keys and counts; its rows are zeros, nothing is deferred.

        Args:
            table: its name; the rule has no slots.
            accesses: as `export_accesses` gave them. Of more keys than the table has room for,
                those of the lowest counts are left out.
        """
        config = self.tables[self._index_of(table)]
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

    def count(self, packed: PackedFeatures, specs: Sequence[FeatureSpec]) -> None:
        """Counts a batch: the keys, from `features.pack` with the same specs."""
        self.lookup(packed, specs, training=True)


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

    def count(self, packed: PackedFeatures, specs: Sequence[FeatureSpec]) -> None:
        """See `ExactCounts.count`."""
        for feature, spec in enumerate(specs):
            keys, _, _ = packed.of(feature)
            counts = packed.is_key(feature)
            if keys.shape.rank == 2:
                keys = tf.reshape(keys, [-1])
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
