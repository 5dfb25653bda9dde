"""What ranks say to each other. The only file that imports Horovod.

In: tensors of one rank. Out: tensors of all. Every method is a collective: every rank must call it,
in the same order, with no rows if it has none, whether in eager code or in a `tf.function`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from slipstream_tf import launch
from slipstream_tf.distributed import watch
from slipstream_tf.errors import require_choice, require_integer, require_number

# What bytes are counted as. "control": counts, digests, states; everything that is not data.
KINDS = ("keys", "rows", "gradients", "deferred", "dense", "control")
# A name, or the scalar tensor of its index, which may change from step to step.
Kind: TypeAlias = "str | tf.Tensor"
_MISSING = (
    "This process was started as one rank of many ({variable} is set), but Horovod cannot be "
    "imported: {error}. Install it: make horovod, or python build_support/install_horovod.py."
)
# Of the job that `init` has joined: what is done once for a process is done.
_job: HorovodCommunicator | None = None


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
    - what SOK sends for this package (`count_sent`): rows count with the rank that asks for them,
      so that only the total over ranks is exact.

    Not in it: headers of TCP and below, about a twentieth on Ethernet, and what Horovod's ranks say
    to each other all the time, at every cycle (HOROVOD_CYCLE_TIME, 1 ms): 0.1 to 0.6 MB/s per rank
    where it was measured, with two to four ranks.

    Attributes:
        bytes: kind (see `KINDS`) -> bytes.
    """

    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.bytes.values())


