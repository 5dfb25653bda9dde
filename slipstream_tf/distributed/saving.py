"""Checkpoints of a job, which its ranks write together and go on from when it is started again.

In: a `tf.train.Checkpoint`, the ranks and their store. Out: a folder per checkpoint, whose manifest
tells a whole one from one whose writers were lost or whose files are damaged.

    DIRECTORY/checkpoint-000007/manifest.json
                                rank-0/state.index, rank-0/state.data-00000-of-00001
                                rank-1/...     (only of tables that are spread over the ranks)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from slipstream_tf.distributed import checkpoint_files
from slipstream_tf.distributed.agreement import gather_json, together
from slipstream_tf.distributed.comm import Communicator
from slipstream_tf.distributed.exchange import Names
from slipstream_tf.distributed.settings import require_same
from slipstream_tf.distributed.sharded import ShardedStore
from slipstream_tf.errors import invalid, require_integer

# What is written until it is whole; one that was left behind is removed at the next save.
_STAGING = ".saving"


@dataclasses.dataclass(frozen=True)
class SavedJob:
    """A checkpoint that is whole.

    Attributes:
        path: its folder.
        step: that `JobCheckpoints.save` was given.
        world_size: number of ranks that saved it.
        placement: "replicated", "sharded" or, of tables in SOK, "spread".
    """

    path: Path
    step: int
    world_size: int
    placement: str


class JobCheckpoints:
    """Saves the state of a job every now and then, and restores the newest that is whole.

        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        saved = JobCheckpoints("checkpoints", checkpoint, comm, embeddings.store)
        last = saved.restore()
        for step in range(0 if last is None else last.step, steps):
            ...
            if (step + 1) % 1000 == 0:
                saved.save(step + 1)

    What the `tf.train.Checkpoint` reaches is saved: a model with its `EmbeddingCollection` (rows,
    slots, counts, learning rate), the optimizer, variables of the program. Of replicated tables
    rank 0 writes everything, access counts and remembered losses as it has them, and any number of
    ranks may restore it. Of sharded tables every rank writes its own rows beside its copy of the
    rest, and as many ranks must restore it. Of tables in SOK every rank writes its own rows, too,
    and any number of ranks may restore it: as many ranks read their own part, others all parts.

    Not saved: what the saturation tracker knows (states of keys, T, windows, the warm-up), which a
    job learns anew, and the place in the input data, which the program finds by the step.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpoint: tf.train.Checkpoint,
        comm: Communicator,
        store: Any,
        keep: int = 3,
    ) -> None:
        """Takes what to save and where; nothing is read or written yet.

        Args:
            directory: of all checkpoints, on a file system that all ranks share; it is made. One
                job at a time may save there.
            checkpoint: of this rank.
            comm: the ranks.
            store: the embedding store, whose held gradients are applied first, and whose placement
                says who writes what; None: there is none, or it is a `VariableStore`, whose held
                gradients `flush_held` applies.
            keep: whole checkpoints that are kept; older ones are removed.

        Raises:
            ValueError: `keep` is no integer >= 1, or the store is no embedding store.
        """
        require_integer("keep", keep, 1, None, "JobCheckpoints")
        if store is not None and not hasattr(store, "flush"):
            allowed = "an embedding store; of a VariableStore, None and flush_held before each save"
            raise invalid("store", type(store).__name__, "JobCheckpoints", allowed)
        self._directory, self._checkpoint, self._keep = Path(directory), checkpoint, keep
        self._comm, self._store = comm, store
        is_sharded = comm.size > 1 and isinstance(store, ShardedStore)
        self._placement = "sharded" if is_sharded else "replicated"
        if hasattr(store, "joining_parts"):
            self._placement = "spread"
        self._names = Names("checkpoints")

    def save(self, step: int) -> SavedJob:
        """Writes a checkpoint; a collective, after which it is on the disk.

        A job that ends at any time in it leaves the earlier checkpoints as they are.

        Args:
            step: how far training is, the same on all ranks.

        Returns:
            The checkpoint.

        Raises:
            ValueError: `step` is no integer >= 0, or the ranks' steps or placements differ.
            OSError: this rank could not write. The others raise a RuntimeError that names it.
        """
        require_integer("step", step, 0, None, "a checkpoint")
        same = {"step": step, "placement": self._placement}
        require_same(self._comm, same, self._names.of("same"), "a checkpoint")
        if self._store is not None:
            self._store.flush()
        self._together(self._clear_staging, "make a folder for a checkpoint")
        parts = self._together(self._write_state, "write its part of a checkpoint")
        files = {name: entry for part in parts for name, entry in part.items()}
        name = self._together(lambda: self._finish(step, files), "finish a checkpoint")[0]
        return SavedJob(self._directory / name, step, self._comm.size, self._placement)

    def restore(self) -> SavedJob | None:
        """Restores the newest whole checkpoint; a collective, to be called before training.

        Model and optimizer must have their variables already (`optimizer.build(...)`). Checkpoints
        that are not whole are passed over with a warning that says why.

        Returns:
            What was restored; None: the directory has no checkpoint, and nothing has changed.

        Raises:
            RuntimeError: there are checkpoints, but none is whole.
            ValueError: the newest whole one is of another placement, of sharded tables and another
                number of ranks, or of other tables or variables.
        """
        listed = gather_json(
            self._comm, checkpoint_files.names(self._directory), self._names.of("listed")
        )[0]
        if not listed:
            return None
        passed_over = []
        for name in listed:
            path = self._directory / name
            check = functools.partial(self._problem, path)
            problems = self._together(check, f"read {path}")
            wrong = [f"{p} (rank {rank})" for rank, p in enumerate(problems) if p is not None]
            if not wrong:
                return self._read(path)
            passed_over.append(f"{path}: {wrong[0]}")
            if self._comm.rank == 0:
                logging.warning("Passed over a checkpoint that is not whole: %s", passed_over[-1])
        raise RuntimeError(
            "No checkpoint is whole: " + "; ".join(passed_over) + ". All ranks must see the same "
            "files. To train from the start, give another directory."
        )

    def _together(self, work: Callable[[], Any], what: str) -> list[Any]:
        return together(self._comm, work, self._names.of("done"), what)

    @property
    def _part(self) -> str:
        """The folder that this rank's state is in."""
        return f"rank-{0 if self._placement == 'replicated' else self._comm.rank}"

    def _parts(self, world_size: int) -> list[str]:
        """The folders that this rank reads; what all ranks have a copy of is that of the last."""
        if self._placement == "spread" and world_size != self._comm.size:
            return [f"rank-{rank}" for rank in reversed(range(world_size))]
        return [self._part]

    def _problem(self, path: Path) -> str | None:
        """Says why a checkpoint is not whole, as far as this rank reads it."""
        found = checkpoint_files.problem(path)
        if found is not None:
            return found
        return checkpoint_files.problem(
            path, self._parts(checkpoint_files.manifest_of(path)["world_size"])
        )

    def _clear_staging(self) -> None:
        if self._comm.rank == 0:
            staging = self._directory / _STAGING
            if staging.exists():
                shutil.rmtree(staging)
            staging.mkdir(parents=True)

    def _write_state(self) -> dict[str, Any]:
        """Writes what this rank has to write; returns the files' manifest entries."""
        if self._part != f"rank-{self._comm.rank}":
            return {}
        folder = self._directory / _STAGING / self._part
        folder.mkdir()
        self._checkpoint.write(str(folder / "state"))
        files = sorted(folder.iterdir())
        for path in [*files, folder]:
            checkpoint_files.sync(path)
        return {f"{self._part}/{path.name}": checkpoint_files.entry_of(path) for path in files}

    def _finish(self, step: int, files: dict[str, Any]) -> str:
        """Makes what all ranks have written a checkpoint, on rank 0; returns its name."""
        if self._comm.rank > 0:
            return ""
        manifest = {
            "step": step,
            "world_size": self._comm.size,
            "placement": self._placement,
            "files": files,
        }
        staging = self._directory / _STAGING
        return checkpoint_files.finish(staging, self._directory, manifest, self._keep)

    def _read(self, path: Path) -> SavedJob:
        manifest = checkpoint_files.manifest_of(path)
        saved = SavedJob(path, manifest["step"], manifest["world_size"], manifest["placement"])
        if saved.placement == "sharded" and saved.world_size != self._comm.size:
            raise ValueError(
                f"{path} was saved by {saved.world_size} ranks, each of which has rows of its own, "
                f"but this job has {self._comm.size}. Start it with {saved.world_size} ranks."
            )
        if saved.placement != self._placement:
            raise ValueError(
                f"{path} was saved with {saved.placement} tables, but this job has "
                f"{self._placement} ones. Restore it with the placement that saved it."
            )
        self._together(lambda: self._read_parts(path, saved.world_size), f"restore {path}")
        logging.info("Restored %s, step %d.", path, saved.step)
        return saved

    def _read_parts(self, path: Path, world_size: int) -> None:
        parts = self._parts(world_size)
        with self._store.joining_parts() if len(parts) > 1 else contextlib.nullcontext():
            for part in parts:
                self._read_state(path, part)

    def _read_state(self, path: Path, part: str) -> None:
        status = self._checkpoint.read(str(path / part / "state"))
        try:
            status.assert_consumed()
        except AssertionError as error:
            status.expect_partial()
            raise ValueError(
                f"{path} was saved of a program with other variables, or restored before there "
                "were any. Call the model on a batch, and optimizer.build("
                f"model.trainable_variables), before restore(). TensorFlow says: {error}"
            ) from error
