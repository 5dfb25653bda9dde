"""Converts the tables of a checkpoint.

The checkpoint can have another number of ranks and another kind of store. All tables are read,
checked and converted before the store changes.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from absl import logging

from slipstream_tf.checkpoint import store_state, tables
from slipstream_tf.checkpoint.array_file import Arrays, CheckpointError, CheckpointMismatchError
from slipstream_tf.checkpoint.manifest import NAME, Manifest
from slipstream_tf.checkpoint.table_state import TableState
from slipstream_tf.config import Table
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.optimizers import SparseOptimizer
from slipstream_tf.tables.base import SavedStore
from slipstream_tf.tables.native import NativeStore
from slipstream_tf.tables.replicas import counts_of


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank of the job that restores or saves a table.

    Attributes:
        number: The rank.
        size: The number of ranks.
        placement: "replicated", "sharded", or "spread" for tables in SOK.
    """

    number: int
    size: int
    placement: str

    @property
    def has_a_part(self) -> bool:
        """Whether other ranks store rows that this rank does not have."""
        return self.size > 1 and self.placement != "replicated"


def file_name(rank: int, index: int) -> str:
    """Returns the path of a rank's table file below the checkpoint's folder."""
    return f"rank-{rank}/table-{index:03d}"


def prepare(
    folder: Path, manifest: Manifest, store: SavedStore, rank: Rank, evict_to_fit: bool = False
) -> list[TableState]:
    """Reads and converts the tables of a checkpoint without changing the store.

    Rows of a table that spills are read twice: once to check them, divided among the ranks, and
    again when they are added.

    Args:
        folder: The folder of the checkpoint.
        manifest: The manifest of the checkpoint.
        store: The store to restore.
        rank: The rank of the store.
        evict_to_fit: Whether the least valuable rows are dropped if a table exceeds its capacity.

    Returns:
        The tables to load, in the order of the store.

    Raises:
        CheckpointMismatchError: If tables, dimensions or update rules differ, or if a capacity is
            too small.
        CheckpointError: If a file is damaged.
    """
    place = str(folder / NAME)
    entries = {entry.get("name"): (i, entry) for i, entry in enumerate(manifest.tables)}
    saved_as = [store_state.SavedAs(e["name"], e["dim"], e["rule"]) for e in manifest.tables]
    taken = store_state.choose(saved_as, store, place)
    ready = []
    for table in store.tables:
        if table.name not in taken:
            continue
        index, entry = entries[table.name]
        paths = [folder / file_name(r, index) for r in range(manifest.world_size)]
        saved = tables.SavedTable(paths, manifest.checkpoint, entry)
        if manifest.world_size > 1 and saved.is_replicated != (manifest.placement == "replicated"):
            problem = f"table {table.name!r} is {manifest.placement} in the manifest, but its files"
            raise CheckpointError(place, f"{problem} have another placement")
        has_slots = taken[table.name] == store_state.WHOLE
        is_same_job = (manifest.world_size, manifest.placement) == (rank.size, rank.placement)
        target = _Target(store, table, rank, place, has_slots, evict_to_fit)
        ready.append(_prepare_table(target, saved, is_same_job))
    return ready


@dataclasses.dataclass(frozen=True)
class _Target:
    """A table of the program that receives a saved table.

    Attributes:
        store: The store of the table.
        table: The table.
        rank: The rank of the store.
        place: The path of the manifest, for errors.
        takes_slots: Whether the saved slots match the update rule of the table.
        evict_to_fit: Whether rows beyond the capacity are dropped.
    """

    store: SavedStore
    table: Table
    rank: Rank
    place: str
    takes_slots: bool = True
    evict_to_fit: bool = False

    def owns(self, keys: np.ndarray) -> np.ndarray:
        """Returns bool [n], whether this rank owns the keys, int64 [n]."""
        return self.store.owners(self.table.name, keys) == self.rank.number

    @property
    def optimizer(self) -> SparseOptimizer | None:
        """The table's sparse optimizer, or None.

        None if SOK creates the rows, or if an external optimizer updates them.
        """
        return None if self.store.is_in_sok else self.store.optimizer_of(self.table.name)

    def with_initial_rows(self, contents: Arrays, keys: np.ndarray) -> Arrays:
        """Returns the contents, with initial rows added for missing `keys`."""
        missing = np.setdiff1d(keys, contents["keys"])
        assert self.optimizer is not None
        in_memory = dataclasses.replace(self.table, storage=self.table.storage.in_memory())
        rows = NativeStore([in_memory], self.optimizer).gather(self.table.name, missing)[0].numpy()
        initial = self.store.slot_layout(self.table.name).initial
        return tables.with_rows(contents, missing, rows, initial)


