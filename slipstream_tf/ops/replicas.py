"""Typed wrappers of the ops on rows of which other ranks have refreshed replicas.

The owner of a sharded table remembers what it sent last of its hot rows, and to which ranks. These
read their replicas, and are sent a row again when it has moved away from them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.ops import _loader
from slipstream_tf.ops.table import to_arrays, to_tensors

REPLICATED = {"keys": np.int64, "rows": np.float32, "holders": np.uint8}


def set_replicated(
    handle: tf.Tensor, keys: Any, movement: float, ranks: int
) -> tf.Operation | None:
    """Says of which rows of a table other ranks have refreshed replicas from now on.

    What was sent of rows that stay among them remains known.

    Args:
        handle: the table, on the rank that owns the rows.
        keys: int64 [n], each once.
        movement: a row is sent anew when a value of it is further away from what was sent; at least
            0, in the unit of the rows.
        ranks: how many there are.

    Returns:
        The operation in a graph, None in eager mode.

    Raises:
        tf.errors.InvalidArgumentError: the movement is negative or no number.
    """
    return _loader.library().slipstream_table_set_replicated(
        handle=handle,
        keys=tf.convert_to_tensor(keys, tf.int64),
        movement=tf.constant(movement, tf.float32),
        ranks=ranks,
    )


def export_replicated(handle: tf.Tensor) -> dict[str, np.ndarray]:
    """Returns what was sent last of these rows (eager only).

    Returns:
        keys int64 [n]; rows float32 [n, dim + slots], of a row without a replica anything; holders
        uint8 [n, (ranks + 7) // 8], whose bit r says whether rank r has a replica.
    """
    result = _loader.library().slipstream_table_export_replicated(handle=handle)
    return to_arrays(result, REPLICATED)


def import_replicated(handle: tf.Tensor, contents: Mapping[str, Any], ranks: int) -> None:
    """Replaces what was sent last of these rows; the movement stays.

    Args:
        handle: the table.
        contents: as `export_replicated` returns it.
        ranks: how many there are, as when it was exported.

    Raises:
        ValueError: an array is missing or unknown.
        tf.errors.InvalidArgumentError: arrays do not fit, or a row is not finite; nothing has
            changed then.
    """
    tensors = to_tensors(contents, REPLICATED, "contents of replicas")
    _loader.library().slipstream_table_import_replicated(handle=handle, ranks=ranks, **tensors)
