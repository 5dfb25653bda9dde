"""What a checkpoint takes from a store, and gives back to another: rows, held sums, copies.

In: a store, of one process or of a rank. Out: `TablePart`s to be written; or, from the files of any
number of ranks and any kind of store, tables that are made ready before the store is touched.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from slipstream_tf.checkpoint.array_file import Arrays
from slipstream_tf.checkpoint.errors import CheckpointError, CheckpointMismatchError
from slipstream_tf.checkpoint.manifest import NAME, Manifest
from slipstream_tf.checkpoint.tables import (
    SavedTable,
    TablePart,
    on_ranks,
    with_counts,
    with_rows,
    with_slots,
    without_least,
)
from slipstream_tf.config import TableConfig
from slipstream_tf.ops.update_policy import KEPT, UpdatePolicy
from slipstream_tf.optimizers import SparseOptimizer
from slipstream_tf.stores.sok_rules import SlotLayout

_LONGEST = 1 << 40


@dataclasses.dataclass(frozen=True)
class Rank:
    """Whose part it is.

    Attributes:
        number: of the rank.
        size: ranks in all.
        placement: "replicated", "sharded" or, of tables in SOK, "spread".
    """

    number: int
    size: int
    placement: str

    @property
    def has_all_rows(self) -> bool:
        """Whether this rank's rows are those that others may read for all."""
        return self.number == 0 or self.placement != "replicated"

    @property
    def has_a_part(self) -> bool:
        """Whether other ranks have rows that this one has not."""
        return self.size > 1 and self.placement != "replicated"


def has_table_files(store: Any) -> bool:
    """Whether a store's tables can be read and replaced with what they hold back."""
    return hasattr(store, "export_pending") and hasattr(store, "import_table")


def _keeps_copies(store: Any) -> bool:
    return getattr(store, "copy_movement", None) is not None


def is_in_sok(store: Any) -> bool:
    """Whether a store's tables are in SOK, each row on the rank that SOK puts it on."""
    return hasattr(store, "reserved_keys")


def rule_of(store: Any) -> SparseOptimizer | None:
    """Returns the update rule of a store's rows; None: they are not the store's to update."""
    rule = getattr(store, "optimizer", None)
    return rule if isinstance(rule, SparseOptimizer) else None


def file_name(rank: int, index: int) -> str:
    """Returns the name, below a checkpoint's folder, of a rank's part of a table."""
    return f"rank-{rank}/table-{index:03d}"


def cut(
    store: Any, rank: Rank, policies: Mapping[str, UpdatePolicy] | None = None
) -> list[TablePart]:
    """Copies all tables as they are now; nothing is flushed.

    Needs as much memory as the rows, slots and counts take, until they are written, and as much as
    those of the largest table once more while it is copied.

    Args:
        store: whose `export_pending` and `export_table` are asked.
        rank: whose.
        policies: that hold now, by table; tables not named hold nothing in shadow mode.
    """
    policies = {} if policies is None else policies
    parts = []
    for table in store.tables:
        contents = store.export_table(table.name, flush=False)
        pending = store.export_pending(table.name)
        is_leaving = bool(pending.pop("is_leaving", False))
        is_own = rank.has_all_rows
        accesses = None if is_own else {n: contents[n] for n in ("keys", "counts")}
        if hasattr(store, "export_accesses"):
            accesses = store.export_accesses(table.name)
        is_apart = rank.size > 1 or is_in_sok(store)
        has_copies = rank.placement != "replicated" and is_apart and hasattr(store, "export_copies")
        has_published = rank.size > 1 and _keeps_copies(store)
        parts.append(
            TablePart(
                name=table.name,
                dim=table.dim,
                slots=int(contents["slots"].shape[1]),
                rule=_layout(store, table).rule,
                contents=contents if is_own else None,
                accesses=accesses,
                pending=pending,
                copies=store.export_copies(table.name) if has_copies else None,
                published=store.export_published(table.name) if has_published else None,
                # What is on its way out was held in earnest, whatever the policy is now.
                is_shadow=policies.get(table.name, UpdatePolicy()).is_shadow and not is_leaving,
                is_leaving=is_leaving,
            )
        )
    return parts


