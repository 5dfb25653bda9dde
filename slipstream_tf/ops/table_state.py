"""Typed wrappers of the ops that read and replace what a table has beside its rows.

In: a native table. Out: its deferred gradients as arrays, as a checkpoint keeps them, and back; the
flags of its rows, and the squared update lengths of watched ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.ops import _loader

DEFERRED = {
    "keys": np.int64,
    "ages": np.int64,
    "ranks": np.int32,
    "sums": np.float32,
    "learning_rate": np.float32,
}


def export_deferred(handle: tf.Tensor) -> dict[str, np.ndarray]:
    """Returns the deferred gradients of a table; they stay (eager only).

    Returns:
        keys int64 [n]; ages int64 [n], updates of the table since the sum began; ranks int32 [n],
        simulated ranks; sums float32 [n, dim]; learning_rate float32 [], of the last update, or 0
        before the first.
    """
    result = _loader.library().slipstream_table_export_deferred(handle=handle)
    return {name: getattr(result, name).numpy() for name in DEFERRED}


def import_deferred(handle: tf.Tensor, contents: Mapping[str, Any]) -> None:
    """Replaces the deferred gradients of a table by what `export_deferred` gave.

    All or nothing. The table's policy must defer, unless there are none.

    Raises:
        ValueError: an array is missing or unknown.
        tf.errors.InvalidArgumentError: shapes do not fit, a key has no row or comes twice for a
            rank, ages are not the oldest first, or the policy defers none such.
    """
    if set(contents) != set(DEFERRED):
        raise ValueError(
            f"Invalid deferred gradients: arrays {sorted(contents)}. Allowed: exactly "
            f"{sorted(DEFERRED)}."
        )
    arrays = {name: tf.constant(np.asarray(contents[name], t)) for name, t in DEFERRED.items()}
    _loader.library().slipstream_table_import_deferred(handle=handle, **arrays)


def row_flags(handle: tf.Tensor, keys: Any) -> np.ndarray:
    """Returns uint8 [n], the flags of the rows of keys int64 [n]; 0 without a row (eager only).

    A row that left the table and came back has none, whatever `set_row_flags` said before.
    """
    keys = tf.convert_to_tensor(keys, tf.int64)
    return _loader.library().slipstream_table_row_flags(handle=handle, keys=keys).numpy()


def set_squared_update_lengths(handle: tf.Tensor, keys: Any, lengths: Any) -> None:
    """Replaces the sums of squared update lengths of watched rows.

    Args:
        handle: the table.
        keys: int64 [n]; those that are not watched are skipped.
        lengths: float32 [n].

    Raises:
        tf.errors.InvalidArgumentError: the lengths differ.
    """
    _loader.library().slipstream_table_set_squared_update_lengths(
        handle=handle,
        keys=tf.convert_to_tensor(keys, tf.int64),
        lengths=tf.convert_to_tensor(lengths, tf.float32),
    )
