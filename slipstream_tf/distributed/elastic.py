"""Elastic training: a job whose ranks change, its commits, and the batches that are left.

`run` starts a training function in a process that `agent` has started, or in any other, and ends
the process when the ranks change; the agent then starts it again. `BlocksLeft` computes which parts
of a data set no rank has trained. `ElasticState` commits checkpoints for programs with their own
training loop.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import tensorflow as tf

from slipstream_tf._utils import agent
from slipstream_tf._utils.agreement import gather_json
from slipstream_tf._utils.comm import Communicator, Link
from slipstream_tf._utils.errors import require_integer
from slipstream_tf.checkpoint import writing
from slipstream_tf.checkpoint.manager import Engine, JobCheckpoints, SavedJob
from slipstream_tf.checkpoint.manifest import read_manifest
from slipstream_tf.distributed import horovod, watch

TIMEOUT_SECONDS = 20.0
_Result = TypeVar("_Result")


class ElasticJob:
    """The ranks of a start; see `run`.

    Attributes:
        comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        """Takes the ranks."""
        self.comm = comm
        self._has_committed = False

    def committed(self, saved: JobCheckpoints) -> None:
        """Hears of hosts that join or leave; a collective, after each commit.

        Does not return if there are such: all ranks end when what was saved is on the disk.

        Args:
            saved: what has saved it.
        """
        self._has_committed = True
        if not agent.is_started_by_agent():
            return
        own = tf.constant([int(agent.is_noticed())], tf.int64)
        if int(self.comm.sum(own, "control", "slipstream.elastic.hosts")[0]):
            saved.wait()
            self._end("Hosts join or leave.")

    def _end(self, reason: str) -> NoReturn:
        """Ends this process at once, so that no rank waits for it; another start comes."""
        print(f"slipstream_tf: rank {self.comm.rank}: {reason}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(agent.AGAIN if self._has_committed else agent.AGAIN_WITHOUT_COMMIT)


def run(
    train: Callable[[ElasticJob], _Result],
    timeout_seconds: float = TIMEOUT_SECONDS,
    link: Link | None = None,
) -> _Result:
    """Trains with the ranks that there are; ends the process when they change.

    Under `agent`. Started otherwise, by a launcher or not, ranks stay the same, and the loss of one
    is an error as in any job.

    Ranks change

    - when a process or a host is lost: the next collective of each other rank fails, at once if a
      process has ended, and within the timeout if a host is silent;
    - when the launcher's script names other hosts: after the next commit.

    Args:
        train: called with the job; goes on from what was saved last, and calls `committed` after
            each commit.
        timeout_seconds: at least 1: how long a host may be silent, and how long ranks wait for each
            other when they start.
        link: see `init`.

    Returns:
        What `train` returned.

    Raises:
        ImportError, ValueError: see `init`.
        Exception: what `train` raised, unless it comes of ranks that were lost.
    """
    job = ElasticJob(horovod.init(timeout_seconds, link))
    try:
        return train(job)
    except tf.errors.OpError as error:
        if not agent.is_started_by_agent() or not watch.is_of_collective(error):
            raise
        job._end(f"Others are lost: {error.message}")


@dataclasses.dataclass(frozen=True)
class BlocksLeft:
    """The blocks that are left: all from `first` on, but `taken`.

    Block i of those that are left goes to rank i % ranks.

    Attributes:
        first: number of the first one.
        taken: numbers of later ones that are not left, ascending.
    """

    first: int = 0
    taken: tuple[int, ...] = ()

    def of(self, blocks: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the blocks of a data set that are left; the others are read all the same."""
        left = blocks.skip(self.first) if self.first else blocks
        if not self.taken:
            return left
        gone = tf.constant(self.taken, tf.int64)

        @tf.autograph.experimental.do_not_convert
        def is_left(number: tf.Tensor, _: Any) -> tf.Tensor:
            return tf.reduce_all(tf.not_equal(gone, number))

        @tf.autograph.experimental.do_not_convert
        def block(_: tf.Tensor, element: Any) -> Any:
            return element

        return left.enumerate(self.first).filter(is_left).map(block)

    def after(self, counts: Sequence[int]) -> BlocksLeft:
        """Returns what is left when ranks have taken blocks.

        Args:
            counts: how many of its blocks each rank has taken, rank 0 first.
        """
        ranks = len(counts)
        left = self._first_left(max(counts) * ranks + 1)
        place = np.arange(left.size)
        has_gone = place // ranks < np.asarray(counts)[place % ranks]
        first = int(left[~has_gone][0])
        gone = np.concatenate([np.asarray(self.taken, np.int64), left[has_gone]])
        return BlocksLeft(first, tuple(np.sort(gone[gone > first]).tolist()))

    def _first_left(self, count: int) -> np.ndarray:
        """Returns the numbers of the first so many blocks that are left, int64."""
        numbers = np.arange(self.first, self.first + count + len(self.taken))
        return numbers[~np.isin(numbers, self.taken)][:count]


_KEPT = 2
# In the position of a rank.
LEFT, TAKEN = "blocks_left", "blocks_taken"


def newest(directory: Path, comm: Communicator) -> tuple[Path | None, Sequence[Any]]:
    """Finds the newest checkpoint that is whole, as far as sizes of files tell; a collective.

    Args:
        directory: of the checkpoints, as rank 0 sees it.
        comm: the ranks.

    Returns:
        Its folder, and what each rank that saved it gave as its position; None and nothing: there
        is none.
    """
    found: list[Any] = [None, []]
    if comm.rank == 0:
        whole = (name for name in writing.names(directory) if writing.is_whole(directory / name))
        name = next(whole, None)
        if name is not None:
            found = [name, read_manifest(directory / name).positions]
    name, positions = gather_json(comm, found, "slipstream.newest")[0]
    return None if name is None else directory / name, positions


def left_after(positions: Sequence[Any]) -> BlocksLeft:
    """Returns the blocks that are left by a checkpoint, of the positions of its ranks."""
    if not positions:
        return BlocksLeft()
    first, taken = positions[0][LEFT]
    return BlocksLeft(first, tuple(taken)).after([position[TAKEN] for position in positions])


def require_restored(last: SavedJob | None, expected: Path | None) -> None:
    """Raises RuntimeError if another checkpoint was restored than the one that the data go by."""
    if (None if last is None else last.path) != expected:
        raise RuntimeError(f"The commit {expected} is damaged. Remove it, and start again.")


class ElasticState:
    """What a start of training commits, and goes on from; see `run_elastic`.

    Attributes:
        job: the job.
        comm: the ranks.
    """

    def __init__(self, job: ElasticJob, directory: str | os.PathLike[str], every: int) -> None:
        """Takes the job, the folder of the commits, and the steps from one to the next."""
        self.job, self.comm = job, job.comm
        self._directory, self._every = Path(directory), every
        self._left, self._read = BlocksLeft(), None
        self._newest: Path | None = None
        self._saved: JobCheckpoints | None = None
        self._engine: Any = None
        self._begun = self._steps = 0

    def remaining(self, batches: tf.data.Dataset, as_read: bool = False) -> tf.data.Dataset:
        """Returns this rank's share of the batches that are left; in place of `shard`.

        Batches that had been trained by the newest commit are left out, whatever the ranks were;
        batch i of the others goes to rank i % size. What is left out is read all the same.

        Args:
            batches: of the whole job, the same at every start and on all ranks, in the same order.
            as_read: whether a batch counts as trained as soon as it is read: where an engine leaves
                examples out. What waits to fill a batch when ranks change is not trained then.
        """
        self._newest, positions = newest(self._directory, self.comm)
        self._left = left_after(positions)
        own = self._left.of(batches).shard(self.comm.size, self.comm.rank)
        if not as_read:
            return own
        with tf.device("CPU:0"):
            self._read = count = tf.Variable(0, dtype=tf.int64, trainable=False)

        @tf.autograph.experimental.do_not_convert
        def counted(*batch: Any) -> Any:
            with tf.control_dependencies([count.assign_add(1)]):
                return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

        return own.map(counted)

    def restore(
        self, checkpoint: tf.train.Checkpoint, store: Any, engine: Engine | None = None
    ) -> SavedJob | None:
        """Goes on from the newest commit; a collective, after `remaining`, before training.

        Args:
            checkpoint: as of `JobCheckpoints`.
            store: likewise.
            engine: likewise.

        Returns:
            The commit; None: there is none, and training begins.

        Raises:
            RuntimeError: a commit is damaged.
            ValueError: see `JobCheckpoints.restore`.
        """
        self._engine = engine
        self._saved = JobCheckpoints(
            self._directory, checkpoint, self.comm, store, _KEPT, engine, evicts=True
        )
        last = self._saved.restore()
        require_restored(last, self._newest)
        self._begun = self._steps = 0 if last is None else last.step
        return last

    def after_step(self, steps: int = 1) -> None:
        """Counts trained steps, and commits when it is time to; every rank must call it.

        `keras.ElasticCallback` does so in `fit`.

        Args:
            steps: that were trained since the last call.
        """
        before, self._steps = self._steps, self._steps + steps
        if before // self._every < self._steps // self._every:
            self.commit()

    def commit(self) -> None:
        """Saves all that was restored, and hears of hosts that join or leave; a collective.

        Raises:
            RuntimeError: nothing was restored.
        """
        if self._saved is None:
            raise RuntimeError("ElasticState: restore() comes before the first step.")
        if self._read is None:
            taken = self._steps - self._begun
        else:
            if self._engine is not None:
                self._engine.settle()
            taken = int(self._read.numpy())
        left = [self._left.first, self._left.taken]
        self._saved.save(self._steps, position={LEFT: left, TAKEN: taken})
        self.job.committed(self._saved)


def run_elastic(
    train: Callable[[ElasticState], _Result],
    directory: str | os.PathLike[str],
    every: int = 200,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> _Result:
    """Trains with the ranks that there are, and goes on from the last commit when they change.

        def train(state):
            embeddings = slip.keras.EmbeddingCollection(..., comm=state.comm, placement="sharded")
            model = ...
            model.compile(slip.distributed.DistributedOptimizer(optimizer, state.comm), ...)
            data = slip.distributed.even_ends(state.remaining(batches), state.comm)
            model.optimizer.build(model.trainable_variables)
            saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            state.restore(saved, embeddings.store)
            model.fit(data, callbacks=[slip.keras.ElasticCallback(state)])
            return model

        slip.distributed.run_elastic(train, "/shared/commits")

    To be started by `slipstream-elastic`, which starts the program again when ranks change:

        horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh \\
            slipstream-elastic python train.py

    Started otherwise, ranks stay the same, and training goes on from the newest commit all the
    same. What was trained since that is trained anew.

    A commit has everything that `JobCheckpoints` saves, for any number of ranks, and writes the
    rows that have changed since the one before.

    Args:
        train: makes tables, model, engine and data for `state.comm`.
        directory: of the commits, on a file system that all ranks share; of this training only.
        every: steps from one commit to the next, at least 1.
        timeout_seconds: see `run`.

    Returns:
        What `train` returned.

    Raises:
        ValueError: `every` or the timeout is out of range.
        ImportError: there is a job, but no Horovod.
        Exception: what `train` raised, unless it comes of ranks that were lost.
    """
    require_integer("every", every, 1, None, "run_elastic")
    return run(lambda job: train(ElasticState(job, directory, every)), timeout_seconds)