@dataclasses.dataclass(frozen=True)
class ReadyTable:
    """A table that is read, checked and made to fit, to replace one of a store.

    Attributes:
        name: of the table.
        contents: for `import_table`.
        accesses: for `import_accesses`, of a store that counts apart from its rows; or None.
        copies: for `import_copies`, or None.
        published: for `import_published`, or None.
        pending: for `import_pending`.
        num_pending: sums that all ranks together held.
        is_shadow: whether they are shadow mode's, which are never applied.
        is_leaving: whether they are to leave with the next step.
    """

    name: str
    contents: Arrays
    accesses: Arrays | None
    copies: Arrays | None
    published: Arrays | None
    pending: Arrays
    num_pending: int
    is_shadow: bool
    is_leaving: bool


def prepare(folder: Path, manifest: Manifest, store: Any, rank: Rank) -> list[ReadyTable]:
    """Reads a checkpoint's tables for a rank of any job; the store is not touched.

    Args:
        folder: of the checkpoint.
        manifest: of it.
        store: that is to have them.
        rank: whose store it is.

    Raises:
        CheckpointMismatchError: tables, dimensions or update rules differ, or a capacity is too
            small.
        CheckpointError: a file is damaged.
    """
    place = str(folder / NAME)
    entries = {entry.get("name"): (i, entry) for i, entry in enumerate(manifest.tables)}
    here = [table.name for table in store.tables]
    if sorted(entries, key=str) != sorted(here):
        raise CheckpointMismatchError(
            place,
            f"was saved with tables {sorted(entries, key=str)}, this program has {sorted(here)}",
            "Restore it into the same tables.",
        )
    ready = []
    for table in store.tables:
        index, entry = entries[table.name]
        paths = [folder / file_name(r, index) for r in range(manifest.world_size)]
        saved = SavedTable(paths, manifest.checkpoint, entry)
        if manifest.world_size > 1 and saved.is_replicated != (manifest.placement == "replicated"):
            problem = f"says that table {table.name!r} is {manifest.placement}, but its files not"
            raise CheckpointError(place, problem)
        saved.require(table.dim, _layout(store, table).rule, place)
        ready.append(_prepare_table(saved, manifest, store, table, rank, place))
    return ready


def _prepare_table(
    saved: SavedTable, manifest: Manifest, store: Any, table: TableConfig, rank: Rank, place: str
) -> ReadyTable:
    is_same_job = (manifest.world_size, manifest.placement) == (rank.size, rank.placement)

    def owns(keys: np.ndarray) -> np.ndarray:
        return store.owners(table.name, keys) == rank.number

    contents = saved.contents(owns if rank.has_a_part else None)
    if is_same_job and rank.has_a_part:
        contents["steps"][1] = saved.lookup_steps(rank.number)
    rule = rule_of(store)
    initial = _layout(store, table).initial
    if contents["slots"].shape[1] != initial.size and contents["keys"].size:
        told = f"start anew, at {initial[0]:g}" if initial.size else "are left out"
        logging.warning("%s: the slots of table %r %s.", place, table.name, told)
    contents = with_slots(contents, initial)
    holds_own = rank.has_a_part and getattr(store, "holds_at_owners", False)
    pending = saved.pending(rank.number, rank.size, owns if holds_own else None)
    accesses: Arrays | None = None
    if is_in_sok(store):
        # It makes rows of keys that have none, and counts accesses apart.
        keys, counts = saved.accesses(rank.number, rank.size)
        accesses = {"keys": keys, "counts": counts}
        if saved.powers is not None:
            contents["powers"] = saved.powers
        _require_free(store, table, np.concatenate([contents["keys"], pending["keys"]]), place)
    else:
        contents.pop("trained", None)
        contents = _with_accesses(contents, saved, table, rank, rule)
    if rank.size == 1 and rule is not None and not is_in_sok(store):
        # A rank may hold a sum of a key that no rank has a row of yet.
        missing = np.setdiff1d(pending["keys"], contents["keys"])
        if missing.size:
            if table.capacity is not None and len(contents["keys"]) <= table.capacity:
                # As when the sums are applied: rows leave for those that are new.
                contents = without_least(
                    contents, table.capacity - missing.size, pending["keys"], table.eviction
                )
            rows = _initial_rows(table, rule, missing)
            contents = with_rows(contents, missing, rows, initial)
    rows_here = len(contents["keys"])
    if table.capacity is not None and rows_here > table.capacity:
        raise CheckpointMismatchError(
            place,
            f"table {table.name!r} has {rows_here} rows for rank {rank.number}, more than its "
            f"capacity of {table.capacity}",
            "Give the table more capacity, or restore with more ranks if it is sharded.",
        )
    num_keys = _num_keys(store, table)
    if num_keys is not None:
        keys = np.concatenate([contents["keys"], pending["keys"]])
        outside = keys[(keys < 0) | (keys >= num_keys)]
        if outside.size:
            raise CheckpointMismatchError(
                place,
                f"table {table.name!r} has key {int(outside[0])}, but its variable has "
                f"{num_keys} rows",
                "Give the variable more rows, or map the keys to 0, 1, ... before training.",
            )
    copies = published = None
    if is_same_job:
        copies = saved.copies(rank.number)
        published = saved.published(rank.number) if _keeps_copies(store) else None
    return ReadyTable(
        name=table.name,
        contents=contents,
        accesses=accesses,
        copies=copies,
        published=published,
        pending=pending,
        num_pending=saved.num_pending,
        is_shadow=saved.is_shadow,
        is_leaving=saved.is_leaving,
    )


