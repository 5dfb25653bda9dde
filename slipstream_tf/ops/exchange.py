"""Typed wrappers of the ops that collect gradient rows for other processes and apply theirs."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from slipstream_tf.ops import _loader
from slipstream_tf.ops.features import PackedFeatures
from slipstream_tf.ops.table import LookupLayout


@dataclasses.dataclass(frozen=True)
class SendBuffer:
    """Keys and rows of several tables for, or from, several ranks.

    Attributes:
        sizes: int64 [ranks, tables], rows of each rank and table.
        keys: int64 [n], by rank, then by table.
        values: float32 [m], their rows behind each other, each as wide as its table; or uint8 [m],
            messages from `pull_rows` or `pack_rows`.
        squares: float32 [ranks, tables], the sum of these values squared, of what an op of this
            process collected.
    """

    sizes: tf.Tensor
    keys: tf.Tensor
    values: tf.Tensor
    squares: tf.Tensor | None = None

    def arguments(self) -> dict[str, tf.Tensor]:
        """Returns the arguments of an op that takes such rows."""
        return {"sizes": self.sizes, "keys": self.keys, "values": self.values}

    def of_tables(self, row_floats: Sequence[int]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns each table's keys [n] and values [n * row floats], rank after rank."""
        ranks, tables = int(self.sizes.shape[0]), len(row_floats)
        lengths = self.sizes * tf.constant(row_floats, tf.int64)
        keys, values = (
            tf.split(flat, tf.reshape(sizes, [-1]), num=ranks * tables)
            for flat, sizes in ((self.keys, self.sizes), (self.values, lengths))
        )
        return [
            (tf.concat(keys[t::tables], 0), tf.concat(values[t::tables], 0)) for t in range(tables)
        ]


def collect_gradients(
    plan: tf.Tensor,
    gradients: Sequence[tf.Tensor],
    learning_rate: Any,
    ranks: int = 1,
    advance_step: bool = False,
    passes_non_finite: bool = False,
) -> SendBuffer:
    """Sums the gradients of each key and gives out what the tables' policies do not defer.

    Args:
        plan: from `ops.table.lookup`.
        gradients: of its pooled vectors, float32 in their shapes.
        learning_rate: float32, a scalar or [tables]; decides how far a deferred sum would move its
            row.
        ranks: owners of the keys, by hash; 1: all rows go to everybody.
        advance_step: whether this is an update of the tables, by which sums age; else applying the
            rows to them is.
        passes_non_finite: whether a gradient that is not finite is no error: all values are NaN
            then, and what the policies defer is as if all gradients were 0.

    Returns:
        The rows; each key once.

    Raises:
        tf.errors.InvalidArgumentError: a gradient is not finite, and does not pass (nothing is
            collected then).
    """
    return SendBuffer(
        *_loader.library().slipstream_collect_gradients(
            plan=plan,
            gradients=list(gradients),
            learning_rate=learning_rate,
            ranks=ranks,
            advance_step=advance_step,
            passes_non_finite=passes_non_finite,
        )
    )


def collect_deferred(handles: Sequence[tf.Tensor], ranks: int = 1) -> SendBuffer:
    """Takes every deferred gradient of the tables; see `collect_gradients`."""
    rows = _loader.library().slipstream_collect_deferred(handles=list(handles), ranks=ranks)
    return SendBuffer(*rows)


def apply_rows(
    handles: Sequence[tf.Tensor],
    rows: SendBuffer,
    learning_rate: Any,
    scale: Any = (),
    create_missing: bool = True,
) -> tf.Operation | None:
    """Adds the rows of each key, in the order given, and applies its table's rule once.

    Args:
        handles: the tables.
        rows: of each rank and table.
        learning_rate: float32, a scalar for all tables or [tables].
        scale: float32 [tables], multiplies the sums; empty: they stay.
        create_missing: whether keys without a row get one; else their gradients are dropped, and
            counted.

    Returns:
        The operation in a graph, None in eager mode.

    Raises:
        tf.errors.InvalidArgumentError: sizes do not fit keys and values, or a value or scale is not
            finite (no row is changed then).
    """
    return _loader.library().slipstream_apply_rows(
        handles=list(handles),
        learning_rate=learning_rate,
        scale=tf.convert_to_tensor(scale, tf.float32),
        create_missing=create_missing,
        **rows.arguments(),
    )


def merge_rows(rows: SendBuffer, row_floats: Sequence[int], ranks: int = 1) -> SendBuffer:
    """Adds up the rows of each key, in the order given, and puts the sums together by owner.

    Args:
        rows: of any parts.
        row_floats: of each table, values of a row.
        ranks: how many own the keys, by hash; 1: one has all.

    Returns:
        Each key once, ascending in its part; with squares.

    Raises:
        tf.errors.InvalidArgumentError: sizes do not fit keys and values.
    """
    op = _loader.library().slipstream_merge_rows
    return SendBuffer(*op(ranks=ranks, row_floats=list(row_floats), **rows.arguments()))


def pack_messages(
    rows: SendBuffer, row_floats: Sequence[int], wire_dtype: Any = 0
) -> tuple[tf.Tensor, tf.Tensor]:
    """Puts sizes, keys and values for each rank in one piece.

    Its length changes seldom from call to call: it may be some hundredths longer than what is in
    it. What carries it agrees on tensors of a new length in more rounds.

    Args:
        rows: for each rank and table.
        row_floats: of each table, values of a row; 0: its keys come without.
        wire_dtype: int32 scalar, of values, a number in `link.WIRE_DTYPES`. Each int8 is one of the
            two nearest, by chance drawn from key and values: equal rows become equal bytes.

    Returns:
        uint8 [bytes], to rank 0 first, and int32 [ranks], the bytes to each.

    Raises:
        tf.errors.InvalidArgumentError: sizes do not fit keys and values, or a rank's message has
            more than 2^30 bytes.
    """
    op = _loader.library().slipstream_pack_messages
    packed = op(wire_dtype=wire_dtype, row_floats=list(row_floats), **rows.arguments())
    return tuple(packed)


