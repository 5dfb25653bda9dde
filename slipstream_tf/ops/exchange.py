"""Typed wrappers of the ops that collect gradient rows for other processes and apply theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf.ops import _loader
from slipstream_tf.ops.features import PADDING_KEY, PackedFeatures


@dataclasses.dataclass(frozen=True)
class RowParcels:
    """Keys and rows of several tables for, or from, several ranks.

    Attributes:
        sizes: int64 [ranks, tables], rows of each rank and table.
        keys: int64 [n], by rank, then by table.
        values: float32 [m], their rows behind each other, each as wide as its table; or uint8 [m],
            from `serve_rows` or `pack_rows`.
    """

    sizes: tf.Tensor
    keys: tf.Tensor
    values: tf.Tensor


def collect_gradients(
    plan: tf.Tensor,
    gradients: Sequence[tf.Tensor],
    learning_rate: Any,
    ranks: int = 1,
    counts_update: bool = False,
) -> RowParcels:
    """Sums the gradients of each key and gives out what the tables' policies let go.

    Args:
        plan: from `ops.table.lookup`.
        gradients: of its pooled vectors, float32 in their shapes.
        learning_rate: scalar float32; decides how far a held sum would move its row.
        ranks: owners of the keys, by hash; 1: all rows go to everybody.
        counts_update: whether this is an update of the tables, by which sums age; else applying the
            rows to them is.

    Returns:
        The rows; each key once.

    Raises:
        tf.errors.InvalidArgumentError: a gradient is not finite (nothing is collected then).
    """
    return RowParcels(
        *_loader.library().slipstream_collect_gradients(
            plan=plan,
            gradients=list(gradients),
            learning_rate=learning_rate,
            ranks=ranks,
            counts_update=counts_update,
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


def route_keys(
    copies: Sequence[tf.Tensor],
    packed: PackedFeatures,
    feature_table: Sequence[int],
    ranks: int,
    reads_frozen: bool = True,
    keeps: bool = False,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Finds the distinct keys of a batch that must be asked for.

    Args:
        copies: the tables of copies that the batch will be looked up in.
        packed: the batch's keys.
        feature_table: per feature, the index of its table.
        ranks: how many ranks own the keys, by hash.
        reads_frozen: whether keys with a frozen copy are left out.
        keeps: whether keys with a kept copy (see `ops.published`) stand apart.

    Returns:
        sizes int64 [ranks, tables] and keys int64 [n], by owner, then by table; where copies are
        kept, sizes [ranks, 2 * tables]: first of keys without one.
    """
    routed = _loader.library().slipstream_route_keys(
        handles=list(copies),
        keys=packed.keys,
        row_splits=packed.row_splits,
        weights=packed.weights,
        **packed.attrs,
        feature_table=list(feature_table),
        padding_key=PADDING_KEY,
        ranks=ranks,
        reads_frozen=reads_frozen,
        keeps=keeps,
    )
    return routed.request_sizes, routed.requests


def serve_rows(
    handles: Sequence[tf.Tensor],
    sizes: tf.Tensor,
    keys: tf.Tensor,
    makes_rows: bool,
    with_summary: Any,
    rounds: Any = False,
    keeps: bool = False,
    own_rank: int = -1,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads the rows of keys that ranks ask for.

    Args:
        handles: the tables.
        sizes: int64 [ranks, tables], keys of each rank.
        keys: int64 [n], by rank, then by table.
        makes_rows: whether keys without a row get one, and each counts as accessed once; else they
            give the rows that they would start with.
        with_summary: bool scalar, whether a number for a row's slots goes with it, if its rule has
            any.
        rounds: bool scalar, whether values are rounded to bfloat16.
        keeps: whether ranks keep copies (see `ops.published`), and sizes are those of `route_keys`
            with copies.
        own_rank: this one, which keeps no copies of its rows.

    Returns:
        uint8 [bytes] and int32 [ranks], of these, the bytes of each rank's rows.

    Raises:
        tf.errors.ResourceExhaustedError: a bounded table cannot hold them.
    """
    return _loader.library().slipstream_serve_rows(
        handles=list(handles),
        sizes=sizes,
        keys=keys,
        with_summary=with_summary,
        rounds=rounds,
        makes_rows=makes_rows,
        keeps=keeps,
        own_rank=own_rank,
    )


def pack_rows(rows: Sequence[tf.Tensor]) -> tf.Tensor:
    """Puts rows that are no table's of ours together, as `serve_rows` does those of one rank.

    Args:
        rows: of each table, float32 [n, dim].

    Returns:
        uint8 [bytes], for `store_copies` without summaries or rounding.
    """
    parts = []
    with tf.device("CPU:0"):
        for values in rows:
            # A bit for each row, set: it is given.
            given = tf.fill([(tf.shape(values)[0] + 7) // 8], tf.constant(255, tf.uint8))
            parts += [given, tf.reshape(tf.bitcast(values, tf.uint8), [-1])]
        return tf.concat(parts, 0)


def store_copies(
    copies: Sequence[tf.Tensor],
    rows: RowParcels,
    with_summary: Any,
    rounds: Any = False,
    frozen: bool = False,
    passed_over: int = -1,
    makes_room: bool = False,
    keeps: bool = False,
) -> tf.Operation | None:
    """Copies rows from `serve_rows`, without counting accesses.

    Args:
        copies: the tables of copies.
        rows: from each rank; values from `serve_rows` or `pack_rows`.
        with_summary: bool scalar, as they were served. Without, the copies' slots are 0, beside
            which a movement is not underestimated.
        rounds: bool scalar, as they were served.
        frozen: whether the copies are read, without asking, until rows are marked anew.
        passed_over: a rank whose rows are not copied; -1: none.
        makes_room: whether bounded tables let other rows go for them; else a lookup of them must
            follow, which does so.
        keeps: whether they were served so.

    Returns:
        The operation in a graph, None in eager mode.

    Raises:
        tf.errors.InvalidArgumentError: the bytes are not those of these keys' rows, or leave a
            copy as it is that is not kept here; nothing is copied then.
    """
    return _loader.library().slipstream_store_copies(
        handles=list(copies),
        sizes=rows.sizes,
        keys=rows.keys,
        rows=rows.values,
        with_summary=with_summary,
        rounds=rounds,
        frozen=frozen,
        passed_over=passed_over,
        makes_room=makes_room,
        keeps=keeps,
    )
