"""The files of a job's checkpoints: which are whole, and how one becomes so.

In: a directory of checkpoints. Out: their names, manifests and what is wrong with them. A manifest
lists every file with its size and checksum and is written last; a folder gets its name after that.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d{6,})")
_KINDS = {"step": int, "world_size": int, "placement": str, "files": dict}
_BLOCK_BYTES = 1 << 20


def names(directory: Path) -> list[str]:
    """Returns the names of a directory's checkpoints, whole or not, the newest first."""
    if not directory.is_dir():
        return []
    found = [path.name for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def finish(staging: Path, directory: Path, manifest: dict[str, Any], keep: int) -> str:
    """Gives a checkpoint its manifest and its name, and removes old ones.

    Args:
        staging: folder in `directory` with the files, which are on the disk.
        directory: of all checkpoints.
        manifest: of the checkpoint: step, world_size, placement; files, their entries by name.
        keep: whole checkpoints that are left, this one included, as far as sizes of files tell.

    Returns:
        The name.
    """
    text = json.dumps({"format": FORMAT, **manifest}, indent=1) + "\n"
    (staging / MANIFEST).write_text(text, encoding="utf-8")
    sync(staging / MANIFEST)
    sync(staging)
    number = max(map(_number, names(directory)), default=0) + 1
    name = f"checkpoint-{number:06d}"
    staging.rename(directory / name)
    sync(directory)
    found = names(directory)
    whole = [other for other in found if problem(directory / other) is None]
    if len(whole) >= keep:
        # Damaged ones stay as long as they are newer than one that is kept: to be looked at.
        for old in found[found.index(whole[keep - 1]) + 1 :]:
            shutil.rmtree(directory / old)
    return name


def manifest_of(path: Path) -> Any:
    """Returns the manifest of a checkpoint."""
    return json.loads((path / MANIFEST).read_text(encoding="utf-8"))


def problem(path: Path, parts: Collection[str] = ()) -> str | None:
    """Says why a checkpoint is not whole; None: it is.

    Args:
        path: its folder.
        parts: of whose files checksums are compared, not only sizes: folders in it.
    """
    try:
        manifest = manifest_of(path)
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']!r}, this version reads {FORMAT}"
        if not all(isinstance(manifest[name], kind) for name, kind in _KINDS.items()):
            return f"{MANIFEST} is damaged (not {', '.join(_KINDS)})"
        files = {name: (entry["bytes"], entry) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is damaged ({type(error).__name__}: {error})"
    for name, (size, entry) in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        found = (path / name).stat().st_size
        if found != size:
            return f"{name} has {found} bytes, not {size}"
        if name.split("/")[0] in parts and entry_of(path / name) != entry:
            return f"{name} has another checksum than when it was written"
    return None


def entry_of(path: Path) -> dict[str, Any]:
    """Returns what a manifest says of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
