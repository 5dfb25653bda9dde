"""Exchanges keys and rows between ranks, optionally in a smaller dtype.

Each exchange is one collective. Every rank must call it, with zero rows if it has none. `link_of`
measures the network between the ranks, and `resolve` chooses the dtype for `wire_dtype="auto"` from
the measurement.
"""

import dataclasses
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from slipstream_tf._utils.agreement import require_same
from slipstream_tf._utils.comm import (
    CollectiveNames,
    Communicator,
    Link,
    Mixed,
    copies_of,
    encoded_bytes,
)
from slipstream_tf._utils.errors import invalid, require_choice, require_integer
from slipstream_tf.config import WIRE_DTYPES
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.exchange import SendBuffer

# The index of a dtype in `WIRE_DTYPES`. A tensor if the dtype changes from step to step.
WireDtype: TypeAlias = "int | tf.Tensor"


@dataclasses.dataclass(frozen=True)
class Wire:
    """The dtypes of rows in messages between ranks.

    Each dtype is one of `config.WIRE_DTYPES`.

    Attributes:
        rows: The dtype of rows that owners of sharded tables send.
        gradients: The dtype of gradient rows.
        warmup_steps: The number of table updates at the start of training during which both dtypes
            are float32.
    """

    rows: str = "float32"
    gradients: str = "float32"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for dtype in (self.rows, self.gradients):
            require_choice("wire_dtype", dtype, WIRE_DTYPES, "messages between ranks")
        require_integer("wire_warmup_steps", self.warmup_steps, 0, None, "messages between ranks")

    @classmethod
    def of(cls, wire_dtype: str, warmup_steps: int = 0) -> "Wire":
        """Parses a `wire_dtype` setting.

        Args:
            wire_dtype: One dtype for both directions, or the dtype of rows and the dtype of
                gradients, separated by a comma. For example, "bfloat16,int8".
            warmup_steps: See `Wire`.

        Raises:
            ValueError: If a dtype is not one of `WIRE_DTYPES`, or if `warmup_steps` is negative.
        """
        rows, comma, gradients = str(wire_dtype).partition(",")
        return cls(rows, gradients if comma else rows, warmup_steps)

    def dtype_of(self, dtype: str, steps: tf.Tensor) -> WireDtype:
        """Returns the index of a dtype, or of float32 during warm-up.

        Args:
            dtype: One of `WIRE_DTYPES`.
            steps: The number of table updates so far, an integer scalar.
        """
        number = WIRE_DTYPES.index(dtype)
        if number == 0 or self.warmup_steps == 0:
            return number
        return tf.where(steps < self.warmup_steps, 0, number)


def require_one_dtype(wire_dtype: str, place: str) -> None:
    """Raises ValueError for a pair of dtypes, because only gradients are exchanged.

    Args:
        wire_dtype: A setting for `Wire.of`, or "auto".
        place: Description of the exchange, for the error.
    """
    if "," in str(wire_dtype):
        dtypes = ", ".join(map(repr, (*WIRE_DTYPES, AUTO)))
        allowed = f"one of {dtypes}. Pass one dtype, because only gradients are sent"
        raise invalid("wire_dtype", wire_dtype, place, allowed)


def exchange_rows(
    comm: Communicator,
    own: SendBuffer,
    row_floats: Sequence[int],
    names: CollectiveNames,
    what: str,
    kind: Any = "rows",
    wire_dtype: WireDtype = 0,
    to_owners: bool = True,
) -> SendBuffer:
    """Sends keys or rows to other ranks, in one message per rank.

    Args:
        comm: The communicator of the job.
        own: The rows of this rank, with sizes [ranks, tables]. With `to_owners=False`, sizes [1,
            tables].
        row_floats: The number of values per row for each table. 0 means that only keys are sent.
        names: The names of the collectives.
        what: The content of the message for the name of the collective, for example "gradients".
        kind: The traffic kind of the values, see `Communicator`. A list gives the kind of each
            table.
        wire_dtype: The index of the values' dtype in `WIRE_DTYPES`, from `Wire.dtype_of`. It must
            be the same on all ranks.
        to_owners: Whether each rank receives only the rows addressed to it. If False, every rank
            receives the rows of all ranks.

    Returns:
        The received rows, with sizes [ranks, tables].
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
    """Returns the traffic kinds of a message.

    Args:
        rows: int64 [tables], the number of rows of each table.
        row_floats: See `exchange_rows`.
        kind: See `exchange_rows`.
        wire_dtype: See `exchange_rows`.
    """
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
_NAME = "slipstream.link"  # Prefix of the names of collectives.
_SHORT, _LONG = 1 << 10, 1 << 21  # Lengths of the timed messages in bytes.
_SECONDS = 1.0  # Target time for all long messages. Short messages and codecs take less.
_ROWS, _DIM = 8192, 32  # Size of the message that is encoded and decoded for timing.


def link_of(comm: Communicator) -> Link:
    """Returns the speed of the network between ranks; measures it if unknown.

    This function is a collective. A measurement takes about two seconds.

    Example:

    >>> comm = slip.distributed.init()
    >>> if comm.size > 1:
    ...     print(slip.distributed.link_of(comm).latency)

    Args:
        comm: The communicator of the job.

    Returns:
        `comm.link`. A measured link is stored there.

    Raises:
        ValueError: If the ranks passed different links to `init`, or if there is neither a link nor
            a second rank.
    """
    if comm.size == 1 and comm.link is None:
        raise invalid("comm.size", 1, "link_of", "at least 2 ranks, or link= in `init`")
    given = None if comm.link is None else dataclasses.asdict(comm.link)
    require_same(comm, given, f"{_NAME}.given", "distributed.init")
    if comm.link is None:
        comm.link = _measure(comm)
    return comm.link


def resolve(wire_dtype: str, comm: Communicator, floats: float, is_spread: bool) -> str:
    """Returns the wire dtype setting with "auto" replaced by the fastest dtype.

    With "auto" and eager execution, this function is a collective. Ranks can trace a function
    different numbers of times, therefore "auto" requires a known link during tracing.

    Args:
        wire_dtype: A setting for `Wire.of`, or "auto". It must be the same on all ranks.
        comm: The communicator of the job.
        floats: The average number of values per row.
        is_spread: Whether each row has one owner.

    Raises:
        ValueError: If `wire_dtype` is "auto", a function is being traced, and the link is unknown.
    """
    if wire_dtype != AUTO:
        return wire_dtype
    if comm.size == 1:
        return "float32"
    if tf.executing_eagerly():
        link = link_of(comm)
    elif comm.link is None:
        allowed = (
            "another dtype, because the speed of the network is unknown. Pass link= to init, or "
            "call link_of(comm) before the function is traced"
        )
        raise invalid("wire_dtype", AUTO, "messages between ranks in a tf.function", allowed)
    else:
        link = comm.link
    return link.choose(floats, copies_of(comm.size, is_spread))


def _measure(comm: Communicator, name: str = _NAME) -> Link:
    """Measures the network between at least two ranks; a collective.

    It takes about two seconds. The bytes are not counted as traffic.

    Args:
        comm: The communicator of the job.
        name: The prefix of the collectives' names.

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
            gather(nbytes)  # Warm up: Horovod negotiates new tensors.
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
    """Returns a function that encodes and decodes a message of random rows."""
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
