"""Arrays of .npz files, and files in .zip archives; what is wrong with one is a ValueError.

Sizes are compared with the archive before anything is read.
"""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np

# What is made of a byte at most, by method: LZMA needs some 0.3 bits for 273 bytes.
_LARGEST_RATIO = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032, zipfile.ZIP_LZMA: 8192}
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def open_entry(
    archive: zipfile.ZipFile, name: str, archive_bytes: int, most: int | None = None
) -> IO[bytes]:
    """Opens a file in an archive.

    Args:
        archive: that is read.
        name: of the file in it.
        archive_bytes: size of the archive.
        most: bytes that the content may have, or None: as many as the archive can hold.

    Returns:
        The content; its checksum is compared when the last byte is read.

    Raises:
        KeyError: there is no such file.
        ValueError: it is compressed in a way that does not bound its size, or its size cannot be
            or is too large.
    """
    info = archive.getinfo(name)
    largest_ratio = _LARGEST_RATIO.get(info.compress_type)
    if largest_ratio is None:
        raise ValueError(
            f"{name} is compressed by method {info.compress_type}; allowed: stored (0), deflated "
            "(8) or LZMA (14)"
        )
    compressed = min(info.compress_size, archive_bytes)
    if info.compress_size > archive_bytes or info.file_size > largest_ratio * compressed:
        raise ValueError(
            f"{name} is said to have {info.file_size} bytes from {info.compress_size} in an "
            f"archive of {archive_bytes}, which cannot be"
        )
    if most is not None and info.file_size > most:
        raise ValueError(f"{name} has {info.file_size} bytes; allowed: {most}")
    return archive.open(info)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[zipfile.ZipFile]:
    try:
        with open(path, "rb") as file:
            if file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
                raise ValueError("it holds a single array")
            with zipfile.ZipFile(file) as archive:
                yield archive
    except FileNotFoundError:
        raise
    except Exception as error:  # There are many kinds that a damaged file is told by.
        told = f"{error}" or type(error).__name__
        raise ValueError(f"{path!r} is no .npz file of arrays, or damaged: {told}") from error


def _names(archive: zipfile.ZipFile) -> tuple[str, ...]:
    suffix = ".npy"
    return tuple(n.removesuffix(suffix) for n in archive.namelist() if n.endswith(suffix))


def _read(archive: zipfile.ZipFile, name: str, archive_bytes: int) -> np.ndarray:
    with open_entry(archive, f"{name}.npy", archive_bytes) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"{name!r} is of version {version}; allowed: {list(_HEADERS)}")
        shape, _, dtype = _HEADERS[version](file)
        # NumPy makes the array before it reads.
        size = file.tell() + math.prod(shape) * dtype.itemsize
        if dtype.kind in "OV" or not dtype.itemsize:
            raise ValueError(f"{name!r} is of type {dtype}; allowed: numbers")
        found = archive.getinfo(f"{name}.npy").file_size
        if size != found:
            raise ValueError(f"{name!r} {shape} of {dtype} takes {size} bytes, but has {found}")
    with open_entry(archive, f"{name}.npy", archive_bytes) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def array_names(path: str) -> tuple[str, ...]:
    """Returns the names of a file's arrays.

    Args:
        path: of the .npz file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no .npz file.
    """
    with _opened(path) as archive:
        return _names(archive)


def read_arrays(path: str, names: Sequence[str], limit: int | None = None) -> dict[str, np.ndarray]:
    """Reads arrays by name.

    Args:
        path: of the .npz file.
        names: of the arrays.
        limit: of each array only so many entries from the start are kept, or None.

    Returns:
        The arrays by name, each of one dimension or more.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no .npz file, damaged, or has not these arrays.
    """
    found = array_names(path)
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{path}: no columns {missing}; found {list(found)}.")
    size = os.path.getsize(path)
    with _opened(path) as archive:
        return {name: np.atleast_1d(_read(archive, name, size))[:limit] for name in names}


def require_integers(path: str, arrays: dict[str, np.ndarray], bits: int) -> None:
    """Raises ValueError unless the arrays are of integers that fit into `bits` bits.

    Args:
        path: of the file, for the message.
        arrays: by name.
        bits: 32 or 64, of a signed integer.
    """
    allowed = np.iinfo(f"int{bits}")
    for name, values in arrays.items():
        if values.dtype.kind not in "iu":
            raise ValueError(
                f"{path}: {name!r} is of type {values.dtype}; allowed: integers, since keys are."
            )
        if np.can_cast(values.dtype, allowed.dtype) or not values.size:
            continue
        for extreme in (int(values.min()), int(values.max())):
            if not allowed.min <= extreme <= allowed.max:
                raise ValueError(
                    f"{path}: {name!r} has {extreme}; allowed: {allowed.min} to {allowed.max}."
                )
