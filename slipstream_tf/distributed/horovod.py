"""The Horovod communicator, and the setup of a rank's process.

Only this module imports the Horovod library. `_utils.agent` imports Horovod's launcher.

On Linux, each rank is bound to its part of the host's processors, and Horovod's threads run as
SCHED_BATCH, which does not preempt other threads on wake-up. Both prevent a stall in Gloo, which
guards each connection with a lock. If Gloo's thread preempts the thread that holds the lock, it
busy-waits until the next clock tick, up to 4 ms later. This happens often if threads of different
ranks share processors.
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
    """Returns processors sorted by socket and core.

    Args:
        processors: The numbers of the processors.
        topology: The path of a processor's topology folder, with "{}" for its number.
    """

    def place(processor: int) -> tuple[int, int, int]:
        ids = []
        for name in ("physical_package_id", "core_id"):
            try:
                with open(os.path.join(topology.format(processor), name), encoding="ascii") as file:
                    ids.append(int(file.read()))
            except (OSError, ValueError):
                return (0, processor, processor)
        return (ids[0], ids[1], processor)

    return sorted(processors, key=place)


def part_of(ordered: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """Returns the processors that a rank is bound to.

    Args:
        ordered: The processors of the host, from `by_place`.
        rank: The local rank on the host, from 0.
        ranks: The number of ranks on the host. If it exceeds the number of processors, each rank
            gets all processors.
    """
    if ranks > len(ordered):
        return ordered
    return ordered[rank * len(ordered) // ranks : (rank + 1) * len(ordered) // ranks]


def keep_to_part(rank: int, ranks: int) -> Sequence[int] | None:
    """Binds all threads of this process to the processors of its rank.

    New threads inherit the binding. It is changed only on Linux and with multiple ranks on the
    host, and not if a launcher, `taskset` or the environment variable HOROVOD_THREAD_AFFINITY has
    already set one.

    Args:
        rank: The local rank on the host, from 0.
        ranks: The number of ranks on the host.

    Returns:
        The processors, or None if the binding has not changed.
    """
    if ranks == 1 or not os.path.isdir(_TASKS) or "HOROVOD_THREAD_AFFINITY" in os.environ:
        return None
    processors = os.sched_getaffinity(0)
    own = part_of(by_place(processors), rank, ranks)
    if len(processors) < (os.cpu_count() or 1) or len(own) == len(processors):
        return None
    for thread in threads():
        # The thread can end before the call.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, own)
    return own


def threads() -> set[int]:
    """Returns the ids of this process's threads on Linux, else none."""
    if not os.path.isdir(_TASKS):
        return set()
    return {int(name) for name in os.listdir(_TASKS)}


@contextlib.contextmanager
def background_priority() -> Iterator[None]:
    """Returns a context in which new threads do not preempt other threads.

    When the context ends, the new threads are set to SCHED_BATCH. See the top of this module.
    """
    before = threads()
    yield
    for thread in threads() - before:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


_MISSING = (
    "A launcher started this process as a rank ({variable} is set), but Horovod cannot be "
    "imported: {error}. Run 'make horovod' or 'python build_support/install_horovod.py' to install "
    "Horovod."
)
# Horovod's cycle time. Collectives start only at the end of a cycle. Sharded rows need three
# dependent collectives per step: with cycles of 0.5 ms they wait up to 1.5 ms, and a step can be as
# short as 5 ms. Across hosts the wait is a smaller part of a step, and a cycle of 0.1 ms would make
# idle ranks send five times as many control messages.
_CYCLE_MS, _CYCLE_MS_OF_HOSTS = "0.1", "0.5"
# Horovod matches collectives by name. TensorFlow adds the scopes of loops and conditions to the
# name, and their numbers can differ between ranks.
_AS_NAMED = {"ignore_name_scope": True}
# The communicator of the job that `init` has joined. A process can join only once.
_job: HorovodCommunicator | None = None


