"""Looks up embedding rows with plain TensorFlow ops, for exported models.

A `ServingStore` replaces the store of a layer in the thread that traces the model for export. Other
threads can train and evaluate the model meanwhile. Initial rows match
`cc_ops/core/table/row_initializer.cc`, and pooling matches `cc_ops/core/lookup/pooling.h`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid
from slipstream_tf._utils.hashing import mix64
from slipstream_tf.config import Table
from slipstream_tf.initializers import op_attributes
from slipstream_tf.ops.features import PackedFeatures

_BITS = (1 << 64) - 1
# Multiplier of an element's index in `row_initializer.cc`.
_ELEMENT = 0xD1342543DE82EF95


class ServedTable(tf.Module):
    """Holds the rows of one table for serving, read-only.

    Keys and rows are variables with an open first dimension. The hash table is filled from the
    keys when a process loads the SavedModel. Therefore the served rows can be replaced by writing
    new variable files, without a change of the graph.

    Attributes:
        config: Configuration of the table.
        keys: int64 [n].
        rows: [n + 1, dim] in the served dtype. The row of `keys[i]` is `rows[i + 1]`. `rows[0]` is
            the row of absent keys.
        scales: float32 [n + 1] for int8 rows: the factor of each row. None for other dtypes.
        numbers: Hash table from key to index in `rows`. Returns 0 for absent keys.
    """

    def __init__(
        self, config: Table, keys: np.ndarray, rows: np.ndarray, rows_dtype: str | None = None
    ):
        """Creates the variables.

        Keys are distinct int64 [n], and rows are float32 [n, dim].
        """
        super().__init__()
        self.config = config
        values = encoded(config, rows, rows_dtype)
        # Hash tables have CPU kernels only, and most tables do not fit into the memory of a GPU.
        with tf.device("CPU:0"):
            self.keys = tf.Variable(keys, shape=[None], dtype=tf.int64, trainable=False)
            self.rows = tf.Variable(values["rows"], shape=[None, config.dim], trainable=False)
            self.scales = None
            if "scales" in values:
                self.scales = tf.Variable(values["scales"], shape=[None], trainable=False)
            self.numbers = tf.lookup.StaticHashTable(Numbering(self.keys.read_value), 0)
        # Keras's export of a layer keeps hash tables and the objects that they track.
        for name, variable in self.variables_by_name().items():
            self.numbers._track_trackable(variable, name)

    def variables_by_name(self) -> dict[str, tf.Variable]:
        """Returns the table's variables by name: keys, rows and, for int8, scales."""
        found = {"keys": self.keys, "rows": self.rows, "scales": self.scales}
        return {name: variable for name, variable in found.items() if variable is not None}

    def gather(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns float32 [n, dim] rows of int64 [n] keys.

        Absent keys get their initial row.
        """
        numbers = self.numbers.lookup(keys)
        rows = tf.cast(self._stored(numbers), tf.float32)
        if self.scales is not None:
            rows *= tf.gather(self.scales, numbers)[:, tf.newaxis]
        if constant_value(self.config) is None:
            absent = tf.where(tf.equal(numbers, 0))
            drawn = initial_rows(self.config, tf.gather_nd(keys, absent))
            rows = tf.tensor_scatter_nd_update(rows, absent, drawn)
        return tf.ensure_shape(rows, [None, self.config.dim])

    def _stored(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns the [n, dim] elements of `rows` at int64 [n] indices."""
        return tf.gather(self.rows, numbers)


def encoded(config: Table, rows: np.ndarray, rows_dtype: str | None) -> dict[str, np.ndarray]:
    """Converts rows to the served dtype.

    The row of absent keys is prepended.

    Args:
        config: Configuration of the table.
        rows: float32 [n, dim].
        rows_dtype: Dtype of the served rows. None keeps the dtype of the table.

    Returns:
        A dictionary with `"rows"` [n + 1, dim], rounded to the nearest value. For int8 also
        `"scales"`, float32 [n + 1]: `rows * scales` differs from the input by at most
        max(|row|) / 254 per value.
    """
    absent = np.full((1, config.dim), constant_value(config) or 0.0, np.float32)
    values = np.concatenate([_rounded(config, absent), np.asarray(rows, np.float32)])
    dtype = rows_dtype or config.storage.dtype
    if dtype != "int8":
        return {"rows": values.astype(tf.as_dtype(dtype).as_numpy_dtype)}
    largest = np.abs(values).max(axis=1)
    scales = (largest / np.float32(127)).astype(np.float32)
    by = np.where(scales > 0, scales, np.float32(1))
    return {"rows": np.rint(values / by[:, np.newaxis]).astype(np.int8), "scales": scales}


def decoded(rows: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """Returns float32 [n, dim] rows from the results of `encoded`.

    The row of absent keys is dropped. Rounding by `encoded` is not undone.
    """
    values = rows[1:].astype(np.float32)
    return values if scales is None else values * scales[1:, np.newaxis]


def _rounded(config: Table, values: Any) -> Any:
    """Rounds initial values to the precision of the table's dtype; returns float32.

    Args:
        config: Configuration of the table.
        values: A float32 array or tensor.
    """
    if config.storage.dtype == "float32":
        return values
    dtype = tf.as_dtype(config.storage.dtype)
    if isinstance(values, np.ndarray):
        return values.astype(dtype.as_numpy_dtype).astype(np.float32)
    return tf.cast(tf.cast(values, dtype), tf.float32)


class Numbering(tf.lookup.KeyValueTensorInitializer):
    """Fills a hash table that maps the i-th key to i + 1."""

    def __init__(self, read_keys: Callable[[], tf.Tensor]):
        """Sets the function that reads the keys, int64 [n], from a variable."""
        nothing = tf.zeros([0], tf.int64)
        super().__init__(nothing, nothing)
        self._read_keys = read_keys

    def initialize(self, table: Any) -> tf.Operation | None:
        """Fills the hash table.

        TensorFlow requires at least one pair. Without keys, the pair (0, 0) is inserted.
        """
        keys = self._read_keys()
        filler = tf.zeros([tf.cast(tf.equal(tf.size(keys), 0), tf.int32)], tf.int64)
        numbers = tf.range(1, tf.size(keys, tf.int64) + 1)
        return tf.raw_ops.LookupTableImportV2(
            table_handle=table.resource_handle,
            keys=tf.concat([keys, filler], axis=0),
            values=tf.concat([numbers, filler], axis=0),
        )


class ServingStore:
    """Implements the lookup of an `EmbeddingStore` for `training=False`.

    Attributes:
        tables: Configurations of the tables, in the order of the replaced store.
    """

    def __init__(self, tables: Sequence[ServedTable]):
        """Creates the store from tables with distinct names."""
        self.tables = tuple(table.config for table in tables)
        self._tables = {table.config.name: table for table in tables}

    def lookup(
        self, packed: PackedFeatures, training: bool, stacked: bool = False
    ) -> tuple[list[tf.Tensor], None]:
        """Looks up the rows of all features; see `EmbeddingStore.lookup`."""
        rows = [
            pooled(packed, index, spec.combiner, self._tables[spec.table].gather)
            for index, spec in enumerate(packed.specs)
        ]
        return ([tf.stack(rows, axis=1)] if stacked else rows), None


class _Export(threading.local):
    """The export that this thread traces.

    Attributes:
        stores: The serving store of each exported layer, by the `id` of the layer.
        function: The graph of the exported function.
    """

    stores: Mapping[int, ServingStore] = MappingProxyType({})
    function: Any = None


_export = _Export()


@contextlib.contextmanager
def served_by(stores: Mapping[int, ServingStore]) -> Iterator[None]:
    """Returns a context in which layers of the exported function use serving stores.

    Enter it inside the function, because TensorFlow may trace the function again. It affects the
    current thread only.

    Args:
        stores: The serving store of each layer, by the `id` of the layer.
    """
    outer = _export.stores, _export.function
    _export.stores, _export.function = stores, _compat.traced_function()
    try:
        yield
    finally:
        _export.stores, _export.function = outer


def serving_store(layer: Any) -> ServingStore | None:
    """Returns the serving store of a layer if this thread is exporting the layer.

    Args:
        layer: A Keras layer with embedding tables.

    Raises:
        ValueError: A `tf.function` of the model calls the layer. TensorFlow would reuse its trace
            in training and evaluation, with the rows of the export.
    """
    store = _export.stores.get(id(layer))
    if store is not None and _compat.traced_function() is not _export.function:
        allowed = (
            "a layer that is called outside of a tf.function of the model, because TensorFlow "
            "would reuse the exported rows in later calls. Decorate the training step with "
            "tf.function instead"
        )
        name = _compat.traced_function().name
        raise invalid("model", name, f"layer {layer.name!r} in a SavedModel", allowed)
    return store


def refuse_own_ops(graph: Any, allowed: str) -> None:
    """Raises a ValueError if the graph of a SavedModel contains ops of this package.

    Args:
        graph: A `GraphDef`.
        allowed: The alternative, for the error message.
    """
    nodes = [node for function in graph.library.function for node in function.node_def]
    own = sorted({node.op for node in [*graph.node, *nodes] if node.op.startswith("Slipstream")})
    if own:
        raise invalid("model", own, "the ops of a SavedModel", allowed)


def constant_value(table: Table) -> float | None:
    """Returns the constant that a table's initializer writes, or None if random."""
    kind, value, _ = op_attributes(table.initializer)
    return {"zeros": 0.0, "constant": value}.get(kind)


def initial_rows(table: Table, keys: tf.Tensor) -> tf.Tensor:
    """Draws the initial rows of keys.

    Uniform rows equal the table's rows bit for bit. Normal rows may differ in the last bit of a
    float32, because TensorFlow's logarithm and cosine may differ from the C library's.

    Args:
        table: Table with a random initializer. Its initializer and seed determine the rows.
        keys: int64 [n].

    Returns:
        float32 [n, dim].
    """
    kind, first, second = op_attributes(table.initializer)
    seed = mix64(np.array(table.seed & _BITS, np.uint64, ndmin=1))
    stream = mix64(mix64(tf.bitcast(keys, tf.uint64)) ^ seed)
    elements = np.array([(j * _ELEMENT) & _BITS for j in range(table.dim)], np.uint64)
    bits = mix64(stream[:, tf.newaxis] + tf.constant(elements))
    if kind == "uniform":
        low, high = np.float32(first), np.float32(second)
        unit = tf.cast(tf.bitwise.right_shift(bits, np.uint64(40)), tf.float32)
        return _rounded(table, low + unit * np.float32(2.0**-24) * (high - low))
    if kind == "truncated_normal":
        (bits,) = tf.while_loop(
            lambda bits: tf.reduce_any(tf.abs(_standard_normal(bits)) > 2.0),
            lambda bits: (tf.where(tf.abs(_standard_normal(bits)) > 2.0, mix64(bits), bits),),
            [bits],
        )
    mean, deviation = np.float64(np.float32(first)), np.float64(np.float32(second))
    return _rounded(table, tf.cast(mean + deviation * _standard_normal(bits), tf.float32))


def _standard_normal(bits: tf.Tensor) -> tf.Tensor:
    """Returns a float64 number of the standard normal distribution for each uint64."""
    u = 1.0 - tf.cast(tf.bitwise.right_shift(bits, np.uint64(40)), tf.float64) * 2.0**-24
    v = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, np.uint64(16)), np.uint64(0xFFFFFF))
    angle = 6.283185307179586 * (tf.cast(v, tf.float64) * 2.0**-24)
    return tf.sqrt(-2.0 * tf.math.log(u)) * tf.cos(angle)


