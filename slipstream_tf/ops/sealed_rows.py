"""Typed wrappers of the checkpoint ops for tables that spill to disk."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.config import Storage
from slipstream_tf.ops import _loader


@dataclasses.dataclass(frozen=True)
class SealedRows:
    """All rows of a table at one time, in files on disk.

    The files do not change while this object exists. They consist of blocks of pages, and each
    block has the same number of rows. The fields `counts` and `last_used` are ordered by block and
    by the position of the row in its block.

    Attributes:
        files: Scalar variant, for `save_file`.
        names: Names of the files, unique over all tables.
        file_of: int32 [b], the file index of each block.
        offsets: int64 [b], the offset of each block in its file, in bytes.
        pages: int64 [b], the number of the first page of each block, which is also stored in the
            page.
        counts: float32 [b * rows_of_block], decayed access counts. -1 marks an outdated row: the
            row was removed, or its current version is in another block.
        steps: int64 [2], number of updates and lookups so far.
        pages_of_block: Number of pages per block.
        rows_of_block: Number of rows per block.
        last_used: int64 [b * rows_of_block], as in `ops.table.export_table`; or [0].
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
        """Number of valid rows."""
        return int(np.count_nonzero(self.counts >= 0))


def seal(handle: tf.Tensor) -> SealedRows:
    """Writes a table's rows to disk; returns their files (eager only).

    Rows that are already on disk are not written again.

    Args:
        handle: A table with rows that spill.

    Raises:
        tf.errors.ResourceExhaustedError: The disk is full. The rows are unchanged then.
    """
    result = _loader.library().slipstream_table_seal(handle=handle)
    names = ("file_of", "offsets", "pages", "counts", "steps", "last_used")
    arrays: dict[str, Any] = {name: getattr(result, name).numpy() for name in names}
    files = tuple(name.decode() for name in result.names.numpy())
    pages, rows = map(int, result.block)
    return SealedRows(result.files, files, **arrays, pages_of_block=pages, rows_of_block=rows)


def save_file(sealed: SealedRows, index: int, path: Path, copies: bool = False) -> bool:
    """Saves a sealed file and waits until it is on disk.

    Args:
        sealed: The sealed rows.
        index: Index of the file.
        path: Path of the new file, which must not exist.
        copies: Whether to copy the file. If not, a hard link is created.

    Returns:
        Whether the file was saved. False means that the file system refused the hard link. Call the
        function again with `copies=True` then.

    Raises:
        OSError: The file could not be written.
    """
    try:
        result = _loader.library().slipstream_save_sealed_file(
            files=sealed.files, index=tf.constant(index, tf.int64), path=str(path), copies=copies
        )
    except tf.errors.ResourceExhaustedError as error:
        raise OSError(_loader.message_of(error)) from error
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
    """Reads blocks of a sealed file and verifies their checksums.

    Args:
        path: Path of the file.
        offsets: int64 [b], offsets of the blocks in bytes.
        pages: int64 [b], numbers of the first pages of the blocks.
        pages_of_block: Number of pages per block.
        storage: Storage settings of the table.
        dim: Number of values per row.
        slots: Number of slots per row.

    Returns:
        keys int64 [n], rows float32 [n, dim] and slots float32 [n, slots] of all rows of the blocks
        in order, including rows that are not valid.

    Raises:
        OSError: A page is missing or corrupt.
    """
    try:
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
    except tf.errors.DataLossError as error:
        raise OSError(_loader.message_of(error)) from error
    return result.keys.numpy(), result.rows.numpy(), result.row_slots.numpy()
