"""Checkpoints of a job, which its ranks write together and go on from when it is started again.

In: a `tf.train.Checkpoint`, the ranks, their store and the saturation engine. Out: a folder per
checkpoint, whose manifest tells a whole one from one whose writers were lost or whose files are
damaged; see the room `checkpoint` for its files.

    DIRECTORY/checkpoint-000007/manifest.json
                                rank-0/state.index, state.data-...   the tf.train.Checkpoint
                                rank-0/table-000, table-001, ...     rows, slots, counts, gradients
                                rank-0/table-000-before-0, ...       rows unchanged since then
                                rank-0/engine                        the saturation engine
                                rank-0/own.index, own.data-...       what is this rank's alone
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

from slipstream_tf._utils.agreement import gather_json, require_same, together
from slipstream_tf._utils.comm import Communicator, Names
from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf._version import __version__
from slipstream_tf.checkpoint import store_parts, store_state, table_parts, writing
from slipstream_tf.checkpoint.array_file import CheckpointError, CheckpointMismatchError
from slipstream_tf.checkpoint.manifest import Manifest, read_manifest, require_named, require_whole
from slipstream_tf.checkpoint.store_state import kept_apart
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables.base import SavedStore


class Engine(Protocol):
    """What is saved of a `Slipstream`."""

    @property
    def policies(self) -> Mapping[str, UpdatePolicy]:
        """What becomes of gradients, by table."""

    def state(self) -> dict[str, Any]:
        """Returns all that it knows: nested dictionaries, lists, numbers and arrays."""

    def check(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if `restore` cannot take the ranks' states."""

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from what `state` gave on each rank."""


@dataclasses.dataclass(frozen=True)
class SavedJob:
    """A checkpoint.

    Attributes:
        path: its folder.
        step: that `JobCheckpoints.save` was given.
        world_size: number of ranks that saved it.
        placement: "replicated", "sharded" or, of tables in SOK, "spread".
        position: in the input, as this rank gave it; None: it gave none, or had no such number.
        rng: likewise, the state of random numbers.
    """

    path: Path
    step: int
    world_size: int
    placement: str
    position: Any = None
    rng: Any = None


class JobCheckpoints:
    """Saves the state of a job every now and then, and restores the newest that is whole.

        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        saved = JobCheckpoints("checkpoints", checkpoint, comm, embeddings.store, engine=slipstream)
        last = saved.restore()
        for step in range(0 if last is None else last.step, steps):
            ...
            if (step + 1) % 1000 == 0:
                saved.save(step + 1)
        saved.wait()

    What the `tf.train.Checkpoint` reaches is saved: a model with its layers, the optimizer,
    variables of the program. The tables of the store (rows, slots, counts, deferred
    gradients) and the engine (states of keys, T, hot set, snapshots, windows) are in files of their
    own, which any number of ranks may restore, replicated or sharded, and a store of another kind:
    native tables, a `VariableStore`, tables in SOK. As many ranks as saved them go on as if never
    stopped: deferred gradients are saved as they are, not flushed.

    With another number of ranks, what was deferred by a rank goes to another; the sample of the
    window's inputs is drawn anew; copies that sharded tables had are made anew, and with them the
    accesses by which the next hot set is chosen; what `own` reaches is not restored.

    Of tables in SOK every rank writes its own rows; `SokEmbeddingStore` twice:
    as others read them, and as SOK holds them, less their initial rows. What others wrote is
    rounded to that difference. SOK does not tell in which order rows would be evicted: after a
    restart they are as young as one another. It takes no keys out: restore into new tables, or keys
    that are not in the checkpoint start anew. Estimated access counts
    (`SokStore(..., counts_on_device=True)`) start anew, too.

    `save` returns as soon as what is to be written has been copied: beside the tables there must be
    room for a copy of their rows, slots and counts, and for a moment for another one of the largest
    table. What the `tf.train.Checkpoint` reaches is written before it returns.

    Of native tables it writes the rows that have changed since its checkpoint before. The files of
    that one become the new one's, too, under one name more, so that a folder may be copied or
    removed by itself; what damages such a file damages all checkpoints that share it. All rows are
    written by the first checkpoint, after a failed one and after `restore`; after eight with
    changes, or when these have more rows than the table had; always where all rows decay in each
    step, where more rows left than the table holds, or where the file system gives a file one name
    only. Replicated tables are written by one rank each. The counts of the others are written
    whole, as are those of replicas, whose rows are not written. Rows of
    tables that spill are written to their own files, as far as they have changed, and the
    checkpoint keeps these: no room is needed for a copy.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpoint: tf.train.Checkpoint,
        comm: Communicator,
        store: Any,
        keep: int = 3,
        engine: Engine | None = None,
        own: tf.train.Checkpoint | None = None,
        background: bool = True,
        evicts: bool = False,
    ) -> None:
        """Takes what to save and where; nothing is read or written yet.

        Args:
            directory: of all checkpoints, on a file system that all ranks share; it is made. One
                job at a time may save there.
            checkpoint: of this rank; of rank 0 it is written, and read by all.
            comm: the ranks.
            store: the embedding store; None: there is none.
            keep: whole checkpoints that are kept; older ones are removed.
            engine: the `Slipstream` of the job, if there is one.
            own: what is this rank's alone, e.g. `tf.train.Checkpoint(inputs=iter(dataset))`, so
                that the data go on where they were, with the inputs that wait to fill a batch.
            background: whether `save` returns before all is on the disk.
            evicts: whether `restore` leaves out rows for which a table with a capacity has no room,
                as where fewer ranks go on: the least valuable ones. Else that is an error.

        Raises:
            ValueError: `keep` is no integer >= 1, or the store is no embedding store.
        """
        require_integer("keep", keep, 1, None, "JobCheckpoints")
        if store is not None and not isinstance(store, SavedStore):
            raise invalid("store", type(store).__name__, "JobCheckpoints", "an embedding store")
        self._directory, self._checkpoint, self._keep = Path(directory), checkpoint, keep
        self._comm, self._engine, self._own = comm, engine, own
        self._store: Any = store
        is_sharded = comm.size > 1 and store is not None and store.is_spread
        self._placement = "sharded" if is_sharded else "replicated"
        if store is not None and store.is_in_sok:
            self._placement = "spread"
        self._rank = store_parts.Rank(comm.rank, comm.size, self._placement)
        self._names = Names("checkpoints")
        self._background, self._evicts = background, evicts
        # Python waits for its thread before it ends.
        self._thread = futures.ThreadPoolExecutor(1, "slipstream-checkpoint")
        self._work: futures.Future[None] | None = None
        # What the next checkpoint may go on from; and the one after, when this one is whole.
        self._before_next: Mapping[str, table_parts.FilesBefore] = {}
        self._before: Mapping[str, table_parts.FilesBefore] = {}
        # Of replicated tables, by name, the rank that writes its rows.
        self._writers: dict[str, int] = {}

    def save(self, step: int, position: Any = None, rng: Any = None) -> SavedJob:
        """Writes a checkpoint, once the one before is written; a collective.

        A job that ends at any time in it leaves the earlier checkpoints as they are.

        Args:
            step: how far training is, the same on all ranks.
            position: of this rank in its input, e.g. the batches it has taken; JSON-serialisable.
            rng: likewise, the state of random numbers that no variable holds.

        Returns:
            The checkpoint; with `background` it is whole only after `wait`.

        Raises:
            ValueError: `step` is no integer >= 0, or the ranks' steps or placements differ.
            TypeError: `position` or `rng` is not JSON-serialisable.
            OSError: this rank could not write, now or the checkpoint before. The others raise a
                RuntimeError that names it.
        """
        require_integer("step", step, 0, None, "a checkpoint")
        same = {"step": step, "placement": self._placement}
        require_same(self._comm, same, self._names.of("same"), "a checkpoint")
        self.wait()
        begin = self._together(self._begin, "make a folder for a checkpoint")
        name, identity, self._writers = begin[0]
        files: list[writing.RankFiles] = []
        part = "write its part of a checkpoint"
        self._together(lambda: files.append(self._cut(position, rng)), part)
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
        """Waits until what `save` began is on the disk; a collective.

        Raises:
            OSError: this rank could not write it. The others raise a RuntimeError that names it.
        """
        work = self._work
        if work is not None:
            # Nothing else may be written before, even if the wait is interrupted.
            futures.wait([work])
            self._before = {}
        self._work = None
        self._together(lambda: work and work.result(), "write a checkpoint")
        if work is not None:
            self._before = {name: files.written() for name, files in self._before_next.items()}

    def restore(self) -> SavedJob | None:
        """Restores the newest whole checkpoint; a collective, to be called before training.

        Model and optimizer must have their variables already (`optimizer.build(...)`). Checkpoints
        that are not whole are passed over with a warning that says why. Tables and engine are read
        and checked by all ranks before anything of them is replaced on any.

        Returns:
            What was restored; None: the directory has no checkpoint, and nothing has changed.

        Raises:
            RuntimeError: there are checkpoints, but none is whole.
            ValueError: the newest whole one is of other tables, dimensions, update rules or
                variables, or has what these tables cannot; `checkpoint.CheckpointMismatchError` if
                it is of another version.
        """
        self.wait()
        listed = gather_json(self._comm, writing.names(self._directory), self._names.of("listed"))
        not_whole = []
        for name in listed[0]:
            path = self._directory / name
            ready: list[_Ready] = []
            prepare = functools.partial(self._prepare, path, ready)
            problems = self._together(prepare, f"read {path}")
            wrong = [f"{p} (rank {rank})" for rank, p in enumerate(problems) if p is not None]
            if not wrong:
                return self._replace(ready.pop())
            not_whole.append(wrong[0])
            if self._comm.rank == 0:
                logging.warning("Passed over a checkpoint that is not whole: %s", not_whole[-1])
        if not not_whole:
            return None
        raise RuntimeError(
            "No checkpoint is whole: " + "; ".join(not_whole) + " All ranks must see the same "
            "files. To train from the start, give another directory."
        )

    def _together(self, work: Callable[[], Any], what: str) -> list[Any]:
        return together(self._comm, work, self._names.of("done"), what)

    def _begin(self) -> list[Any]:
        """Of rank 0: a name, an identity, and who writes which table, from the first time on."""
        if self._comm.rank > 0:
            return []
        writers = self._writers
        is_shared = self._placement == "replicated" and not writers
        if is_shared and self._store is not None and self._store.updates_rows:
            writers = table_parts.writers_of(self._store, self._comm.size)
        return [writing.stage(self._directory), uuid.uuid4().hex, writers]

    def _own_parts(self, manifest: Manifest) -> list[str]:
        """The `tf.train.Checkpoint` that is this rank's alone, if it is there and to be read."""
        own = f"rank-{self._comm.rank}/own"
        is_there = any(name.startswith(f"{own}.") for name in manifest.files)
        is_wanted = self._own is not None and manifest.world_size == self._comm.size
        return [own] if is_wanted and is_there else []

    def _apart(self) -> Any:
        return contextlib.nullcontext() if self._store is None else kept_apart(self._store)

    def _cut(self, position: Any, rng: Any) -> writing.RankFiles:
        """Writes what TensorFlow writes, and copies the rest."""
        told = json.loads(json.dumps([position, rng]))
        folder = self._directory / writing.STAGING / f"rank-{self._comm.rank}"
        folder.mkdir()
        if self._comm.rank == 0:
            with self._apart():
                self._checkpoint.write(str(folder / "state"))
        if self._own is not None:
            self._own.write(str(folder / "own"))
        parts, rates = [], None
        if self._store is not None:
            policies = None if self._engine is None else self._engine.policies
            parts = table_parts.cut(
                self._store, self._rank, policies, folder, self._before, self._writers
            )
            if self._store.updates_rows:
                saved = self._store.rates.export()
                rates = {name: values.tolist() for name, values in saved.items()}
        state = None if self._engine is None else self._engine.state()
        return writing.RankFiles(self._comm.rank, parts, rates, state, *told)

    def _write(self, name: str, manifest: Manifest, files: writing.RankFiles) -> None:
        """Writes this rank's files; on rank 0, then makes a checkpoint of all ranks'."""
        writing.write_rank(self._directory / writing.STAGING, manifest.checkpoint, files)
        if self._comm.rank == 0:
            writing.finish_with_all(self._directory, name, manifest, self._keep)

    def _prepare(self, path: Path, ready: "list[_Ready]") -> str | None:
        """Reads a checkpoint without a change to anything; returns why it is not whole."""
        try:
            manifest = read_manifest(path)
            for prefix in ["rank-0/state", *self._own_parts(manifest)]:
                require_named(path, manifest, prefix)
            require_whole(path, manifest, ["rank-0", f"rank-{self._comm.rank}"])
            tables = []
            if self._store is not None:
                tables = store_parts.prepare(path, manifest, self._store, self._rank, self._evicts)
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
        self._together(lambda: self._read_states(path, manifest), f"restore {path}")
        if ready.tables:
            self._together(
                lambda: store_parts.replace(self._store, ready.tables),
                f"restore the tables of {path}",
            )
            if ready.rates is not None and self._store.updates_rows:
                tables = [table["name"] for table in manifest.tables]
                self._store.rates.restore(ready.rates, tables)
        policies: Mapping[str, UpdatePolicy] = {}
        is_in_window = self._engine is not None and bool(ready.states)
        if self._engine is not None:
            if is_in_window:
                self._engine.restore(ready.states)
            else:
                logging.warning("%s was saved without an engine, which starts anew.", path)
            policies = self._engine.policies
        if ready.tables:
            self._together(
                lambda: store_parts.replace_replicas(self._store, ready.tables, is_in_window),
                f"restore the copies of {path}",
            )
        store_parts.defer(self._store, ready.tables, policies, self._together)
        logging.info("Restored %s, step %d.", path, manifest.step)
        rank = self._comm.rank
        told = [
            values[rank] if rank < manifest.world_size else None
            for values in (manifest.positions, manifest.rng)
        ]
        return SavedJob(path, manifest.step, manifest.world_size, manifest.placement, *told)

    def _read_states(self, path: Path, manifest: Manifest) -> None:
        with self._apart():
            self._read_state(path, path / "rank-0" / "state", self._checkpoint)
        if self._own is not None:
            own_parts = self._own_parts(manifest)
            for own in own_parts:
                self._read_state(path, path / own, self._own)
            if not own_parts:
                logging.warning("%s has nothing that is rank %d's alone.", path, self._comm.rank)

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
                f"{path} was saved of a program with other variables, or restored before there "
                "were any. Call the model on a batch, and optimizer.build("
                f"model.trainable_variables), before restore(). TensorFlow says: {error}"
            ) from error


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A checkpoint that was read and checked.

    Attributes:
        path: its folder.
        manifest: of it.
        tables: for this rank's store.
        rates: of the store, or None.
        states: of the engine on all ranks that saved it; empty if there was none.
    """

    path: Path
    manifest: Manifest
    tables: list[store_parts.ReadyTable]
    rates: dict[str, Any] | None
    states: list[dict[str, Any]]
