"""Reading arrays from .npz files; whatever is wrong with a file is a ValueError that names it."""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterator, Sequence

import numpy as np


@contextlib.contextmanager
def _opened(path: str) -> Iterator[np.lib.npyio.NpzFile]:
    try:
        arrays = np.load(path, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
        with arrays:
            yield arrays
    except FileNotFoundError:
        raise
    except (ValueError, OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(f"{path!r} is no .npz file of arrays, or damaged: {error}") from error


def array_names(path: str) -> tuple[str, ...]:
    """Returns the names of a file's arrays.

    Args:
        path: of the .npz file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no .npz file.
    """
    with _opened(path) as arrays:
        return tuple(arrays.files)


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
    with _opened(path) as arrays:
        return {name: np.atleast_1d(arrays[name])[:limit] for name in names}


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