def pooled(
    packed: PackedFeatures,
    feature: int,
    combiner: str | None,
    gather: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Looks up and pools the rows of one feature.

    Args:
        packed: Keys of the batch.
        feature: Index of the feature.
        combiner: `"sum"`, `"mean"` (divides by the sum of the weights) or `"sqrtn"` (divides by the
            root of the sum of the squared weights). A bag for which the divisor is 0, for example
            an empty bag, returns zeros. None returns the rows without pooling.
        gather: Maps int64 [n] keys to float32 [n, dim] rows.

    Returns:
        float32 [batch, dim]. Without a combiner [number of keys, dim], where padding keys return
        zeros.
    """
    keys, row_splits, weights = packed.of(feature)
    is_key = packed.is_key(feature)
    is_key = tf.ones_like(keys, tf.bool) if is_key is None else is_key
    if combiner is None or (row_splits is None and keys.shape.rank == 1):
        keys, is_key = tf.reshape(keys, [-1, 1]), tf.reshape(is_key, [-1, 1])
        weights = None if weights is None else tf.reshape(weights, [-1, 1])
        return _pooled_padded(keys, is_key, weights, combiner or "sum", gather)
    if row_splits is not None:
        return _pooled_ragged((keys, row_splits), is_key, weights, combiner, gather)
    return _pooled_padded(keys, is_key, weights, combiner, gather)


def _pooled_padded(
    keys: tf.Tensor,
    is_key: tf.Tensor,
    weights: tf.Tensor | None,
    combiner: str,
    gather: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Pools int64 [batch, width] keys where bool [batch, width] `is_key` is True."""
    shape = tf.shape(keys)
    rows = gather(tf.reshape(keys, [-1]))
    rows = tf.reshape(rows, [shape[0], shape[1], rows.shape[-1]])
    if weights is not None or combiner != "sum":
        used = tf.cast(is_key, tf.float32) if weights is None else tf.where(is_key, weights, 0.0)
        divisor = tf.reduce_sum(_counted(used, combiner), axis=1)
        rows = rows * (used * _factor(divisor, combiner)[:, tf.newaxis])[..., tf.newaxis]
    return tf.reduce_sum(tf.where(is_key[..., tf.newaxis], rows, 0.0), axis=1)


def _pooled_ragged(
    bags: tuple[tf.Tensor, tf.Tensor],
    is_key: tf.Tensor,
    weights: tf.Tensor | None,
    combiner: str,
    gather: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Pools bags: keys int64 [total] and row splits [batch + 1].

    Only keys with a True value in bool [total] `is_key` count.
    """
    keys, row_splits = bags
    rows = gather(keys)
    batch = tf.size(row_splits) - 1
    inputs = tf.repeat(tf.range(batch), row_splits[1:] - row_splits[:-1])
    if weights is not None or combiner != "sum":
        used = tf.cast(is_key, tf.float32) if weights is None else tf.where(is_key, weights, 0.0)
        divisor = tf.math.unsorted_segment_sum(_counted(used, combiner), inputs, batch)
        rows = rows * (used * tf.gather(_factor(divisor, combiner), inputs))[:, tf.newaxis]
    rows = tf.where(is_key[:, tf.newaxis], rows, 0.0)
    return tf.math.unsorted_segment_sum(rows, inputs, batch)


def _counted(weights: tf.Tensor, combiner: str) -> tf.Tensor:
    return tf.square(weights) if combiner == "sqrtn" else weights


def _factor(divisor: tf.Tensor, combiner: str) -> tf.Tensor:
    if combiner == "sum":
        return tf.ones_like(divisor)
    return tf.math.divide_no_nan(1.0, tf.sqrt(divisor) if combiner == "sqrtn" else divisor)
