"""The collectives of a job's ranks as an interface, and their form in a single process.

In: tensors of one rank. Out: tensors of all. Every method is a collective: every rank must call it,
in the same order, with no rows if it has none, whether in eager code or in a `tf.function`.
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

# What the values of rows may become between ranks; the ops take their numbers. An int8 is a
# multiple of a 127th of its row's largest magnitude, which goes with the row as a float.
_VALUE_BYTES = dict(zip(WIRE_DTYPES, (4, 2, 2, 1), strict=True))
# What "auto" chooses among, the most exact first. A float16 takes as long as a bfloat16.
CHOICES = ("float32", "bfloat16", "int8")
# A dtype that rounds more is to take at most this part of what the one before it takes, and so many
# seconds less for each value: a training step spends some ten times as much on it.
_WORTH, _LEAST_SAVED = 0.8, 1e-9


def encoded_bytes(dtype: str, floats: float) -> float:
    """Returns the bytes of a row of so many values, 0 of none, in a dtype of `WIRE_DTYPES`."""
    scale = 4 if dtype == "int8" and floats else 0
    return floats * _VALUE_BYTES[dtype] + scale


def copies_of(ranks: int, is_spread: bool) -> float:
    """Returns how many others each row of a rank goes to, on average.

    Args:
        ranks: of the job.
        is_spread: whether each row has one owner; else all ranks have all rows.
    """
    return (ranks - 1) / ranks if is_spread else ranks - 1


@dataclasses.dataclass(frozen=True)
class Link:
    """What a message between ranks takes.

    Attributes:
        bytes_per_second: that a rank sends, while all do.
        latency: seconds of a message with next to nothing in it.
        codec_seconds: dtype -> seconds, for a value, of putting it into a message and taking it
            out.
    """

    bytes_per_second: float
    latency: float = 0.0
    codec_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        require_number("bytes_per_second", self.bytes_per_second, 1.0, place="Link")
        require_number("latency", self.latency, 0.0, place="Link")

    def seconds(self, rows: float, floats: float, dtype: str, copies: float = 1.0) -> float:
        """Returns what rows and their keys take in one message, without its latency.

        Args:
            rows: of this rank.
            floats: values of a row.
            dtype: of the values, one of `WIRE_DTYPES`.
            copies: how many others each row goes to.
        """
        sent = rows * copies * (8 + encoded_bytes(dtype, floats))
        coded = rows * floats * max(copies, 1.0) * self.codec_seconds.get(dtype, 0.0)
        return sent / self.bytes_per_second + coded

    def choose(self, floats: float, copies: float = 1.0) -> str:
        """Returns the most exact of `CHOICES` beside which none that rounds more is worth it.

        Args:
            floats: values of a row.
            copies: see `seconds`.
        """
        chosen = CHOICES[0]
        for dtype in CHOICES[1:]:
            taken, before = (self.seconds(1, floats, it, copies) for it in (dtype, chosen))
            if taken < min(_WORTH * before, before - _LEAST_SAVED * floats):
                chosen = dtype
        return chosen

    def __str__(self) -> str:
        speed = f"{self.bytes_per_second / 1e6:,.0f} MB/s"
        return f"{speed} from each rank, {1e3 * self.latency:.2f} ms a message"


# What bytes are counted as. "control": counts, digests, states; everything that is not data.
KINDS = ("keys", "rows", "gradients", "deferred", "dense", "control")
# A name, or the scalar tensor of its index, which may change from step to step.
OneKind: TypeAlias = "str | tf.Tensor"


@dataclasses.dataclass(frozen=True)
class Mixed:
    """The kinds of a message that has several.

    Attributes:
        parts: kinds, and as int64 scalars the bytes that are of them: of a tensor that is gathered,
            all of it; of one that is exchanged, what is meant for others. All other bytes are
            "control".
    """

    parts: "Sequence[tuple[OneKind, tf.Tensor]]"


Kind: TypeAlias = "OneKind | Mixed"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that this rank gave to the network since the start, by kind.

    Counted as payload, as Gloo sends it; MPI may choose other ways:

    - sum: around a ring, 2 * (size - 1) / size of the tensor;
    - gather: around a ring, what each rank has to every other. A rank passes on what others have;
      here it counts with the rank that has it, so that only the total over ranks is exact where
      ranks have different numbers of rows;
    - exchange: what is meant for others, straight to them;
    - broadcast: down a binomial tree, each rank to those below it;
    - what SOK sends for this package (`count_sent`): rows count with the rank that requests them,
      so that only the total over ranks is exact.

    Not in it: headers of TCP and below, about a twentieth on Ethernet, and what Horovod's ranks say
    to each other all the time, at every cycle (HOROVOD_CYCLE_TIME, see `init`): 0.7 to 1.3 MB/s per
    rank where it was measured, with two to four ranks.

    Attributes:
        bytes: kind (see `KINDS`) -> bytes.
    """

    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.bytes.values())


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


