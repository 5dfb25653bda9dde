"""Bytes that SOK sends for this package, counted beside those that the communicator sends itself.

In: the keys of a lookup, or the sizes of what is sent. Out: counts by kind. Of a key that another
rank owns 8 bytes go there, its row comes back, and its gradient goes there. This rank counts all
three: the row, which the other rank sends, with the one that asked for it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from slipstream_tf.stores.sok.table import SokTable

KEY_BYTES = 8
FLOAT_BYTES = 4
_NAME = "slipstream.sok"


def lookup(comm: Any, table: SokTable, keys: tf.Tensor) -> tf.Tensor:
    """Looks rows up as `SokTable.lookup`, and counts what is sent, in the backward pass, too.

    Args:
        comm: the ranks, or None.
        table: of any rank's keys.
        keys: int64 [n].

    Returns:
        float32 [n, dim].
    """
    rows = table.lookup(keys)
    if comm is None or comm.size == 1:
        return rows
    with tf.device("CPU:0"):
        others = tf.math.count_nonzero(table.spread(keys) != table.rank)
        row_bytes = others * (FLOAT_BYTES * table.dim)
        count(comm, others * KEY_BYTES, "keys")
        count(comm, row_bytes, "rows")

    @tf.custom_gradient
    def counted(values: tf.Tensor) -> Any:
        def backward(upstream: tf.Tensor) -> tf.Tensor:
            count(comm, row_bytes, "gradients")
            return upstream

        return tf.identity(values), backward

    return counted(rows)


def count_delivery(comm: Any, table: SokTable, splits: tf.Tensor, is_deferred: Any) -> None:
    """Counts keys and gradients on their way to the ranks that own them.

    Args:
        comm: the ranks, or None.
        table: whose rows they are.
        splits: int32 [ranks], rows for each rank.
        is_deferred: bool scalar, whether they may be sums that were held back.
    """
    if comm is None or comm.size == 1:
        return
    with tf.device("CPU:0"):
        splits = tf.cast(splits, tf.int64)
        others = tf.reduce_sum(splits) - splits[table.rank]
        count(comm, others * KEY_BYTES, "keys")
        row_bytes = others * (FLOAT_BYTES * table.dim)
        deferred = row_bytes * tf.cast(is_deferred, tf.int64)
        count(comm, deferred, "deferred")
        count(comm, row_bytes - deferred, "gradients")


def count(comm: Any, nbytes: Any, kind: str) -> None:
    """Counts bytes, int64, of a kind, if there are ranks to send to."""
    if comm is not None and comm.size > 1:
        comm.count_sent(nbytes, kind, f"{_NAME}.{kind}")
