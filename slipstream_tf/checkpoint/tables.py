"""Reads a saved table and redistributes it over any number of ranks.

The arrays have the same format (key, row, slots, access count) for all stores and numbers of ranks.
Each rank reads the files of all ranks and selects the rows that it owns. Rows that spill to disk
are stored in separate files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream_tf.checkpoint import spilled
from slipstream_tf.checkpoint.array_file import ArrayFile, Arrays, CheckpointError
from slipstream_tf.tables.watching import added_up

_ROW_KINDS = {"keys": "<i8", "rows": "<f4", "slots": "<f4", "counts": "<f4", "last_used": "<i8"}
# The columns of each group in a file. "contents": the rows. "copies": replicas of rows of other
# ranks. "accesses": counts that are stored separately from rows. "removed" and "decays": changes
# since the earlier files. "pending": deferred gradients. "admission": counters of keys without a
# row.
KINDS = {
    "contents": {**_ROW_KINDS, "trained": "<f4"},
    "copies": {"keys": "<i8", "counts": "<f4", "last_used": "<i8", "marks": "|u1"},
    "accesses": {"keys": "<i8", "counts": "<f4"},
    "removed": {"keys": "<i8"},
    "decays": {"counts": "<f4"},
    "pending": {"keys": "<i8", "ages": "<i8", "ranks": "<i4", "sums": "<f4"},
    "admission": {"counters": "|u1"},
}
# Columns that a file may lack.
_OPTIONAL = ("last_used", "marks", "trained")
# Additional dtypes for tables with a narrow dtype: float16, or the upper half of a float32
# (bfloat16).
_NARROW = {"rows": ("<f2", "<u2"), "slots": ("<u2",)}
META = ("name", "dim", "slots", "rule")


class SavedTable:
    """The files of a table in a checkpoint, one per rank.

    Attributes:
        name: The name of the table.
        dim: The number of values per row.
        slots: The number of slot values per row.
        world_size: The number of ranks that saved it.
        is_replicated: Whether one rank wrote all rows.
        has_counts_apart: Whether a file has rows and, separately, access counts, as files of tables
            in SOK do. Each rank then counted the accesses of its batches.
        powers: The powers of Adam's betas for its bias correction in SOK, float32. None if the
            number of steps determines them.
        num_deferred: The number of deferred gradient sums on all ranks.
        is_shadow: Whether the deferred gradients belong to a dry run, which has already applied
            them.
        is_leaving: Whether all deferred gradients are due in the next step.
    """

    def __init__(self, paths: Sequence[Path], checkpoint: str, entry: Mapping[str, Any]) -> None:
        """Reads and checks the headers of the files.

        Args:
            paths: The paths of the files, rank 0 first.
            checkpoint: The identity of the checkpoint.
            entry: The manifest entry of the table.

        Raises:
            CheckpointError: If a file is damaged or does not match the manifest.
        """
        self._paths = list(paths)
        self._files = [ArrayFile(path, checkpoint) for path in self._paths]
        self.name, self.dim, self.slots = entry["name"], entry["dim"], entry["slots"]
        # The number of values per row in columns with more than one value.
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
            problem = f"the files of all ranks have {rows} rows of table {self.name!r}"
            problem += f"; expected {entry['rows']} rows as in the manifest"
            raise CheckpointError(self._paths[0], problem)
        groups, metas = [f.groups for f in self._files], [f.meta for f in self._files]
        self.world_size = len(self._files)
        # The ranks that wrote rows.
        self._writers = [r for r, found in enumerate(groups) if "contents" in found] or [0]
        self.is_replicated = len(self._writers) == 1
        self.has_counts_apart = any({"contents", "accesses"} <= set(found) for found in groups)
        powers = metas[0].get("powers")
        self.powers = None if powers is None else np.asarray(powers, np.float32)
        self.num_deferred = sum(found["pending"].rows for found in groups)
        self.is_shadow = any(meta.get("pending_is_shadow", False) for meta in metas)
        self.is_leaving = any(meta.get("pending_is_leaving", False) for meta in metas)

    def _files_before(self, path: Path, file: ArrayFile, rank: int) -> list[ArrayFile]:
        """Returns the earlier files that a file extends, oldest first."""
        found = []
        before = file.meta.get("before", [])
        if not isinstance(before, list) or not isinstance(file.meta.get("rows", 0), int):
            details = f"`before` {before!r} and `rows` {file.meta.get('rows')!r}"
            raise CheckpointError(path, f"the header has {details}; expected a list and an integer")
        for index, checkpoint in enumerate(before):
            earlier = name_before(path, index)
            found.append(ArrayFile(earlier, str(checkpoint)))
            require_rank(earlier, found[-1], rank)
            self._require_meta(earlier, found[-1])
            if "contents" not in found[-1].groups:
                problem = "the file is damaged or incomplete: its rows "
                raise CheckpointError(earlier, f"{problem}(group 'contents') are missing")
        return found

    def _require_meta(self, path: Path, file: ArrayFile) -> None:
        """Raises CheckpointError unless a file has this table's metadata and columns."""
        for name in META:
            if file.meta.get(name) != self._entry[name]:
                problem = f"the file has {name} {file.meta.get(name)!r}"
                problem += f"; expected {self._entry[name]!r} as in the manifest"
                raise CheckpointError(path, problem)
        for group in KINDS:
            self._require_columns(path, file, group)

    def _require_columns(self, path: Path, file: ArrayFile, group: str) -> None:
        """Raises CheckpointError unless a group, if present, has columns of valid dtypes."""
        if group not in file.groups:
            if group == "pending":
                problem = "the file is damaged or incomplete: its deferred gradients "
                raise CheckpointError(path, f"{problem}(group {group!r}) are missing")
            return
        widths, found = self._widths, file.groups[group].columns
        for name, kind in KINDS[group].items():
            shape = (widths[name],) if name in widths else ()
            columns = [np.dtype((one, shape)) for one in (kind, *_NARROW.get(name, ()))]
            if found.get(name, columns[0] if name in _OPTIONAL else None) not in columns:
                problem = f"column {name!r} of group {group!r} has dtype {found.get(name)}"
                problem += f"; expected {columns[0]}"
                raise CheckpointError(path, problem, offset=file.groups[group].offset)

    def _joined(self, group: str, blocks: Sequence[Arrays]) -> Arrays:
        """Concatenates blocks of a group; drops optional columns that a block lacks."""
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
        """Returns rows sorted by key, in the format of `store.import_table`.

        For tables in SOK, it includes the column "trained".

        Args:
            owns: A function from keys int64 [n] to bool [n] that selects keys. None selects all.

        Raises:
            CheckpointError: If a file is damaged or contains a key twice.
        """
        joined = self._joined("contents", list(self.content_blocks(owns)))
        order = np.argsort(joined["keys"], kind="stable")
        joined = {name: values[order] for name, values in joined.items()}
        twice = joined["keys"][1:] == joined["keys"][:-1]
        if twice.any():
            key = int(joined["keys"][1:][twice][0])
            raise CheckpointError(self._paths[0], f"table {self.name!r} has key {key} twice")
        joined.setdefault("last_used", np.empty(0, np.int64))
        return {**joined, "steps": self.steps}

    def check(self, rank: int, size: int) -> None:
        """Reads rows to verify their checksums.

        The files are divided among the ranks, so that all ranks together check all rows.

        Args:
            rank: The rank of this process.
            size: The number of ranks.

        Raises:
            CheckpointError: If a file is damaged.
        """
        for saved in range(rank, len(self._files), size):
            if "contents" in self._files[saved].groups:
                for _ in self._blocks(saved, "contents"):
                    pass

    @property
    def steps(self) -> np.ndarray:
        """Maximum number of updates and of lookups over the ranks, int64 [2]."""
        found = [self._files[rank].meta["contents_steps"] for rank in self._writers]
        return np.max(np.asarray(found, np.int64), axis=0)

    def without_rows(self) -> Arrays:
        """Returns the arrays of `contents` with zero rows."""
        empty = {**self._joined("contents", []), "last_used": np.empty(0, np.int64)}
        return {**empty, "steps": self.steps}

    def content_blocks(
        self, owns: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> Iterator[Arrays]:
        """Yields the rows of `contents` in blocks, in any order.

        Args:
            owns: See `contents`.

        Raises:
            CheckpointError: If a file is damaged.
        """
        for rank in self._writers:
            for block in self._blocks(rank, "contents"):
                taken = slice(None) if owns is None else owns(block["keys"])
                yield {name: widened(values[taken]) for name, values in block.items()}

    def _blocks(self, rank: int, group: str) -> Iterator[Arrays]:
        """Yields the blocks of a group that a saved rank wrote.

        For rows, the blocks include the earlier files and the files of spilled rows.
        """
        if group == "contents" and self._before[rank]:
            yield from self._blocks_with_before(rank)
            return
        yield from self._files[rank].blocks(group)
        saved = self._spilled[rank]
        if group == "contents" and saved is not None:
            yield from saved.blocks()

    def _blocks_with_before(self, rank: int) -> Iterator[Arrays]:
        """Yields each row of a rank from its newest file."""
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
            problem = f"the file and the earlier files have {read} rows"
            problem += f"; expected {_rows_of(self._files[rank])} rows as in its header"
            raise CheckpointError(self._paths[rank], problem)

    def lookup_steps(self, rank: int) -> int:
        """Returns the number of lookups of a saved rank that wrote rows."""
        return int(self._files[rank].meta["contents_steps"][1])

    def accesses(self, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the access counts for a rank.

        If another number of ranks saved the checkpoint, the counts of saved rank r are assigned to
        rank r % `size`.

        Args:
            rank: The rank of this process.
            size: The number of ranks.

        Returns:
            Keys int64 [n], ascending, and access counts float32 [n].
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
        """Returns the admission counters of keys without a row.

        Args:
            rank: The saved rank, or None to merge all ranks. Merging takes the maximum of each
                counter. Keys share counters, and only the owner of a key counted it, so the merged
                counts of a key are never too low but can be too high.

        Returns:
            Arrays for `ops.table.import_admission`, or None if the table has no such counters.
        """
        files = self._files if rank is None else [self._files[rank]]
        files = [file for file in files if "admission" in file.groups]
        if not files:
            return None
        counters = [file.read("admission")["counters"] for file in files]
        added = [np.asarray(file.meta["admission_added"], np.int64) for file in files]
        maximum = max(counters, key=len)
        for other in counters:
            maximum = np.maximum(maximum, other) if other.size else maximum
        return {"counters": maximum, "added": np.max(added, axis=0)}

    def replicas(self, rank: int) -> Arrays | None:
        """Returns a saved rank's replicas for `store.import_copies`, or None without replicas."""
        file = self._files[rank]
        if "copies" not in file.groups:
            return None
        found = {"last_used": np.empty(0, np.int64), **file.read("copies")}
        return {**found, "steps": np.asarray(file.meta["copies_steps"], np.int64)}

    def deferred(
        self, rank: int, size: int, owns: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> Arrays:
        """Returns the deferred sums of a rank for `store.import_deferred`.

        No sum is lost. If another number of ranks saved the checkpoint, the sums of saved rank r
        are assigned to rank r % `size`. Sums of the same key are added.

        Args:
            rank: The rank of this process.
            size: The number of ranks.
            owns: A function from keys int64 [n] to bool [n] that selects keys. The rank then takes
                the sums of all saved ranks for these keys. None assigns sums by saved rank.
        """
        assigned = self._files[rank::size] if owns is None else self._files
        parts = [file.read("pending") for file in assigned]
        if owns is not None:
            parts = [{n: v[owns(part["keys"])] for n, v in part.items()} for part in parts]
        rate = np.float32((assigned or self._files)[0].meta["learning_rate"])
        joined = {**self._joined("pending", parts), "learning_rate": rate}
        return joined if len(parts) == 1 else _added_up(joined)


def name_before(path: Path, index: int) -> Path:
    """Returns the path of an earlier file that a table's file extends.

    Args:
        path: The path of the table's file.
        index: The number of the earlier file, 0 for the oldest.
    """
    return path.with_name(f"{path.name}-before-{index}")


def _are_in(keys: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Returns bool [n], whether each key is in the sorted array `among`."""
    if not among.size:
        return np.zeros(keys.size, bool)
    at = np.searchsorted(among, keys)
    found: np.ndarray = among[np.minimum(at, among.size - 1)] == keys
    return found


def _rows_of(file: ArrayFile) -> int:
    """Returns the number of rows, including those in the earlier files."""
    here = file.groups["contents"].rows if "contents" in file.groups else 0
    return int(file.meta.get("rows", here))


def widened(values: np.ndarray) -> np.ndarray:
    """Returns values of a narrow dtype as float32, and other values unchanged."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if values.dtype == np.float16 else values


def require_rank(path: Path, file: ArrayFile, rank: int) -> None:
    """Raises CheckpointError if another rank wrote a file."""
    found = file.meta.get("rank")
    if found != rank:
        raise CheckpointError(path, f"the file belongs to rank {found}; expected rank {rank}")


def on_ranks(deferred: Arrays, ranks: int) -> Arrays:
    """Reassigns sums to simulated ranks; rank r becomes r % `ranks`.

    Args:
        deferred: Arrays from `SavedTable.deferred`.
        ranks: The number of simulated ranks of the update policy, at least 1.
    """
    if not (deferred["ranks"] >= ranks).any():
        return deferred
    return _added_up({**deferred, "ranks": deferred["ranks"] % ranks})


def keep_most_valuable(contents: Arrays, maximum: int, pinned: np.ndarray, eviction: str) -> Arrays:
    """Returns contents without the least valuable rows.

    Args:
        contents: Arrays sorted by key.
        maximum: The maximum number of remaining rows. Pinned rows can exceed it.
        pinned: int64 [n], the keys of rows that must be kept.
        eviction: "lfu" (rows with the lowest counts are dropped) or "lru" (rows with the oldest use
            are dropped).
    """
    excess = len(contents["keys"]) - max(maximum, 0)
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
    """Returns contents with added rows, which have an access count of 0.

    Args:
        contents: Arrays sorted by key.
        keys: int64 [n], keys that are not in the contents.
        rows: float32 [n, dim].
        initial: float32 [slots per row], the initial slots of the new rows.
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
    """Adds sums with the same key and rank.

    The result is sorted by age, oldest first.
    """
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
