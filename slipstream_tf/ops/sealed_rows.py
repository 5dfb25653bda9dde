"""Typed wrappers of the ops that checkpoint tables whose rows spill to the disk."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.config import Storage
from slipstream_tf.ops import _loader


@dataclasses.dataclass(frozen=True)
class SealedRows:
    """All rows of a table as they were at one time, in files that stay so as long as this lives.

    The files are in blocks of as many pages each, and these of as many rows; a row's place in a
    block tells it.

    Attributes:
        files: scalar variant, for `save_file`.
        names: of each file, that no other file of any table has.
        file_of: int32 [b], of each block of rows, the index of its file.
        offsets: int64 [b], where it begins there, bytes.
        pages: int64 [b], the number of its first page, which the page repeats.
        counts: float32 [b * rows_of_block], decayed access counts; -1: the row is in another
            block, or gone.
        steps: int64 [2], updates and lookups so far.
        pages_of_block: pages.
        rows_of_block: rows.
        last_used: int64 [b * rows_of_block], as of `ops.table.export_table`; or [0].
    """

    files: tf.Tensor
    names: tuple[str, ...]
    file_of: np.ndarray
    offsets: np.ndarray
    pages: np.ndarray
    counts: np.ndarray
    steps: np.ndarray
    pages_of_block: int
    rows_of_block: int
    last_used: np.ndarray

    @property
    def rows(self) -> int:
        """Rows that count."""
        return int(np.count_nonzero(self.counts >= 0))


def seal(handle: tf.Tensor) -> SealedRows:
    """Writes all rows of a table to the disk, but for those that are there (eager only).

    Args:
        handle: of a table whose rows spill.

    Raises:
        tf.errors.ResourceExhaustedError: the disk is full; the rows are where they were.
    """
    result = _loader.library().slipstream_table_seal(handle=handle)
    names = ("file_of", "offsets", "pages", "counts", "steps", "last_used")
    arrays: dict[str, Any] = {name: getattr(result, name).numpy() for name in names}
    files = tuple(name.decode() for name in result.names.numpy())
    pages, rows = map(int, result.block)
    return SealedRows(result.files, files, **arrays, pages_of_block=pages, rows_of_block=rows)


def save_file(sealed: SealedRows, index: int, path: Path, copies: bool = False) -> bool:
    """Gives a sealed file a path, and waits until it is on the disk.

    Args:
        sealed: whose file.
        index: of the file.
        path: where nothing is.
        copies: whether it is read and written; else the file gets one name more, if the file
            system allows it.

    Returns:
        Whether it did.

    Raises:
        OSError: it could not be written.
    """
    try:
        result = _loader.library().slipstream_save_sealed_file(
            files=sealed.files, index=tf.constant(index, tf.int64), path=str(path), copies=copies
        )
    except tf.errors.ResourceExhaustedError as error:
        raise OSError(error.message) from error
    return bool(result)


def read(
    path: Path,
    offsets: np.ndarray,
    pages: np.ndarray,
    pages_of_block: int,
    storage: Storage,
    dim: int,
    slots: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads blocks of a sealed file; each page is compared with its checksum.

    Args:
        path: of the file.
        offsets: int64 [b], of the blocks.
        pages: int64 [b], the numbers of their first pages.
        pages_of_block: pages.
        storage: of the table that they are of.
        dim: values of a row.
        slots: values of a row's slots.

    Returns:
        keys int64 [n], rows float32 [n, dim] and slots float32 [n, slots], of all rows of the
        blocks, in order, whether they count or not.

    Raises:
        tf.errors.DataLossError: a page is not what was written, or not there.
    """
    result = _loader.library().slipstream_read_sealed_rows(
        path=str(path),
        offsets=offsets,
        pages=pages,
        pages_of_block=pages_of_block,
        dim=dim,
        slots=slots,
        dtype=storage.dtype,
        slot_dtype=storage.slot_dtype,
    )
    return result.keys.numpy(), result.rows.numpy(), result.row_slots.numpy()
