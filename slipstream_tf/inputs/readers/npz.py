"""Reading arrays from .npz files; whatever is wrong with a file is a ValueError that names it."""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Iterator, Sequence

import numpy as np

from slipstream_tf.inputs.readers.archives import open_entry

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


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
