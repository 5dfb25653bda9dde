"""The interface of collectives between ranks, and its single-process version.

Note: the methods `sum`, `gather`, `exchange` and `broadcast` are collectives. Every rank must call
them in the same order, with an empty tensor if it has no rows. Collectives run eagerly and in a
`tf.function`.
"""

import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import tensorflow as tf

from slipstream_tf._utils.errors import require_choice, require_integer, require_number
from slipstream_tf.config import WIRE_DTYPES

# Bytes per value of the wire dtypes; ops refer to a dtype by its position. An int8 value is a
# multiple of 1/127 of the row's largest magnitude, which is sent with the row as a float32.
_VALUE_BYTES = dict(zip(WIRE_DTYPES, (4, 2, 2, 1), strict=True))
# Dtypes for "auto", most exact first. No float16, because it takes as long as bfloat16.
CHOICES = ("float32", "bfloat16", "int8")
# A less exact dtype is chosen only if it takes at most this fraction of the time of the more exact
# dtype, and saves at least this many seconds per value. For comparison, a training step takes about
# ten times as long per value.
_WORTH, _MIN_SECONDS_SAVED = 0.8, 1e-9


def encoded_bytes(dtype: str, floats: float) -> float:
    """Returns the bytes of an encoded row.

    Args:
        dtype: One of `WIRE_DTYPES`.
        floats: Number of values in the row.
    """
    scale = 4 if dtype == "int8" and floats else 0
    return floats * _VALUE_BYTES[dtype] + scale


def copies_of(ranks: int, is_spread: bool) -> float:
    """Returns the average number of other ranks that receive each row.

    Args:
        ranks: Number of ranks.
        is_spread: Whether each row has one owner. If False, all ranks have all rows.
    """
    return (ranks - 1) / ranks if is_spread else ranks - 1


@dataclasses.dataclass(frozen=True)
class Link:
    """The speed of messages between ranks.

    Example:

    >>> slip.distributed.Link(bytes_per_second=125e6, latency=1e-4).bytes_per_second
    125000000.0

    Attributes:
        bytes_per_second: Send rate of a rank while all ranks send.
        latency: Seconds for a message with almost no content.
        codec_seconds: Seconds per value to encode and decode it, by dtype.
    """

    bytes_per_second: float
    latency: float = 0.0
    codec_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        require_number("bytes_per_second", self.bytes_per_second, 1.0, place="Link")
        require_number("latency", self.latency, 0.0, place="Link")

    def seconds(self, rows: float, floats: float, dtype: str, copies: float = 1.0) -> float:
        """Returns the seconds to send rows with their keys, without latency.

        Args:
            rows: Number of rows that this rank sends.
            floats: Number of values per row.
            dtype: The wire dtype, one of `WIRE_DTYPES`.
            copies: Number of other ranks that receive each row.
        """
        sent = rows * copies * (8 + encoded_bytes(dtype, floats))
        coded = rows * floats * max(copies, 1.0) * self.codec_seconds.get(dtype, 0.0)
        return sent / self.bytes_per_second + coded

    def choose(self, floats: float, copies: float = 1.0) -> str:
        """Returns the wire dtype with the best trade-off of exactness and time.

        A less exact dtype of `CHOICES` is returned only if it saves enough time.

        Args:
            floats: Number of values per row.
            copies: Number of other ranks that receive each row.
        """
        chosen = CHOICES[0]
        for dtype in CHOICES[1:]:
            taken, before = (self.seconds(1, floats, it, copies) for it in (dtype, chosen))
            if taken < min(_WORTH * before, before - _MIN_SECONDS_SAVED * floats):
                chosen = dtype
        return chosen

    def __str__(self) -> str:
        speed = f"{self.bytes_per_second / 1e6:,.0f} MB/s"
        return f"{speed} from each rank, {1e3 * self.latency:.2f} ms a message"