def _with_accesses(
    contents: Arrays,
    saved: SavedTable,
    table: TableConfig,
    rank: Rank,
    rule: SparseOptimizer | None,
) -> Arrays:
    """Returns contents with the access counts that a rank of a native job has with its rows."""
    if rank.has_a_part:
        # An owner counts what all ranks access of its rows.
        return with_counts(contents, *saved.accesses(0, 1)) if saved.has_counts_apart else contents
    if not (saved.is_replicated or saved.has_counts_apart):
        return contents
    accesses = saved.accesses(rank.number, rank.size)
    if rank.size > 1 and rule is not None:
        # A rank has met keys that rank 0 has not, whose gradients are held back.
        missing = np.setdiff1d(accesses[0], contents["keys"])
        rows = _initial_rows(table, rule, missing)
        contents = with_rows(contents, missing, rows, _slots_at_start(rule, table))
    return with_counts(contents, *accesses)


def _require_free(store: Any, table: TableConfig, keys: np.ndarray, place: str) -> None:
    """Raises CheckpointMismatchError if a key is one that SOK's tables use themselves."""
    reserved = store.reserved_keys(table.name)
    found = keys[np.isin(keys, reserved)]
    if found.size:
        raise CheckpointMismatchError(
            place,
            f"table {table.name!r} has key {int(found[0])}, one of {reserved} that SOK's tables "
            "use themselves",
            "Hash keys to others before training, or restore it into a native table.",
        )


def replace(store: Any, ready: list[ReadyTable]) -> None:
    """Replaces rows, slots and counts of all tables; nothing is held back then."""
    for table in ready:
        # What a live store held back belongs to the rows that it had.
        nothing = {name: values[:0] for name, values in table.pending.items() if np.ndim(values)}
        store.import_pending(table.name, {**table.pending, **nothing})
        store.import_table(table.name, table.contents)
        if table.accesses is not None:
            store.import_accesses(table.name, table.accesses)


def replace_copies(store: Any, ready: list[ReadyTable], is_in_window: bool) -> None:
    """Replaces copies of other ranks' rows, if as many ranks have saved theirs.

    Args:
        store: of which the engine has told already what holds in the window: rows are marked, and
            others frozen, as they are now. Copies that are given back are as they were.
        ready: the tables.
        is_in_window: whether an engine has restored the window in which copies were marked; else
            no mark of theirs would ever end.
    """
    for table in ready:
        # Of stores that hold tables in SOK one kind alone has copies.
        if table.copies is not None and hasattr(store, "import_copies"):
            copies = dict(table.copies)
            if not is_in_window:
                copies.pop("marks", None)
            elif table.published is None and "marks" in copies:
                # Their owners do not know what was sent.
                copies["marks"] = copies["marks"] & ~KEPT
            store.import_copies(table.name, copies)
            if is_in_window and table.published is not None:
                store.import_published(table.name, table.published)


