"""Elastic training: jobs with a changing set of ranks.

`run` calls a training function and ends the process when the set of ranks changes. The program
`slipstream-elastic` (`_utils.agent`) that started the process then starts it again. `BlocksLeft`
computes the parts of a dataset that no rank has trained on. `ElasticState` saves checkpoints for
programs with a custom training loop. A checkpoint of an elastic job is called a commit.
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
from slipstream_tf.checkpoint.manager import CheckpointManager, Engine, SavedJob
from slipstream_tf.checkpoint.manifest import read_manifest
from slipstream_tf.distributed import horovod, watch

TIMEOUT_SECONDS = 20.0
_Result = TypeVar("_Result")


class ElasticJob:
    """One start of an elastic job with a fixed set of ranks.

    `run` passes it to the training function.

    Attributes:
        comm: The communicator of these ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._has_committed = False

    def committed(self, saved: CheckpointManager) -> None:
        """Ends the process if hosts joined or left.

        Call it after each commit.

        This method is a collective. If any host joined or left, all ranks wait until the checkpoint
        is on disk and then exit, so the call does not return.

        Args:
            saved: The checkpoint manager that saved the commit.
        """
        self._has_committed = True
        if not agent.is_started_by_agent():
            return
        own = tf.constant([int(agent.is_noticed())], tf.int64)
        if int(self.comm.sum(own, "control", "slipstream.elastic.hosts")[0]):
            saved.wait()
            self._end("Hosts have joined or left the job.")

    def _end(self, reason: str) -> NoReturn:
        """Exits the process immediately, without waiting for other ranks.

        The exit code requests a restart from the agent.
        """
        text = f"slipstream_tf: Rank {self.comm.rank} exits to be restarted: {reason}"
        print(text, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(agent.AGAIN if self._has_committed else agent.AGAIN_WITHOUT_COMMIT)


def run(
    train: Callable[[ElasticJob], _Result],
    timeout_seconds: float = TIMEOUT_SECONDS,
    link: Link | None = None,
) -> _Result:
    """Calls a training function; ends the process when the ranks change.

    This requires that `slipstream-elastic` started the process. Otherwise the set of ranks is
    fixed, and the loss of a rank is an error.

    The set of ranks changes in two cases:

    - A process or a host is lost. The next collective of every other rank then fails: immediately
      if a process has ended, within the timeout if a host does not respond.
    - The launcher's discovery script lists other hosts. The job then restarts after the next
      commit.

    Args:
        train: The training function. It receives the job, continues from the last commit, and calls
            `job.committed` after each commit.
        timeout_seconds: The maximum time without a response from a host, and the maximum time that
            ranks wait for each other at the start. At least 1.
        link: The speed of the network between ranks; see `init`.

    Returns:
        The return value of `train`.

    Raises:
        ImportError: See `init`.
        ValueError: See `init`.
        Exception: Any exception of `train` that the loss of a rank did not cause.
    """
    job = ElasticJob(horovod.init(timeout_seconds, link))
    try:
        return train(job)
    except tf.errors.OpError as error:
        if not agent.is_started_by_agent() or not watch.is_of_collective(error):
            raise
        job._end(f"Other ranks are lost ({error.message}).")


@dataclasses.dataclass(frozen=True)
class BlocksLeft:
    """The blocks of a dataset that no rank has trained on.

    A block is one element of the dataset, for example a batch. The remaining blocks are all blocks
    from `first` on, except the blocks in `taken`. Remaining block i is assigned to rank i % number
    of ranks.

    Attributes:
        first: The number of the first remaining block.
        taken: The numbers of later blocks that have been trained on, ascending.
    """

    first: int = 0
    taken: tuple[int, ...] = ()

    def of(self, blocks: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the remaining blocks of a dataset, in order.

        Other blocks are skipped, but the dataset still reads them.
        """
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
        """Returns the blocks that remain after further training.

        Args:
            counts: The number of these blocks that each rank has trained on, rank 0 first.
        """
        ranks = len(counts)
        left = self._first_left(max(counts) * ranks + 1)
        place = np.arange(left.size)
        has_gone = place // ranks < np.asarray(counts)[place % ranks]
        first = int(left[~has_gone][0])
        gone = np.concatenate([np.asarray(self.taken, np.int64), left[has_gone]])
        return BlocksLeft(first, tuple(np.sort(gone[gone > first]).tolist()))

    def _first_left(self, count: int) -> np.ndarray:
        """Returns the numbers of the first `count` remaining blocks, int64."""
        numbers = np.arange(self.first, self.first + count + len(self.taken))
        return numbers[~np.isin(numbers, self.taken)][:count]


_KEPT = 2  # Number of commits to keep.
# Fields of the position that each rank stores in a checkpoint.
LEFT, TAKEN = "blocks_left", "blocks_taken"


def newest(directory: Path, comm: Communicator) -> tuple[Path | None, Sequence[Any]]:
    """Finds the newest complete checkpoint, judged by file sizes; a collective.

    Args:
        directory: The directory of the checkpoints. Only rank 0 reads it.
        comm: The communicator of the job.

    Returns:
        The folder of the checkpoint, and the positions of the ranks that saved it. `(None, [])` if
        there is no complete checkpoint.
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
    """Returns the blocks that remain after a commit.

    Args:
        positions: The positions in the commit, from `newest`. Empty without a commit.
    """
    if not positions:
        return BlocksLeft()
    first, taken = positions[0][LEFT]
    return BlocksLeft(first, tuple(taken)).after([position[TAKEN] for position in positions])


def require_restored(last: SavedJob | None, expected: Path | None) -> None:
    """Raises RuntimeError if the restored checkpoint is not the expected one.

    The data continues from the expected checkpoint, so restoring another one would repeat or lose
    examples.

    Args:
        last: The restored checkpoint, or None.
        expected: The folder that `newest` returned, or None.
    """
    if (None if last is None else last.path) != expected:
        restored = "no commit" if last is None else last.path
        raise RuntimeError(
            f"Restored {restored} instead of the newest commit, {expected}, which is damaged. "
            f"Remove {expected} and start the job again to continue from an older commit."
        )


class ElasticState:
    """Saves and restores the state of an elastic job; see `run_elastic`.

    Example:

    >>> import tempfile
    >>> def train(state):
    ...     batches = tf.data.Dataset.range(6).batch(2)
    ...     return len(list(state.remaining(batches)))
    >>> slip.distributed.run_elastic(train, tempfile.mkdtemp())
    3

    Attributes:
        job: The job of this start.
        comm: The communicator of the job.
    """

    def __init__(self, job: ElasticJob, directory: str | os.PathLike[str], every: int) -> None:
        """Creates the state; nothing is read yet.

        Args:
            job: The job of this start.
            directory: The folder of the commits.
            every: The number of steps between two commits.
        """
        self.job, self.comm = job, job.comm
        self._directory, self._every = Path(directory), every
        self._left, self._read = BlocksLeft(), None
        self._newest: Path | None = None
        self._saved: CheckpointManager | None = None
        self._engine: Any = None
        self._begun = self._steps = 0

    def remaining(self, batches: tf.data.Dataset, as_read: bool = False) -> tf.data.Dataset:
        """Returns this rank's part of the untrained batches.

        Use it instead of `Dataset.shard`. Batches that the newest commit covers are skipped, even
        if another number of ranks trained on them. Skipped batches are still read. Remaining batch
        i is assigned to rank i % `comm.size`.

        Args:
            batches: The batches of the whole job, the same at every start and on all ranks, in the
                same order.
            as_read: If False, a batch counts as trained when `after_step` counts its step. If True,
                it counts when it is read. Pass True if an engine drops examples, because a step
                then does not correspond to a batch. Examples that wait to fill a batch when the set
                of ranks changes are then not trained on.
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
        """Restores the newest commit; a collective.

        Call it after `remaining` and before training.

        Args:
            checkpoint: The `tf.train.Checkpoint` of the model and its optimizer.
            store: The embedding store, or None.
            engine: The `Slipstream` of the job, or None.

        Returns:
            The restored commit, or None if there is no commit and training starts from scratch.

        Raises:
            RuntimeError: If a commit is damaged.
            ValueError: See `CheckpointManager.restore`.
        """
        self._engine = engine
        self._saved = CheckpointManager(
            self._directory, checkpoint, self.comm, store, _KEPT, engine, evict_to_fit=True
        )
        last = self._saved.restore()
        require_restored(last, self._newest)
        self._begun = self._steps = 0 if last is None else last.step
        return last

    def after_step(self, steps: int = 1) -> None:
        """Counts trained steps, and commits when an interval of steps is complete.

        Every rank must call it after each step. In `fit`, use `keras.ElasticCallback`.

        Args:
            steps: The number of steps since the last call.
        """
        before, self._steps = self._steps, self._steps + steps
        if before // self._every < self._steps // self._every:
            self.commit()

    def commit(self) -> None:
        """Saves a checkpoint; ends the process if hosts joined or left.

        This method is a collective.

        Raises:
            RuntimeError: If `restore` has not been called.
        """
        if self._saved is None:
            raise RuntimeError(
                "ElasticState cannot commit before its state is restored. Call "
                "restore(checkpoint, store) before the first step."
            )
        if self._read is None:
            taken = self._steps - self._begun
        else:
            if self._engine is not None:
                self._engine.wait_until_idle()
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
    """Trains with the available ranks and continues when they change.

    Start the program with `slipstream-elastic`, which restarts it when the set of ranks changes:

        horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh \\
            slipstream-elastic python train.py

    Started in any other way, the set of ranks is fixed. Training continues from the newest commit
    in both cases. Steps after that commit are repeated.

    A commit contains everything that `CheckpointManager` saves. Any number of ranks can restore it.
    Only rows that changed since the previous commit are written.

    A complete training function:

        def train(state):
            embeddings = slip.keras.EmbeddingCollection(..., comm=state.comm, placement="sharded")
            model = ...
            model.compile(slip.distributed.DistributedOptimizer(optimizer, state.comm), ...)
            data = slip.distributed.pad_to_equal_steps(state.remaining(batches), state.comm)
            model.optimizer.build(model.trainable_variables)
            saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            state.restore(saved, embeddings.store)
            model.fit(data, callbacks=[slip.keras.ElasticCallback(state)])
            return model

    Example:

    >>> def train(state):
    ...     return state.comm.size
    >>> slip.distributed.run_elastic(train, "/tmp/commits")
    1

    Args:
        train: The training function. It creates tables, model, engine and data for `state.comm`.
        directory: The folder of the commits, on a file system that all ranks share. No other job
            may use it.
        every: The number of steps between two commits, at least 1.
        timeout_seconds: The maximum time without a response from a host, and the maximum time that
            ranks wait for each other at the start. At least 1.

    Returns:
        The return value of `train`.

    Raises:
        ValueError: If `every` or the timeout is out of range.
        ImportError: If a launcher started this process but Horovod is not installed.
        Exception: Any exception of `train` that the loss of a rank did not cause.
    """
    require_integer("every", every, 1, None, "run_elastic")
    return run(lambda job: train(ElasticState(job, directory, every)), timeout_seconds)
