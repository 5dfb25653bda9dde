"""Damaged checkpoints are restored bitwise, replaced by an older one, or refused.

One job with one or two ranks runs all cases. Before each case the job trains, so that its state
differs from every checkpoint. If `CheckpointManager.restore` raises an error, this state must be
unchanged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from damages import MANIFEST, damage
from fuzzing import SECONDS, Hang, bounded_space, watched
from thread_jobs import TABLES, Job, Threads

from slipstream_tf.checkpoint import CheckpointMismatchError, store_state
from slipstream_tf.distributed import SavedJob

CASES = {"native": 120, "replicated": 40, "sharded": 50}
SHARE = 0.5 / len(CASES)
MAX_BYTES = 32 << 20
NAME = r"checkpoint-\d{6,}"
RAISED = re.compile(r"All checkpoints in .* are incomplete or damaged\. |Rank \d+ could not read ")

Digest = list[dict[str, str]]


class Ranks:
    """A job with one or more ranks and a checkpoint directory."""

    def __init__(self, placement: str, directory: Path) -> None:
        self.directory, self.step = directory, 0
        self.threads = Threads(1 if placement == "native" else 2)

        def start(comm: Any) -> Job:
            dense, own = tf.Variable(tf.zeros([5])), tf.Variable(0)
            parts = tf.train.Checkpoint(dense=dense), tf.train.Checkpoint(own=own)
            job = Job(comm, placement, directory, checkpoint=parts[0], own=parts[1])
            job.dense, job.own = dense, own
            return job

        self.jobs = self.threads.run(start)

    def train(self, steps: int) -> None:
        """Trains. No two calls leave the same state."""

        def work(comm: Any) -> None:
            job = self.jobs[comm.rank]
            job.train(self.step, self.step + steps)
            job.dense.assign(tf.fill([5], float(self.step + steps)))
            job.own.assign(100 * (self.step + steps) + comm.rank)
            job.store.learning_rate.assign(0.1 + 0.001 * (self.step + steps))

        self.threads.run(work)
        self.step += steps

    def save(self) -> None:
        """Saves a checkpoint on all ranks."""

        def work(comm: Any) -> None:
            checkpoints = self.jobs[comm.rank].checkpoints
            checkpoints.save(self.step, position=[self.step, comm.rank], rng={"seed": comm.rank})
            checkpoints.wait()

        self.threads.run(work)

    def restore(self) -> list[Any]:
        """Restores, and returns the result or exception of each rank."""

        def work(comm: Any) -> Any:
            try:
                return self.jobs[comm.rank].checkpoints.restore()
            except Exception as error:
                return error

        return self.threads.run(work)

    def digests(self) -> Digest:
        """Returns the checksums of all checkpointed state, per rank."""
        return [_digests(job) for job in self.jobs]


def _digests(job: Any) -> dict[str, str]:
    state = {"engine": job.tracker.state(), "rate": job.store.learning_rate.numpy()}
    for table in TABLES:
        found: dict[str, Any] = {"contents": job.store.export_table(table.name, flush=False)}
        found["deferred"] = dict(job.store.export_deferred(table.name))
        found["states"] = vars(job.tracker.states[table.name])
        if job.store.has_replicas:
            found["copies"] = job.store.export_copies(table.name)
        state[table.name] = found
    state |= {"dense": job.dense.numpy(), "own": job.own.numpy()}
    return {name: _checksum(part) for name, part in state.items()}


def _checksum(part: Any) -> str:
    skeleton, arrays = store_state.flatten(part)
    digest = hashlib.sha256(json.dumps(skeleton, default=str).encode())
    for array in arrays.values():
        digest.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).data)
    return digest.hexdigest()


def content_of(folder: Path) -> dict[str, bytes]:
    """Returns name -> content of a folder's files.

    Links and pipes have a placeholder as content.
    """
    if folder.is_symlink() or not folder.is_dir():
        return {"": b"no folder"}
    return {
        str(path.relative_to(folder)): (
            path.read_bytes() if path.is_file() and not path.is_symlink() else b"no file"
        )
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    }


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    with bounded_space():
        tracemalloc.stop()
        yield
    logging.set_verbosity(before)


@dataclasses.dataclass(frozen=True)
class IntactCheckpoint:
    """An undamaged checkpoint.

    Attributes:
        content: Name -> content of the files in its folder.
        digests: Digests of a job that has restored it.
        reported: Result of `restore` on each rank.
    """

    content: dict[str, bytes]
    digests: Digest
    reported: list[SavedJob]


@pytest.mark.parametrize("placement", CASES)
def test_damaged_checkpoint_raises_or_restores_bitwise(placement: str, tmp_path: Path) -> None:
    directory, base = tmp_path / "checkpoints", tmp_path / "base"
    ranks = Ranks(placement, directory)
    for steps in (13, 9):
        ranks.train(steps)
        ranks.save()
    directory.rename(base)

    def restored_alone(name: str) -> IntactCheckpoint:
        ranks.train(1)
        shutil.copytree(base / name, directory / name)
        reported = ranks.restore()
        shutil.rmtree(directory)
        return IntactCheckpoint(content_of(base / name), ranks.digests(), reported)

    older, newer = (restored_alone(name) for name in sorted(os.listdir(base)))
    assert older == restored_alone(older.reported[0].path.name)
    assert older.digests != newer.digests

    draw, case, end = random.Random(placement), 0, time.monotonic() + SECONDS * SHARE
    outcomes = dict.fromkeys(("newer", "older", "refused", "nothing"), 0)
    while case < CASES[placement] or time.monotonic() < end:
        case += 1
        ranks.train(1)
        shutil.copytree(base, directory)
        reported = f"case {case}: {damage(directory, draw)}"
        before = ranks.digests()
        try:
            found = _watched_restore(ranks)
            restored = _restored(directory, found, before, ranks.digests(), [older, newer])
            _require_newest(directory, found, [older.content, newer.content])
        except (Exception, Hang) as error:
            raise AssertionError(reported) from error
        refused = "nothing" if found[0] is None else "refused"
        outcomes[{id(older): "older", id(newer): "newer"}.get(id(restored), refused)] += 1
        shutil.rmtree(directory)
    assert min(outcomes[name] for name in ("newer", "older", "refused")) > 0, outcomes


def _watched_restore(ranks: Ranks) -> list[Any]:
    # Trace only the restore, because tracing slows training down a lot.
    tracemalloc.start()
    try:
        with watched(MAX_BYTES):
            return ranks.restore()
    finally:
        tracemalloc.stop()


def _restored(
    directory: Path, found: list[Any], before: Digest, after: Digest, wholes: list[IntactCheckpoint]
) -> IntactCheckpoint | None:
    """Returns the restored checkpoint, or None if the restore was refused.

    Args:
        directory: The directory of the checkpoints.
        found: Result or exception of `restore` on each rank.
        before: Digests of the job before `restore`.
        after: Digests of the job after `restore`.
        wholes: The checkpoints before they were damaged.
    """
    if found[0] is None or any(isinstance(value, Exception) for value in found):
        assert found[0] is not None or found == [None] * len(found)
        for error in found:
            if error is None:
                continue
            is_mismatch = type(error) is CheckpointMismatchError
            assert is_mismatch or (type(error) is RuntimeError and RAISED.match(str(error))), error
            assert str(directory) in str(error), f"no file is named: {error}"
        assert after == before, f"refused, but changed: {found}"
        return None
    path = found[0].path
    # The folder may be a link to another checkpoint, or contain one.
    content = (path / MANIFEST).read_bytes()
    parts = set(after[0])
    if not any("/own." in name for name in json.loads(content)["files"]):
        parts.remove("own")
    for whole in wholes:
        pairs = zip(whole.digests, after, strict=True)
        if all(one[part] == other[part] for one, other in pairs for part in parts):
            # Otherwise the manifest was edited and its checksum updated.
            if content == whole.content[MANIFEST]:
                assert found == [
                    dataclasses.replace(reported, path=path) for reported in whole.reported
                ]
            return whole
    raise AssertionError(f"{found} is as no checkpoint was")


def _require_newest(directory: Path, found: list[Any], wholes: list[dict[str, bytes]]) -> None:
    """Asserts that the newest undamaged checkpoint, or a newer one, was restored.

    A `CheckpointMismatchError` is allowed as well.
    """
    names = [path.name for path in directory.iterdir() if re.fullmatch(NAME, path.name)]
    untouched = [name for name in names if content_of(directory / name) in wholes]
    if not untouched:
        return
    newest = max(_number(name) for name in untouched)
    if isinstance(found[0], SavedJob):
        assert _number(found[0].path.name) >= newest, f"{found} is older than {untouched}"
    else:
        is_mismatch = any(isinstance(error, CheckpointMismatchError) for error in found)
        assert is_mismatch, f"{untouched} are whole, but {found}"


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
