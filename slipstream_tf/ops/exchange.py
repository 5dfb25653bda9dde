"""Typed wrappers of the ops that exchange rows between ranks."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from slipstream_tf.ops import _loader
from slipstream_tf.ops.features import PackedFeatures
from slipstream_tf.ops.table import LookupLayout


@dataclasses.dataclass(frozen=True)
class SendBuffer:
    """Keys and rows of multiple tables, grouped by rank.

    Before an exchange, the rank is the receiver of the rows. After it, the rank is their sender.

    Attributes:
        sizes: int64 [ranks, tables], number of rows per rank and table.
        keys: int64 [n], ordered by rank, then by table.
        values: float32 [m], the concatenated rows of the keys, where the width depends on the
            table.
        squares: float32 [ranks, tables], the sums of the squared values, or None if an exchange
            returned the buffer.
    """

    sizes: tf.Tensor
    keys: tf.Tensor
    values: tf.Tensor
    squares: tf.Tensor | None = None

    def arguments(self) -> dict[str, tf.Tensor]:
        """Returns the arguments for an op that takes a send buffer."""
        return {"sizes": self.sizes, "keys": self.keys, "values": self.values}

    def of_tables(self, row_floats: Sequence[int]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns the keys and values of each table, in rank order.

        Args:
            row_floats: Number of values per row, for each table.

        Returns:
            For each table, keys int64 [n] and values float32 [n * row_floats].
        """
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
    handles: Sequence[tf.Tensor] = (),
    advice: str = "",
) -> SendBuffer:
    """Sums the gradients of each key and returns the sums to send.

    Args:
        plan: Plan from `ops.table.lookup`, or a sum of `ops.row_gradients.row_gradients`, as in
            `ops.table.apply_gradients`.
        gradients: Gradients of the pooled vectors of that lookup, float32 with equal shapes.
        learning_rate: float32, a scalar or [tables]. It determines how far a deferred sum would
            move its row.
        ranks: Number of ranks that own rows. A hash of the key selects the owner. With 1, the rows
            have no owner, and the caller sends all of them to every rank.
        advance_step: Whether this call counts as an update of the tables, by which deferred sums
            age. If not, applying the rows counts as the update.
        passes_non_finite: Whether a gradient that is not finite is allowed. Then all returned
            values are NaN, and the deferred sums are updated as if all gradients were 0.
        handles: As in `ops.table.apply_gradients`.
        advice: As in `ops.table.apply_gradients`.

    Returns:
        The sums, grouped by owner and table, with each key at most once.

    Raises:
        tf.errors.InvalidArgumentError: A gradient is not finite and `passes_non_finite` is False.
            No row is collected then.
    """
    return SendBuffer(
        *_loader.library().slipstream_collect_gradients(
            plan=plan,
            gradients=list(gradients),
            handles=list(handles),
            learning_rate=learning_rate,
            advice=advice,
            ranks=ranks,
            advance_step=advance_step,
            passes_non_finite=passes_non_finite,
        )
    )


def collect_deferred(handles: Sequence[tf.Tensor], ranks: int = 1) -> SendBuffer:
    """Removes and returns all deferred gradients of the tables.

    Args:
        handles: The tables.
        ranks: Number of owners, as for `collect_gradients`.
    """
    rows = _loader.library().slipstream_collect_deferred(handles=list(handles), ranks=ranks)
    return SendBuffer(*rows)


