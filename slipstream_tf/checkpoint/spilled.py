"""Checkpoints of spilled tables, without reading the spill files.

The file of a table, RANK/table-000, is accompanied by files of rows, RANK/table-000-rows-NAME. If
the file system supports it, these are hard links to the spill files or to files of an earlier
checkpoint, otherwise copies. Their content never changes, therefore a checkpoint costs only the
rows that changed since the previous one. The table's file lists the valid rows.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream_tf._utils import disk
from slipstream_tf.checkpoint.array_file import ArrayFile, Arrays, CheckpointError
from slipstream_tf.config import Storage
from slipstream_tf.ops import sealed_rows
from slipstream_tf.ops.sealed_rows import SealedRows

BLOCKS, COUNTS = "spilled", "spilled_counts"
_INFIX = "-rows-"
_AT_ONCE_BYTES = 32 << 20
_KINDS = {BLOCKS: {"file_of": "<i4", "offsets": "<i8", "pages": "<i8"}, COUNTS: {"counts": "<f4"}}
_LAST_USED = {"last_used": np.dtype("<i8")}


def has_rows(name: str) -> bool:
    """Returns whether a file, by its name, contains rows in checksummed pages."""
    return _INFIX in name


def save_files(sealed: SealedRows, path: Path, earlier: Sequence[Path]) -> None:
    """Links or copies the row files next to the table's file.

    Args:
        sealed: The rows of the table.
        path: The path of the table's file.
        earlier: The folders of this rank in earlier checkpoints.

    Raises:
        OSError: If writing fails, for example because the disk is full.
    """
    for index, name in enumerate(sealed.names):
        target = path.with_name(f"{path.name}{_INFIX}{name}")
        if sealed_rows.save_file(sealed, index, target):
            continue
        if not any(disk.link(folder / target.name, target) for folder in earlier):
            sealed_rows.save_file(sealed, index, target, copies=True)


def described(sealed: SealedRows, storage: Storage) -> tuple[dict[str, Any], dict[str, Arrays]]:
    """Returns the metadata and the groups of columns that describe spilled rows."""
    meta = {
        "names": list(sealed.names),
        "pages_of_block": sealed.pages_of_block,
        "rows_of_block": sealed.rows_of_block,
        "dtype": storage.dtype,
        "slot_dtype": storage.slot_dtype,
        "rows": sealed.rows,
    }
    blocks = {name: getattr(sealed, name) for name in _KINDS[BLOCKS]}
    counts = {"counts": sealed.counts}
    if sealed.last_used.size:
        counts["last_used"] = sealed.last_used
    return meta, {BLOCKS: blocks, COUNTS: counts}


class SavedRows:
    """The rows of a saved table in separate row files.

    Attributes:
        rows: The number of valid rows.
    """

    def __init__(self, path: Path, file: ArrayFile, dim: int, slots: int) -> None:
        """Checks the description in the table's file.

        Args:
            path: The path of the table's file.
            file: The reader of the table's file.
            dim: The number of values per row.
            slots: The number of slot values per row.

        Raises:
            CheckpointError: If the description is damaged or a row file is missing.
        """
        self._path, self._file, self._dim, self._slots = path, file, dim, slots
        try:
            meta = file.meta["spilled"]
            self.rows = int(meta["rows"])
            self._pages_of_block = int(meta["pages_of_block"])
            self._rows_of_block = int(meta["rows_of_block"])
            self._storage = Storage(dtype=meta["dtype"], slot_dtype=meta["slot_dtype"])
            self._names = [path.with_name(f"{path.name}{_INFIX}{n}") for n in meta["names"]]
        except (KeyError, TypeError, ValueError) as error:
            problem = f"the description of its row files is invalid ({error!r})"
            raise CheckpointError(path, problem) from error
        for group, columns in _KINDS.items():
            found = file.groups[group].columns if group in file.groups else {}
            kinds = {name: np.dtype(kind) for name, kind in columns.items()}
            if found not in (kinds, {**kinds, **_LAST_USED} if group == COUNTS else kinds):
                problem = f"group {group!r} has columns {found}; expected {columns}"
                raise CheckpointError(path, problem)
        blocks, counts = file.groups[BLOCKS].rows, file.groups[COUNTS].rows
        if counts != blocks * self._rows_of_block or self._pages_of_block < 1:
            problem = (
                f"the file has {counts} access counts for {blocks} blocks of {self._rows_of_block} "
                f"rows and {self._pages_of_block} pages; expected one count per row and >= 1 page"
            )
            raise CheckpointError(path, problem)
        for rows_path in self._names:
            if not rows_path.is_file():
                raise CheckpointError(rows_path, "the file is missing")

    def blocks(self) -> Iterator[Arrays]:
        """Yields the keys, rows, slots and counts of the rows in blocks.

        Raises:
            CheckpointError: If a file is damaged.
        """
        layout = self._file.read(BLOCKS)
        of_rows = {
            name: values.reshape((-1, self._rows_of_block))
            for name, values in self._file.read(COUNTS).items()
        }
        row_bytes = self._storage.row_bytes(self._dim, self._slots)
        at_once = max(1, _AT_ONCE_BYTES // (self._rows_of_block * row_bytes))
        read = 0
        for index, path in enumerate(self._names):
            in_file = np.flatnonzero(layout["file_of"] == index)
            in_file = in_file[np.argsort(layout["offsets"][in_file])]
            for begin in range(0, in_file.size, at_once):
                chosen = in_file[begin : begin + at_once]
                found = {name: values[chosen].reshape(-1) for name, values in of_rows.items()}
                keys, rows, slots = self._read(path, layout, chosen)
                if keys.size != found["counts"].size:
                    problem = f"the file has {keys.size} rows in {chosen.size} blocks"
                    problem += f"; expected {found['counts'].size} rows"
                    raise CheckpointError(path, problem)
                lives = found["counts"] >= 0
                read += int(np.count_nonzero(lives))
                found.update(keys=keys, rows=rows, slots=slots)
                yield {name: values[lives] for name, values in found.items()}
        if read != self.rows:
            problem = f"the row files have {read} rows; expected {self.rows} rows as in this file"
            raise CheckpointError(self._path, problem)

    def _read(
        self, path: Path, layout: Arrays, chosen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        try:
            blocks = layout["offsets"][chosen], layout["pages"][chosen], self._pages_of_block
            return sealed_rows.read(path, *blocks, self._storage, self._dim, self._slots)
        except OSError as error:
            raise CheckpointError(path, str(error)) from error
