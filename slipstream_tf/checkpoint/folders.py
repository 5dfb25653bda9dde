"""The folder of a job's checkpoints: their names, how one becomes whole, and which are kept.

    DIRECTORY/checkpoint-000007/manifest.json, rank-0/..., rank-1/...

What is being written lies in DIRECTORY/.saving, and gets its name when all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from slipstream_tf import disk
from slipstream_tf.checkpoint.errors import CheckpointError
from slipstream_tf.checkpoint.manifest import Manifest, read_manifest, require_whole

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


def finish(directory: Path, name: str, manifest: Manifest, keep: int) -> None:
    """Gives what was written its manifest and its name, and removes old checkpoints.

    Args:
        directory: of all checkpoints.
        name: that `stage` gave.
        manifest: of the files in the staging folder, which are on the disk.
        keep: whole checkpoints that are left, this one included, as far as sizes of files tell.
    """
    staging = directory / STAGING
    manifest.write(staging)
    disk.commit(staging, directory / name)
    found = names(directory)
    whole = [other for other in found if is_whole(directory / other)]
    if len(whole) >= keep:
        # Damaged ones stay as long as they are newer than one that is kept: to be looked at.
        for old in found[found.index(whole[keep - 1]) + 1 :]:
            # The manifest first: what is half removed is no checkpoint.
            with contextlib.suppress(FileNotFoundError):
                disk.remove(directory / old / "manifest.json")
            disk.remove(directory / old)


def is_whole(path: Path) -> bool:
    """Whether a checkpoint is whole, as far as sizes of files tell."""
    try:
        require_whole(path, read_manifest(path))
    except CheckpointError:
        return False
    return True


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
