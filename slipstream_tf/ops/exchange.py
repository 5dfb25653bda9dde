"""Typed wrappers of the ops that collect gradient rows for other processes and apply theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf.ops import _loader


@dataclasses.dataclass(frozen=True)
class RowParcels:
    """Keys and rows of several tables for, or from, several ranks.

    Attributes:
        sizes: int64 [ranks, tables], rows of each rank and table.
        keys: int64 [n], by rank, then by table.
        values: float32 [m], their rows behind each other, each as wide as its table.
    """

    sizes: tf.Tensor
    keys: tf.Tensor
    values: tf.Tensor


def collect_gradients(
    plan: tf.Tensor, gradients: Sequence[tf.Tensor], learning_rate: Any, ranks: int = 1
) -> RowParcels:
    """Sums the gradients of each key and gives out what the tables' policies let go.

    Args:
        plan: from `ops.table.lookup`.
        gradients: of its pooled vectors, float32 in their shapes.
        learning_rate: scalar float32; decides how far a held sum would move its row.
        ranks: owners of the keys, by hash; 1: all rows go to everybody.

    Returns:
        The rows; each key once.

    Raises:
        tf.errors.InvalidArgumentError: a gradient is not finite (nothing is collected then).
    """
    return RowParcels(
        *_loader.library().slipstream_collect_gradients(
            plan=plan, gradients=list(gradients), learning_rate=learning_rate, ranks=ranks
        )
    )


def collect_held(handles: Sequence[tf.Tensor], ranks: int = 1) -> RowParcels:
    """Takes every gradient sum that the tables hold; see `collect_gradients`."""
    held = _loader.library().slipstream_collect_held(handles=list(handles), ranks=ranks)
    return RowParcels(*held)


def apply_rows(
    handles: Sequence[tf.Tensor],
    parcels: RowParcels,
    learning_rate: Any,
    scale: float = 1.0,
    makes_rows: bool = True,
) -> tf.Operation | None:
    """Adds the rows of each key, in the order given, and applies its table's rule once.

    Args:
        handles: the tables.
        parcels: the rows.
        learning_rate: scalar float32.
        scale: multiplies the sums.
        makes_rows: whether keys without a row get one; else their gradients are dropped, counted.

    Returns:
        The operation in a graph, None in eager mode.

    Raises:
        tf.errors.InvalidArgumentError: sizes do not fit keys and values, or a value is not finite
            (no row is changed then).
    """
    return _loader.library().slipstream_apply_rows(
        handles=list(handles),
        sizes=parcels.sizes,
        keys=parcels.keys,
        values=parcels.values,
        learning_rate=learning_rate,
        scale=scale,
        makes_rows=makes_rows,
    )