class HorovodCommunicator:
    """The communicator of a Horovod job; see `Communicator`."""

    def __init__(self, horovod: Any, link: Link | None = None):
        """Creates a communicator.

        Args:
            horovod: The initialized module `horovod.tensorflow`.
            link: The speed of the network, or None if unknown.
        """
        self._hvd, self.link = horovod, link
        self.rank, self.size = int(horovod.rank()), int(horovod.size())
        self.local_rank = int(horovod.local_rank())
        with tf.device("CPU:0"):
            # The counter is int64, because TensorFlow does not place int32 variables on a GPU and
            # because byte counts exceed 32 bits.
            self._bytes = tf.Variable(tf.zeros([len(comm.KINDS)], tf.int64), trainable=False)
            self._zero = tf.Variable(0, trainable=False)

    @tf.autograph.experimental.do_not_convert
    def sum(self, tensor: Any, kind: comm.Kind, name: str) -> tf.Tensor:
        """Sums a tensor over the ranks."""
        tensor = self._never_constant(tensor)
        # In a ring, each rank sends 2 * (size - 1) parts of 1 / size of the tensor.
        nbytes = _nbytes(tensor) * 2 * (self.size - 1) // self.size
        with tf.control_dependencies([self._count(nbytes, kind, name)]):
            return self._hvd.allreduce(tensor, op=self._hvd.Sum, name=name, **_AS_NAMED)

    @tf.autograph.experimental.do_not_convert
    def gather(self, tensor: Any, kind: comm.Kind, name: str) -> tf.Tensor:
        """Concatenates the tensors of all ranks, rank 0 first."""
        tensor = self._never_constant(tensor)
        with tf.control_dependencies([self._count(_nbytes(tensor), kind, name, self.size - 1)]):
            return self._hvd.allgather(tensor, name=name, **_AS_NAMED)

    @tf.autograph.experimental.do_not_convert
    def exchange(
        self, tensor: Any, splits: Any, kind: comm.Kind, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends each rank its part of a tensor."""
        tensor, splits = self._never_constant(tensor), tf.convert_to_tensor(splits)
        row = tf.cast(tf.reduce_prod(tf.shape(tensor)[1:]), tf.int64) * tensor.dtype.size
        others = tf.cast(tf.reduce_sum(splits) - splits[self.rank], tf.int64)
        with tf.control_dependencies([self._count(row * others, kind, name)]):
            return self._hvd.alltoall(tensor, splits=splits, name=name, **_AS_NAMED)

    @tf.autograph.experimental.do_not_convert
    def broadcast(self, tensor: Any, root: int, kind: comm.Kind, name: str) -> tf.Tensor:
        """Returns the tensor of rank `root`."""
        tensor = self._never_constant(tensor)
        nbytes = _nbytes(tensor) * _ranks_below(self.rank, root, self.size)
        with tf.control_dependencies([self._count(nbytes, kind, name)]):
            return self._hvd.broadcast(tensor, root_rank=root, name=name, **_AS_NAMED)

    def traffic(self) -> comm.Traffic:
        """Returns the bytes that this rank has sent."""
        counts = self._bytes.numpy()
        return comm.Traffic(dict(zip(comm.KINDS, map(int, counts), strict=True)))

    def count_sent(self, nbytes: Any, kind: comm.Kind, name: str) -> Any:
        """Counts bytes that another library sent for this rank."""
        return self._count(tf.cast(nbytes, tf.int64), kind, name)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Returns a context that excludes its bytes from the traffic."""
        before = self._bytes.numpy()
        try:
            yield
        finally:
            self._bytes.assign(before)

    def start_timeline(self, path: str) -> None:
        """Starts Horovod's timeline."""
        self._hvd.start_timeline(path)

    def stop_timeline(self) -> None:
        """Stops Horovod's timeline."""
        self._hvd.stop_timeline()

    def _never_constant(self, tensor: Any) -> tf.Tensor:
        """Returns the tensor such that TensorFlow cannot fold it into a constant.

        Horovod's ops are not stateful. TensorFlow would run a collective of a constant (for
        example, the size of a batch of known shape) once during graph optimization on one rank, and
        then remove it from the graph. An identity or a placeholder with a default value does not
        prevent that. A dependency on a variable does. No data is copied.
        """
        tensor = tf.convert_to_tensor(tensor)
        if tf.executing_eagerly():
            return tensor
        # Reshape to the same shape. The rank of the shape tensor depends on the variable, so that
        # the value of a scalar is not known statically either.
        passed = tf.reshape(tensor, tf.shape(tensor)[self._zero.read_value() :])
        passed.set_shape(tensor.shape)
        return passed

    def _count(self, nbytes: Any, kind: comm.Kind, name: str, times: int = 1) -> Any:
        """Adds bytes to the traffic of one or multiple kinds.

        Args:
            nbytes: The number of bytes, int64. The rest that a `Mixed` does not name is "control".
            kind: See `Communicator.sum`.
            name: See `Communicator.sum`.
            times: How often this rank sends the bytes.
        """
        counts = [nbytes]
        if isinstance(kind, comm.Mixed):
            parts = [part for _, part in kind.parts]
            counts = [*parts, nbytes - tf.add_n(parts)]
        with tf.device("CPU:0"):
            indices = tf.stack([tf.cast(i, tf.int64) for i in comm.indices_of(kind, name)])
            return self._bytes.scatter_add(tf.IndexedSlices(tf.stack(counts) * times, indices))


def _ranks_below(rank: int, root: int, size: int) -> int:
    """Returns how many ranks a rank forwards to in a broadcast.

    Gloo's broadcast uses a binomial tree.
    """
    # In round i, the 2 ** i ranks that have the tensor (the first ones from the root) send it to
    # the ranks at distance 2 ** i.
    distance = (rank - root) % size
    return sum(distance < 2**i and distance + 2**i < size for i in range(size.bit_length()))


def _nbytes(tensor: tf.Tensor) -> tf.Tensor:
    return tf.size(tensor, tf.int64) * tensor.dtype.size


def init(timeout_seconds: float | None = 30.0, link: Link | None = None) -> comm.Communicator:
    """Joins the Horovod job of this process, or returns a single-process job.

    A process is a rank of a job if a launcher (horovodrun, mpirun) has set its environment
    variables. In a job, further calls return the same communicator. Call it before TensorFlow runs
    any operation, because it binds the process to processors and TensorFlow sizes its thread pools
    by them.

    It changes these defaults, unless the environment sets them:

    - HOROVOD_FUSION_THRESHOLD: 0. Tensor fusion depends on timing, and sums would differ from run
      to run.
    - HOROVOD_CYCLE_TIME: 0.1 ms on a single host, 0.5 ms on multiple hosts.
    - OMPI_MCA_mpi_yield_when_idle: 1, so that waiting Open MPI ranks yield their processor.
    - The processors of a host are divided among its ranks (see `keep_to_part`).

    A job ends when it loses a rank. The next collective of every other rank then raises an error.
    If the program does not catch it, the reported error is a `watch.PeerLostError` with the lost
    rank and the address of its host. The loss of a rank is detected

    - immediately, if its program fails, exits early or is killed.
    - after 1.1 times the timeout, or one second after the timeout if that is later, if its host or
      the network fails.
    - after 1.5 times the timeout and five seconds, if its process is stopped.

    A rank that does not end by itself, because it is not in a collective or catches the error, is
    terminated after one more timeout.

    Ranks that `slipstream-elastic` started are not watched, because it restarts them.

    Example:

    >>> comm = slip.distributed.init()
    >>> comm.rank, comm.size
    (0, 1)

    Args:
        timeout_seconds: The time without a response after which a rank counts as lost, at least 1.
            It is also used as Gloo's timeout, rounded up, unless HOROVOD_GLOO_TIMEOUT_SECONDS is
            set. With Gloo, all ranks must start within it. None keeps Gloo's timeout and does not
            watch ranks. Only the first call's value is used.
        link: The speed of the network, for `wire_dtype="auto"` and the estimates of a dry run. None
            measures it when it is first needed, in about two seconds. Only the first call's value
            is used. It is ignored in a single process.

    Returns:
        The communicator.

    Raises:
        ImportError: If a launcher started this process but Horovod is not installed.
        ValueError: If `timeout_seconds` is out of range.
        ConnectionError: If the ranks cannot connect to each other.
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
    # Fusion sums all waiting tensors as one, in parts that depend on timing. Results would not be
    # reproducible bit for bit.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    # Waiting Open MPI ranks poll without a pause, which takes processors from computing ranks.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    with background_priority():
        horovod.init()
    keep_to_part(horovod.local_rank(), horovod.local_size())
    is_watched = not agent.is_started_by_agent()
    if timeout_seconds is not None and horovod.size() > 1 and is_watched:
        # Use a separate communicator, so that these bytes do not count as traffic.
        own = HorovodCommunicator(horovod)
        gather = functools.partial(gather_json, own, name="slipstream_watch")
        watch.start(horovod.rank(), horovod.size(), gather, timeout_seconds)
    _job = HorovodCommunicator(horovod, link)
    return _job
