"""Atomic file operations: a file is either complete or absent.

Data is synced to disk before the file gets its name. If a process is killed, the disk therefore has
either the old file or the new file.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write(file: Any, data: Any) -> None:
    """Writes all bytes of a buffer to an unbuffered file.

    Raises:
        OSError: The disk is full or failed.
    """
    view = memoryview(data).cast("B")
    while view.nbytes:
        view = view[file.write(view) :]


def sync(path: Path) -> None:
    """Syncs a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(partial: Path, path: Path) -> None:
    """Syncs a file or folder, then renames it to its final name.

    The files in a folder must be synced already.

    Args:
        partial: The written file or folder, on the file system of `path`.
        path: The final name. An existing file is replaced.
    """
    sync(partial)
    rename(partial, path)
    sync(path.parent)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path that replaces `path` unless an error is raised.

    The temporary name is `path` with a suffix that is unique for this process.

    Args:
        path: The file to write. Its folder must exist.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield partial
        commit(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_json(path: str | os.PathLike[str]) -> Any:
    """Returns the contents of a JSON file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not JSON. The message contains its path.
    """
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)} is not valid JSON: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically: it is complete or absent."""
    with whole_file(path) as partial, open(partial, "wb", buffering=0) as file:
        write(file, text.encode())


def link(old: Path, new: Path) -> bool:
    """Creates a hard link; returns False if that fails.

    It fails if `old` is missing, or if the file system does not support links.
    """
    try:
        os.link(old, new)
    except OSError:
        return False
    return True


def rename(old: Path, new: Path) -> None:
    """Renames a file or folder within a file system."""
    os.replace(old, new)


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents.

    Raises:
        FileExistsError: The folder exists.
    """
    path.mkdir(parents=True)


def remove(path: Path) -> None:
    """Removes a file, or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
