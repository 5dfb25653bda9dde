"""Gradient rows between ranks: every rank's to all ranks, in float32 or bfloat16.

In: what `ops.exchange` collected on this rank. Out: what to apply on this rank. Every rank must
call it, with no rows if it has none.
"""

import collections
import dataclasses
import weakref
from typing import Any, ClassVar, TypeAlias

import tensorflow as tf

from slipstream_tf.distributed.comm import Communicator
from slipstream_tf.errors import require_choice, require_integer
from slipstream_tf.ops.exchange import SendBuffer

WIRE_DTYPES = ("float32", "bfloat16")
# What one rank can send another at once.
_MOST_SENT = 2**31 - 1
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


def to_wire(values: tf.Tensor, rounds: Rounds) -> tf.Tensor:
    """Returns float32 values in the form that is sent.

    Args:
        values: float32 [n], or of any shape if `rounds` is no tensor.
        rounds: from `Wire.rounds`.

    Returns:
        The values, if they are never rounded; else bits of them as uint16: those of bfloat16, in
        their shape, or all: [2 n].
    """
    if isinstance(rounds, bool):
        return tf.bitcast(tf.cast(values, tf.bfloat16), tf.uint16) if rounds else values
    return tf.cond(
        rounds,
        lambda: to_wire(values, True),
        lambda: tf.reshape(tf.bitcast(values, tf.uint16), [-1]),
    )


def splits_on_wire(splits: tf.Tensor, rounds: Rounds) -> tf.Tensor:
    """Returns how long the parts of `to_wire` are, for int32 `splits` of the values."""
    return splits if isinstance(rounds, bool) else splits * tf.where(rounds, 1, 2)


def from_wire(sent: tf.Tensor, rounds: Rounds) -> tf.Tensor:
    """Returns the float32 values of what `to_wire` made."""
    if isinstance(rounds, bool):
        return tf.cast(tf.bitcast(sent, tf.bfloat16), tf.float32) if rounds else sent
    return tf.cond(
        rounds,
        lambda: from_wire(sent, True),
        lambda: tf.bitcast(tf.reshape(sent, [-1, 2]), tf.float32),
    )


def splits_of(sizes: tf.Tensor, what: str) -> tf.Tensor:
    """Returns int32 sizes of what is sent to each rank, for int64 ones.

    Args:
        sizes: int64 [ranks].
        what: is sent, for the error, e.g. "keys".

    Raises:
        tf.errors.InvalidArgumentError: one is more than 2^31 - 1.
    """
    message = f"{what} for one rank are more than 2^31 - 1: make the batches smaller"
    tf.debugging.assert_less_equal(sizes, tf.constant(_MOST_SENT, tf.int64), message)
    return tf.cast(sizes, tf.int32)


def gather_keys(
    comm: Communicator, sizes: tf.Tensor, keys: tf.Tensor, names: Names, what: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Gives every rank the keys of all.

    Args:
        comm: the ranks.
        sizes: int64 [1, tables], keys of each table on this rank.
        keys: int64 [n], by table.
        names: names the collectives.
        what: the keys are of, e.g. "gradients".

    Returns:
        sizes int64 [ranks, tables] and keys int64 [m] of all ranks.
    """
    all_sizes = comm.gather(sizes, "control", names.of(f"{what}.sizes"))
    return all_sizes, comm.gather(keys, "keys", names.of(f"{what}.keys"))


def gather_rows(
    comm: Communicator, own: SendBuffer, names: Names, what: str, kind: Any, rounds: Rounds
) -> SendBuffer:
    """Gives every rank the rows of all.

    Args:
        comm: the ranks.
        own: rows of this rank, for all: sizes [1, tables].
        names: names the collectives.
        what: the rows are, e.g. "gradients".
        kind: what the values' bytes are counted as, see `Communicator`.
        rounds: from `Wire.rounds`; the same on all ranks.

    Returns:
        The ranks' rows, sizes [ranks, tables].
    """
    if comm.size == 1:
        return own
    # All are given at once: Horovod sends them together.
    sizes, keys = gather_keys(comm, own.sizes, own.keys, names, what)
    values = comm.gather(to_wire(own.values, rounds), kind, names.of(f"{what}.values"))
    return SendBuffer(sizes, keys, from_wire(values, rounds))


def exchange_keys(
    comm: Communicator, sizes: tf.Tensor, keys: tf.Tensor, names: Names, what: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends each rank the keys that are meant for it.

    Args:
        comm: the ranks.
        sizes: int64 [ranks, buffers], keys for each.
        keys: int64 [n], by rank, then by table.
        names: names the collectives.
        what: the keys are for, e.g. "lookup".

    Returns:
        sizes int64 [ranks, buffers] and keys int64 [m] that came from each.
    """
    each = tf.ones([comm.size], tf.int32)
    received_sizes, _ = comm.exchange(sizes, each, "control", names.of(f"{what}.sizes"))
    splits = splits_of(tf.reduce_sum(sizes, axis=1), "keys")
    received, _ = comm.exchange(keys, splits, "keys", names.of(f"{what}.keys"))
    return received_sizes, received
