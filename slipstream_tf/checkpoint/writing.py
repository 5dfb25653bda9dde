"""How the ranks' files become a checkpoint, without a word over the network.

    DIRECTORY/checkpoint-000007/manifest.json, rank-0/..., rank-1/...

What is being written lies in DIRECTORY/.saving, and gets its name when all of it is on the disk.
In: what each rank copied. Out: its files, and a note of them in that folder; rank 0 waits for the
notes of all, writes the manifest and gives the folder its name. So a thread may do it while the
ranks train.
"""

import contextlib
import dataclasses
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream_tf._utils import disk
from slipstream_tf.checkpoint import array_file, store_state
from slipstream_tf.checkpoint.array_file import ArrayFile, CheckpointError
from slipstream_tf.checkpoint.manifest import NAME, Manifest, entry_of, read_manifest, require_whole
from slipstream_tf.checkpoint.store_parts import file_name
from slipstream_tf.checkpoint.table_parts import TablePart
from slipstream_tf.checkpoint.tables import require_rank

_PAUSE_SECONDS = 0.02
# How often a rank that writes gives a sign of life, and how long rank 0 waits without one: some
# file systems show others' changes a minute late.
_BEAT_SECONDS = 5.0
_PATIENCE_SECONDS = 150.0
_ENGINE = "engine"
STAGING = ".saving"
_NAME = re.compile(r"checkpoint-(\d{6,})")


