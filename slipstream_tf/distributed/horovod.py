"""The ranks of a Horovod job. The only file that imports Horovod, but for its launcher's files.

In: the environment that a launcher has made. Out: the job's communicator, whose ranks watch each
other.

On Linux each rank also keeps to its own processors. Gloo's thread busy-waits for a connection's
lock until the next tick of the clock, 4 ms later, when it has taken the processor of the thread
that holds the lock. Threads of two ranks that share two processors preempt each other all the time.
Therefore Horovod's threads run as SCHED_BATCH and do not preempt others when they wake.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf._utils import agent, comm
from slipstream_tf._utils.agreement import gather_json
from slipstream_tf._utils.comm import Link
from slipstream_tf._utils.errors import require_number
from slipstream_tf.distributed import watch

_TASKS = "/proc/self/task"
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology"


def by_place(processors: Iterable[int], topology: str = _TOPOLOGY) -> list[int]:
    """Returns processors in an order in which those of a socket, and of a core, are neighbours.

    Args:
        processors: of the machine.
        topology: path of the folder that tells where a processor is, with "{}" for its number.
    """

    def place(processor: int) -> tuple[int, int, int]:
        told = []
        for name in ("physical_package_id", "core_id"):
            try:
                with open(os.path.join(topology.format(processor), name), encoding="ascii") as file:
                    told.append(int(file.read()))
            except (OSError, ValueError):
                return (0, processor, processor)
        return (told[0], told[1], processor)

    return sorted(processors, key=place)


def share_of(ordered: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """Returns the processors that a rank of a machine keeps to.

    Args:
        ordered: processors of the machine, from `by_place`.
        rank: of the machine's ranks, from 0.
        ranks: on the machine; all processors, where there are more ranks than these.
    """
    if ranks > len(ordered):
        return ordered
    return ordered[rank * len(ordered) // ranks : (rank + 1) * len(ordered) // ranks]


def keep_to_share(rank: int, ranks: int) -> Sequence[int] | None:
    """Keeps all threads of this process, and those to come, to its rank's processors.

    Not where somebody has chosen for it: a launcher that binds processes, `taskset`, or
    HOROVOD_THREAD_AFFINITY in the environment.

    Args:
        rank: of the machine's ranks, from 0.
        ranks: on the machine.

    Returns:
        The processors; None: nothing has changed.
    """
    if ranks == 1 or not os.path.isdir(_TASKS) or "HOROVOD_THREAD_AFFINITY" in os.environ:
        return None
    processors = os.sched_getaffinity(0)
    own = share_of(by_place(processors), rank, ranks)
    if len(processors) < (os.cpu_count() or 1) or len(own) == len(processors):
        return None
    for thread in threads():
        # One that has just ended.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, own)
    return own


def threads() -> set[int]:
    """Returns the numbers of this process's threads; none where Linux is not."""
    if not os.path.isdir(_TASKS):
        return set()
    return {int(name) for name in os.listdir(_TASKS)}


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Has threads that begin within it interrupt none of the others when they wake."""
    before = threads()
    yield
    for thread in threads() - before:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


_MISSING = (
    "This process was started as one rank of many ({variable} is set), but Horovod cannot be "
    "imported: {error}. Install it: make horovod, or python build_support/install_horovod.py."
)
# How often Horovod looks for work. Exchanges in a row wait for a cycle each: with sharded
# rows three, a fifth of a step of 5 ms at .5 ms. On a network, where that is less of a step, ranks
# that have nothing to say talk five times as much at .1 ms.
_CYCLE_MS, _CYCLE_MS_OF_HOSTS = "0.1", "0.5"
# Ranks know a collective by its node's name. Before it TensorFlow puts the scopes of loops and
# conditions, numbered by what else a graph has.
_AS_NAMED = {"ignore_name_scope": True}
# Of the job that `init` has joined: what is done once for a process is done.
_job: HorovodCommunicator | None = None


class HorovodCommunicator:
    """The ranks of a Horovod job."""

    def __init__(self, horovod: Any, link: Link | None = None):
        """Takes an initialised `horovod.tensorflow`, and its link if that is known."""
        self._hvd, self.link = horovod, link
        self.rank, self.size = int(horovod.rank()), int(horovod.size())
        self.local_rank = int(horovod.local_rank())
        with tf.device("CPU:0"):
            # int32 has no place on a GPU; int64 counts a lifetime of bytes.
            self._bytes = tf.Variable(tf.zeros([len(comm.KINDS)], tf.int64), trainable=False)
            self._zero = tf.Variable(0, trainable=False)

    def sum(self, tensor: Any, kind: comm.Kind, name: str) -> tf.Tensor:
        """See `Communicator.sum`."""
        tensor = self._never_constant(tensor)
        # Of a ring, whose every rank sends 2 * (size - 1) parts of 1 / size.
        nbytes = _nbytes(tensor) * 2 * (self.size - 1) // self.size
        with tf.control_dependencies([self._count(nbytes, kind, name)]):
            return self._hvd.allreduce(tensor, op=self._hvd.Sum, name=name, **_AS_NAMED)

    def gather(self, tensor: Any, kind: comm.Kind, name: str) -> tf.Tensor:
        """See `Communicator.gather`."""
        tensor = self._never_constant(tensor)
        with tf.control_dependencies([self._count(_nbytes(tensor), kind, name, self.size - 1)]):
            return self._hvd.allgather(tensor, name=name, **_AS_NAMED)

    def exchange(
        self, tensor: Any, splits: Any, kind: comm.Kind, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Communicator.exchange`."""
        tensor, splits = self._never_constant(tensor), tf.convert_to_tensor(splits)
        row = tf.cast(tf.reduce_prod(tf.shape(tensor)[1:]), tf.int64) * tensor.dtype.size
        others = tf.cast(tf.reduce_sum(splits) - splits[self.rank], tf.int64)
        with tf.control_dependencies([self._count(row * others, kind, name)]):
            return self._hvd.alltoall(tensor, splits=splits, name=name, **_AS_NAMED)

    def broadcast(self, tensor: Any, root: int, kind: comm.Kind, name: str) -> tf.Tensor:
        """See `Communicator.broadcast`."""
        tensor = self._never_constant(tensor)
        nbytes = _nbytes(tensor) * _ranks_below(self.rank, root, self.size)
        with tf.control_dependencies([self._count(nbytes, kind, name)]):
            return self._hvd.broadcast(tensor, root_rank=root, name=name, **_AS_NAMED)

    def traffic(self) -> comm.Traffic:
        """Returns the bytes that this rank gave to the network."""
        counts = self._bytes.numpy()
        return comm.Traffic(dict(zip(comm.KINDS, map(int, counts), strict=True)))

    def count_sent(self, nbytes: Any, kind: comm.Kind, name: str) -> Any:
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

    def start_timeline(self, path: str) -> None:
        """See `Communicator.start_timeline`."""
        self._hvd.start_timeline(path)

    def stop_timeline(self) -> None:
        """See `Communicator.stop_timeline`."""
        self._hvd.stop_timeline()

    def _never_constant(self, tensor: Any) -> tf.Tensor:
        """Returns the tensor, uncopied; TensorFlow cannot know its value before it runs a graph.

        Horovod's ops are not stateful: TensorFlow would run one of a constant (the size of a batch
        of known shape) once, while it optimises a graph on one rank, and then leave it out. It does
        so behind an identity and a placeholder's default, but not behind a variable.
        """
        tensor = tf.convert_to_tensor(tensor)
        if tf.executing_eagerly():
            return tensor
        # Into its own shape, whose rank depends on the variable: a scalar's would be known.
        passed = tf.reshape(tensor, tf.shape(tensor)[self._zero.read_value() :])
        passed.set_shape(tensor.shape)
        return passed

    def _count(self, nbytes: Any, kind: comm.Kind, name: str, times: int = 1) -> Any:
        """Counts bytes of a kind, or of several, that are sent so many times."""
        counts = [nbytes]
        if isinstance(kind, comm.Mixed):
            parts = [part for _, part in kind.parts]
            counts = [*parts, nbytes - tf.add_n(parts)]
        with tf.device("CPU:0"):
            indices = tf.stack([tf.cast(i, tf.int64) for i in comm.indices_of(kind, name)])
            return self._bytes.scatter_add(tf.IndexedSlices(tf.stack(counts) * times, indices))