def apply_rows(
    handles: Sequence[tf.Tensor],
    rows: SendBuffer,
    learning_rate: Any,
    scale: Any = (),
    create_missing: bool = True,
) -> tf.Operation | None:
    """Sums the rows of each key and applies the update rule.

    Args:
        handles: The tables.
        rows: Rows per rank and table. The rows of a key are summed in this order.
        learning_rate: float32, a scalar for all tables or [tables].
        scale: float32 [tables], factors of the sums. Empty means 1.
        create_missing: Whether to create rows for new keys. If not, their gradients are dropped and
            counted.

    Returns:
        The operation in a graph, None in eager mode.

    Raises:
        tf.errors.InvalidArgumentError: The sizes do not fit keys and values, or a value, a scale
            or an updated row is not finite. No row is changed then.
    """
    return _loader.library().slipstream_apply_rows(
        handles=list(handles),
        learning_rate=learning_rate,
        scale=tf.convert_to_tensor(scale, tf.float32),
        create_missing=create_missing,
        **rows.arguments(),
    )


def merge_rows(rows: SendBuffer, row_floats: Sequence[int], ranks: int = 1) -> SendBuffer:
    """Sums the rows of each key and orders the sums by owner.

    Args:
        rows: Rows that are grouped by any ranks. The rows of a key are summed in their order.
        row_floats: Number of values per row, for each table.
        ranks: Number of owners, to which keys are assigned by hash.

    Returns:
        The sums, grouped by owner and table, with unique and ascending keys in each group, and with
        `squares`.

    Raises:
        tf.errors.InvalidArgumentError: The sizes do not fit keys and values.
    """
    op = _loader.library().slipstream_merge_rows
    return SendBuffer(*op(ranks=ranks, row_floats=list(row_floats), **rows.arguments()))


def pack_messages(
    rows: SendBuffer, row_floats: Sequence[int], wire_dtype: Any = 0
) -> tuple[tf.Tensor, tf.Tensor]:
    """Packs the sizes, keys and values for each rank into one message.

    Note: a message is up to a few percent longer than its contents, so that its length rarely
    changes. Horovod caches the negotiation of a tensor by its shape, and each change of the length
    costs additional communication.

    Args:
        rows: Rows per rank and table.
        row_floats: Number of values per row, for each table. 0 means that a table has keys only.
        wire_dtype: int32 scalar, data type of the values in the message, an index in
            `config.WIRE_DTYPES`. int8 values are rounded stochastically. The random numbers depend
            on key and values only, so that equal rows are encoded to equal bytes.

    Returns:
        uint8 [bytes], the messages in rank order, and int32 [ranks], the bytes per rank.

    Raises:
        tf.errors.InvalidArgumentError: The sizes do not fit keys and values, or a message has more
            than 2^30 bytes.
    """
    op = _loader.library().slipstream_pack_messages
    packed = op(wire_dtype=wire_dtype, row_floats=list(row_floats), **rows.arguments())
    return tuple(packed)


def unpack_messages(messages: tf.Tensor, ranks: int, row_floats: Sequence[int]) -> SendBuffer:
    """Unpacks the messages that `pack_messages` of each rank made for this rank.

    Args:
        messages: uint8 [bytes], in rank order.
        ranks: Number of messages.
        row_floats: Number of values per row, as they were packed.

    Returns:
        The rows, grouped by sending rank and table. int8 and 16-bit values are decoded to float32.

    Raises:
        tf.errors.InvalidArgumentError: The messages do not match the numbers of ranks and tables.
    """
    op = _loader.library().slipstream_unpack_messages
    return SendBuffer(*op(messages=messages, ranks=ranks, row_floats=list(row_floats)))


class Routed(NamedTuple):
    """A batch with a planned lookup.

    Attributes:
        plan: Scalar variant, for `look_up_pulled`.
        sizes: int64 [ranks, tables], number of keys to request from each rank.
        keys: int64 [n], unique, ordered by rank, then by table.
    """

    plan: tf.Tensor
    sizes: tf.Tensor
    keys: tf.Tensor


