"""Inputs that are in memory as NumPy arrays, and how arrays are read from .npz files.

Whatever is wrong with a file is a ValueError that names it. Sizes are compared with the archive
before anything is read.
"""

import contextlib
import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np

from slipstream_tf.inputs.readers.base import BatchReader, Rows
from slipstream_tf.inputs.spec import DataSpec

# Rows widened to int64 at a time: enough to cost nothing per batch, and to stay in the cache.
_ROWS_AT_ONCE = 1 << 16
# What is shuffled at a time, about: 256 KiB of positions.
_ROWS_OF_A_PART = 1 << 15
# What is made of a byte at most, by method: LZMA needs some 0.3 bits for 273 bytes.
_LARGEST_RATIO = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032, zipfile.ZIP_LZMA: 8192}
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class ArrayReader(BatchReader):
    """Batches of arrays, in their order or shuffled anew in every pass.

    The arrays may be of any integer type; batches are int64.
    """

    def __init__(
        self,
        spec: DataSpec,
        keys: np.ndarray,
        label: np.ndarray,
        batch_size: int,
        dense: np.ndarray | None = None,
        shuffle_seed: int | None = None,
        drop_remainder: bool = False,
    ):
        """Keeps references to the arrays.

        Args:
            spec: what the batches hold.
            keys: [n, fields].
            label: [n].
            batch_size: inputs of a batch.
            dense: [n, num_dense], or None.
            shuffle_seed: None keeps the order; with a seed, pass e (counted over the passes of
                this reader) has the order that (seed, e) gives.
            drop_remainder: leave out a last batch that is not full.

        Raises:
            ValueError: the arrays do not fit together, keys are no integers, a label or
                a dense number is not finite, or the batch size is below 1.
        """
        super().__init__(batch_size, drop_remainder=drop_remainder)
        count = label.shape[0] if label.ndim == 1 else -1
        dense = np.empty((max(count, 0), 0), np.float32) if dense is None else dense
        if keys.shape != (count, len(spec.fields)) or dense.shape != (count, spec.num_dense):
            raise ValueError(
                f"Arrays of {spec.name!r} do not fit: keys {keys.shape}, label {label.shape}, "
                f"dense {dense.shape}; allowed: "
                f"[n, {len(spec.fields)}], [n], [n, {spec.num_dense}]."
            )
        if keys.dtype.kind not in "iu":
            raise ValueError(f"Keys of {spec.name!r} are of type {keys.dtype}; allowed: integers.")
        require_all(f"Label of {spec.name!r}", label, np.isfinite(label), "finite numbers")
        if dense.size:
            require_all(f"Dense of {spec.name!r}", dense, np.isfinite(dense), "finite numbers")
        self.spec = spec
        self._keys, self._label, self._dense = keys, label, dense
        self._shuffle_seed = shuffle_seed

    def _blocks(self, number: int) -> Iterator[Rows]:
        count = len(self._label)
        size = self._batch_size * max(1, _ROWS_AT_ONCE // self._batch_size)
        order = None
        if self._shuffle_seed is not None:
            order = random_order(count, np.random.default_rng([self._shuffle_seed, number]))
        for begin in range(0, count, size):
            part = slice(begin, min(begin + size, count))
            arrays = (self._label, self._dense, self._keys)
            if order is None:
                label, dense, keys = (array[part] for array in arrays)
            else:
                # For rows of a few values several times as fast as indexing with positions.
                label, dense, keys = (array.take(order[part], axis=0) for array in arrays)
            label, dense = label.astype(np.float32), dense.astype(np.float32)
            yield Rows(label, dense, keys.astype(np.int64))


def random_order(count: int, random: np.random.Generator) -> np.ndarray:
    """Returns 0 to count - 1, int64 [count], in any order with the same probability.

    As `random.permutation`, but in half its time where there are millions: each goes to a part
    at random, and the parts are shuffled one by one, in the cache.
    """
    parts = min(256, 1 + count // _ROWS_OF_A_PART)
    part = random.integers(parts, size=count, dtype=np.uint8)
    order = np.argsort(part, kind="stable")
    for own in np.split(order, np.cumsum(np.bincount(part, minlength=parts))[:-1]):
        random.shuffle(own)
    return order


def require_all(what: str, values: np.ndarray, is_good: np.ndarray, allowed: str) -> None:
    """Raises ValueError with the first value of [n, ...] where `is_good` is not set, if any."""
    if not is_good.all():
        index = tuple(int(i) for i in np.argwhere(~is_good)[0])
        raise ValueError(f"{what} has {values[index]} at {index}; allowed: {allowed}.")


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
        reason = f"{error}" or type(error).__name__
        raise ValueError(f"{path!r} is no .npz file of arrays, or damaged: {reason}") from error


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
        names = archive.namelist()
    return tuple(n.removesuffix(".npy") for n in names if n.endswith(".npy"))


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
            what = f"{path}: {name!r} is of type {values.dtype}"
            raise ValueError(f"{what}; allowed: integers, since keys are.")
        if np.can_cast(values.dtype, allowed.dtype) or not values.size:
            continue
        for extreme in (int(values.min()), int(values.max())):
            if not allowed.min <= extreme <= allowed.max:
                what = f"{path}: {name!r} has {extreme}"
                raise ValueError(f"{what}; allowed: {allowed.min} to {allowed.max}.")
