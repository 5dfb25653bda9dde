"""Keys and rows between ranks: to all, or to their owners, as floats or in fewer bytes.

In: what `ops.exchange` collected on this rank. Out: what came to this rank. Each call is one
collective, which every rank must call, with no rows if it has none. `link_of` measures the link
between ranks; `resolve` chooses the dtype of `wire_dtype="auto"` by it.
"""

import dataclasses
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from slipstream_tf._utils.agreement import require_same
from slipstream_tf._utils.comm import Communicator, Link, Mixed, Names, copies_of, encoded_bytes
from slipstream_tf._utils.errors import invalid, require_choice, require_integer
from slipstream_tf.config import WIRE_DTYPES
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.exchange import SendBuffer

# The number of a dtype, or one that changes from step to step.
WireDtype: TypeAlias = "int | tf.Tensor"


@dataclasses.dataclass(frozen=True)
class Wire:
    """How rows travel: each dtype is one of `config.WIRE_DTYPES`.

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


def exchange_rows(
    comm: Communicator,
    own: SendBuffer,
    row_floats: Sequence[int],
    names: Names,
    what: str,
    kind: Any = "rows",
    wire_dtype: WireDtype = 0,
    to_owners: bool = True,
) -> SendBuffer:
    """Sends rows, or keys, to the ranks they are meant for, in one message to each.

    Args:
        comm: the ranks.
        own: rows of this rank: sizes [ranks, tables]; or [1, tables], those for all ranks.
        row_floats: of each table, values of a row; 0: keys come without.
        names: names the collective.
        what: the rows are, e.g. "gradients".
        kind: what the values' bytes are counted as, see `Communicator`; a list: each table's.
        wire_dtype: of values, from `Wire.dtype_of`; the same on all ranks.
        to_owners: whether each rank gets its own rows; else every rank gets the rows of all.

    Returns:
        What came from each: sizes [ranks, tables].
    """
    if comm.size == 1 and not to_owners:
        return own
    messages, lengths = exchange_ops.pack_messages(own, row_floats, wire_dtype)
    sent = tf.reduce_sum(own.sizes, axis=0) - own.sizes[comm.rank] if to_owners else own.sizes[0]
    kinds = _kinds_of(sent, row_floats, kind, wire_dtype)
    if to_owners:
        received, _ = comm.exchange(messages, lengths, kinds, names.of(what))
    else:
        received = comm.gather(messages, kinds, names.of(what))
    return exchange_ops.unpack_messages(received, comm.size, row_floats)


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


AUTO = "auto"
_NAME = "slipstream.link"  # Begins the names of collectives.
_SHORT, _LONG = 1 << 10, 1 << 21  # Bytes of the messages that are timed.
_SECONDS = 1.0  # Of long messages; short ones and codecs take less.
_ROWS, _DIM = 8192, 32  # Of the message whose making and reading is timed.


def link_of(comm: Communicator) -> Link:
    """Returns the link of a job of several ranks, measured if it is not known; a collective.

    Raises:
        ValueError: ranks were given other links.
    """
    given = None if comm.link is None else dataclasses.asdict(comm.link)
    require_same(comm, given, f"{_NAME}.given", "distributed.init")
    if comm.link is None:
        comm.link = _measure(comm)
    return comm.link


def resolve(wire_dtype: str, comm: Communicator, floats: float, is_spread: bool) -> str:
    """Returns a setting of the wire, with "auto" replaced by what is soonest; then a collective.

    While a function is traced, which ranks may do more or less often, "auto" goes by a link that is
    known.

    Args:
        wire_dtype: of `Wire.of`, or "auto"; on all ranks alike.
        comm: the ranks.
        floats: values of a row, on average.
        is_spread: whether each row has one owner.

    Raises:
        ValueError: "auto" while a function is traced, and the link is not known.
    """
    if wire_dtype != AUTO:
        return wire_dtype
    if comm.size == 1:
        return "float32"
    if tf.executing_eagerly():
        link = link_of(comm)
    elif comm.link is None:
        allowed = "another one in a tf.function, or init(link=...), or link_of(comm) before it"
        raise invalid("wire_dtype", AUTO, "rows between ranks", allowed)
    else:
        link = comm.link
    return link.choose(floats, copies_of(comm.size, is_spread))


def _measure(comm: Communicator, name: str = _NAME) -> Link:
    """Measures the link of a job of several ranks, in about two seconds; a collective.

    Args:
        comm: the ranks. Nothing that is sent counts.
        name: of the collectives.

    Returns:
        The link, the same on all ranks.
    """

    clock = time.perf_counter

    def gather(nbytes: int) -> float:
        sent = tf.zeros([nbytes], tf.uint8)
        start = time.perf_counter()
        comm.gather(sent, "control", f"{name}.{nbytes}").numpy()
        return time.perf_counter() - start

    def agreed(seconds: Sequence[float]) -> list[float]:
        mean = comm.sum(tf.constant(seconds, tf.float64), "control", f"{name}.sum") / comm.size
        return [float(value) for value in mean]

    with comm.uncounted():
        for nbytes in (_SHORT, _LONG):
            gather(nbytes)  # Horovod agrees on a tensor that it does not know.
        (long_once,) = agreed([gather(_LONG)])
        times = int(min(max(_SECONDS / long_once, 3), 30))
        short = statistics.median(gather(_SHORT) for _ in range(30))
        long = statistics.median(gather(_LONG) for _ in range(times))
        codecs = [
            statistics.median(timeit.repeat(_coding_in(dtype), repeat=9, number=1, timer=clock))
            / (_ROWS * _DIM)
            for dtype in WIRE_DTYPES
        ]
        short, long, *codecs = agreed([short, long, *codecs])
    per_byte = max(long - short, 1e-9) / ((_LONG - _SHORT) * (comm.size - 1))
    return Link(1.0 / per_byte, short, dict(zip(WIRE_DTYPES, codecs, strict=True)))


def _coding_in(dtype: str) -> Callable[[], SendBuffer]:
    """Makes a message of random rows, and takes it apart."""
    number, random = WIRE_DTYPES.index(dtype), tf.random.Generator.from_seed(0)
    rows = SendBuffer(
        tf.constant([[_ROWS]], tf.int64),
        tf.range(_ROWS, dtype=tf.int64),
        random.normal([_ROWS * _DIM], stddev=1e-3),
    )

    def code() -> SendBuffer:
        messages, _ = exchange_ops.pack_messages(rows, [_DIM], number)
        return exchange_ops.unpack_messages(messages, 1, [_DIM])

    return code
