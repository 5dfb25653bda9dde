"""Keys and rows between ranks: to all, or to their owners, as floats or in fewer bytes.

In: what `ops.exchange` collected on this rank. Out: what came to this rank. Each call is one
collective, which every rank must call, with no rows if it has none.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from slipstream_tf._utils.comm import Communicator, Mixed, Names
from slipstream_tf._utils.errors import invalid, require_choice, require_integer
from slipstream_tf._utils.link import WIRE_DTYPES, encoded_bytes
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.exchange import SendBuffer

# The number of a dtype, or one that changes from step to step.
WireDtype: TypeAlias = "int | tf.Tensor"


@dataclasses.dataclass(frozen=True)
class Wire:
    """How rows travel: each dtype is one of `link.WIRE_DTYPES`.

    Attributes:
        rows: dtype of the rows of sharded tables, from their owners.
        gradients: dtype of gradients.
        warmup_steps: updates of the tables for which both are float32.
    """

    rows: str = "float32"
    gradients: str = "float32"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for dtype in (self.rows, self.gradients):
            require_choice("wire_dtype", dtype, WIRE_DTYPES, "rows between ranks")
        require_integer("wire_warmup_steps", self.warmup_steps, 0, None, "rows between ranks")

    @classmethod
    def of(cls, wire_dtype: str, warmup_steps: int = 0) -> "Wire":
        """Reads a setting.

        Args:
            wire_dtype: one dtype for both directions, or that of rows and that of gradients, with a
                comma between them.
            warmup_steps: see `Wire`.

        Raises:
            ValueError: a dtype is not one of `WIRE_DTYPES`, or the steps are below 0.
        """
        rows, comma, gradients = str(wire_dtype).partition(",")
        return cls(rows, gradients if comma else rows, warmup_steps)

    def dtype_of(self, dtype: str, steps: tf.Tensor) -> WireDtype:
        """Returns the number of a dtype, or after so few updates that of float32."""
        number = WIRE_DTYPES.index(dtype)
        if number == 0 or self.warmup_steps == 0:
            return number
        return tf.where(steps < self.warmup_steps, 0, number)


def require_one_dtype(wire_dtype: str, place: str) -> None:
    """Raises ValueError for a pair of dtypes, where rows stay and gradients alone travel."""
    if "," in str(wire_dtype):
        allowed = f"one of {', '.join(WIRE_DTYPES)}, auto: only gradients travel"
        raise invalid("wire_dtype", wire_dtype, place, allowed)


def gather_rows(
    comm: Communicator,
    own: SendBuffer,
    row_floats: Sequence[int],
    names: Names,
    what: str,
    kind: Any = "rows",
    wire_dtype: WireDtype = 0,
) -> SendBuffer:
    """Gives every rank the rows of all, in one message of each.

    Args:
        comm: the ranks.
        own: rows of this rank, for all: sizes [1, tables].
        row_floats: of each table, values of a row; 0: keys come without.
        names: names the collective.
        what: the rows are, e.g. "gradients".
        kind: what the values' bytes are counted as, see `Communicator`; a list: each table's.
        wire_dtype: of values, from `Wire.dtype_of`; the same on all ranks.

    Returns:
        The ranks' rows, sizes [ranks, tables].
    """
    if comm.size == 1:
        return own
    message, _ = exchange_ops.pack_messages(own, row_floats, wire_dtype)
    kinds = _kinds_of(own.sizes[0], row_floats, kind, wire_dtype)
    received = comm.gather(message, kinds, names.of(what))
    return exchange_ops.unpack_messages(received, comm.size, row_floats)


def exchange_rows(
    comm: Communicator,
    own: SendBuffer,
    row_floats: Sequence[int],
    names: Names,
    what: str,
    kind: Any = "rows",
    wire_dtype: WireDtype = 0,
) -> SendBuffer:
    """Sends each rank the rows, or keys, that are meant for it, in one message to each.

    Args:
        comm: the ranks.
        own: sizes [ranks, tables].
        row_floats, names, what, kind, wire_dtype: see `gather_rows`.

    Returns:
        What came from each: sizes [ranks, tables].
    """
    messages, lengths = exchange_ops.pack_messages(own, row_floats, wire_dtype)
    to_others = tf.reduce_sum(own.sizes, axis=0) - own.sizes[comm.rank]
    kinds = _kinds_of(to_others, row_floats, kind, wire_dtype)
    received, _ = comm.exchange(messages, lengths, kinds, names.of(what))
    return exchange_ops.unpack_messages(received, comm.size, row_floats)


def exchange_pulled(
    comm: Communicator,
    messages: tf.Tensor,
    lengths: tf.Tensor,
    row_bytes: tf.Tensor,
    names: Names,
    what: str,
) -> tf.Tensor:
    """Sends each rank its message from `ops.exchange.pull_rows`; returns those that came.

    Args:
        comm: the ranks.
        messages, lengths, row_bytes: what was pulled for each.
        names: names the collective.
        what: the rows are for, e.g. "lookup".
    """
    kinds = Mixed([("rows", tf.reduce_sum(row_bytes) - row_bytes[comm.rank])])
    received, _ = comm.exchange(messages, lengths, kinds, names.of(what))
    return received


def _kinds_of(
    rows: tf.Tensor, row_floats: Sequence[int], kind: Any, wire_dtype: WireDtype
) -> Mixed:
    """The kinds of a message of so many rows of each table."""
    row_bytes = [[encoded_bytes(dtype, floats) for floats in row_floats] for dtype in WIRE_DTYPES]
    if isinstance(wire_dtype, int):
        sent = rows * tf.constant(row_bytes[wire_dtype], tf.int64)
    else:
        sent = rows * tf.gather(tf.constant(row_bytes, tf.int64), wire_dtype)
    parts = [("keys", tf.reduce_sum(rows) * 8)]
    if isinstance(kind, list):
        return Mixed([*parts, *zip(kind, tf.unstack(sent, len(kind)), strict=True)])
    return Mixed([*parts, (kind, tf.reduce_sum(sent))])
