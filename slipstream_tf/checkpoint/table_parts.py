"""What a rank writes of its tables: all rows, or those that changed since its checkpoint before.

In: a store, of one process or of a rank. Out: files of checked blocks. A file of changes goes on
from those of earlier checkpoints, back to one with all rows. These are kept, not written anew:
RANK/table-000-before-0, -1, ... are the same files under one name more.
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
from slipstream_tf.checkpoint.tables import KINDS, META, name_before, widened
from slipstream_tf.config import Storage, Table
from slipstream_tf.ops.sealed_rows import SealedRows
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables.base import SavedStore, table_contents
from slipstream_tf.tables.replicas import counts_of

# A file with all rows comes again after so many with changes, or when these have more rows.
_MOST_BEFORE = 8


@dataclasses.dataclass(frozen=True)
class FilesBefore:
    """The files of a table that the next checkpoint may go on from.

    Attributes:
        folder: of a rank's files of its newest checkpoint.
        name: of the newest file.
        checkpoints: that the files are of, the one with all rows first.
        sizes: of the files in bytes.
        rows: that each has.
        number: of the changes that the newest has.
    """

    folder: Path
    name: str
    checkpoints: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: tuple[int, ...]
    number: int

    @property
    def are_too_many(self) -> bool:
        """Whether all rows are to be written again."""
        return len(self.rows) > _MOST_BEFORE or sum(self.rows[1:]) > self.rows[0]

    def written(self) -> "FilesBefore":
        """Returns the same with the size of the newest file, once it is there.

        Where a file system shows that late, no size fits, and all rows are written again.
        """
        size = -1
        with contextlib.suppress(OSError):
            size = (self.folder / self.name).stat().st_size
        return dataclasses.replace(self, sizes=(*self.sizes, size))

    def link(self, folder: Path) -> bool:
        """Gives them names in another folder, beside a file of the same name; all or none.

        Returns whether they have them: no if one is missing, or not as long as when it was written.
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
    """What one rank has of one table.

    Attributes:
        name: of the table.
        dim: values of a row.
        slots: values of a row's slots.
        rule: class name of the update rule; None: the rows are not the store's to update.
        contents: of the rows on this rank, as `store.export_table(name, flush=False)`; None: they
            are the same as on the rank that writes them.
        sealed: the rows on this rank, if they spill to the disk; the contents have none then.
        rows: on this rank, wherever they are; 0: another rank writes them.
        removed: keys int64 [n] that have left since the files before.
        decays: float32 [n], what the counts of all other rows were multiplied by since, in turn.
        before: what the contents are changes of; none: they are all rows.
        number: of these changes; 0: later ones cannot go on from them.
        accesses: keys int64 [n] and counts float32 [n] of this rank where its contents do not have
            them, or it has none.
        deferred: gradients, as `store.export_deferred` gives them.
        replicas: of other ranks' rows, with this rank's accesses, as `store.export_copies(name)`;
            or None.
        is_shadow: whether the sums are shadow mode's, whose gradients were applied when they came.
        is_leaving: whether they all leave with the next step.
        storage: of the table.
        admission: what a table that admits knows of keys without a row; or None.
    """

    name: str
    dim: int
    slots: int
    rule: str | None
    contents: Arrays | None
    accesses: Arrays | None
    deferred: Arrays
    replicas: Arrays | None = None
    is_shadow: bool = False
    is_leaving: bool = False
    storage: Storage = dataclasses.field(default_factory=Storage)
    sealed: SealedRows | None = None
    rows: int = 0
    removed: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    decays: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.float32))
    before: FilesBefore | None = None
    number: int = 0
    admission: Arrays | None = None

    def entry(self) -> dict[str, Any]:
        """Returns what a manifest says of the table, if it is all of the table."""
        of_table = {name: getattr(self, name) for name in META}
        return {**of_table, "dtype": self.storage.dtype, "rows": self.rows}

    def write(self, path: Path, checkpoint: str, rank: int, earlier: Sequence[Path] = ()) -> int:
        """Writes it to a file that is a rank's, and returns the bytes.

        Rows that spill are in files beside it, which may be those of earlier checkpoints, in the
        folders `earlier` of the rank.
        """
        groups: dict[str, Arrays] = {}
        meta: dict[str, Any] = {
            "rank": rank,
            **{name: getattr(self, name) for name in META},
            "learning_rate": float(self.deferred["learning_rate"]),
            "pending_is_shadow": self.is_shadow,
            "pending_is_leaving": self.is_leaving,
        }
        found = {
            "contents": self.contents,
            "copies": self.replicas,
            "accesses": self.accesses,
            "pending": self.deferred,
            "admission": self.admission,
        }
        if self.before is not None:
            meta["rows"], meta["before"] = self.rows, list(self.before.checkpoints)
            found["removed"] = {"keys": self.removed}
            found["decays"] = {"counts": self.decays}
        dtypes = {"rows": self.storage.dtype, "slots": self.storage.slot_dtype}
        for name, arrays in found.items():
            if arrays is None:
                continue
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
        if self.contents is not None and "powers" in self.contents:
            meta["powers"] = [float(power) for power in self.contents["powers"]]
        if self.sealed is not None:
            spilled.save_files(self.sealed, path, earlier)
            meta["spilled"], of_rows = spilled.described(self.sealed, self.storage)
            groups.update(of_rows)
        return array_file.write(path, checkpoint, meta, groups)


