"""Saves and restores the checkpoints of a job.

The manifest of a checkpoint identifies incomplete checkpoints and damaged files.

    DIRECTORY/checkpoint-000007/manifest.json
                                rank-0/state.index, state.data-...   the tf.train.Checkpoint
                                rank-0/table-000, table-001, ...     rows, slots, access counts,
                                                                     admission filter and deferred
                                                                     gradients of a table
                                rank-0/table-000-before-0, ...       files of earlier checkpoints
                                                                     with the unchanged rows
                                rank-0/table-000-rows-NAME, ...      rows that spill to disk
                                rank-0/engine                        the saturation engine and the
                                                                     learning rates of the tables
                                rank-0/own.index, own.data-...       state of this rank only
                                rank-1/...
"""

import contextlib
import dataclasses
import functools
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf
from absl import logging

from slipstream_tf._utils.agreement import gather_json, on_all_ranks, require_same
from slipstream_tf._utils.comm import CollectiveNames, Communicator
from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf._version import __version__
from slipstream_tf.checkpoint import store_parts, store_state, table_parts, table_state, writing
from slipstream_tf.checkpoint.array_file import CheckpointError, CheckpointMismatchError
from slipstream_tf.checkpoint.manifest import Manifest, read_manifest, require_named, require_whole
from slipstream_tf.checkpoint.store_state import excluded_from_checkpoint
from slipstream_tf.tables.base import SavedStore