def _prepare_table(target: _Target, saved: tables.SavedTable, is_same_job: bool) -> TableState:
    store, rank, name = target.store, target.rank, target.table.name
    spills = store.spills_rows(name)
    owns = target.owns if rank.has_a_part else None
    if spills:
        # Read them twice, because there is no memory for them until the old rows are removed.
        saved.check(rank.number, rank.size)
    contents = saved.without_rows() if spills else saved.contents(owns)
    if is_same_job and rank.has_a_part:
        contents["steps"][1] = saved.lookup_steps(rank.number)
    initial = store.slot_layout(name).initial
    keeps_slots = target.takes_slots and contents["slots"].shape[1] == initial.size
    if not keeps_slots:
        if spills or contents["keys"].size:
            details = "this table has no slots"
            if initial.size:
                details = (
                    f"the optimizer of this program has other slots, which start at {initial[0]:g}"
                )
            logging.warning("Ignored the slots of table %r in %s: %s.", name, target.place, details)
        contents["slots"] = np.tile(initial, (contents["keys"].size, 1))
    at_owners = rank.has_a_part and store.defers_at_owners
    deferred = saved.deferred(rank.number, rank.size, target.owns if at_owners else None)
    accesses: Arrays | None = None
    blocks: Iterator[Arrays] | None = None
    if store.is_in_sok:
        # SOK creates missing rows, and access counts are stored separately.
        keys, counts = saved.accesses(rank.number, rank.size)
        accesses = {"keys": keys, "counts": counts}
        if saved.powers is not None:
            contents["powers"] = saved.powers
    elif spills:
        contents.pop("trained", None)
        blocks = _blocks(target, saved, contents, keeps_slots, deferred["keys"])
    else:
        contents.pop("trained", None)
        contents = _with_accesses(target, contents, saved)
    if rank.size == 1 and target.optimizer is not None and not spills:
        contents = _with_deferred_rows(target, contents, deferred["keys"])
    if target.evict_to_fit and target.table.capacity is not None:
        maximum, eviction = target.table.capacity, target.table.eviction
        contents = tables.keep_most_valuable(contents, maximum, deferred["keys"], eviction)
    _require_fit(target, contents["keys"], deferred["keys"])
    return TableState(
        name,
        contents,
        deferred,
        UpdatePolicy("defer", is_shadow=saved.is_shadow),
        saved.is_leaving,
        saved.num_deferred,
        accesses,
        replicas=saved.replicas(rank.number) if is_same_job else None,
        admission=saved.admission(rank.number if is_same_job else None),
        blocks=blocks,
    )


