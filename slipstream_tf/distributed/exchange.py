"""Keys and rows between ranks: to all, or to their owners, in float32 or bfloat16.

In: what `ops.exchange` collected on this rank. Out: what came to this rank. Each call is one
collective, which every rank must call, with no rows if it has none.
"""

import collections
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import tensorflow as tf

from slipstream_tf.distributed.comm import Communicator, Mixed
from slipstream_tf.errors import require_choice, require_integer
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.exchange import SendBuffer

WIRE_DTYPES = ("float32", "bfloat16")
# Whether rows are rounded: always or never, or as a tensor says.
Rounds: TypeAlias = "bool | tf.Tensor"


class Names:
    """Names of collectives: the same on all ranks, and of one collective under way only.

    A graph's collectives are numbered within the graph: ranks may trace a function at different
    times (their last batches differ), but they trace the same one.
    """

    _prefixes: ClassVar[collections.Counter[str]] = collections.Counter()

    def __init__(self, prefix: str):
        """Takes a prefix; a second object with the same one gets a number.

        Args:
            prefix: what the collectives are for.
        """
        number = Names._prefixes[prefix]
        Names._prefixes[prefix] += 1
        self._prefix = f"slipstream.{prefix}" + (f".{number}" if number else "")
        self._used: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, collective: str) -> str:
        """Returns a name for one call of a collective."""
        name = f"{self._prefix}.{collective}"
        if tf.executing_eagerly():
            return name
        used = self._used.setdefault(tf.compat.v1.get_default_graph(), collections.Counter())
        number = used[collective]
        used[collective] += 1
        return f"{name}-{number}" if number else name  # TensorFlow takes it for a scope, too.


@dataclasses.dataclass(frozen=True)
class Wire:
    """How rows travel.

    Attributes:
        dtype: "float32", or "bfloat16", to which rows are rounded before they are sent.
        warmup_steps: updates of the tables before rows are rounded.
    """

    dtype: str = "float32"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        require_choice("wire_dtype", self.dtype, WIRE_DTYPES, "rows between ranks")
        require_integer("wire_warmup_steps", self.warmup_steps, 0, None, "rows between ranks")

    def rounds(self, steps: tf.Tensor) -> Rounds:
        """Returns whether rows are rounded after so many updates: a bool, or a bool scalar."""
        if self.dtype == "float32" or self.warmup_steps == 0:
            return self.dtype != "float32"
        return steps >= self.warmup_steps


def gather_rows(
    comm: Communicator,
    own: SendBuffer,
    row_floats: Sequence[int],
    names: Names,
    what: str,
    kind: Any = "rows",
    rounds: Rounds = False,
) -> SendBuffer:
    """Gives every rank the rows of all, in one message of each.

    Args:
        comm: the ranks.
        own: rows of this rank, for all: sizes [1, tables].
        row_floats: of each table, values of a row; 0: keys come without.
        names: names the collective.
        what: the rows are, e.g. "gradients".
        kind: what the values' bytes are counted as, see `Communicator`; a list: each table's.
        rounds: from `Wire.rounds`; the same on all ranks.

    Returns:
        The ranks' rows, sizes [ranks, tables].
    """
    if comm.size == 1:
        return own
    message, _ = exchange_ops.pack_messages(own, row_floats, rounds)
    kinds = _kinds_of(own.sizes[0], row_floats, kind, rounds)
    received = comm.gather(message, kinds, names.of(what))
    return exchange_ops.unpack_messages(received, comm.size, row_floats)


def exchange_rows(
    comm: Communicator,
    own: SendBuffer,
    row_floats: Sequence[int],
    names: Names,
    what: str,
    kind: Any = "rows",
    rounds: Rounds = False,
) -> SendBuffer:
    """Sends each rank the rows, or keys, that are meant for it, in one message to each.

    Args:
        comm: the ranks.
        own: sizes [ranks, tables].
        row_floats, names, what, kind, rounds: see `gather_rows`.

    Returns:
        What came from each: sizes [ranks, tables].
    """
    messages, lengths = exchange_ops.pack_messages(own, row_floats, rounds)
    to_others = tf.reduce_sum(own.sizes, axis=0) - own.sizes[comm.rank]
    kinds = _kinds_of(to_others, row_floats, kind, rounds)
    received, _ = comm.exchange(messages, lengths, kinds, names.of(what))
    return exchange_ops.unpack_messages(received, comm.size, row_floats)


def exchange_bytes(
    comm: Communicator, sent: tf.Tensor, lengths: tf.Tensor, names: Names, what: str
) -> tf.Tensor:
    """Sends each rank its part of the bytes of rows, uint8 [n]; returns those that came.

    Args:
        comm: the ranks.
        sent: uint8 [m], for rank 0 first.
        lengths: int32 [ranks], the bytes for each.
        names: names the collective.
        what: the rows are for, e.g. "lookup".
    """
    padded, padded_lengths = exchange_ops.pad_messages(sent, lengths)
    to_others = tf.reduce_sum(lengths) - lengths[comm.rank]
    kinds = Mixed([("rows", tf.cast(to_others, tf.int64))])
    received, _ = comm.exchange(padded, padded_lengths, kinds, names.of(what))
    return exchange_ops.unpad_messages(received, comm.size)


def _kinds_of(rows: tf.Tensor, row_floats: Sequence[int], kind: Any, rounds: Rounds) -> Mixed:
    """The kinds of a message of so many rows of each table."""
    value_bytes = tf.where(rounds, 2, 4) if isinstance(rounds, tf.Tensor) else 2 if rounds else 4
    sent = rows * tf.constant(row_floats, tf.int64) * tf.cast(value_bytes, tf.int64)
    parts = [("keys", tf.reduce_sum(rows) * 8)]
    if isinstance(kind, list):
        return Mixed([*parts, *zip(kind, tf.unstack(sent, len(kind)), strict=True)])
    return Mixed([*parts, (kind, tf.reduce_sum(sent))])
