"""One table in the engine: hot keys, their snapshot, states, drift and update counts.

In: a store and a table's name. Out: drifts at a window's end, row flags for the store. `for_each`
works on multiple tables at once: a kernel uses all threads, but is short, and much of a window's
end around it runs on one thread. With 26 tables on two processors: 413 ms instead of 556.
Method: Slipstream, arXiv 2404.04270, snapshot block.
"""

import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf._utils.memory import require_room
from slipstream_tf.config import Table
from slipstream_tf.engine.hot_set import snapshot_bytes
from slipstream_tf.engine.ranks import Ranks
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.engine.states import KeyStates, deciding_drifts
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.ops.update_policy import SATURATED, UpdateCounts, UpdatePolicy
from slipstream_tf.tables.base import TrackedStore


@dataclasses.dataclass(frozen=True)
class Measured:
    """Drifts of one table's hot keys over a window.

    Attributes:
        keys: int64 [n], ascending: hot keys that the store still has.
        drift: float32 [n], as measured.
        deciding: float32 [n], the drifts that T and states follow from; see
            `states.deciding_drifts`.
        evicted: hot keys that the store no longer holds.
    """

    keys: np.ndarray
    drift: np.ndarray
    deciding: np.ndarray
    evicted: int


class TrackedTable:
    """What is known of a table between window ends."""

    def __init__(self, store: TrackedStore, table: Table, metric: str, ranks: Ranks):
        """Starts with every key cold.

        Args:
            store: holds the table.
            table: which one.
            metric: "linf" or "l2".
            ranks: that train it; where they own different rows, each measures its own.
        """
        self._store = store
        self._ranks = ranks
        self._metric = metric
        self._snapshot = tf.zeros((0, table.dim), tf.float32)
        # Whose rows, as they are now, the snapshot has: from `measure` to `renew`.
        self._gathered: np.ndarray | None = None
        self._counts = store.update_counts(table.name)
        self.name = table.name
        self.dim = table.dim
        self.most_watched = sys.maxsize
        if table.storage.spill is not None:
            # Watched rows are to be in memory, and to leave room there for others.
            rule = store.rule_of(table.name)
            slots = 0 if rule is None else rule.slots_per_row(table.dim)
            self.most_watched = table.storage.rows_in_memory(table.dim, slots) // 2
        self.states = KeyStates.empty()
        self.policy = UpdatePolicy()
        # What the store was told last; None: not known, and so told again.
        self._told_policy: UpdatePolicy | None = None
        self._has_flags: bool | None = None

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the snapshot."""
        return 4 * self._snapshot.shape.num_elements()

    @property
    def saturated_keys(self) -> np.ndarray:
        """Keys that are saturated in this window, int64, ascending."""
        return self.states.keys[self.states.is_saturated]

    def measure(self, are_withheld: bool) -> Measured:
        """Drifts since the snapshot was taken; the rows that were measured take its place.

        Call `renew` next, before any of them changes.

        Args:
            are_withheld: whether saturated keys' gradients were masked, or are yet to come.
        """
        keys = self.states.keys
        if not keys.size:
            none = np.zeros(0, np.float32)
            return Measured(keys, none, none, 0)
        owners = self._owners(keys)
        own_keys = self._own(keys, owners)
        rows, found, drift = self._store.measure(self.name, own_keys, self._snapshot, self._metric)
        found = np.asarray(found, bool)
        # Most windows have the hot keys of the one before: their rows are read once.
        self._snapshot = tf.convert_to_tensor(rows, tf.float32)  # a copy of the store's own
        self._gathered = own_keys if found.all() else None
        drift = self._of_all_ranks(np.asarray(drift), owners, "drift")
        is_there = self._of_all_ranks(found, owners, "found")
        if not is_there.all():
            keys, drift = keys[is_there], drift[is_there]
        deciding = deciding_drifts(self.states, keys, drift, are_masked=are_withheld)
        return Measured(keys, drift, deciding, int((~is_there).sum()))

    def renew(self, states: KeyStates) -> None:
        """Takes over the states of the window that begins and copies the hot rows.

        Keys that the store lost since the hot set was chosen are dropped.
        """
        owners = self._owners(states.keys)
        own_keys, gathered = self._own(states.keys, owners), self._gathered
        self._gathered = None
        if gathered is not None and np.array_equal(own_keys, gathered):
            rows, found = self._snapshot, np.ones(own_keys.shape, bool)
        else:
            rows, found = self._store.gather(self.name, own_keys)
        is_there = self._of_all_ranks(np.asarray(found, bool), owners, "present")
        if not is_there.all():
            states = states.take(is_there)
            rows = tf.boolean_mask(rows, np.asarray(found, bool))
        self.states = states
        self._snapshot = tf.convert_to_tensor(rows, tf.float32)

    def _owners(self, keys: np.ndarray) -> np.ndarray | None:
        """The rank that has each key's row; None: every rank has all rows."""
        if self._ranks.size == 1 or not self._store.is_spread:
            return None
        return self._store.owners(self.name, keys)

    @property
    def _own_keys(self) -> np.ndarray:
        """Hot keys whose rows are this rank's."""
        return self._own(self.states.keys, self._owners(self.states.keys))

    def _own(self, keys: np.ndarray, owners: np.ndarray | None) -> np.ndarray:
        return keys if owners is None else keys[owners == self._ranks.rank]

    def _of_all_ranks(self, values: np.ndarray, owners: np.ndarray | None, name: str) -> np.ndarray:
        if owners is None:
            return values
        return self._ranks.of_owners(values, owners, f"{name}.{self.name}")

    def set_flags(self, withholds: bool, but: np.ndarray | None = None) -> None:
        """Passes the saturated rows to the store, if the store masks or defers their gradients.

        Args:
            withholds: whether gradients of saturated rows are masked or deferred.
            but: keys int64 [n] whose rows have no flags, whatever their state.
        """
        keys = self.saturated_keys if withholds else self.states.keys[:0]
        if but is not None:
            keys = keys[~np.isin(keys, but)]
        if keys.size or self._has_flags is not False:
            self._store.set_row_flags(self.name, keys, np.full(keys.shape, SATURATED))
        self._has_flags = bool(keys.size)

    def set_policy(self) -> None:
        """Tells the store what becomes of the table's gradient rows, if that is something new."""
        if self.policy != self._told_policy:
            self._store.set_update_policy(self.name, self.policy)
        self._told_policy = self.policy

    def take_counts(self) -> UpdateCounts:
        """Returns what became of gradient rows since the last call; `pending` is as of now."""
        before, self._counts = self._counts, self._store.update_counts(self.name)
        return _since(self._counts, before)

    def state(self) -> dict[str, Any]:
        """Returns what is known of the table in the midst of a window.

        Returns:
            JSON-serialisable values and arrays: "dim"; the fields of `KeyStates`, by name;
            "policy"; "counts", of this window so far; and, of the hot keys whose rows are this
            rank's, "snapshot_keys" int64 [n] and "snapshot" float32 [n, dim]; and "unmarked"
            int64 [m], of them those whose row came back in this window.
        """
        own = self._own_keys
        counts = _since(self._store.update_counts(self.name), self._counts)
        return {
            "dim": self.dim,
            **{f.name: getattr(self.states, f.name) for f in dataclasses.fields(KeyStates)},
            "policy": dataclasses.asdict(self.policy),
            "counts": dataclasses.asdict(counts),
            "snapshot_keys": own,
            "snapshot": self._snapshot.numpy(),
            "unmarked": self._without_flags(own),
        }

    def _without_flags(self, keys: np.ndarray) -> np.ndarray:
        """Keys whose rows left the store and came back, without flags, since these were set."""
        # A rank's own part of a sharded table has no flags; its replicas save theirs themselves.
        if not self._store.forgets_flags or self._owners(keys) is not None:
            return keys[:0]
        _, found = self._store.gather(self.name, keys)
        return keys[np.asarray(found, bool) & (self._store.row_flags(self.name, keys) == 0)]

    def restore(self, state: Mapping[str, Any], rule: UpdatePolicy) -> None:
        """Goes on from what `state` gave, with the snapshots of all ranks; sets no flags yet.

        Args:
            state: of this table.
            rule: of its gradients after the warm-up, as configured here, where the store took it:
                what a store may refuse is as there.
        """
        self.states = KeyStates(**{f.name: state[f.name] for f in dataclasses.fields(KeyStates)})
        policy = UpdatePolicy(**state["policy"])
        decays = policy.decay_skipped and rule.decay_skipped
        self.policy = dataclasses.replace(policy, decay_skipped=decays)
        self._told_policy = self._has_flags = None
        self._snapshot = tf.constant(state["snapshot"][self._own_rows(state)], tf.float32)
        before, now = UpdateCounts(**state["counts"]), self._store.update_counts(self.name)
        self._counts = _since(now, before)

    def _own_rows(self, state: Mapping[str, Any]) -> np.ndarray:
        """Indices of the snapshots of this rank's own hot keys."""
        order = np.argsort(state["snapshot_keys"])
        found = np.searchsorted(state["snapshot_keys"], self._own_keys, sorter=order)
        return order[found]