def _blocks(
    target: _Target,
    saved: tables.SavedTable,
    contents: Arrays,
    keeps_slots: bool,
    deferred_keys: np.ndarray,
) -> Iterator[Arrays]:
    """Yields the rows of a spilling table for `add_rows`; see `_prepare_table`.

    The last block contains keys without a saved row. It is created after the other blocks have been
    added.
    """
    store, rank, name = target.store, target.rank, target.table.name
    initial = store.slot_layout(name).initial
    apart = _counts_apart(target, saved)
    nothing = {"last_used": np.empty(0, np.int64), "steps": np.zeros(2, np.int64)}
    for block in saved.content_blocks(target.owns if rank.has_a_part else None):
        block.pop("trained", None)
        if not keeps_slots:
            block["slots"] = np.tile(initial, (block["keys"].size, 1))
        if apart is not None:
            order = np.argsort(block["keys"])
            block = {column: values[order] for column, values in block.items()}
            block["counts"] = counts_of(block["keys"], *apart)
        yield {**nothing, **block}
    rowless = deferred_keys if rank.size == 1 else np.empty(0, np.int64)
    if apart is not None and rank.size > 1 and not rank.has_a_part:
        rowless = apart[0]
    missing = np.setdiff1d(rowless, store.keys_of(name)) if rowless.size else rowless
    if missing.size:
        made = target.with_initial_rows(contents, missing)
        counts = made["counts"] if apart is None else counts_of(missing, *apart)
        yield {**made, "counts": counts}


def _counts_apart(
    target: _Target, saved: tables.SavedTable
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns separately stored keys and access counts.

    None if the rows include the counts that this rank needs.
    """
    rank = target.rank
    if not saved.has_counts_apart and (rank.has_a_part or not saved.is_replicated):
        return None
    if not saved.has_counts_apart and saved.world_size == rank.size == 1:
        return None
    # An owner counts the accesses of all ranks to its rows.
    return saved.accesses(*((0, 1) if rank.has_a_part else (rank.number, rank.size)))


def _with_accesses(target: _Target, contents: Arrays, saved: tables.SavedTable) -> Arrays:
    """Returns the contents with separately stored access counts, if any."""
    rank, accesses = target.rank, _counts_apart(target, saved)
    if accesses is None:
        return contents
    if rank.size > 1 and not rank.has_a_part and target.optimizer is not None:
        # A rank can have counted keys that have no row yet on the rank that wrote the rows, because
        # their gradients are still deferred.
        contents = target.with_initial_rows(contents, accesses[0])
    return {**contents, "counts": counts_of(contents["keys"], *accesses)}


def _with_deferred_rows(target: _Target, contents: Arrays, keys: np.ndarray) -> Arrays:
    """Adds missing rows of keys with deferred gradients."""
    missing, capacity = np.setdiff1d(keys, contents["keys"]), target.table.capacity
    if not missing.size:
        return contents
    if capacity is not None and len(contents["keys"]) <= capacity:
        # Evict rows for the new ones, as applying the sums would.
        maximum = capacity - missing.size
        contents = tables.keep_most_valuable(contents, maximum, keys, target.table.eviction)
    return target.with_initial_rows(contents, keys)


def _require_fit(target: _Target, keys: np.ndarray, deferred_keys: np.ndarray) -> None:
    """Raises CheckpointMismatchError if the table does not support the keys."""
    table, capacity = target.table, target.table.capacity
    all_keys = np.concatenate([keys, deferred_keys])
    reserved = target.store.reserved_keys(table.name)
    found = all_keys[np.isin(all_keys, reserved)]
    if found.size:
        raise CheckpointMismatchError(
            target.place,
            f"table {table.name!r} has key {int(found[0])}, but SOK reserves the keys {reserved}",
            "Map this key to another key before training, or restore into a native table.",
        )
    if capacity is not None and keys.size > capacity:
        raise CheckpointMismatchError(
            target.place,
            f"table {table.name!r} has {keys.size} rows for rank {target.rank.number}, more than "
            f"its capacity of {capacity}",
            "Increase its capacity, restore a sharded table with more ranks, or pass "
            "evict_to_fit=True to the CheckpointManager.",
        )
    num_keys = target.store.num_keys(table.name)
    if num_keys is None:
        return
    outside = all_keys[(all_keys < 0) | (all_keys >= num_keys)]
    if outside.size:
        raise CheckpointMismatchError(
            target.place,
            f"table {table.name!r} has key {int(outside[0])}, but its variable has {num_keys} rows",
            "Use a variable with more rows, or map the keys to 0, 1, ... before training.",
        )