def _ranks_below(rank: int, root: int, size: int) -> int:
    """Returns to how many others a rank of Gloo's broadcast tree sends."""
    # In round i, whoever has the tensor, the 2 ** i first from the root, sends it 2 ** i further.
    distance = (rank - root) % size
    return sum(distance < 2**i and distance + 2**i < size for i in range(size.bit_length()))


def _nbytes(tensor: tf.Tensor) -> tf.Tensor:
    return tf.size(tensor, tf.int64) * tensor.dtype.size


def init(timeout_seconds: float | None = 30.0, link: Link | None = None) -> comm.Communicator:
    """Joins the job that this process was started in: Horovod's, or one of this process alone.

    A process is a rank of a job if a launcher (horovodrun, mpirun) says so in its environment.
    Calling it again gives the same communicator.

    Sums are added up in the same order every time: Horovod's fusion, which depends on chance, is
    off unless the environment has HOROVOD_FUSION_THRESHOLD. Horovod looks for work every tenth of a
    millisecond, in jobs of several hosts every half (HOROVOD_CYCLE_TIME). Ranks of Open MPI that
    wait give way (OMPI_MCA_mpi_yield_when_idle). Ranks of one machine share out its processors,
    where nobody has bound them (see `keep_to_share`): call it before TensorFlow has run
    anything, so that each takes as many threads as it has processors.

    A job that loses a rank ends. From then on the next collective of every other rank raises, and
    an error that nobody catches is reported as a `watch.PeerLostError` that names the lost rank and
    the address of its host. A rank is lost

    - at once, if its program fails, ends before the others, or is killed;
    - after the timeout and a tenth of it, or a second, if its host or a link is down;
    - after one and a half times the timeout and five seconds, if its process has stopped.

    A rank that does not end by itself, because it is not in a collective or catches the error, is
    ended when the timeout has passed once more.

    Ranks that come and go (see `agent`) are not watched: they are started again.

    Args:
        timeout_seconds: at least 1. Gloo's own timeout is set to it as well, rounded up, unless the
            environment has HOROVOD_GLOO_TIMEOUT_SECONDS; by Gloo, ranks must also start within it
            of each other. None: Gloo's is left alone, and lost ranks are not named. Only the first
            call's counts.
        link: what messages take, for `wire_dtype="auto"` and the estimates of a dry run; None: it
            is measured, in about two seconds, when it is first asked for. Only the first call's
            counts.

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
    launched = agent.rank_variable()
    if launched is None:
        return comm.SingleProcess()
    if _job is not None:
        return _job
    try:
        horovod: Any = importlib.import_module("horovod.tensorflow")
    except ImportError as error:
        raise ImportError(_MISSING.format(variable=launched, error=error)) from error
    if timeout_seconds is not None:
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(timeout_seconds)))
    cycle = _CYCLE_MS if agent.is_on_one_host() else _CYCLE_MS_OF_HOSTS
    os.environ.setdefault("HOROVOD_CYCLE_TIME", cycle)
    # What Horovod finds waiting at one time it would add up as one tensor, in parts that depend on
    # what there is: the same job would end with other bits each time.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    # Open MPI's ranks look for messages without a pause: what waits takes a processor from what
    # computes.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    with giving_way():
        horovod.init()
    keep_to_share(horovod.local_rank(), horovod.local_size())
    is_watched = not agent.is_started_by_agent()
    if timeout_seconds is not None and horovod.size() > 1 and is_watched:
        # By a communicator of its own, whose bytes nobody counts.
        own = HorovodCommunicator(horovod)
        gather = functools.partial(gather_json, own, name="slipstream_watch")
        watch.start(horovod.rank(), horovod.size(), gather, timeout_seconds)
    _job = HorovodCommunicator(horovod, link)
    return _job
