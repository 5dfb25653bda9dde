"""Access counts of tables whose rows are elsewhere: exact in host memory, or estimated on a GPU.

In: the packed keys of batches. Out: the most accessed keys of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from slipstream_tf.config import TableConfig
from slipstream_tf.initializers import Zeros
from slipstream_tf.ops.features import PADDING_KEY, FeatureSpec, PackedFeatures
from slipstream_tf.ops.hot_keys import HotKeySketch
from slipstream_tf.optimizers import SGD
from slipstream_tf.stores.native import NativeStore


class AccessCounts(Protocol):
    """Counts the accesses of keys, table by table."""

    def count(self, packed: PackedFeatures, specs: Sequence[FeatureSpec]) -> None:
        """Counts a batch: the keys, from `features.pack` with the same specs."""
        ...

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `TrackedStore.hot_keys`."""
        ...

    def decay(self, factor: float) -> None:
        """Multiplies the counts of all tables by `factor`, 0 to 1."""
        ...


class ExactCounts:
    """Counts in host memory, exact; the least accessed of the counted keys makes room for new."""

    def __init__(self, tables: Iterable[str], counted_keys: int):
        """Counts nothing yet.

        Args:
            tables: their names.
            counted_keys: of a table, at most; at least those of a batch.
        """
        configs = [
            TableConfig(name, dim=1, capacity=counted_keys, eviction="lfu", initializer=Zeros())
            for name in tables
        ]
        self._counter = NativeStore(configs, SGD())

    def count(self, packed: PackedFeatures, specs: Sequence[FeatureSpec]) -> None:
        """See `AccessCounts.count`."""
        self._counter.lookup(packed, specs, training=True)

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `AccessCounts.hot_keys`."""
        return self._counter.hot_keys(table, k)

    def decay(self, factor: float) -> None:
        """See `AccessCounts.decay`."""
        self._counter.decay_counts(factor)


class EstimatedCounts:
    """Counts on the tables' devices, where keys already are: estimates; see `HotKeySketch`."""

    def __init__(self, devices: Mapping[str, str], counted_keys: int):
        """Counts nothing yet.

        Args:
            devices: table name -> device.
            counted_keys: counters a row, of each table; the next power of two.
        """
        width = max(counted_keys, 2)
        self._sketches = {name: HotKeySketch(width, device) for name, device in devices.items()}

    def count(self, packed: PackedFeatures, specs: Sequence[FeatureSpec]) -> None:
        """See `AccessCounts.count`."""
        columns, tensors = packed.attrs["feature_column"], packed.attrs["feature_keys"]
        for spec, column, tensor in zip(specs, columns, tensors, strict=True):
            keys, counts = packed.keys[tensor], None
            if column >= 0:
                keys = keys[:, column]
            elif keys.shape.rank == 2:
                keys = tf.reshape(keys, [-1])
                counts = keys != PADDING_KEY
            self._sketches[spec.table].count(keys, counts)

    def hot_keys(self, table: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `AccessCounts.hot_keys`."""
        return self._sketches[table].hottest(k)

    def decay(self, factor: float) -> None:
        """See `AccessCounts.decay`."""
        for sketch in self._sketches.values():
            sketch.decay(factor)