def _since(now: UpdateCounts, before: UpdateCounts) -> UpdateCounts:
    """The difference of counts; of what is deferred now, `now`."""
    old = {**dataclasses.asdict(before), "deferred_now": 0, "deferred_bytes": 0}
    return UpdateCounts(**{name: n - old[name] for name, n in dataclasses.asdict(now).items()})


def tables_to_track(
    tables: Sequence[Table], settings: EngineSettings, specs: Sequence[FeatureSpec]
) -> list[Table]:
    """Returns the tables that a feature uses and the settings do not exempt, in their order.

    Args:
        tables: of the store.
        settings: of the engine.
        specs: features of an input.

    Raises:
        ValueError: there is no feature, a feature's table is not in the store, a setting names a
            table that no feature uses, a budget is too small for one row, or no table is left.
    """
    if not specs:
        raise invalid("specs", specs, "SaturationTracker", "one feature or more")
    known = [table.name for table in tables]
    for spec in specs:
        if spec.table not in known:
            allowed = "a table of the store: " + ", ".join(known)
            raise invalid("table", spec.table, f"feature {spec.name!r}", allowed)
    used = {spec.table for spec in specs}
    hot_set = settings.hot_set
    for setting, names in (("exclude", hot_set.exclude), ("table_memory", hot_set.table_memory)):
        for name in names:
            if name not in used:
                allowed = "tables that a feature uses: " + ", ".join(sorted(used))
                raise invalid(setting, name, "HotSet", allowed)
    tracked = [t for t in tables if t.name in used and t.name not in hot_set.exclude]
    if not tracked:
        allowed = "fewer than all tables: one must be left to track"
        raise invalid("exclude", hot_set.exclude, "HotSet", allowed)
    needed = min(snapshot_bytes(table.dim) for table in tracked)
    if (settings.snapshot_bytes if settings.goes_by_keys else hot_set.memory_bytes) < needed:
        allowed = (
            f"at least {needed}, beside a pilot: the snapshot of one row takes that many bytes"
        )
        raise invalid("memory", hot_set.memory, "HotSet", allowed)
    snapshots = f"snapshots of {', '.join(repr(table.name) for table in tracked[:3])}"
    snapshots += ", ..." if len(tracked) > 3 else ""
    budgets = {"memory": (hot_set.memory_bytes, snapshots)}
    for table, budget in hot_set.table_bytes.items():
        budgets[f"table_memory[{table!r}]"] = (budget, f"snapshots of {table!r}")
    for setting, (budget, what) in budgets.items():
        require_room(setting, budget, budget, what, "HotSet")
    return tracked


