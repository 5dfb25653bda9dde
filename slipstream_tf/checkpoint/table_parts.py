"""Copies and writes a rank's tables: all rows or only changed rows.

A file with changes extends the files of earlier checkpoints, back to a file with all rows. The
earlier files are hard-linked into the new checkpoint as RANK/table-000-before-0, -1, ...
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream_tf._utils import disk
from slipstream_tf.checkpoint import array_file, spilled
from slipstream_tf.checkpoint.array_file import Arrays
from slipstream_tf.checkpoint.store_parts import Rank, file_name
from slipstream_tf.checkpoint.table_state import TableState, export_table
from slipstream_tf.checkpoint.tables import KINDS, META, name_before, widened
from slipstream_tf.config import Storage, Table
from slipstream_tf.ops.sealed_rows import SealedRows
from slipstream_tf.tables.base import SavedStore, table_contents
from slipstream_tf.tables.replicas import counts_of

# Write all rows after this many files with changes, or when these have more rows than the first.
_MAX_FILES_BEFORE = 8


@dataclasses.dataclass(frozen=True)
class EarlierFiles:
    """The files of a table that the next checkpoint can extend.

    Attributes:
        folder: The folder of the rank in its newest checkpoint.
        name: The name of the newest file.
        checkpoints: The identities of the files' checkpoints, starting with the file of all rows.
        sizes: The sizes of the files in bytes.
        rows: The number of rows in each file.
        number: The number of the change set in the newest file, see `store.export_changes`.
    """

    folder: Path
    name: str
    checkpoints: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: tuple[int, ...]
    number: int

    @property
    def are_too_many(self) -> bool:
        """Whether the next file must contain all rows."""
        return len(self.rows) > _MAX_FILES_BEFORE or sum(self.rows[1:]) > self.rows[0]

    def written(self) -> "EarlierFiles":
        """Returns a copy that includes the size of the newest file.

        Call it after the file has been written. If the file system does not show the file yet, the
        size is -1. It never matches, so all rows are written again.
        """
        size = -1
        with contextlib.suppress(OSError):
            size = (self.folder / self.name).stat().st_size
        return dataclasses.replace(self, sizes=(*self.sizes, size))

    def link(self, folder: Path) -> bool:
        """Hard-links the files into another folder.

        Returns:
            Whether all files were linked. If not, because a file is missing or has another size,
            no link remains.
        """
        targets = [name_before(folder / self.name, index) for index in range(len(self.sizes))]
        sources = [self.folder / path.name for path in targets[:-1]] + [self.folder / self.name]
        for source, target, size in zip(sources, targets, self.sizes, strict=True):
            if not disk.link(source, target) or target.stat().st_size != size:
                for linked in targets:
                    linked.unlink(missing_ok=True)
                return False
        return True


@dataclasses.dataclass(frozen=True)
class TablePart:
    """The data of one table on one rank.

    Attributes:
        state: The state of the table. Its contents are only the changes since the earlier files if
            `before` is not None. They have no rows if the rows spill to disk.
        dim: The number of values per row.
        slots: The number of slot values per row.
        rule: The class name of the update rule. None if the store does not update the rows.
        storage: The storage of the table.
        sealed: The rows on this rank if they spill to disk.
        rows: The number of rows on this rank, in memory and on disk. 0 if another rank writes them.
        removed: Keys int64 [n] that were removed since the earlier files.
        decays: float32 [n], the factors that the counts of all unchanged rows were multiplied by
            since the earlier files, in order.
        before: The earlier files that the contents extend. None if the contents are all rows.
        number: The number of this change set. 0 if later files cannot extend it.
    """

    state: TableState
    dim: int
    slots: int
    rule: str | None
    storage: Storage = dataclasses.field(default_factory=Storage)
    sealed: SealedRows | None = None
    rows: int = 0
    removed: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    decays: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.float32))
    before: EarlierFiles | None = None
    number: int = 0

    @property
    def name(self) -> str:
        return self.state.name

    def entry(self) -> dict[str, Any]:
        """Returns the table's manifest entry; "rows" counts this rank's rows."""
        of_table = {name: getattr(self, name) for name in META}
        return {**of_table, "dtype": self.storage.dtype, "rows": self.rows}

    def write(self, path: Path, checkpoint: str, rank: int, earlier: Sequence[Path] = ()) -> int:
        """Writes the table's file and returns its size in bytes.

        Args:
            path: The path of the file.
            checkpoint: The identity of the checkpoint.
            rank: The rank that writes the file.
            earlier: The folders of this rank in earlier checkpoints. Row files of spilled tables
                are linked from there.
        """
        groups: dict[str, Arrays] = {}
        meta: dict[str, Any] = {
            "rank": rank,
            **{name: getattr(self, name) for name in META},
            "learning_rate": float(self.state.deferred["learning_rate"]),
            "pending_is_shadow": self.state.policy.is_shadow,
            "pending_is_leaving": self.state.is_leaving,
        }
        contents, found = self.state.contents, self.state.groups()
        if self.before is not None:
            meta["rows"], meta["before"] = self.rows, list(self.before.checkpoints)
            found["removed"] = {"keys": self.removed}
            found["decays"] = {"counts": self.decays}
        dtypes = {"rows": self.storage.dtype, "slots": self.storage.slot_dtype}
        for name, arrays in found.items():
            if "steps" in arrays:
                meta[f"{name}_steps"] = [int(step) for step in arrays["steps"]]
            if name == "admission":
                meta["admission_added"] = [int(added) for added in arrays["added"]]
            has_use = len(arrays.get("last_used", ())) == len(arrays.get("keys", ()))
            groups[name] = {
                column: _narrowed(arrays[column], dtypes.get(column, "float32"))
                for column in KINDS[name]
                if column in arrays and (has_use or column != "last_used")
            }
        if contents is not None and "powers" in contents:
            meta["powers"] = [float(power) for power in contents["powers"]]
        if self.sealed is not None:
            spilled.save_files(self.sealed, path, earlier)
            meta["spilled"], of_rows = spilled.described(self.sealed, self.storage)
            groups.update(of_rows)
        return array_file.write(path, checkpoint, meta, groups)


def writers_of(store: SavedStore, ranks: int) -> dict[str, int]:
    """Assigns each replicated table to a rank that writes its rows.

    The number of values to write is balanced over the ranks.

    Args:
        store: The store of one rank.
        ranks: The number of ranks.

    Returns:
        Table name -> rank.
    """
    values = {
        table.name: (store.size(table.name) + 1)
        * (table.dim + store.slot_layout(table.name).initial.size)
        for table in store.tables
    }
    found, of_rank = {}, [0] * ranks
    for name in sorted(values, key=lambda name: -values[name]):
        found[name] = of_rank.index(min(of_rank))
        of_rank[found[name]] += values[name]
    return found


def cut(
    store: SavedStore,
    rank: Rank,
    folder: Path | None = None,
    before: Mapping[str, EarlierFiles] | None = None,
    writers: Mapping[str, int] | None = None,
) -> list[TablePart]:
    """Copies the current tables, without rows that earlier files contain.

    Deferred gradients are not flushed. The memory must hold the copied rows, slots and counts until
    they are written, and temporarily a second copy of the largest table. Changed rows of a table
    that spills are written to its spill files instead.

    Args:
        store: The store to copy.
        rank: The rank of the store.
        folder: The folder for the rank's files. Earlier files are linked there.
        before: The files to extend by table name, from `next_before`. Other tables are copied
            completely.
        writers: The rank that copies each replicated table, by table name. Defaults to rank 0.

    Returns:
        One part per table, in the order of the store.
    """
    parts = []
    for table in store.tables:
        name, layout = table.name, store.slot_layout(table.name)
        of_rows: dict[str, Any] = {}
        if rank.placement == "replicated" and (writers or {}).get(name, 0) != rank.number:
            # Include all keys, also without an access on this rank, because each has a row.
            keys = store.keys_of(name)
            own = {"keys": keys, "counts": counts_of(keys, **store.export_accesses(name))}
            state, slots = export_table(store, name, None, own), layout.initial.size
        else:
            contents, of_rows = _rows_of(store, table, (before or {}).get(name), folder)
            state, slots = export_table(store, name, contents), int(contents["slots"].shape[1])
        part = TablePart(state, table.dim, slots, layout.rule, table.storage, **of_rows)
        parts.append(part)
    return parts


def next_before(
    parts: Sequence[TablePart], folder: Path, checkpoint: str
) -> dict[str, EarlierFiles]:
    """Returns the files that the next checkpoint can extend, by table name.

    Call `EarlierFiles.written` on each result after the files have been written.

    Args:
        parts: All tables of the newest checkpoint.
        folder: The folder of the rank's files in the newest checkpoint.
        checkpoint: The identity of the newest checkpoint.
    """
    found = {}
    for index, part in enumerate(parts):
        contents = part.state.contents
        if not part.number or contents is None:
            continue
        name = Path(file_name(0, index)).name
        old = part.before or EarlierFiles(folder, name, (), (), (), 0)
        checkpoints, rows = (*old.checkpoints, checkpoint), (*old.rows, len(contents["keys"]))
        found[part.name] = EarlierFiles(folder, name, checkpoints, old.sizes, rows, part.number)
    return found


def _rows_of(
    store: SavedStore,
    table: Table,
    before: EarlierFiles | None,
    folder: Path | None,
) -> tuple[Arrays, dict[str, Any]]:
    """Returns contents and attributes of a `TablePart` for a table that this rank writes.

    Args:
        store: The store.
        table: The table.
        before: The earlier files to extend, or None.
        folder: The folder into which they are linked, or None.
    """
    name = table.name
    if store.spills_rows(name):
        sealed, slots = store.seal_rows(name), store.slot_layout(name).initial.size
        empty, no_slots = (np.empty((0, width), np.float32) for width in (table.dim, slots))
        contents = table_contents(np.empty(0, np.int64), empty, no_slots, steps=sealed.steps)
        return contents, {"sealed": sealed, "rows": sealed.rows}
    if before is not None and before.are_too_many:
        before = None
    changes = store.export_changes(name, 0 if before is None else before.number)
    if changes.is_all or before is None or folder is None:
        before = None
    elif not before.link(folder):
        # The files were removed, or the file system does not support hard links.
        before, changes = None, store.export_changes(name, 0)
    contents = changes.contents
    return contents, {
        "rows": len(contents["keys"]) if before is None else store.size(name),
        "removed": changes.removed,
        "decays": changes.decays,
        "before": before,
        "number": changes.number,
    }


def _narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """Converts values to the table's dtype if that is lossless.

    Otherwise the values are returned unchanged, for example in this case: if the optimizer decays
    all rows, the table stores each row divided by a common scale. The exported product is then not
    exact in the table's dtype.
    """
    if dtype == "float32" or values.dtype != np.float32:
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            narrow: np.ndarray = values.astype(np.float16)
    else:
        narrow = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    return narrow if np.array_equal(widened(narrow), values) else values