def writers_of(store: SavedStore, ranks: int) -> dict[str, int]:
    """Returns the rank that writes each table whose rows are the same on all.

    Each gets about as many values to write.

    Args:
        store: of one rank.
        ranks: in all.
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
    policies: Mapping[str, UpdatePolicy] | None = None,
    folder: Path | None = None,
    before: Mapping[str, FilesBefore] | None = None,
    writers: Mapping[str, int] | None = None,
) -> list[TablePart]:
    """Copies all tables as they are now, as far as files before do not have them.

    Nothing is flushed. Needs as much memory as the rows, slots and counts take that are copied,
    until they are written, and as much as those of the largest table once more while it is copied.
    Rows of a table that spills are written to its disk instead, those that changed.

    Args:
        store: whose tables they are.
        rank: whose.
        policies: of now, by table; those of tables not named are no dry run.
        folder: where the rank's files will be; the files before get names there.
        before: of tables, by name, what `next_before` returned; others are copied whole.
        writers: of replicated tables, by name, the rank that copies them; 0: of those not named.
    """
    is_apart = rank.size > 1 or store.is_in_sok
    has_replicas = rank.placement != "replicated" and is_apart and store.has_replicas
    parts = []
    for table in store.tables:
        name, policy = table.name, (policies or {}).get(table.name, UpdatePolicy())
        found = None if folder is None else (before or {}).get(name)
        if rank.placement == "replicated" and (writers or {}).get(name, 0) != rank.number:
            rows = _accesses_of(store, name)
        else:
            rows = _rows_of(store, table, found, folder)
        deferred = store.export_deferred(name)
        is_leaving = bool(deferred.pop("is_leaving", False))
        part = TablePart(
            name=name,
            dim=table.dim,
            rule=store.slot_layout(name).rule,
            deferred=deferred,
            replicas=store.export_copies(name) if has_replicas else None,
            # What is on its way out was deferred in earnest, whatever the policy is now.
            is_shadow=policy.is_shadow and not is_leaving,
            is_leaving=is_leaving,
            storage=table.storage,
            admission=store.export_admission(name) if table.admits else None,
            **rows,
        )
        parts.append(part)
    return parts


def next_before(
    parts: Sequence[TablePart], folder: Path, checkpoint: str
) -> dict[str, FilesBefore]:
    """Returns, by table, what the next checkpoint may go on from once its files are `written`.

    Args:
        parts: of the newest one, all of its tables.
        folder: where a rank's files of it will be.
        checkpoint: its identity.
    """
    found = {}
    for index, part in enumerate(parts):
        if not part.number or part.contents is None:
            continue
        name = Path(file_name(0, index)).name
        old = part.before or FilesBefore(folder, name, (), (), (), 0)
        checkpoints, rows = (*old.checkpoints, checkpoint), (*old.rows, len(part.contents["keys"]))
        found[part.name] = FilesBefore(folder, name, checkpoints, old.sizes, rows, part.number)
    return found


def _accesses_of(store: SavedStore, name: str) -> dict[str, Any]:
    """Returns those of a `TablePart`'s attributes that tell of rows, of a table of another's."""
    # Of all keys, though some have been accessed by others alone: rows are made for them.
    keys = store.keys_of(name)
    own = {"keys": keys, "counts": counts_of(keys, **store.export_accesses(name))}
    return {"slots": store.slot_layout(name).initial.size, "contents": None, "accesses": own}


def _rows_of(
    store: SavedStore,
    table: Table,
    before: FilesBefore | None,
    folder: Path | None,
) -> dict[str, Any]:
    """Returns those of a `TablePart`'s attributes that tell of rows, of a rank's table."""
    name, slots = table.name, store.slot_layout(table.name).initial.size
    accesses = store.export_accesses(name) if store.is_in_sok else None
    if store.spills_rows(name):
        sealed = store.seal_rows(name)
        empty, no_slots = (np.empty((0, width), np.float32) for width in (table.dim, slots))
        contents = table_contents(np.empty(0, np.int64), empty, no_slots, steps=sealed.steps)
        of_rows = {"contents": contents, "sealed": sealed, "rows": sealed.rows}
        return {"slots": slots, "accesses": accesses, **of_rows}
    if before is not None and before.are_too_many:
        before = None
    changes = store.export_changes(name, 0 if before is None else before.number)
    if changes.is_all or before is None or folder is None:
        before = None
    elif not before.link(folder):
        # Somebody has removed them, or the file system gives a file one name.
        before, changes = None, store.export_changes(name, 0)
    contents = changes.contents
    return {
        "slots": int(contents["slots"].shape[1]),
        "contents": contents,
        "accesses": accesses,
        "rows": len(contents["keys"]) if before is None else store.size(name),
        "removed": changes.removed,
        "decays": changes.decays,
        "before": before,
        "number": changes.number,
    }


def _narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns values as they lie in a table of a dtype, if they are what it can hold.

    Those of rows that lie divided by a scale, since all of them decay, are not.
    """
    if dtype == "float32" or values.dtype != np.float32:
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            narrow: np.ndarray = values.astype(np.float16)
    else:
        narrow = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    return narrow if np.array_equal(widened(narrow), values) else values
