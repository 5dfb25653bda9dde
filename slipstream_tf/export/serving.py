"""A store of TensorFlow's own ops, which stands in for a layer's store while a model is traced.

In: rows that training left. Out: a graph that looks them up without the op library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.config import TableConfig
from slipstream_tf.export import pooling
from slipstream_tf.export.initial_rows import constant_value, initial_rows
from slipstream_tf.ops.features import FeatureSpec, PackedFeatures


class ServedTable(tf.Module):
    """The rows of a table, read only.

    Keys and rows are variables of open length, and the hash table is filled from the keys when a
    process loads the SavedModel: writing other variables beside the graph changes what is served.

    Attributes:
        config: of the table.
        keys: int64 [n].
        rows: float32 [n + 1, dim]: the row of keys[i] is rows[i + 1]; rows[0] is for absent keys.
        numbers: key -> place in `rows`; 0 for an absent key.
    """

    def __init__(self, config: TableConfig, keys: np.ndarray, rows: np.ndarray):
        """Takes keys int64 [n], each once, and their rows float32 [n, dim]."""
        super().__init__()
        self.config = config
        with tf.device("CPU:0"):  # Where hash tables are; rows are far too many for most GPUs.
            self.keys = tf.Variable(keys, shape=[None], dtype=tf.int64, trainable=False)
            self.rows = tf.Variable(
                with_absent_row(config, rows), shape=[None, config.dim], trainable=False
            )
            self.numbers = tf.lookup.StaticHashTable(_Numbering(self.keys), 0)

    def gather(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the rows of keys, float32 [n, dim] for int64 [n]; absent keys: initial rows."""
        numbers = self.numbers.lookup(keys)
        rows = tf.gather(self.rows, numbers)
        if constant_value(self.config) is None:
            absent = tf.where(tf.equal(numbers, 0))
            drawn = initial_rows(self.config, tf.gather_nd(keys, absent))
            rows = tf.tensor_scatter_nd_update(rows, absent, drawn)
        return tf.ensure_shape(rows, [None, self.config.dim])


def with_absent_row(config: TableConfig, rows: np.ndarray) -> np.ndarray:
    """Puts the row of absent keys before the others: float32 [n + 1, dim] of [n, dim]."""
    absent = np.full((1, config.dim), constant_value(config) or 0.0, np.float32)
    return np.concatenate([absent, np.asarray(rows, np.float32)])


class _Numbering(tf.lookup.KeyValueTensorInitializer):
    """Numbers the keys of a variable from 1; reads it when the hash table is made."""

    def __init__(self, keys: tf.Variable):
        nothing = tf.zeros([0], tf.int64)
        super().__init__(nothing, nothing)
        self._variable = keys

    def initialize(self, table: Any) -> tf.Operation | None:
        """Fills the hash table; TensorFlow wants one pair at least: (0, absent)."""
        keys = self._variable.read_value()
        filler = tf.zeros([tf.cast(tf.equal(tf.size(keys), 0), tf.int32)], tf.int64)
        numbers = tf.range(1, tf.size(keys, tf.int64) + 1)
        return tf.raw_ops.LookupTableImportV2(
            table_handle=table.resource_handle,
            keys=tf.concat([keys, filler], axis=0),
            values=tf.concat([numbers, filler], axis=0),
        )


class ServingStore:
    """The part of an `EmbeddingStore` that a layer needs when `training` is False.

    Attributes:
        tables: the configurations, as those of the store that it stands in for.
    """

    def __init__(self, tables: Sequence[ServedTable]):
        """Takes the tables, of distinct names."""
        self.tables = tuple(table.config for table in tables)
        self._tables = {table.config.name: table for table in tables}

    def lookup(
        self,
        packed: PackedFeatures,
        specs: Sequence[FeatureSpec],
        training: bool,
        stacked: bool = False,
    ) -> tuple[list[tf.Tensor], None]:
        """See `EmbeddingStore.lookup`; `training` is False."""
        del training
        pooled = [
            pooling.pooled(packed, index, spec.combiner, self._tables[spec.table].gather)
            for index, spec in enumerate(specs)
        ]
        return ([tf.stack(pooled, axis=1)] if stacked else pooled), None