def joined(
    keys: list[np.ndarray], numbers: list[np.ndarray]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The index of each key's table, int32 [n], keys and numbers, listed table by table."""
    # Tensors at once: of arrays as large a copy would be made.
    with tf.device("CPU:0"):
        tables = np.repeat(np.arange(len(keys), dtype=np.int32), [k.size for k in keys])
        return tf.constant(tables), tf.concat(keys, 0), tf.concat(numbers, 0)


Result = TypeVar("Result")
# Hot keys of all tables; with fewer, threads cost more than they save.
FEW_KEYS = 1 << 16
# A table that is measured takes its snapshot's memory twice.
MOST_AT_ONCE = 4


def tables_at_once(store: TrackedStore, ranks: int) -> int:
    """Returns how many tables of a store may be worked on at once.

    One where the store does not say that it takes more, or where ranks meet for each table, in the
    same order on all of them; else as many as TensorFlow has threads for a kernel, at most
    `MOST_AT_ONCE`.
    """
    if ranks > 1 or not store.takes_tables_at_once:
        return 1
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    return min(threads or len(os.sched_getaffinity(0)), MOST_AT_ONCE)


def for_each(work: Callable[..., Result], threads: int, *arguments: Iterable[Any]) -> list[Result]:
    """Returns `list(map(work, *arguments))`, computed by this thread and `threads` - 1 others.

    By fewer where the system gives no more: an interpreter that is about to end starts none, which
    is why no executor of the standard library is used here. No call is begun after one that failed.

    Raises:
        BaseException: the first error of a call, after all calls that began have ended.
    """
    calls = list(zip(*arguments, strict=True))
    results: list[Any] = [None] * len(calls)
    errors: dict[int, BaseException] = {}
    left, lock = iter(range(len(calls))), threading.Lock()

    def take_calls() -> None:
        while True:
            with lock:
                index = None if errors else next(left, None)
            if index is None:
                return
            try:
                results[index] = work(*calls[index])
            except BaseException as error:
                errors[index] = error

    helpers: list[threading.Thread] = []
    for _ in range(min(threads, len(calls)) - 1):
        helper = threading.Thread(target=take_calls, name="slipstream-window-end")
        try:
            helper.start()
        except RuntimeError:
            break
        helpers.append(helper)
    take_calls()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[min(errors)]
    return results