def unpack_messages(messages: tf.Tensor, ranks: int, row_floats: Sequence[int]) -> SendBuffer:
    """Takes apart what `pack_messages` of each rank put together for this one.

    Args:
        messages: uint8 [bytes], of rank 0 first.
        ranks: how many there are.
        row_floats: as they were packed.

    Raises:
        tf.errors.InvalidArgumentError: they are not those of so many ranks and tables.
    """
    op = _loader.library().slipstream_unpack_messages
    return SendBuffer(*op(messages=messages, ranks=ranks, row_floats=list(row_floats)))


class Routed(NamedTuple):
    """A batch whose lookup is planned.

    Attributes:
        plan: scalar variant, for `look_up_pulled`.
        sizes: int64 [ranks, tables], keys to request of each rank.
        keys: int64 [n], distinct, by rank, then by table.
    """

    plan: tf.Tensor
    sizes: tf.Tensor
    keys: tf.Tensor


def route_keys(
    replicas: Sequence[tf.Tensor], packed: PackedFeatures, layout: LookupLayout, ranks: int
) -> Routed:
    """Plans the lookup of a batch, and finds the distinct keys that must be requested.

    Args:
        replicas: the tables of replicas that training batches are looked up in.
        packed: the batch's keys.
        layout: of the lookup.
        ranks: how many ranks own the keys, by hash.
    """
    arguments = layout.arguments(packed)
    routed = _loader.library().slipstream_route_keys(
        handles=list(replicas),
        ranks=ranks,
        combiners=arguments["combiners"],
        feature_table=arguments["feature_table"],
        **packed.arguments(),
    )
    return Routed(routed.plan, routed.request_sizes, routed.requests)


def pull_rows(
    handles: Sequence[tf.Tensor],
    sizes: tf.Tensor,
    keys: tf.Tensor,
    create_missing: bool,
    with_summary: Any,
    wire_dtype: Any = 0,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Reads the rows of keys that ranks request.

    Args:
        handles: the tables.
        sizes: int64 [ranks, tables], keys of each rank.
        keys: int64 [n], by rank, then by table.
        create_missing: whether keys without a row get one, and each counts as accessed once; else
            they give the rows that they would start with.
        with_summary: bool scalar, whether a number for a row's slots goes with it, if its rule has
            any.
        wire_dtype: int32 scalar, of values, a number in `link.WIRE_DTYPES`; to the nearest.

    Returns:
        Messages to the ranks, uint8 [bytes], rank 0 first, whose lengths change seldom from call to
        call; int32 [ranks], the bytes of each; int64 [ranks], of these, those of rows.

    Raises:
        tf.errors.ResourceExhaustedError: a bounded table cannot hold them.
    """
    return _loader.library().slipstream_pull_rows(
        handles=list(handles),
        sizes=sizes,
        keys=keys,
        with_summary=with_summary,
        wire_dtype=wire_dtype,
        create_missing=create_missing,
    )


def pack_rows(rows: Sequence[tf.Tensor]) -> tf.Tensor:
    """Makes a message of rows that are no table's of ours, as `pull_rows` does.

    Args:
        rows: of each table, float32 [n, dim].

    Returns:
        uint8 [bytes], the message of one rank for `look_up_pulled`.
    """
    parts = []
    with tf.device("CPU:0"):
        for values in rows:
            # A bit for each row, set: it is given.
            given = tf.fill([(tf.shape(values)[0] + 7) // 8], tf.constant(255, tf.uint8))
            parts += [given, tf.reshape(tf.bitcast(values, tf.uint8), [-1])]
        body = tf.concat(parts, 0)
        size = tf.size(body, tf.int64)
        # Its length and that of the rows, in bytes; float32; without slots.
        head = tf.stack([size + 32, size, tf.constant(0, tf.int64), tf.constant(0, tf.int64)])
        return tf.concat([tf.reshape(tf.bitcast(head, tf.uint8), [-1]), body], 0)


def look_up_pulled(
    replicas: Sequence[tf.Tensor],
    packed: PackedFeatures,
    layout: LookupLayout,
    routed: Routed,
    messages: tf.Tensor,
    training: bool,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Looks up a batch in the rows that came for it.

    Rows that came without a number for their slots get slots of 0, beside which a movement is not
    underestimated.

    Args:
        replicas: as `route_keys` was given them.
        packed: as `route_keys` was given it, with weights.
        layout: as `route_keys` was given it.
        routed: what it gave.
        messages: uint8 [bytes], from `pull_rows` of each rank, or `pack_rows`.
        training: whether accesses are counted, and the rows become replicas, for an update.

    Returns:
        As `ops.table.lookup`; the plan is of use in training.

    Raises:
        tf.errors.InvalidArgumentError: the messages are not those of these keys' rows; nothing is
            stored then.
        tf.errors.ResourceExhaustedError: there is no room for so many replicas.
    """
    result = _loader.library().slipstream_look_up_pulled(
        handles=list(replicas),
        plan=routed.plan,
        sizes=routed.sizes,
        requests=routed.keys,
        messages=messages,
        training=training,
        **layout.arguments(packed),
    )
    return list(result.pooled), result.looked_up