class Communicator(Protocol):
    """The ranks of a job.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
        local_rank: of this process among those of its machine.
        link: what messages take; None: not measured yet (see `distributed.link_of`).
    """

    rank: int
    size: int
    local_rank: int
    link: Link | None

    def sum(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """Adds up a tensor of the same shape and dtype over all ranks.

        Args:
            tensor: any shape.
            kind: what its bytes are counted as: one of `KINDS`, its index as a tensor, or several.
            name: the same on all ranks and of no other collective under way.
        """

    def gather(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """Puts the ranks' tensors behind each other, rank 0 first.

        Args:
            tensor: [n, ...]; n may differ between ranks and be 0.
            kind: what its bytes are counted as.
            name: as for `sum`.
        """

    def exchange(
        self, tensor: Any, splits: Any, kind: Kind, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends each rank its part of a tensor.

        Args:
            tensor: [n, ...]: first what is for rank 0, then for rank 1, ...
            splits: int32 [size], rows for each rank; they add up to n.
            kind: what its bytes are counted as.
            name: as for `sum`.

        Returns:
            What the ranks sent to this one, rank 0 first, and int32 [size], rows from each.
        """

    def broadcast(self, tensor: Any, root: int, kind: Kind, name: str) -> tf.Tensor:
        """Returns the tensor of rank `root`; the others' have its shape and dtype."""

    def traffic(self) -> Traffic:
        """Returns the bytes that this rank gave to the network."""

    def count_sent(self, nbytes: Any, kind: Kind, name: str) -> Any:
        """Counts bytes that others' code gave to the network for this rank; no collective.

        Args:
            nbytes: int64 scalar.
            kind: what they are counted as.
            name: of what was sent, for errors.

        Returns:
            The operation in a graph.
        """

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context whose bytes do not count, for what is not part of the training.

        It must be entered in eager code, and no collective may be under way.
        """

    def start_timeline(self, path: str) -> None:
        """Has every collective noted, on rank 0, in a file as Horovod's timeline has it.

        Args:
            path: of the file. The environment must have HOROVOD_TIMELINE=DYNAMIC since before
                `init`.
        """

    def stop_timeline(self) -> None:
        """Ends what `start_timeline` began."""


class SingleProcess:
    """A job of one rank: every collective returns its own tensor."""

    rank, size, local_rank = 0, 1, 0
    link: Link | None = None

    def sum(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """See `Communicator.sum`."""
        indices_of(kind, name)
        return tf.convert_to_tensor(tensor)

    def gather(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """See `Communicator.gather`."""
        indices_of(kind, name)
        return tf.convert_to_tensor(tensor)

    def exchange(
        self, tensor: Any, splits: Any, kind: Kind, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Communicator.exchange`."""
        indices_of(kind, name)
        tensor, splits = tf.convert_to_tensor(tensor), tf.convert_to_tensor(splits)
        return tensor, tf.ensure_shape(splits, [1])

    def broadcast(self, tensor: Any, root: int, kind: Kind, name: str) -> tf.Tensor:
        """See `Communicator.broadcast`."""
        indices_of(kind, name)
        require_integer("root", root, 0, 0, name)
        return tf.convert_to_tensor(tensor)

    def traffic(self) -> Traffic:
        """Returns zeros: nothing leaves the process."""
        return Traffic(dict.fromkeys(KINDS, 0))

    def count_sent(self, nbytes: Any, kind: Kind, name: str) -> Any:
        """See `Communicator.count_sent`; nothing leaves the process."""
        indices_of(kind, name)

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """See `Communicator.uncounted`."""
        return contextlib.nullcontext()

    def start_timeline(self, path: str) -> None:
        """See `Communicator.start_timeline`; there is nothing to note."""

    def stop_timeline(self) -> None:
        """See `Communicator.stop_timeline`."""


def indices_of(kind: Kind, name: str) -> list[Any]:
    """Returns a kind's number in `KINDS`, where it has parts behind those of theirs.

    Args:
        kind: whose number; that of a tensor is the tensor.
        name: of the collective, for errors.

    Raises:
        ValueError: there is no such kind.
    """
    if isinstance(kind, Mixed):
        return [*(indices_of(part, name)[0] for part, _ in kind.parts), KINDS.index("control")]
    if not isinstance(kind, str):
        return [kind]
    require_choice("kind", kind, KINDS, name)
    return [KINDS.index(kind)]
