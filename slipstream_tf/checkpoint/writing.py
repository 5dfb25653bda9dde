"""Combines the files of all ranks into a checkpoint without network communication.

    DIRECTORY/checkpoint-000007/manifest.json, rank-0/..., rank-1/...

Each rank writes its files and a note that lists them to DIRECTORY/.saving. Rank 0 waits for the
notes of all ranks, writes the manifest and renames the folder to its final name. The ranks
communicate only through files, so this can run in a background thread during training.
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
# Interval at which a writing rank updates the modification time of its folder, and the maximum time
# that rank 0 waits for an update. Some file systems show changes of other hosts a minute late.
_BEAT_SECONDS = 5.0
_PATIENCE_SECONDS = 150.0
_ENGINE = "engine"
# Folder of the checkpoint that is being written. It is renamed when the checkpoint is complete.
STAGING = ".saving"
_NAME = re.compile(r"checkpoint-(\d{6,})")


def names(directory: Path) -> list[str]:
    """Returns the names of all checkpoints in a directory, newest first.

    Incomplete checkpoints are included.
    """
    if not directory.is_dir():
        return []
    found = [path.name for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def stage(directory: Path) -> str:
    """Creates an empty staging folder; returns the name of the new checkpoint."""
    staging = directory / STAGING
    if staging.exists():
        disk.remove(staging)
    disk.make_folder(staging)
    number = max(map(_number, names(directory)), default=0) + 1
    return f"checkpoint-{number:06d}"


@dataclasses.dataclass(frozen=True)
class RankFiles:
    """The copied state of one rank, ready to be written.

    Attributes:
        rank: The rank.
        tables: The tables of the rank's store.
        rates: The learning rates of the store, from `Rates.export`, or None.
        state: The state of the saturation engine, or None.
        position: The position in the input, from `CheckpointManager.save`, after conversion to JSON
            and back.
        rng: The state of random numbers, in the same way.
    """

    rank: int
    tables: list[TablePart]
    rates: dict[str, Any] | None
    state: dict[str, Any] | None
    position: Any
    rng: Any


def write_rank(staging: Path, checkpoint: str, files: RankFiles) -> None:
    """Writes a rank's files, and a note that lists them.

    Args:
        staging: The staging folder.
        checkpoint: The identity of the checkpoint.
        files: The state to write.

    Raises:
        OSError: If writing fails, for example because the disk is full. The note then contains the
            error.
    """
    folder = staging / f"rank-{files.rank}"
    note: dict[str, Any] = {"checkpoint": checkpoint}
    with _heartbeat(folder):
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
                if path.name not in of_parts:  # Already on disk.
                    disk.sync(path)
            note["files"] = {f"{folder.name}/{path.name}": entry_of(path) for path in written}
            note["tables"] = [part.entry() for part in files.tables]
            note["position"], note["rng"] = files.position, files.rng
            note["saturation"] = _summary(files)
        except Exception as error:
            # Rank 0 waits for the note. Free some space for it, because the disk can be full.
            with contextlib.suppress(OSError):
                disk.remove(folder)
            note = {"checkpoint": checkpoint, "error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            disk.write_text(_note(staging, files.rank), json.dumps(note))


def finish_with_all(directory: Path, name: str, manifest: Manifest, keep: int) -> None:
    """Completes a checkpoint after all ranks have written; on rank 0.

    Args:
        directory: The folder of all checkpoints.
        name: The name of the new checkpoint.
        manifest: A manifest with identity, step, number of ranks, placement and versions.
        keep: The number of complete checkpoints to keep, including this one. See `is_whole`.

    Raises:
        RuntimeError: If another rank failed to write or stopped updating its folder.
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
        # Keep damaged checkpoints that are newer than a kept one, so that users can inspect them.
        if found < keep:
            found += other == name or is_whole(directory / other)
            continue
        # Remove the manifest first, so that a partly removed folder is not a checkpoint.
        with contextlib.suppress(FileNotFoundError):
            disk.remove(directory / other / NAME)
        disk.remove(directory / other)


def is_whole(path: Path) -> bool:
    """Returns whether all files of a checkpoint exist with their recorded sizes."""
    try:
        require_whole(path, read_manifest(path))
    except CheckpointError:
        return False
    return True


def read_engines(
    folder: Path, manifest: Manifest
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Reads the store's rates and the engine states of all ranks.

    Returns:
        The learning rates for `Rates.restore`, or None, and the states of the ranks that had an
        engine, rank 0 first.

    Raises:
        CheckpointError: If a file is damaged.
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
            raise CheckpointError(path, f"entry {error} is missing") from error
        if state is not None:
            states.append(state)
    return rates, states


def _wait_for(path: Path, checkpoint: str, rank: int) -> dict[str, Any]:
    """Returns a rank's note; waits while the rank updates its folder."""
    folder = path.with_suffix("")
    seen, deadline = _changed(folder), time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        now = _changed(folder)
        if now != seen:
            seen, deadline = now, time.monotonic() + _PATIENCE_SECONDS
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"Rank {rank} did not write its part of a checkpoint: {folder} did not change for "
                f"{_PATIENCE_SECONDS:g} seconds. The rank has ended or does not see this folder. "
                "Earlier checkpoints are unchanged. Restart the job to resume from the newest "
                "checkpoint."
            )
        time.sleep(_PAUSE_SECONDS)
    note = json.loads(path.read_text(encoding="utf-8"))
    if "error" in note or note["checkpoint"] != checkpoint:
        other = "its files belong to another checkpoint. Run only one job per directory."
        part, reason = f"its part of a checkpoint in {folder}", note.get("error", other)
        raise RuntimeError(f"Rank {rank} could not write {part}: {reason}")
    return dict(note)


@contextlib.contextmanager
def _heartbeat(folder: Path) -> Iterator[None]:
    """Returns a context that regularly updates the modification time of a folder.

    This needs no free space on disk.
    """
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
    """Returns a folder's modification time in ns, or None if missing."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return None


def _note(staging: Path, rank: int) -> Path:
    return staging / f"rank-{rank}.json"


def _summary(files: RankFiles) -> dict[str, Any] | None:
    """Returns a summary of the engine's state for the manifest, or None."""
    if files.state is None:
        return None
    tracker = files.state["tracker"]
    return {
        "window": tracker["reports"]["windows"],
        "step": tracker["loop"]["step"],
        "threshold": tracker["loop"]["threshold"],
        "hot_keys": {name: len(table["keys"]) for name, table in tracker["tables"].items()},
        "pending": {part.name: part.state.num_deferred for part in files.tables},
    }


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
