"""What is done to a disk where a file must never be half there: write, wait, rename, remove.

A name appears only after what it names is on the disk: whoever is killed leaves either what was
there before or what is to be there after.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
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


def commit(partial: Path, path: Path) -> None:
    """Gives a file, or a folder whose files are on the disk, its name, once all of it is there.

    Args:
        partial: what was written, on the file system of `path`.
        path: its name; a former file is replaced.
    """
    sync(partial)
    rename(partial, path)
    sync(path.parent)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a path to write to; what lies there becomes `path` if no error is raised.

    The path is the file's own with more behind it, and of this process alone.

    Args:
        path: of the file, which is replaced; its folder is there.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield partial
        commit(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_json(path: str | os.PathLike[str]) -> Any:
    """Returns what a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON; the message names it.
    """
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)}: not JSON: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Writes a file that has all of a text or is not there, under its name."""
    with whole_file(path) as partial, open(partial, "wb", buffering=0) as file:
        write(file, text.encode())


def link(old: Path, new: Path) -> bool:
    """Gives a file one name more; returns whether it is there and the file system allows it."""
    try:
        os.link(old, new)
    except OSError:
        return False
    return True


def rename(old: Path, new: Path) -> None:
    """Gives a file or folder another name on the same file system."""
    os.replace(old, new)


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it that are missing."""
    path.mkdir(parents=True)


def remove(path: Path) -> None:
    """Removes a file or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