def route_keys(
    replicas: Sequence[tf.Tensor], packed: PackedFeatures, layout: LookupLayout, ranks: int
) -> Routed:
    """Plans the lookup of a batch and returns the keys to request.

    Args:
        replicas: Tables of replicas, in which training batches are looked up.
        packed: Keys of the batch.
        layout: Layout of the lookup.
        ranks: Number of owners, to which keys are assigned by hash.
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
    joins_step: bool = False,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Reads the rows of the keys that ranks request.

    Args:
        handles: The tables.
        sizes: int64 [ranks, tables], number of keys that each rank requests.
        keys: int64 [n], ordered by rank, then by table.
        create_missing: Whether to create rows for new keys and to count one access per key. If not,
            initial rows are returned for new keys.
        with_summary: bool scalar, whether to add one number that summarizes the slots of a row, if
            the update rule has slots. With it, the receiver can estimate how far a gradient would
            move the row.
        wire_dtype: int32 scalar, data type of the values in the message, an index in
            `config.WIRE_DTYPES`. Values are rounded to the nearest.
        joins_step: As in `ops.table.lookup`.

    Returns:
        Messages to the ranks, uint8 [bytes], in rank order, with lengths that rarely change; the
        bytes of each message, int32 [ranks]; and the bytes of rows in each message, int64 [ranks].

    Raises:
        tf.errors.ResourceExhaustedError: A bounded table cannot hold the rows.
    """
    return _loader.library().slipstream_pull_rows(
        handles=list(handles),
        sizes=sizes,
        keys=keys,
        with_summary=with_summary,
        wire_dtype=wire_dtype,
        create_missing=create_missing,
        joins_step=joins_step,
    )


def pack_rows(rows: Sequence[tf.Tensor]) -> tf.Tensor:
    """Packs rows that another library stores into a message like `pull_rows`.


    Args:
        rows: For each table, float32 [n, dim].

    Returns:
        uint8 [bytes], the message of one rank for `look_up_pulled`.
    """
    parts = []
    with tf.device("CPU:0"):
        for values in rows:
            # One bit per row, set if the message contains the row.
            given = tf.fill([(tf.shape(values)[0] + 7) // 8], tf.constant(255, tf.uint8))
            parts += [given, tf.reshape(tf.bitcast(values, tf.uint8), [-1])]
        body = tf.concat(parts, 0)
        size = tf.size(body, tf.int64)
        # Header: bytes of the message, bytes of the rows, data type (0: float32), no slots (0).
        head = tf.stack([size + 32, size, tf.constant(0, tf.int64), tf.constant(0, tf.int64)])
        return tf.concat([tf.reshape(tf.bitcast(head, tf.uint8), [-1]), body], 0)


def look_up_pulled(
    replicas: Sequence[tf.Tensor],
    packed: PackedFeatures,
    layout: LookupLayout,
    routed: Routed,
    messages: tf.Tensor,
    training: bool,
    joins_step: bool = False,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Looks up a batch in the rows that were received for it.

    Rows that were received without a summary of their slots get slots of 0. With such slots the
    movement of a row is never underestimated.

    Args:
        replicas: Tables of replicas, as for `route_keys`.
        packed: Keys of the batch, as for `route_keys`, with weights.
        layout: Layout of the lookup, as for `route_keys`.
        routed: Result of `route_keys`.
        messages: uint8 [bytes], from `pull_rows` of each rank, or from `pack_rows`.
        training: Whether to count accesses and to store the rows as replicas for an update.
        joins_step: As in `ops.table.lookup`.

    Returns:
        The pooled vectors and the plan, as for `ops.table.lookup`. The plan is only valid in
        training.

    Raises:
        tf.errors.InvalidArgumentError: The messages do not contain the rows of these keys. No row
            is stored then.
        tf.errors.ResourceExhaustedError: There is not enough memory for the replicas.
    """
    result = _loader.library().slipstream_look_up_pulled(
        handles=list(replicas),
        plan=routed.plan,
        sizes=routed.sizes,
        requests=routed.keys,
        messages=messages,
        training=training,
        joins_step=joins_step,
        **layout.arguments(packed),
    )
    return list(result.pooled), result.looked_up
