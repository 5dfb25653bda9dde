"""What ranks say to each other. The only file that imports Horovod.

In: tensors of one rank. Out: tensors of all. Every method is a collective: every rank must call it,
in the same order, with no rows if it has none, whether in eager code or in a `tf.function`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from slipstream_tf.errors import require_choice, require_integer

# What bytes are counted as. "control": counts, digests, states; everything that is not data.
KINDS = ("keys", "rows", "gradients", "deferred", "dense", "control")
# A name, or the scalar tensor of its index, which may change from step to step.
Kind: TypeAlias = "str | tf.Tensor"
# Set by horovodrun (Gloo) and by Open MPI, MPICH or Slurm launchers.
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_MISSING = (
    "This process was started as one rank of many ({variable} is set), but Horovod cannot be "
    "imported: {error}. Install it: make horovod, or python build_support/install_horovod.py."
)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that this rank gave to the network since the start, by kind.

    Counted as payload: a gathered tensor goes to every other rank once, a sum around the ring takes
    2 * (size - 1) / size of the tensor, an exchange what is meant for others. Headers are not in.

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
        nbytes = _nbytes(tensor) * (self.size - 1 if self.rank == root else 0)
        with tf.control_dependencies([self._count(nbytes, kind, name)]):
            return self._hvd.broadcast(tensor, root_rank=root, name=name)

    def traffic(self) -> Traffic:
        """Returns the bytes that this rank gave to the network."""
        counts = self._bytes.numpy()
        return Traffic({kind: int(count) for kind, count in zip(KINDS, counts, strict=True)})

    def _never_constant(self, tensor: Any) -> tf.Tensor:
        """Returns the tensor, of which TensorFlow can know no value before it runs a graph.

        Horovod's ops are not stateful: TensorFlow would run one of a constant (the size of a batch
        of known shape) once, while it optimises a graph on one rank, and then leave it out.
        """
        tensor = tf.convert_to_tensor(tensor)
        if tf.executing_eagerly():
            return tensor
        return tf.where(self._is_there, tensor, tf.zeros_like(tensor))

    def _count(self, nbytes: Any, kind: str, name: str) -> Any:
        with tf.device("CPU:0"):
            place = tf.reshape(tf.cast(_index(kind, name), tf.int64), [1])
            return self._bytes.scatter_add(tf.IndexedSlices(tf.reshape(nbytes, [1]), place))


def _index(kind: Kind, name: str) -> Any:
    if not isinstance(kind, str):
        return kind
    require_choice("kind", kind, KINDS, name)
    return KINDS.index(kind)


def _nbytes(tensor: tf.Tensor) -> tf.Tensor:
    return tf.size(tensor, tf.int64) * tensor.dtype.size


def init() -> Communicator:
    """Joins the job that this process was started in: Horovod's, or one of this process alone.

    A process is a rank of a job if a launcher (horovodrun, mpirun) says so in its environment.
    Calling it again gives a communicator for the same job.

    Returns:
        The communicator.

    Raises:
        ImportError: there is a job, but no Horovod.
    """
    launched = next((name for name in _RANK_VARIABLES if name in os.environ), None)
    if launched is None:
        return SingleProcess()
    try:
        horovod: Any = importlib.import_module("horovod.tensorflow")
    except ImportError as error:
        raise ImportError(_MISSING.format(variable=launched, error=error)) from error
    horovod.init()
    return HorovodCommunicator(horovod)