class Communicator(Protocol):
    """The ranks of a job.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
        local_rank: of this process among those of its machine.
    """

    rank: int
    size: int
    local_rank: int

    def sum(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """Adds up a tensor of the same shape and dtype over all ranks.

        Args:
            tensor: any shape.
            kind: what its bytes are counted as: one of `KINDS`, or its index as a tensor.
            name: the same on all ranks and of no other collective under way.
        """
        ...

    def gather(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """Puts the ranks' tensors behind each other, rank 0 first.

        Args:
            tensor: [n, ...]; n may differ between ranks and be 0.
            kind: what its bytes are counted as.
            name: as for `sum`.
        """
        ...

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
        ...

    def broadcast(self, tensor: Any, root: int, kind: Kind, name: str) -> tf.Tensor:
        """Returns the tensor of rank `root`; the others' have its shape and dtype."""
        ...

    def traffic(self) -> Traffic:
        """Returns the bytes that this rank gave to the network."""
        ...

    def count_sent(self, nbytes: Any, kind: Kind, name: str) -> Any:
        """Counts bytes that others' code gave to the network for this rank; no collective.

        Args:
            nbytes: int64 scalar.
            kind: what they are counted as.
            name: of what was sent, for errors.

        Returns:
            The operation in a graph.
        """
        ...

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context whose bytes do not count, for what is not part of the training.

        It must be entered in eager code, and no collective may be under way.
        """
        ...


class SingleProcess:
    """A job of one rank: every collective returns its own tensor."""

    rank, size, local_rank = 0, 1, 0

    def sum(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """See `Communicator.sum`."""
        _index(kind, name)
        return tf.convert_to_tensor(tensor)

    def gather(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """See `Communicator.gather`."""
        _index(kind, name)
        return tf.convert_to_tensor(tensor)

    def exchange(
        self, tensor: Any, splits: Any, kind: Kind, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Communicator.exchange`."""
        _index(kind, name)
        tensor, splits = tf.convert_to_tensor(tensor), tf.convert_to_tensor(splits)
        return tensor, tf.ensure_shape(splits, [1])

    def broadcast(self, tensor: Any, root: int, kind: Kind, name: str) -> tf.Tensor:
        """See `Communicator.broadcast`."""
        _index(kind, name)
        require_integer("root", root, 0, 0, name)
        return tf.convert_to_tensor(tensor)

    def traffic(self) -> Traffic:
        """Returns zeros: nothing leaves the process."""
        return Traffic(dict.fromkeys(KINDS, 0))

    def count_sent(self, nbytes: Any, kind: Kind, name: str) -> Any:
        """See `Communicator.count_sent`; nothing leaves the process."""
        del nbytes
        _index(kind, name)

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """See `Communicator.uncounted`."""
        return contextlib.nullcontext()


class HorovodCommunicator:
    """The ranks of a Horovod job."""

    def __init__(self, horovod: Any):
        """Takes an initialised `horovod.tensorflow`."""
        self._hvd = horovod
        self.rank, self.size = int(horovod.rank()), int(horovod.size())
        self.local_rank = int(horovod.local_rank())
        with tf.device("CPU:0"):
            # int32 has no place on a GPU; int64 counts a lifetime of bytes.
            self._bytes = tf.Variable(tf.zeros([len(KINDS)], tf.int64), trainable=False)
            self._is_there = tf.Variable(True, trainable=False)

    def sum(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """See `Communicator.sum`."""
        tensor = self._never_constant(tensor)
        # Of a ring, whose every rank sends 2 * (size - 1) parts of 1 / size.
        nbytes = _nbytes(tensor) * 2 * (self.size - 1) // self.size
        with tf.control_dependencies([self._count(nbytes, kind, name)]):
            return self._hvd.allreduce(tensor, op=self._hvd.Sum, name=name)

    def gather(self, tensor: Any, kind: Kind, name: str) -> tf.Tensor:
        """See `Communicator.gather`."""
        tensor = self._never_constant(tensor)
        nbytes = _nbytes(tensor) * (self.size - 1)
        with tf.control_dependencies([self._count(nbytes, kind, name)]):
            return self._hvd.allgather(tensor, name=name)

    def exchange(
        self, tensor: Any, splits: Any, kind: Kind, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Communicator.exchange`."""
        tensor, splits = self._never_constant(tensor), tf.convert_to_tensor(splits)
        row = tf.cast(tf.reduce_prod(tf.shape(tensor)[1:]), tf.int64) * tensor.dtype.size
        others = tf.cast(tf.reduce_sum(splits) - splits[self.rank], tf.int64)
        with tf.control_dependencies([self._count(row * others, kind, name)]):
            received, received_splits = self._hvd.alltoall(tensor, splits=splits, name=name)
        return received, received_splits

    def broadcast(self, tensor: Any, root: int, kind: Kind, name: str) -> tf.Tensor:
        """See `Communicator.broadcast`."""
        tensor = self._never_constant(tensor)
        nbytes = _nbytes(tensor) * _ranks_below(self.rank, root, self.size)
        with tf.control_dependencies([self._count(nbytes, kind, name)]):
            return self._hvd.broadcast(tensor, root_rank=root, name=name)

    def traffic(self) -> Traffic:
        """Returns the bytes that this rank gave to the network."""
        counts = self._bytes.numpy()
        return Traffic({kind: int(count) for kind, count in zip(KINDS, counts, strict=True)})

    def count_sent(self, nbytes: Any, kind: Kind, name: str) -> Any:
        """See `Communicator.count_sent`."""
        return self._count(tf.cast(nbytes, tf.int64), kind, name)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """See `Communicator.uncounted`."""
        before = self._bytes.numpy()
        try:
            yield
        finally:
            self._bytes.assign(before)

    def _never_constant(self, tensor: Any) -> tf.Tensor:
        """Returns the tensor, of which TensorFlow can know no value before it runs a graph.

        Horovod's ops are not stateful: TensorFlow would run one of a constant (the size of a batch
        of known shape) once, while it optimises a graph on one rank, and then leave it out.
        """
        tensor = tf.convert_to_tensor(tensor)
        if tf.executing_eagerly():
            return tensor
        return tf.where(self._is_there, tensor, tf.zeros_like(tensor))

    def _count(self, nbytes: Any, kind: Kind, name: str) -> Any:
        with tf.device("CPU:0"):
            place = tf.reshape(tf.cast(_index(kind, name), tf.int64), [1])
            return self._bytes.scatter_add(tf.IndexedSlices(tf.reshape(nbytes, [1]), place))


def _index(kind: Kind, name: str) -> Any:
    if not isinstance(kind, str):
        return kind
    require_choice("kind", kind, KINDS, name)
    return KINDS.index(kind)


def _ranks_below(rank: int, root: int, size: int) -> int:
    """Returns to how many others a rank of Gloo's broadcast tree sends."""
    # In round i, whoever has the tensor, the 2 ** i first from the root, sends it 2 ** i further.
    place = (rank - root) % size
    return sum(place < 2**i and place + 2**i < size for i in range(size.bit_length()))


def _nbytes(tensor: tf.Tensor) -> tf.Tensor:
    return tf.size(tensor, tf.int64) * tensor.dtype.size


def init(timeout_seconds: float | None = 30.0) -> Communicator:
    """Joins the job that this process was started in: Horovod's, or one of this process alone.

    A process is a rank of a job if a launcher (horovodrun, mpirun) says so in its environment.
    Calling it again gives the same communicator.

    Sums are added up in the same order every time: Horovod's fusion, which depends on chance, is
    off unless the environment has HOROVOD_FUSION_THRESHOLD.

    A job that loses a rank ends. From then on the next collective of every other rank raises, and
    an error that nobody catches is reported as a `watch.PeerLostError` that names the lost rank and
    the address of its host. A rank is lost

    - at once, if its program fails, ends before the others, or is killed;
    - after the timeout and a tenth of it, or a second, if its host or a link is down;
    - after one and a half times the timeout and five seconds, if its process has stopped.

    A rank that does not end by itself, because it is not in a collective or catches the error, is
    ended when the timeout has passed once more.

    Args:
        timeout_seconds: at least 1. Gloo's own timeout is set to it as well, rounded up, unless the
            environment has HOROVOD_GLOO_TIMEOUT_SECONDS; by Gloo, ranks must also start within it
            of each other. None: Gloo's is left alone, and lost ranks are not named. Only the first
            call's counts.

    Returns:
        The communicator.

    Raises:
        ImportError: there is a job, but no Horovod.
        ValueError: `timeout_seconds` is out of range.
        ConnectionError: the ranks cannot connect to each other.
    """
    global _job
    if timeout_seconds is not None:
        require_number("timeout_seconds", timeout_seconds, 1, place="init")
    launched = launch.rank_variable()
    if launched is None:
        return SingleProcess()
    if _job is not None:
        return _job
    try:
        horovod: Any = importlib.import_module("horovod.tensorflow")
    except ImportError as error:
        raise ImportError(_MISSING.format(variable=launched, error=error)) from error
    if timeout_seconds is not None:
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(timeout_seconds)))
    # What Horovod finds waiting at one time it would add up as one tensor, in parts that depend on
    # what there is: the same job would end with other bits each time.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    horovod.init()
    if timeout_seconds is not None and horovod.size() > 1:
        from slipstream_tf.distributed.agreement import gather_json  # Which imports this module.

        # By a communicator of its own, whose bytes nobody counts.
        own = HorovodCommunicator(horovod)
        gather = functools.partial(gather_json, own, name="slipstream_watch")
        watch.start(horovod.rank(), horovod.size(), gather, timeout_seconds)
    _job = HorovodCommunicator(horovod)
    return _job
