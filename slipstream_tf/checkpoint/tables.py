"""A table in a checkpoint: what a rank makes of the files that the ranks of any job wrote.

In: files of checked blocks. Out: arrays for a store. They hold (key, row, slots, access count)
whatever the store and the number of ranks, so that each rank takes the rows that it owns from the
files of all. Rows that spill to the disk are in files of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream_tf.checkpoint import spilled
from slipstream_tf.checkpoint.array_file import ArrayFile, Arrays, CheckpointError
from slipstream_tf.tables.watching import added_up

_ROW_KINDS = {"keys": "<i8", "rows": "<f4", "slots": "<f4", "counts": "<f4", "last_used": "<i8"}
# Of each group of a file, its columns.
KINDS = {
    "contents": {**_ROW_KINDS, "trained": "<f4"},
    "copies": {"keys": "<i8", "counts": "<f4", "last_used": "<i8", "marks": "|u1"},
    "accesses": {"keys": "<i8", "counts": "<f4"},
    "removed": {"keys": "<i8"},
    "decays": {"counts": "<f4"},
    "pending": {"keys": "<i8", "ages": "<i8", "ranks": "<i4", "sums": "<f4"},
    "admission": {"counters": "|u1"},
}
# Columns that a file need not have.
_OPTIONAL = ("last_used", "marks", "trained")
# Columns that lie as they do in a narrow table, as float16 or the upper half of a float32.
_NARROW = {"rows": ("<f2", "<u2"), "slots": ("<u2",)}
META = ("name", "dim", "slots", "rule")


class SavedTable:
    """The files of one table of a checkpoint, one per rank that saved it.

    Attributes:
        name: of the table.
        dim: values of a row.
        slots: values of a row's slots.
        world_size: ranks that saved it.
        is_replicated: whether one rank has written all rows.
        has_counts_apart: whether accesses are not with their rows: each rank counted those of its
            batches.
        powers: what Adam's bias correction goes by in SOK, float32; None: steps tell it.
        num_deferred: gradient sums that all ranks together deferred.
        is_shadow: whether these are of a dry run, whose gradients were applied when they came.
        is_leaving: whether these were all to leave with the next step.
    """

    def __init__(self, paths: Sequence[Path], checkpoint: str, entry: Mapping[str, Any]) -> None:
        """Reads the headers.

        Args:
            paths: of the files, rank 0's first.
            checkpoint: that they are of.
            entry: of the table in the manifest.

        Raises:
            CheckpointError: a file is damaged, or does not have what the manifest says.
        """
        self._paths = list(paths)
        self._files = [ArrayFile(path, checkpoint) for path in self._paths]
        self.name, self.dim, self.slots = entry["name"], entry["dim"], entry["slots"]
        # Values of a row in each column that has more than one.
        self._widths = {**dict.fromkeys(("rows", "trained", "sums"), self.dim), "slots": self.slots}
        self._entry, self._before = entry, list[list[ArrayFile]]()
        for rank, (path, file) in enumerate(zip(self._paths, self._files, strict=True)):
            require_rank(path, file, rank)
            self._require_meta(path, file)
            self._before.append(self._files_before(path, file, rank))
        self._spilled = [
            spilled.SavedRows(path, file, self.dim, self.slots) if "spilled" in file.meta else None
            for path, file in zip(self._paths, self._files, strict=True)
        ]
        rows = sum(_rows_of(file) for file in self._files)
        rows += sum(0 if saved is None else saved.rows for saved in self._spilled)
        if rows != entry["rows"]:
            problem = f"and the files of other ranks have {rows} rows, but the manifest"
            raise CheckpointError(self._paths[0], f"{problem} {entry['rows']}")
        groups, metas = [f.groups for f in self._files], [f.meta for f in self._files]
        self.world_size = len(self._files)
        # Ranks that have written rows.
        self._writers = [r for r, found in enumerate(groups) if "contents" in found] or [0]
        self.is_replicated = len(self._writers) == 1
        self.has_counts_apart = any({"contents", "accesses"} <= set(found) for found in groups)
        powers = metas[0].get("powers")
        self.powers = None if powers is None else np.asarray(powers, np.float32)
        self.num_deferred = sum(found["pending"].rows for found in groups)
        self.is_shadow = any(meta.get("pending_is_shadow", False) for meta in metas)
        self.is_leaving = any(meta.get("pending_is_leaving", False) for meta in metas)

    def _files_before(self, path: Path, file: ArrayFile, rank: int) -> list[ArrayFile]:
        """Returns the files that have the rows which a file does not have, oldest first."""
        found = []
        before = file.meta.get("before", [])
        if not isinstance(before, list) or not isinstance(file.meta.get("rows", 0), int):
            told = f"goes on from {before!r} to {file.meta.get('rows')!r} rows"
            raise CheckpointError(path, told)
        for index, checkpoint in enumerate(before):
            earlier = name_before(path, index)
            found.append(ArrayFile(earlier, str(checkpoint)))
            require_rank(earlier, found[-1], rank)
            self._require_meta(earlier, found[-1])
            if "contents" not in found[-1].groups:
                raise CheckpointError(earlier, "has no 'contents'")
        return found

    def _require_meta(self, path: Path, file: ArrayFile) -> None:
        """Raises CheckpointError unless a file is of this table, and has columns of its kinds."""
        for name in META:
            if file.meta.get(name) != self._entry[name]:
                told = f"has {name} {file.meta.get(name)!r}, but the manifest {self._entry[name]!r}"
                raise CheckpointError(path, told)
        for group in KINDS:
            self._require_columns(path, file, group)

    def _require_columns(self, path: Path, file: ArrayFile, group: str) -> None:
        """Raises CheckpointError unless a group, if it is there, has columns of its kinds."""
        if group not in file.groups:
            if group == "pending":
                raise CheckpointError(path, f"has no {group!r}")
            return
        widths, found = self._widths, file.groups[group].columns
        for name, kind in KINDS[group].items():
            shape = (widths[name],) if name in widths else ()
            columns = [np.dtype((one, shape)) for one in (kind, *_NARROW.get(name, ()))]
            if found.get(name, columns[0] if name in _OPTIONAL else None) not in columns:
                problem = f"its {group!r} have {name!r} as {found.get(name)}, not {columns[0]}"
                raise CheckpointError(path, problem, offset=file.groups[group].offset)

    def _joined(self, group: str, blocks: Sequence[Arrays]) -> Arrays:
        """Returns blocks of a group as one; an optional column only if all blocks have it."""
        widths = self._widths
        return {
            name: np.concatenate(
                [
                    np.empty((0, widths[name]) if name in widths else 0, kind),
                    *(widened(block[name]) for block in blocks),
                ]
            )
            for name, kind in KINDS[group].items()
            if name not in _OPTIONAL or (blocks and all(name in block for block in blocks))
        }

    def contents(self, owns: Callable[[np.ndarray], np.ndarray] | None = None) -> Arrays:
        """Returns the rows of some keys, sorted by key, as `store.import_table` takes them.

        Those of tables in SOK have "trained" besides.

        Args:
            owns: of keys int64 [n]: bool [n], which to take; None: all.

        Raises:
            CheckpointError: a file is damaged, or a key comes twice.
        """
        joined = self._joined("contents", list(self.content_blocks(owns)))
        order = np.argsort(joined["keys"], kind="stable")
        joined = {name: values[order] for name, values in joined.items()}
        twice = joined["keys"][1:] == joined["keys"][:-1]
        if twice.any():
            key = int(joined["keys"][1:][twice][0])
            raise CheckpointError(self._paths[0], f"key {key} of table {self.name!r} comes twice")
        joined.setdefault("last_used", np.empty(0, np.int64))
        return {**joined, "steps": self.steps}

    def check(self, rank: int, size: int) -> None:
        """Reads the rows of the files that are a rank's of `size` to check.

        Raises:
            CheckpointError: one is damaged.
        """
        for saved in range(rank, len(self._files), size):
            if "contents" in self._files[saved].groups:
                for _ in self._blocks(saved, "contents"):
                    pass

    @property
    def steps(self) -> np.ndarray:
        """Updates and lookups of the rank that had most, int64 [2]."""
        found = [self._files[rank].meta["contents_steps"] for rank in self._writers]
        return np.max(np.asarray(found, np.int64), axis=0)

    def without_rows(self) -> Arrays:
        """Returns what `contents` does, but no row."""
        empty = {**self._joined("contents", []), "last_used": np.empty(0, np.int64)}
        return {**empty, "steps": self.steps}

    def content_blocks(
        self, owns: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> Iterator[Arrays]:
        """Yields the rows of some keys, some at a time, in any order; see `contents`.

        Raises:
            CheckpointError: a file is damaged.
        """
        for rank in self._writers:
            for block in self._blocks(rank, "contents"):
                taken = slice(None) if owns is None else owns(block["keys"])
                yield {name: widened(values[taken]) for name, values in block.items()}

    def _blocks(self, rank: int, group: str) -> Iterator[Arrays]:
        """Yields the blocks of a group of a rank's, wherever they are."""
        if group == "contents" and self._before[rank]:
            yield from self._blocks_with_before(rank)
            return
        yield from self._files[rank].blocks(group)
        saved = self._spilled[rank]
        if group == "contents" and saved is not None:
            yield from saved.blocks()

    def _blocks_with_before(self, rank: int) -> Iterator[Arrays]:
        """Yields each row of a rank's as the newest of its files has it."""
        newer, decays, read = np.empty(0, np.int64), np.empty(0, np.float32), 0
        oldest_last = (self._files[rank], *reversed(self._before[rank]))
        for file in oldest_last:
            keys = [newer]
            for block in file.blocks("contents"):
                is_newest = ~_are_in(block["keys"], newer)
                read += int(np.count_nonzero(is_newest))
                found = {name: values[is_newest] for name, values in block.items()}
                for factor in decays:
                    found["counts"] *= factor
                yield found
                if file is not oldest_last[-1]:
                    keys.append(block["keys"])
            if file is not oldest_last[-1]:
                keys.append(file.read("removed")["keys"])
                decays = np.concatenate([file.read("decays")["counts"], decays])
                newer = np.unique(np.concatenate(keys))
        if read != _rows_of(self._files[rank]):
            told = f"has {read} rows with those before, but says {_rows_of(self._files[rank])}"
            raise CheckpointError(self._paths[rank], told)

    def lookup_steps(self, rank: int) -> int:
        """Returns the lookups of a rank that has rows, so far."""
        return int(self._files[rank].meta["contents_steps"][1])

    def accesses(self, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys int64 [n] and counts float32 [n] of what a rank of `size` has accessed.

        Where another number of ranks saved them, the counts of each go to the rank of its number
        modulo `size`.
        """
        blocks: list[Arrays] = []
        for saved in range(rank, len(self._files), size):
            group = "accesses" if "accesses" in self._files[saved].groups else "contents"
            columns = KINDS["accesses"]
            blocks += [{n: block[n] for n in columns} for block in self._blocks(saved, group)]
        joined = self._joined("accesses", blocks)
        ages = np.zeros(joined["keys"].size, np.int64)
        merged, _, total = added_up(joined["keys"], ages, joined["counts"][:, None])
        return merged, total[:, 0]

    def admission(self, rank: int | None) -> Arrays | None:
        """Returns what a rank knew of keys without a row; None: of all ranks together, each key's.

        Of several, each key was counted by one; a count may be too high then, but not too low.
        """
        files = self._files if rank is None else [self._files[rank]]
        files = [file for file in files if "admission" in file.groups]
        if not files:
            return None
        counters = [file.read("admission")["counters"] for file in files]
        added = [np.asarray(file.meta["admission_added"], np.int64) for file in files]
        most = max(counters, key=len)
        for other in counters:
            most = np.maximum(most, other) if other.size else most
        return {"counters": most, "added": np.max(added, axis=0)}

    def replicas(self, rank: int) -> Arrays | None:
        """Returns a rank's replicas of other ranks' rows, for `store.import_copies`, or None."""
        file = self._files[rank]
        if "copies" not in file.groups:
            return None
        found = {"last_used": np.empty(0, np.int64), **file.read("copies")}
        return {**found, "steps": np.asarray(file.meta["copies_steps"], np.int64)}

    def deferred(
        self, rank: int, size: int, owns: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> Arrays:
        """Returns the sums that a rank of `size` is to defer, for `store.import_deferred`.

        Nothing that was deferred is lost: where another number of ranks saved them, the sums of
        each go to the rank of its number modulo `size`; of one key they are added up.

        Args:
            rank: that is to defer them.
            size: ranks in all.
            owns: of keys int64 [n]: bool [n], whose sums the rank takes, of any rank's; None: it
                defers sums of any keys.
        """
        assigned = self._files[rank::size] if owns is None else self._files
        parts = [file.read("pending") for file in assigned]
        if owns is not None:
            parts = [{n: v[owns(part["keys"])] for n, v in part.items()} for part in parts]
        rate = np.float32((assigned or self._files)[0].meta["learning_rate"])
        joined = {**self._joined("pending", parts), "learning_rate": rate}
        return joined if len(parts) == 1 else _added_up(joined)


def name_before(path: Path, index: int) -> Path:
    """Returns the path of file `index` of those that a table's file goes on from, oldest first."""
    return path.with_name(f"{path.name}-before-{index}")


def _are_in(keys: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Returns bool [n]: which keys are among others, ascending."""
    if not among.size:
        return np.zeros(keys.size, bool)
    at = np.searchsorted(among, keys)
    found: np.ndarray = among[np.minimum(at, among.size - 1)] == keys
    return found


def _rows_of(file: ArrayFile) -> int:
    """Returns the rows that a file stands for, with those of the files before."""
    here = file.groups["contents"].rows if "contents" in file.groups else 0
    return int(file.meta.get("rows", here))


def widened(values: np.ndarray) -> np.ndarray:
    """Returns values that lie as in a narrow table as float32; others as they are."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if values.dtype == np.float16 else values


def require_rank(path: Path, file: ArrayFile, rank: int) -> None:
    """Raises CheckpointError if a file is another rank's."""
    found = file.meta.get("rank")
    if found != rank:
        raise CheckpointError(path, f"is a file of rank {found}, not {rank}")


def on_ranks(deferred: Arrays, ranks: int) -> Arrays:
    """Returns sums for so many simulated ranks: those of others join rank number modulo `ranks`.

    Args:
        deferred: as `SavedTable.deferred` returns it.
        ranks: from 1.
    """
    if not (deferred["ranks"] >= ranks).any():
        return deferred
    return _added_up({**deferred, "ranks": deferred["ranks"] % ranks})


def without_least(contents: Arrays, most: int, pinned: np.ndarray, eviction: str) -> Arrays:
    """Returns contents of at most so many rows, without the least valuable ones.

    Args:
        contents: sorted by key.
        most: rows that may be left; more are if they are pinned.
        pinned: int64 [n], keys whose rows stay.
        eviction: "lfu" or "lru", as of a table.
    """
    excess = len(contents["keys"]) - max(most, 0)
    if excess <= 0:
        return contents
    by_use = eviction == "lru" and len(contents["last_used"]) == len(contents["keys"])
    value = contents["last_used"] if by_use else contents["counts"]
    order = np.lexsort((contents["keys"], contents["counts"], value))
    order = order[~np.isin(contents["keys"][order], pinned)]
    stays = np.ones(len(contents["keys"]), bool)
    stays[order[:excess]] = False
    columns = [name for name in _ROW_KINDS if len(contents[name])]
    return {**contents, **{name: contents[name][stays] for name in columns}}


def with_rows(contents: Arrays, keys: np.ndarray, rows: np.ndarray, initial: np.ndarray) -> Arrays:
    """Returns contents with rows of further keys, which have not been accessed.

    Args:
        contents: sorted by key.
        keys: int64 [n], none of which is in the contents.
        rows: float32 [n, dim].
        initial: float32 [slots per row], their slots.
    """
    added = {
        "keys": keys,
        "rows": rows,
        "slots": np.tile(initial, (keys.size, 1)),
        "counts": np.zeros(keys.size, np.float32),
    }
    if len(contents["last_used"]) == len(contents["keys"]):
        added["last_used"] = np.zeros(keys.size, np.int64)
    joined = {name: np.concatenate([contents[name], values]) for name, values in added.items()}
    order = np.argsort(joined["keys"], kind="stable")
    return {**contents, **{name: values[order] for name, values in joined.items()}}


def _added_up(deferred: Arrays) -> Arrays:
    """Returns sums of which each rank has one per key, the oldest first."""
    owners = np.stack([deferred["keys"], deferred["ranks"].astype(np.int64)])
    merged, ages, sums = added_up(owners, deferred["ages"], deferred["sums"])
    order = np.argsort(-ages, kind="stable")
    return {
        "keys": merged[0][order],
        "ages": ages[order],
        "ranks": merged[1][order].astype(np.int32),
        "sums": sums[order],
        "learning_rate": deferred["learning_rate"],
    }