# Kinds of traffic. "control" is everything that is not data: counts, digests, states.
KINDS = ("keys", "rows", "gradients", "deferred", "dense", "control")
# A name, or a scalar tensor with its index, which may change from step to step.
OneKind: TypeAlias = "str | tf.Tensor"


@dataclasses.dataclass(frozen=True)
class Mixed:
    """The kinds of a message that contains more than one kind.

    Attributes:
        parts: Pairs of a kind and its number of bytes, an int64 scalar. For a gathered tensor,
            count all bytes. For an exchanged tensor, count the bytes for other ranks. The remaining
            bytes count as "control".
    """

    parts: "Sequence[tuple[OneKind, tf.Tensor]]"


Kind: TypeAlias = "OneKind | Mixed"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that this rank has sent, by kind.

    The counts are payload bytes, for Gloo's algorithms. MPI may use other algorithms.

    - sum: a ring sends 2 * (size - 1) / size of the tensor.
    - gather: a ring sends each rank's part to every other rank. In reality ranks forward the parts
      of other ranks. Here a part counts for the rank that has it, so only the total over
      ranks is exact if parts differ in size.
    - exchange: each part is sent directly to its rank.
    - broadcast: along a binomial tree, each rank sends to its children.
    - traffic of SOK (`count_sent`): rows count for the rank that requests them, so only the
      total over ranks is exact.

    The counts do not include headers of TCP and lower layers (about 5% on Ethernet), nor Horovod's
    coordination messages in every cycle (HOROVOD_CYCLE_TIME, see `init`). The latter were measured
    as 0.7 to 1.3 MB/s per rank, with two to four ranks.

    Attributes:
        bytes: Number of bytes by kind, see `KINDS`.
    """

    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """The total over all kinds."""
        return sum(self.bytes.values())


class CollectiveNames:
    """Generates names of collectives that are equal on all ranks.

    Collectives that run at the same time must have different names. In a graph, calls are numbered
    within the graph. Ranks may trace a function at different times, for example because their last
    batches differ, but they trace the same function and therefore get the same numbers.
    """

    _prefixes: ClassVar[collections.Counter[str]] = collections.Counter()

    def __init__(self, prefix: str):
        """Reserves a prefix. If it is used already, a number is appended.

        Note: all ranks must create their objects in the same order.

        Args:
            prefix: Purpose of the collectives.
        """
        number = CollectiveNames._prefixes[prefix]
        CollectiveNames._prefixes[prefix] += 1
        self._prefix = f"slipstream.{prefix}" + (f".{number}" if number else "")
        self._used: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, collective: str) -> str:
        """Returns a name for one call of a collective.

        Args:
            collective: Short name of the call, for example "gather".
        """
        name = f"{self._prefix}.{collective}"
        if tf.executing_eagerly():
            return name
        used = self._used.setdefault(tf.compat.v1.get_default_graph(), collections.Counter())
        number = used[collective]
        used[collective] += 1
        # "-" because TensorFlow also uses the name as a scope.
        return f"{name}-{number}" if number else name


class Communicator(Protocol):
    """The ranks of a job and their collectives.

    Example:

    >>> comm = slip.distributed.init()
    >>> comm.size
    1

    Attributes:
        rank: Rank of this process, from 0.
        size: Number of ranks.
        local_rank: Rank of this process among the ranks on its machine.
        link: Speed of messages between the ranks. None before `distributed.link_of` measures it.
    """

    rank: int
    size: int
    local_rank: int
    link: Link | None

    def sum(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """Sums a tensor of the same shape and dtype over all ranks.

        Args:
            tensor: Any shape.
            kind: Kind of traffic: a name in `KINDS`, its index as a tensor, or `Mixed`.
            name: Name of the collective, equal on all ranks. No two running collectives may have
                the same name.
        """

    def gather(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """Concatenates the tensors of all ranks, rank 0 first.

        Args:
            tensor: [n, ...]. n may differ between ranks and may be 0.
            kind: Kind of traffic, as in `sum`.
            name: Name of the collective, as in `sum`.
        """

    def exchange(
        self, tensor: Any, splits: Any, kind: Kind, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends each rank its part of a tensor (all-to-all).

        Args:
            tensor: [n, ...], the parts for rank 0, rank 1, ... in this order.
            splits: int32 [size], number of rows for each rank. The sum must be n.
            kind: Kind of traffic, as in `sum`.
            name: Name of the collective, as in `sum`.

        Returns:
            received: The parts from all ranks, rank 0 first.
            received_splits: int32 [size], number of rows from each rank.
        """

    def broadcast(self, tensor: Any, root: int, kind: Kind, name: str) -> tf.Tensor:
        """Returns the tensor of rank `root` on all ranks.

        Args:
            tensor: Any shape and dtype, equal on all ranks.
            root: The sending rank.
            kind: Kind of traffic, as in `sum`.
            name: Name of the collective, as in `sum`.
        """

    def traffic(self) -> Traffic:
        """Returns the bytes that this rank has sent."""

    def count_sent(self, nbytes: Any, kind: Kind, name: str) -> Any:
        """Counts bytes that other code sent for this rank; not a collective.

        Args:
            nbytes: int64 scalar.
            kind: Kind of traffic, as in `sum`.
            name: Name of the message, for errors.

        Returns:
            The operation in a graph.
        """

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which traffic is not counted.

        Use it for messages that are not part of training. Enter it eagerly, while no collective is
        running.
        """

    def start_timeline(self, path: str) -> None:
        """Starts to record collectives in a Horovod timeline file, on rank 0.

        Args:
            path: Path of the file. The environment variable HOROVOD_TIMELINE must be DYNAMIC before
                `init`.
        """

    def stop_timeline(self) -> None:
        """Stops the recording of `start_timeline`."""


class SingleProcess:
    """A communicator for one process; collectives return their input.

    Example:

    >>> comm = slip.distributed.SingleProcess()
    >>> (comm.rank, comm.size)
    (0, 1)
    """

    rank, size, local_rank = 0, 1, 0
    link: Link | None = None

    def sum(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """Returns the tensor."""
        indices_of(kind, name)
        return tf.convert_to_tensor(tensor)

    def gather(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """Returns the tensor."""
        indices_of(kind, name)
        return tf.convert_to_tensor(tensor)

    def exchange(
        self, tensor: Any, splits: Any, kind: Kind, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the tensor and the splits."""
        indices_of(kind, name)
        tensor, splits = tf.convert_to_tensor(tensor), tf.convert_to_tensor(splits)
        return tensor, tf.ensure_shape(splits, [1])

    def broadcast(self, tensor: Any, root: int, kind: Kind, name: str) -> tf.Tensor:
        """Returns the tensor."""
        indices_of(kind, name)
        require_integer("root", root, 0, 0, name)
        return tf.convert_to_tensor(tensor)

    def traffic(self) -> Traffic:
        """Returns zeros, because a single process sends no messages."""
        return Traffic(dict.fromkeys(KINDS, 0))

    def count_sent(self, nbytes: Any, kind: Kind, name: str) -> Any:
        """Does not count, because a single process sends no messages."""
        indices_of(kind, name)

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """Returns an empty context."""
        return contextlib.nullcontext()

    def start_timeline(self, path: str) -> None:
        """Does nothing; there are no collectives to record."""

    def stop_timeline(self) -> None:
        """Does nothing."""


def indices_of(kind: Kind, name: str) -> list[Any]:
    """Returns the indices of a kind in `KINDS`.

    For `Mixed`, these are the indices of its parts, followed by the index of "control".

    Args:
        kind: A name, an index as a tensor (returned unchanged), or `Mixed`.
        name: Name of the collective, for errors.

    Raises:
        ValueError: There is no such kind.
    """
    if isinstance(kind, Mixed):
        return [*(indices_of(part, name)[0] for part, _ in kind.parts), KINDS.index("control")]
    if not isinstance(kind, str):
        return [kind]
    require_choice("kind", kind, KINDS, name)
    return [KINDS.index(kind)]
