"""The complete state of a table, which every file format contains.

Weight files, `.keras` files, `tf.train.Checkpoint`, `get_weights` and `CheckpointManager` save the
result of `export_table` and restore it with `replace`, `replace_replicas` and `defer`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from absl import logging

from slipstream_tf.checkpoint import tables
from slipstream_tf.checkpoint.array_file import Arrays
from slipstream_tf.ops.update_policy import NUM_SHARDS, UpdatePolicy
from slipstream_tf.tables.base import SavedStore

_LONGEST = 1 << 40  # An age in updates that no deferred sum reaches.


@dataclasses.dataclass(frozen=True)
class TableState:
    """The complete state of a table on one rank.

    Attributes:
        name: The name of the table.
        contents: Rows, slots, counts, times of use and steps, from `store.export_table(name,
            flush=False)`. None if another rank saves the same rows.
        deferred: Deferred gradients, from `store.export_deferred(name)`.
        policy: The policy under which they were deferred. Its `is_shadow` is True if they belong to
            a dry run, which has already applied them.
        is_leaving: Whether all deferred gradients are due in the next step.
        num_deferred: The number of deferred gradients on all ranks.
        accesses: Keys int64 [n] and counts float32 [n] of this rank if the contents do not include
            them, else None.
        replicas: Replicas of other ranks' rows with this rank's access counts, from
            `store.export_copies(name)`, or None.
        admission: Counters of keys without a row for a table with admission, or None.
        blocks: Further rows for `store.add_rows`, produced one by one, or None.
    """

    name: str
    contents: Arrays | None
    deferred: Arrays
    policy: UpdatePolicy = dataclasses.field(default_factory=UpdatePolicy)
    is_leaving: bool = False
    num_deferred: int = 0
    accesses: Arrays | None = None
    replicas: Arrays | None = None
    admission: Arrays | None = None
    blocks: Iterator[Arrays] | None = None

    def groups(self) -> dict[str, Arrays]:
        """Returns the arrays to save, by the groups of `tables.KINDS`."""
        found = {
            "contents": self.contents,
            "copies": self.replicas,
            "accesses": self.accesses,
            "pending": self.deferred,
            "admission": self.admission,
        }
        return {group: arrays for group, arrays in found.items() if arrays is not None}


def export_table(
    store: SavedStore, name: str, contents: Arrays | None, accesses: Arrays | None = None
) -> TableState:
    """Copies the state of a table, without applying or removing deferred gradients.

    Args:
        store: The store of the table.
        name: The name of the table.
        contents: See `TableState`.
        accesses: See `TableState`. Tables in SOK always save their access counts separately.
    """
    if accesses is None and store.is_in_sok:
        accesses = store.export_accesses(name)
    deferred, policy = store.export_deferred(name), store.policy_of(name)
    is_leaving = bool(deferred.pop("is_leaving", False))
    if is_leaving:
        # A dry run did not defer these gradients, although it may be the current policy.
        policy = dataclasses.replace(policy, is_shadow=False)
    has_replicas = store.has_replicas and (store.is_in_sok or num_ranks(store) > 1)
    return TableState(
        name,
        contents,
        deferred,
        policy,
        is_leaving,
        num_deferred=deferred["keys"].size,
        accesses=accesses,
        replicas=store.export_copies(name) if has_replicas else None,
        admission=store.export_admission(name) if _admits(store, name) else None,
    )


def num_ranks(store: SavedStore) -> int:
    """Returns the number of ranks that train the tables of a store together."""
    return 1 if store.comm is None else int(store.comm.size)


def _admits(store: SavedStore, name: str) -> bool:
    return store.tables[store.index_of(name)].admits and not store.is_in_sok


def replace(store: SavedStore, states: Iterable[TableState]) -> None:
    """Replaces everything but replicas, and removes the deferred gradients of the store."""
    for state in states:
        assert state.contents is not None
        # Deferred gradients of the live store belong to its old rows.
        nothing = {name: values[:0] for name, values in state.deferred.items() if np.ndim(values)}
        store.import_deferred(state.name, {**state.deferred, **nothing})
        store.import_table(state.name, state.contents)
        for block in state.blocks or ():
            store.add_rows(state.name, block)
        if _admits(store, state.name):
            empty = {"counters": np.empty(0, np.uint8), "added": np.zeros(NUM_SHARDS, np.int64)}
            store.import_admission(state.name, state.admission or empty)
        if state.accesses is not None and store.is_in_sok:
            store.import_accesses(state.name, state.accesses)


def replace_replicas(store: SavedStore, states: Iterable[TableState], is_in_window: bool) -> None:
    """Restores replicas if the same number of ranks saved them.

    Args:
        store: A store with restored rows. The engine has already set its flags for the current
            window. Restored replicas keep their saved flags.
        states: The tables.
        is_in_window: Whether the engine continues the window in which the replicas were flagged. If
            False, flags are dropped, because no window end would reset them.
    """
    for state in states:
        # `SokStore` has no replicas.
        if state.replicas is not None and store.has_replicas:
            store.import_copies(state.name, state.replicas, takes_flags=is_in_window)


def defer(
    store: SavedStore,
    states: Iterable[TableState],
    on_all_ranks: Callable[[Callable[[], Any], str], Any] = lambda work, details: work(),
    is_engine_next: bool = False,
) -> None:
    """Restores deferred gradients; applies them if the current policy defers none.

    Deferred gradients of a dry run were already applied. They are restored if the dry run
    continues, and dropped otherwise. Gradients that were due in the next step are applied in the
    next step, or immediately if the store supports that.

    With multiple ranks, this function is a collective.

    Args:
        store: A store with restored rows and its current policies.
        states: The tables.
        on_all_ranks: Calls a function that is not a collective. Its second argument describes the
            call for errors. It raises on all ranks if a call fails on one.
        is_engine_next: Whether an engine may be restored next, and its policy may defer. The
            gradients then stay deferred until the next policy or update.
    """
    for state in states:
        policy, is_late = store.policy_of(state.name), store.flushes_with_next_step
        if not state.num_deferred:
            continue
        is_shadow, is_leaving = state.policy.is_shadow, state.is_leaving
        is_same = policy.mode == "defer" and policy.is_shadow == is_shadow
        details = f"restore the deferred gradients of table {state.name!r}"
        can_wait = is_engine_next and not is_leaving and not store.is_in_sok
        if can_wait and policy.mode == "apply":
            # Like the current policy, this policy applies all gradients at once. The policy of the
            # engine keeps its sums, because it has the same kind.
            policy = dataclasses.replace(state.policy, movement=0.0, max_age=1)
            store.set_update_policy(state.name, policy)
            is_same = True
        if is_shadow and not is_same:
            logging.info(
                "%d deferred gradients of table %r are dropped, because a dry run had already "
                "applied them.", state.num_deferred, state.name,
            )  # fmt: skip
            continue
        if is_same and (is_late or not is_leaving):
            on_all_ranks(functools.partial(_import_deferred, store, state, policy.ranks), details)
            continue
        if not is_leaving:
            when = "with the next step" if is_late else "now"
            logging.warning(
                "%d deferred gradients of table %r are applied %s, because its policy does not "
                "defer gradients, or only in a dry run.", state.num_deferred, state.name, when,
            )  # fmt: skip
        # Import them under a policy of a different kind than the final one. The change of policy
        # then applies them.
        can_compute_movement = store.updates_rows and not store.is_in_sok
        trigger = (
            "movement" if can_compute_movement and policy.trigger != "movement" else "interval"
        )
        until = UpdatePolicy("defer", trigger, max_age=_LONGEST, max_rows=state.num_deferred)
        store.set_update_policy(state.name, until)
        on_all_ranks(functools.partial(_import_deferred, store, state, 1), details)
        if store.is_in_sok and not is_late:
            # The final policy can be of the same kind and would keep them.
            store.flush()
        store.set_update_policy(state.name, policy)


def _import_deferred(store: SavedStore, state: TableState, ranks: int) -> None:
    store.import_deferred(state.name, tables.on_ranks(state.deferred, ranks))
    if state.is_leaving and store.flushes_with_next_step:
        store.flush_with_next_step(state.name)
