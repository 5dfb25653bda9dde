"""The rows that keys start with, in TensorFlow's own ops. In: keys. Out: float32 rows.

The same function of (seed, key) as `cc_ops/core/table/row_initializer.cc`, so that a serving
process without the op library gives a key it has never seen the row that training would have given
it.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from slipstream_tf.config import TableConfig
from slipstream_tf.hashing import mix64
from slipstream_tf.initializers import op_attributes

_BITS = (1 << 64) - 1
_ELEMENT = 0xD1342543DE82EF95


def constant_value(table: TableConfig) -> float | None:
    """Returns the value that every initial row is made of, or None if rows are random."""
    kind, value, _ = op_attributes(table.initializer)
    return {"zeros": 0.0, "constant": value}.get(kind)


def initial_rows(table: TableConfig, keys: tf.Tensor) -> tf.Tensor:
    """Draws the rows that keys of a table start with.

    Uniform rows are the table's bit for bit; normal ones to the last bit of a float32, as far as
    TensorFlow's logarithm and cosine agree with those of the C library.

    Args:
        table: whose initializer and seed count; one that draws at random.
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
        unit = tf.cast(_shifted(bits, 40), tf.float32) * np.float32(2.0**-24)
        return low + unit * (high - low)
    mean, deviation = np.float64(np.float32(first)), np.float64(np.float32(second))
    u = 1.0 - tf.cast(_shifted(bits, 40), tf.float64) * 2.0**-24
    v = tf.bitwise.bitwise_and(_shifted(bits, 16), np.uint64(0xFFFFFF))
    angle = 6.283185307179586 * (tf.cast(v, tf.float64) * 2.0**-24)
    z = tf.sqrt(-2.0 * tf.math.log(u)) * tf.cos(angle)
    return tf.cast(mean + deviation * z, tf.float32)


def _shifted(x: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(x, np.uint64(bits))