def names(directory: Path) -> list[str]:
    """Returns the names of a directory's checkpoints, whole or not, the newest first."""
    if not directory.is_dir():
        return []
    found = [path.name for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def stage(directory: Path) -> str:
    """Makes an empty folder for what is to be written; returns the name that it will get."""
    staging = directory / STAGING
    if staging.exists():
        disk.remove(staging)
    disk.make_folder(staging)
    number = max(map(_number, names(directory)), default=0) + 1
    return f"checkpoint-{number:06d}"


@dataclasses.dataclass(frozen=True)
class RankFiles:
    """What one rank copied, to be written.

    Attributes:
        rank: its number.
        tables: of its store.
        rates: of its store, as `stores.rates.Rates.export` gave them; or None.
        state: of its saturation engine, or None.
        position: in its input, JSON.
        rng: of its random numbers, JSON.
    """

    rank: int
    tables: list[TablePart]
    rates: dict[str, Any] | None
    state: dict[str, Any] | None
    position: Any
    rng: Any


def write_rank(staging: Path, checkpoint: str, files: RankFiles) -> None:
    """Writes a rank's files beside those that lie in its folder, and the note that tells of all.

    Args:
        staging: folder of what is not whole yet.
        checkpoint: that the files are of.
        files: what to write.

    Raises:
        OSError: the disk is full, ...; the note tells of it, too.
    """
    folder = staging / f"rank-{files.rank}"
    note: dict[str, Any] = {"checkpoint": checkpoint}
    with _signs_of_life(folder):
        try:
            earlier = [staging.parent / name / folder.name for name in names(staging.parent)]
            for index, part in enumerate(files.tables):
                path = staging / file_name(files.rank, index)
                part.write(path, checkpoint, files.rank, earlier)
            skeleton, arrays = store_state.flatten(files.state)
            rates = files.rates or {"learning_rate": None}
            meta = {"rank": files.rank, "state": skeleton, **rates}
            groups = {name: {"values": array} for name, array in arrays.items()}
            array_file.write(folder / _ENGINE, checkpoint, meta, groups)
            written = sorted(folder.iterdir())
            of_parts = {Path(file_name(0, i)).name for i in range(len(files.tables))}
            for path in [*written, folder]:
                if path.name not in of_parts:  # On the disk already.
                    disk.sync(path)
            note["files"] = {f"{folder.name}/{path.name}": entry_of(path) for path in written}
            note["tables"] = [part.entry() for part in files.tables]
            note["position"], note["rng"] = files.position, files.rng
            note["saturation"] = _summary(files)
        except Exception as error:
            # Rank 0 waits for the note: it needs room on a disk that may be full.
            with contextlib.suppress(OSError):
                disk.remove(folder)
            note = {"checkpoint": checkpoint, "error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            disk.write_text(_note(staging, files.rank), json.dumps(note))


def finish_with_all(directory: Path, name: str, manifest: Manifest, keep: int) -> None:
    """Makes a checkpoint of what all ranks have written, as soon as they have; on rank 0.

    Args:
        directory: of all checkpoints.
        name: that the checkpoint gets.
        manifest: its identity, step, ranks, placement and versions.
        keep: whole checkpoints that are left, this one included, as far as sizes of files tell.

    Raises:
        RuntimeError: another rank could not write, or gave no sign of life for too long.
    """
    staging = directory / STAGING
    notes = [
        _wait_for(_note(staging, rank), manifest.checkpoint, rank)
        for rank in range(manifest.world_size)
    ]
    for rank in range(manifest.world_size):
        disk.remove(_note(staging, rank))
    tables = [dict(table) for table in notes[0]["tables"]]
    for i, table in enumerate(tables):
        table["rows"] = sum(note["tables"][i]["rows"] for note in notes)
    whole = dataclasses.replace(
        manifest,
        tables=tables,
        files={name: entry for note in notes for name, entry in note["files"].items()},
        positions=[note["position"] for note in notes],
        rng=[note["rng"] for note in notes],
        saturation=notes[0]["saturation"],
    )
    whole.write(staging)
    disk.commit(staging, directory / name)
    found = 0
    for other in names(directory):
        # Damaged ones stay as long as they are newer than one that is kept: to be looked at.
        if found < keep:
            found += other == name or is_whole(directory / other)
            continue
        # The manifest first: what is half removed is no checkpoint.
        with contextlib.suppress(FileNotFoundError):
            disk.remove(directory / other / NAME)
        disk.remove(directory / other)


def is_whole(path: Path) -> bool:
    """Whether a checkpoint is whole, as far as sizes of files tell."""
    try:
        require_whole(path, read_manifest(path))
    except CheckpointError:
        return False
    return True


def read_engines(
    folder: Path, manifest: Manifest
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Returns the rates of rank 0's store, and the engine's state of each rank.

    Raises:
        CheckpointError: a file is damaged.
    """
    states, rates = [], None
    for rank in range(manifest.world_size):
        path = folder / f"rank-{rank}" / _ENGINE
        file = ArrayFile(path, manifest.checkpoint)
        require_rank(path, file, rank)
        arrays = {name: file.read(name)["values"] for name in file.groups}
        try:
            state = store_state.unflatten(file.meta["state"], arrays)
            if rank == 0 and file.meta["learning_rate"] is not None:
                rates = {name: file.meta.get(name) for name in ("learning_rate", "followed_rate")}
        except KeyError as error:
            raise CheckpointError(path, f"has no {error}") from error
        if state is not None:
            states.append(state)
    return rates, states


def _wait_for(path: Path, checkpoint: str, rank: int) -> dict[str, Any]:
    """Returns a rank's note; waits for it as long as the rank gives signs of life."""
    folder = path.with_suffix("")
    seen, deadline = _changed(folder), time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        now = _changed(folder)
        if now != seen:
            seen, deadline = now, time.monotonic() + _PATIENCE_SECONDS
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"Rank {rank} did not write its part of a checkpoint: it gave no sign of life in "
                f"{folder} for {_PATIENCE_SECONDS:g} seconds. It has ended, or does not see this "
                "folder. The checkpoints before are as they were; start the job again from them."
            )
        time.sleep(_PAUSE_SECONDS)
    note = json.loads(path.read_text(encoding="utf-8"))
    if "error" in note or note["checkpoint"] != checkpoint:
        reason = note.get("error", "its files are of another checkpoint")
        raise RuntimeError(f"Rank {rank} could not write its part of a checkpoint: {reason}")
    return dict(note)


@contextlib.contextmanager
def _signs_of_life(folder: Path) -> Iterator[None]:
    """Changes the time of a folder now and then, which needs no room on its disk."""
    has_ended = threading.Event()

    def beat() -> None:
        while not has_ended.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(folder)

    thread = threading.Thread(target=beat, name="slipstream-checkpoint-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _changed(folder: Path) -> int | None:
    """When a folder changed last, by the clock of its file system; None: it is not there."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return None


def _note(staging: Path, rank: int) -> Path:
    return staging / f"rank-{rank}.json"


def _summary(files: RankFiles) -> dict[str, Any] | None:
    """The engine's state in short, for readers of the manifest."""
    if files.state is None:
        return None
    tracker = files.state["tracker"]
    return {
        "window": tracker["reports"]["windows"],
        "step": tracker["loop"]["step"],
        "threshold": tracker["loop"]["threshold"],
        "hot_keys": {name: len(table["keys"]) for name, table in tracker["tables"].items()},
        "pending": {part.name: len(part.deferred["keys"]) for part in files.tables},
    }


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