class Engine(Protocol):
    """The part of `Slipstream` that checkpoints use."""

    def state(self) -> dict[str, Any]:
        """Returns the complete state: nested dictionaries, lists, numbers and arrays."""

    def check(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if `restore` cannot use `states`, without changing any state."""

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores a state.

        Args:
            states: The results of `state` on all ranks that saved the checkpoint, rank 0 first.
        """


@dataclasses.dataclass(frozen=True)
class SavedJob:
    """A checkpoint of a job, as returned by `CheckpointManager`.

    Example:

    >>> last = slip.distributed.SavedJob("checkpoint-000007", 100, 1, "replicated")
    >>> last.step
    100

    Attributes:
        path: The folder of the checkpoint.
        step: The step that was passed to `CheckpointManager.save`.
        world_size: The number of ranks that saved it.
        placement: "replicated", "sharded", or "spread" for tables in SOK.
        position: The position in the input that this rank passed to `save`. None if it passed none,
            or if the job that saved the checkpoint had so few ranks that this rank did not exist.
        rng: The state of random numbers that this rank passed to `save`. None in the same cases.
    """

    path: Path
    step: int
    world_size: int
    placement: str
    position: Any = None
    rng: Any = None


class CheckpointManager:
    """Saves the state of a job and restores the newest complete checkpoint.

    A checkpoint contains everything that the `tf.train.Checkpoint` reaches: the model, its
    optimizer and variables of the program. The tables of the store (rows, slots, counts, admission
    filters, deferred gradients) and the engine (key states, threshold, hot set, snapshots, windows)
    are stored in separate files. Any number of ranks can restore them, with replicated or sharded
    tables, and with another kind of store: native tables, a `VariableStore`, or tables in SOK.

    With the same number of ranks, training continues as if it had not been interrupted. Deferred
    gradients are saved, not flushed. With another number of ranks,

    - deferred gradients can move to another rank.
    - the engine draws its sample of the window's examples again.
    - the replicas of sharded tables start empty, together with their access counts, from which the
      next hot set is selected.
    - the state in `rank_checkpoint` is not restored.

    `save` returns when all data has been copied. The memory must hold a copy of all rows, slots and
    counts in addition to the tables, and temporarily another copy of the largest table. The
    `tf.train.Checkpoint` is written before `save` returns.

    **Incremental files.** For native tables, only rows that changed since the previous checkpoint
    are written. The files of the previous checkpoint are hard-linked into the new one, so each
    folder can be copied or removed independently. Damage to a shared file affects all checkpoints
    that share it. All rows are written

    - in the first checkpoint, after a failed one and after `restore`.
    - after eight files with changes, or when these files together have more rows than the file with
      all rows.
    - if the optimizer decays or penalizes all rows in each step, if more rows were removed than the
      table contains, or if the file system does not support hard links.

    One rank writes the rows of a replicated table. The access counts of the other ranks and of
    replicas are written completely. Rows of tables that spill to disk are written to their spill
    files first, and the checkpoint links these files. They need no memory for a copy.

    **Tables in SOK.** Every rank writes its rows. A `SokEmbeddingStore` writes each row twice: its
    value for other stores, and the difference from its initial value, which SOK stores. A row from
    another kind of store is rounded to that difference. SOK does not report the eviction order, so
    all rows have the same age after a restart. SOK cannot remove keys. Restore into new tables,
    otherwise keys that are not in the checkpoint start from scratch. Estimated access counts
    (`SokStore(..., counts_on_device=True)`) also start from scratch.

    A training loop:

        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        saved = CheckpointManager(
            "checkpoints", checkpoint, comm, embeddings.store, engine=slipstream
        )
        last = saved.restore()
        for step in range(0 if last is None else last.step, steps):
            ...
            if (step + 1) % 1000 == 0:
                saved.save(step + 1)
        saved.wait()

    Example:

    >>> import tempfile
    >>> weight = tf.Variable(1.0)
    >>> checkpoint = tf.train.Checkpoint(weight=weight)
    >>> comm = slip.distributed.init()
    >>> saved = slip.distributed.CheckpointManager(tempfile.mkdtemp(), checkpoint, comm, store=None)
    >>> _ = saved.save(step=100)
    >>> _ = weight.assign(5.0)
    >>> saved.restore().step
    100
    >>> float(weight.numpy())
    1.0
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpoint: tf.train.Checkpoint,
        comm: Communicator,
        store: Any,
        max_to_keep: int = 3,
        engine: Engine | None = None,
        rank_checkpoint: tf.train.Checkpoint | None = None,
        background: bool = True,
        evict_to_fit: bool = False,
    ) -> None:
        """Creates a manager; nothing is read or written yet.

        Args:
            directory: The folder of all checkpoints, on a file system that all ranks share. It is
                created by the first `save`. Only one job at a time can save there.
            checkpoint: The `tf.train.Checkpoint` of this rank. Rank 0 writes it, and all ranks read
                it.
            comm: The communicator of the job.
            store: The embedding store, or None.
            max_to_keep: The number of complete checkpoints to keep, at least 1. Older ones are
                removed.
            engine: The `Slipstream` of the job, or None.
            rank_checkpoint: State of this rank only. For example, with
                `tf.train.Checkpoint(inputs=iter(dataset))` the data continues from its position,
                including the examples that wait to fill a batch.
            background: Whether `save` returns before all files are on disk.
            evict_to_fit: Whether `restore` drops the least valuable rows if a table exceeds its
                capacity, for example when fewer ranks continue. If False, that is an error.

        Raises:
            ValueError: If `max_to_keep` is not an integer >= 1, or if `store` is not an embedding
                store.
        """
        require_integer("max_to_keep", max_to_keep, 1, None, "CheckpointManager")
        if store is not None and not isinstance(store, SavedStore):
            allowed = "an embedding store, for example `layer.store`, or None"
            raise invalid("store", type(store).__name__, "CheckpointManager", allowed)
        self._directory, self._checkpoint = Path(directory), checkpoint
        self._max_to_keep = max_to_keep
        self._comm, self._engine, self._rank_checkpoint = comm, engine, rank_checkpoint
        self._store: Any = store
        is_sharded = comm.size > 1 and store is not None and store.is_spread
        self._placement = "sharded" if is_sharded else "replicated"
        if store is not None and store.is_in_sok:
            self._placement = "spread"
        self._rank = store_parts.Rank(comm.rank, comm.size, self._placement)
        self._names = CollectiveNames("checkpoints")
        self._background, self._evict_to_fit = background, evict_to_fit
        # Python waits for this thread at exit.
        self._thread = futures.ThreadPoolExecutor(1, "slipstream-checkpoint")
        self._work: futures.Future[None] | None = None
        # The files that the current and the next checkpoint can extend. `_before_next` replaces
        # `_before` when the current checkpoint is complete.
        self._before_next: Mapping[str, table_parts.EarlierFiles] = {}
        self._before: Mapping[str, table_parts.EarlierFiles] = {}
        # The rank that writes the rows of each replicated table, by table name.
        self._writers: dict[str, int] = {}

    def save(self, step: int, position: Any = None, rng: Any = None) -> SavedJob:
        """Writes a checkpoint after the previous one is complete; a collective.

        An interruption at any time leaves earlier checkpoints unchanged.

        Args:
            step: The number of trained steps, the same on all ranks.
            position: The position of this rank in its input, for example the number of batches
                read. JSON-serializable.
            rng: The state of random numbers that no variable contains. JSON-serializable.

        Returns:
            The checkpoint. With `background`, it is complete only after `wait`.

        Raises:
            ValueError: If `step` is not an integer >= 0, or if the ranks' steps or placements
                differ.
            TypeError: If `position` or `rng` is not JSON-serializable.
            OSError: If this rank failed to write this checkpoint or the previous one. The other
                ranks raise a RuntimeError that names this rank.
        """
        require_integer("step", step, 0, None, "a checkpoint")
        same = {"step": step, "placement": self._placement}
        require_same(self._comm, same, self._names.of("same"), "a checkpoint")
        self.wait()
        begin = self._on_all_ranks(self._begin, f"create a checkpoint folder in {self._directory}")
        name, identity, self._writers = begin[0]
        files: list[writing.RankFiles] = []
        part = f"write its part of a checkpoint to {self._directory}"
        self._on_all_ranks(lambda: files.append(self._cut(position, rng)), part)
        versions = {"slipstream_tf": __version__, "tensorflow": tf.__version__}
        manifest = Manifest(identity, step, self._comm.size, self._placement, versions=versions)
        folder = self._directory / name / f"rank-{self._comm.rank}"
        self._before_next = table_parts.next_before(files[0].tables, folder, identity)
        self._work = self._thread.submit(self._write, name, manifest, files.pop())
        if not self._background:
            self.wait()
        path = self._directory / name
        return SavedJob(path, step, self._comm.size, self._placement, position, rng)

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk; a collective.

        Raises:
            OSError: If this rank failed to write. The other ranks raise a RuntimeError that names
                this rank.
        """
        work = self._work
        if work is not None:
            # Even an interrupted wait must not allow a second write at the same time.
            futures.wait([work])
            self._before = {}
        self._work = None
        self._on_all_ranks(
            lambda: work and work.result(), f"write a checkpoint to {self._directory}"
        )
        if work is not None:
            self._before = {name: files.written() for name, files in self._before_next.items()}

    def restore(self) -> SavedJob | None:
        """Restores the newest complete checkpoint; a collective.

        Call it before training. Model and optimizer must already have their variables
        (`optimizer.build(...)`). Incomplete checkpoints are skipped with a warning that gives the
        reason. All ranks read and check tables and engine before any rank replaces its state.

        Returns:
            The restored checkpoint, or None if the directory contains no checkpoint.

        Raises:
            RuntimeError: If all checkpoints are incomplete.
            ValueError: If the newest complete checkpoint has other tables, dimensions, update rules
                or variables, or content that the tables do not support.
                `checkpoint.CheckpointMismatchError` if it has another version.
        """
        self.wait()
        listed = gather_json(self._comm, writing.names(self._directory), self._names.of("listed"))
        not_whole = []
        for name in listed[0]:
            path = self._directory / name
            ready: list[_Ready] = []
            prepare = functools.partial(self._prepare, path, ready)
            problems = self._on_all_ranks(prepare, f"read {path}")
            wrong = [f"Error of rank {r}: {p}" for r, p in enumerate(problems) if p is not None]
            if not wrong:
                return self._replace(ready.pop())
            not_whole.append(wrong[0])
            if self._comm.rank == 0:
                logging.warning(
                    "Skipped an incomplete or damaged checkpoint; the next older checkpoint is "
                    "tried. %s", not_whole[-1],
                )  # fmt: skip
        if not not_whole:
            return None
        raise RuntimeError(
            f"All checkpoints in {self._directory} are incomplete or damaged. "
            f"{' '.join(not_whole)} Check that all ranks see the same files. To train from "
            "scratch, pass another directory."
        )

    def _on_all_ranks(self, work: Callable[[], Any], what: str) -> list[Any]:
        return on_all_ranks(self._comm, work, self._names.of("done"), what)

    def _begin(self) -> list[Any]:
        """Creates the staging folder on rank 0.

        Returns:
            The name and the identity of the new checkpoint, and the writer of each replicated
            table. [] on other ranks.
        """
        if self._comm.rank > 0:
            return []
        writers = self._writers
        is_shared = self._placement == "replicated" and not writers
        if is_shared and self._store is not None and self._store.updates_rows:
            writers = table_parts.writers_of(self._store, self._comm.size)
        return [writing.stage(self._directory), uuid.uuid4().hex, writers]

    def _own_parts(self, manifest: Manifest) -> list[str]:
        """Returns a list with the prefix of this rank's `own` files.

        The list is empty if the checkpoint has no such files, or if they must not be restored.
        """
        own = f"rank-{self._comm.rank}/own"
        is_present = any(name.startswith(f"{own}.") for name in manifest.files)
        is_wanted = self._rank_checkpoint is not None and manifest.world_size == self._comm.size
        return [own] if is_wanted and is_present else []

    def _apart(self) -> Any:
        return (
            contextlib.nullcontext()
            if self._store is None
            else excluded_from_checkpoint(self._store)
        )

    def _cut(self, position: Any, rng: Any) -> writing.RankFiles:
        """Writes the `tf.train.Checkpoint` files and copies all other state."""
        input_state = json.loads(json.dumps([position, rng]))
        folder = self._directory / writing.STAGING / f"rank-{self._comm.rank}"
        folder.mkdir()
        if self._comm.rank == 0:
            with self._apart():
                self._checkpoint.write(str(folder / "state"))
        if self._rank_checkpoint is not None:
            self._rank_checkpoint.write(str(folder / "own"))
        parts, rates = [], None
        if self._store is not None:
            parts = table_parts.cut(self._store, self._rank, folder, self._before, self._writers)
            if self._store.updates_rows:
                saved = self._store.rates.export()
                rates = {name: values.tolist() for name, values in saved.items()}
        state = None if self._engine is None else self._engine.state()
        return writing.RankFiles(self._comm.rank, parts, rates, state, *input_state)

    def _write(self, name: str, manifest: Manifest, files: writing.RankFiles) -> None:
        """Writes this rank's files; rank 0 also completes the checkpoint."""
        writing.write_rank(self._directory / writing.STAGING, manifest.checkpoint, files)
        if self._comm.rank == 0:
            writing.finish_with_all(self._directory, name, manifest, self._max_to_keep)

    def _prepare(self, path: Path, ready: "list[_Ready]") -> str | None:
        """Reads and checks a checkpoint; returns the reason if it is incomplete.

        It changes no state except `ready`, to which it appends the result.
        """
        try:
            manifest = read_manifest(path)
            for prefix in ["rank-0/state", *self._own_parts(manifest)]:
                require_named(path, manifest, prefix)
            require_whole(path, manifest, ["rank-0", f"rank-{self._comm.rank}"])
            tables = []
            if self._store is not None:
                tables = store_parts.prepare(
                    path, manifest, self._store, self._rank, self._evict_to_fit
                )
            rates, states = writing.read_engines(path, manifest)
        except CheckpointMismatchError:
            raise
        except CheckpointError as error:
            return str(error)
        if self._engine is not None and states:
            self._engine.check(states)
        ready.append(_Ready(path, manifest, tables, rates, states))
        return None

    def _replace(self, ready: "_Ready") -> SavedJob:
        path, manifest = ready.path, ready.manifest
        self._on_all_ranks(lambda: self._read_states(path, manifest), f"restore {path}")
        if ready.tables:
            self._on_all_ranks(
                lambda: table_state.replace(self._store, ready.tables),
                f"restore the tables of {path}",
            )
            if ready.rates is not None and self._store.updates_rows:
                tables = [table["name"] for table in manifest.tables]
                self._store.rates.restore(ready.rates, tables)
        is_in_window = self._engine is not None and bool(ready.states)
        if self._engine is not None:
            if is_in_window:
                self._engine.restore(ready.states)
            else:
                logging.warning(
                    "%s was saved without an engine. Therefore the engine starts from scratch. To "
                    "save its state, pass `engine` to the CheckpointManager.", path,
                )  # fmt: skip
        if ready.tables:
            self._on_all_ranks(
                lambda: table_state.replace_replicas(self._store, ready.tables, is_in_window),
                f"restore the replicas of {path}",
            )
        table_state.defer(self._store, ready.tables, self._on_all_ranks)
        logging.info("Restored checkpoint %s of step %d.", path, manifest.step)
        rank = self._comm.rank
        input_state = [
            values[rank] if rank < manifest.world_size else None
            for values in (manifest.positions, manifest.rng)
        ]
        return SavedJob(path, manifest.step, manifest.world_size, manifest.placement, *input_state)

    def _read_states(self, path: Path, manifest: Manifest) -> None:
        with self._apart():
            self._read_state(path, path / "rank-0" / "state", self._checkpoint)
        if self._rank_checkpoint is not None:
            own_parts = self._own_parts(manifest)
            for own in own_parts:
                self._read_state(path, path / own, self._rank_checkpoint)
            if not own_parts:
                saved, size = manifest.world_size, self._comm.size
                input_state = "it has no such state"
                if saved != size:
                    input_state = f"it was saved by {saved} ranks, and the job has {size}"
                logging.warning(
                    "`rank_checkpoint` of rank %d is not restored from %s and stays unchanged: %s.",
                    *(self._comm.rank, path, input_state),
                )

    def _read_state(self, path: Path, prefix: Path, checkpoint: tf.train.Checkpoint) -> None:
        status = checkpoint.read(str(prefix))
        try:
            if store_state.is_active():
                status.assert_existing_objects_matched()
            else:
                status.assert_consumed()
        except AssertionError as error:
            status.expect_partial()
            raise ValueError(
                f"The variables in {path} do not match this program: it has other variables, or "
                "they do not exist yet. Before restore(), call the model on a batch and call "
                f"optimizer.build(model.trainable_variables). TensorFlow reports: {error}"
            ) from error


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A checkpoint that was read and checked.

    Attributes:
        path: The folder of the checkpoint.
        manifest: The manifest of the checkpoint.
        tables: The tables for this rank's store.
        rates: The learning rates of the store, or None.
        states: The engine states of all ranks that saved the checkpoint. Empty without an engine.
    """

    path: Path
    manifest: Manifest
    tables: list[table_state.TableState]
    rates: dict[str, Any] | None
    states: list[dict[str, Any]]
