"""All that checkpoints do to a disk: write, wait until it is there, rename, remove.

A name appears only after what it names is on the disk: whoever is killed leaves either what was
there before or what is to be there after.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any


def write(file: Any, data: Any) -> None:
    """Writes all of some bytes to an unbuffered file.

    Raises:
        OSError: the disk is full, or failed.
    """
    view = memoryview(data).cast("B")
    while view.nbytes:
        view = view[file.write(view) :]


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a file that has all of a text or is not there, under its name."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb", buffering=0) as file:
        write(file, text.encode())
    sync(partial)
    rename(partial, path)
    sync(path.parent)


def rename(old: Path, new: Path) -> None:
    """Gives a file or folder another name on the same file system."""
    os.rename(old, new)


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it that are missing."""
    path.mkdir(parents=True)


def remove(path: Path) -> None:
    """Removes a file or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
