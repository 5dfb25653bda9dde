"""Measures the link between ranks, and chooses the dtype in which rows travel by it.

In: a communicator. Out: its `Link`, and for "auto" the dtype, the same on all ranks.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from slipstream_tf._utils.agreement import require_same
from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.errors import invalid
from slipstream_tf._utils.link import WIRE_DTYPES, Link, copies_of
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.exchange import SendBuffer

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
        codecs = [_median_seconds(_coding_in(dtype)) / (_ROWS * _DIM) for dtype in WIRE_DTYPES]
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


def _median_seconds(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