def hold(
    store: Any,
    ready: list[ReadyTable],
    policies: Mapping[str, UpdatePolicy],
    together: Callable[[Callable[[], Any], str], Any],
) -> None:
    """Gives a store the sums to hold back; where its policy holds none, they are applied now.

    Those of shadow mode are held where it goes on, and left out elsewhere: their gradients were
    applied when they came. Those that were to leave with the next step do so.

    With several ranks a collective.

    Args:
        store: whose rows are replaced already.
        ready: the tables.
        policies: that hold now, by table; tables not named apply everything.
        together: calls what is no collective, and says what it does; raises on all ranks if one
            failed.
    """
    for table in ready:
        if not table.num_pending:
            continue
        policy = policies.get(table.name, UpdatePolicy())
        if table.is_shadow and not (policy.mode == "defer" and policy.is_shadow):
            logging.info(
                "%d gradient sums of table %r that shadow mode counted are left out.",
                table.num_pending,
                table.name,
            )
            continue
        what = f"take the sums that table {table.name!r} holds back"
        is_same = policy.mode == "defer" and policy.is_shadow == table.is_shadow
        if is_same and not (table.is_leaving and not hasattr(store, "let_go_of")):
            together(functools.partial(_import_pending, store, table, policy), what)
            continue
        if not table.is_leaving:
            logging.warning(
                "%d deferred gradients of table %r are applied %s, as its policy defers none, or "
                "does so in shadow mode only.",
                table.num_pending,
                table.name,
                "with the next step" if rule_of(store) is None else "now",
            )
        holding = UpdatePolicy("defer", max_age=_LONGEST, max_rows=table.num_pending)
        if rule_of(store) is None or is_in_sok(store):
            holding = dataclasses.replace(holding, trigger="interval")
        elif policy.trigger == "movement":
            # Of another kind than the policy to come, before which all leave.
            holding = dataclasses.replace(holding, trigger="interval")
        store.set_update_policy(table.name, holding)
        together(functools.partial(_import_pending, store, table, UpdatePolicy()), what)
        if is_in_sok(store) and not hasattr(store, "let_go_of"):
            # The policy to come may be of the same kind, and keep them.
            store.flush()
        store.set_update_policy(table.name, policy)


def _import_pending(store: Any, table: ReadyTable, policy: UpdatePolicy) -> None:
    store.import_pending(table.name, on_ranks(table.pending, policy.ranks))
    if table.is_leaving and hasattr(store, "let_go_of"):
        store.let_go_of(table.name)


def _layout(store: Any, table: TableConfig) -> SlotLayout:
    """Whose slots the rows of a table have, and how those of a new row are."""
    if hasattr(store, "slot_layout"):
        return store.slot_layout(table.name)
    rule = rule_of(store)
    if rule is None:
        return SlotLayout(None, np.empty(0, np.float32))
    return SlotLayout(type(rule).__name__, _slots_at_start(rule, table))


def _slots_at_start(rule: SparseOptimizer, table: TableConfig) -> np.ndarray:
    initial = float(getattr(rule, "initial_accumulator_value", 0.0))
    return np.full(rule.slots_per_row(table.dim), initial, np.float32)


def _num_keys(store: Any, table: TableConfig) -> int | None:
    """How many keys, from 0, a variable has rows of; None: a table may have any."""
    if is_in_sok(store):
        return store.num_keys(table.name) if hasattr(store, "num_keys") else None
    return store.size(table.name) if rule_of(store) is None else None


def _initial_rows(table: TableConfig, rule: SparseOptimizer, keys: np.ndarray) -> np.ndarray:
    """The rows that keys have before their first gradient, float32 [n, dim]."""
    from slipstream_tf.stores.native import NativeStore

    return NativeStore([table], rule).gather(table.name, keys)[0].numpy()
