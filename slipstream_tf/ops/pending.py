"""Typed wrappers of the ops that read and replace what a table holds beside its rows.

In: a native table. Out: its pending updates (gradient sums that are held back) as arrays, as a
checkpoint keeps them, and back; which rows are marked, and how far watched ones have travelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.ops import _loader

PENDING = {
    "keys": np.int64,
    "ages": np.int64,
    "ranks": np.int32,
    "sums": np.float32,
    "learning_rate": np.float32,
}


def export_pending(handle: tf.Tensor) -> dict[str, np.ndarray]:
    """Returns the gradient sums that a table holds back; they stay (eager only).

    Returns:
        keys int64 [n]; ages int64 [n], updates of the table since the sum began; ranks int32 [n],
        simulated ranks; sums float32 [n, dim]; learning_rate float32 [], of the last update, or 0
        before the first.
    """
    result = _loader.library().slipstream_table_export_pending(handle=handle)
    return {name: getattr(result, name).numpy() for name in PENDING}


def import_pending(handle: tf.Tensor, contents: Mapping[str, Any]) -> None:
    """Replaces the gradient sums that a table holds back by what `export_pending` gave.

    All or nothing. The table's policy must defer, unless there is no sum.

    Raises:
        ValueError: an array is missing or unknown.
        tf.errors.InvalidArgumentError: shapes do not fit, a key has no row or comes twice for a
            rank, ages are not the oldest first, or the policy holds no such sum.
    """
    if set(contents) != set(PENDING):
        raise ValueError(
            f"Invalid pending updates: arrays {sorted(contents)}. Allowed: exactly "
            f"{sorted(PENDING)}."
        )
    arrays = {name: tf.constant(np.asarray(contents[name], t)) for name, t in PENDING.items()}
    _loader.library().slipstream_table_import_pending(handle=handle, **arrays)


def marks(handle: tf.Tensor, keys: Any) -> np.ndarray:
    """Returns uint8 [n], the marks of the rows of keys int64 [n]; 0 without a row (eager only).

    A row that left the table and came back has none, whatever `mark_rows` said before.
    """
    keys = tf.convert_to_tensor(keys, tf.int64)
    return _loader.library().slipstream_table_marks(handle=handle, keys=keys).numpy()


def set_travelled(handle: tf.Tensor, keys: Any, travelled: Any) -> None:
    """Replaces the summed squared update lengths of watched rows.

    Args:
        handle: the table.
        keys: int64 [n]; those that are not watched are passed over.
        travelled: float32 [n].

    Raises:
        tf.errors.InvalidArgumentError: the lengths differ.
    """
    _loader.library().slipstream_table_set_travelled(
        handle=handle,
        keys=tf.convert_to_tensor(keys, tf.int64),
        travelled=tf.convert_to_tensor(travelled, tf.float32),
    )
