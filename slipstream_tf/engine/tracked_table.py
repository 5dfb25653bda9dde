"""State of one table in the engine.

Source: Slipstream, arXiv 2404.04270, snapshot block.

`for_each` processes multiple tables at the same time. A kernel uses all threads, but it is short,
and much of the code around it runs on one thread. With 26 tables on two processors, the end of a
window takes 413 ms instead of 556 ms.
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
    """Drifts of the hot keys of one table over a window.

    Attributes:
        keys: int64 [n], ascending: hot keys that still have a row in the store.
        drift: float32 [n], the measured drifts.
        deciding: float32 [n], the drifts that determine T and the states; see
            `states.deciding_drifts`.
        evicted: Number of evicted hot keys.
    """

    keys: np.ndarray
    drift: np.ndarray
    deciding: np.ndarray
    evicted: int


class TrackedTable:
    """Tracks the hot keys of one table from window to window.

    Attributes:
        name: Name of the table.
        dim: Number of values per row.
        max_watched: Maximum number of hot keys. For a table that spills to disk, it is half of the
            rows that fit into memory.
        states: States of the hot keys in this window.
        policy: Update policy of this window. `set_policy` sends it to the store.
    """

    def __init__(self, store: TrackedStore, table: Table, metric: str, ranks: Ranks):
        """Starts with every key cold.

        Args:
            store: The store that contains the table.
            table: The table.
            metric: Drift metric, "linf" or "l2".
            ranks: The ranks that train the table. If its rows are sharded, each rank measures the
                rows that it owns.
        """
        self._store = store
        self._ranks = ranks
        self._metric = metric
        self._snapshot = tf.zeros((0, table.dim), tf.float32)
        # Keys of the current rows in the snapshot. Set between `measure` and `renew` only.
        self._gathered: np.ndarray | None = None
        self._counts = store.update_counts(table.name)
        self.name = table.name
        self.dim = table.dim
        self.max_watched = sys.maxsize
        if table.storage.spill is not None:
            # Measured rows must be in memory and leave space for other rows.
            optimizer = store.optimizer_of(table.name)
            slots = 0 if optimizer is None else optimizer.slots_per_row(table.dim)
            self.max_watched = table.storage.rows_in_memory(table.dim, slots) // 2
        self.states = KeyStates.empty()
        self.policy = UpdatePolicy()
        # Whether the store has flags. None means unknown, so that they are sent again.
        self._has_flags: bool | None = None

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the snapshot."""
        return 4 * self._snapshot.shape.num_elements()

    @property
    def saturated_keys(self) -> np.ndarray:
        """Keys that are saturated in this window, int64, ascending."""
        return self.states.keys[self.states.is_saturated]

    def measure(self, are_filtered: bool) -> Measured:
        """Returns the drifts since the snapshot and replaces the snapshot.

        Note: the new snapshot contains the measured rows. Call `renew` before any of these rows
        changes.

        Args:
            are_filtered: Whether gradients of saturated keys were masked or deferred.
        """
        keys = self.states.keys
        if not keys.size:
            none = np.zeros(0, np.float32)
            return Measured(keys, none, none, 0)
        owners = self._owners(keys)
        own_keys = self._own(keys, owners)
        rows, found, drift = self._store.measure(self.name, own_keys, self._snapshot, self._metric)
        found = np.asarray(found, bool)
        # Most hot keys stay hot in the next window, therefore their rows are read only once.
        self._snapshot = tf.convert_to_tensor(rows, tf.float32)  # independent of the store
        self._gathered = own_keys if found.all() else None
        drift = self._of_all_ranks(np.asarray(drift), owners, "drift")
        is_present = self._of_all_ranks(found, owners, "found")
        if not is_present.all():
            keys, drift = keys[is_present], drift[is_present]
        deciding = deciding_drifts(self.states, keys, drift, are_masked=are_filtered)
        return Measured(keys, drift, deciding, int((~is_present).sum()))

    def renew(self, states: KeyStates) -> None:
        """Starts a window with new key states and a new snapshot.

        Keys that were evicted after the choice of the hot set are dropped.

        Args:
            states: States of the hot keys during the window that begins.
        """
        owners = self._owners(states.keys)
        own_keys, gathered = self._own(states.keys, owners), self._gathered
        self._gathered = None
        if gathered is not None and np.array_equal(own_keys, gathered):
            rows, found = self._snapshot, np.ones(own_keys.shape, bool)
        else:
            rows, found = self._store.gather(self.name, own_keys)
        is_present = self._of_all_ranks(np.asarray(found, bool), owners, "present")
        if not is_present.all():
            states = states.take(is_present)
            rows = tf.boolean_mask(rows, np.asarray(found, bool))
        self.states = states
        self._snapshot = tf.convert_to_tensor(rows, tf.float32)

    def _owners(self, keys: np.ndarray) -> np.ndarray | None:
        """Returns the owner of each key, or None if replicated."""
        if self._ranks.size == 1 or not self._store.is_spread:
            return None
        return self._store.owners(self.name, keys)

    @property
    def _own_keys(self) -> np.ndarray:
        """Hot keys that this rank owns."""
        return self._own(self.states.keys, self._owners(self.states.keys))

    def _own(self, keys: np.ndarray, owners: np.ndarray | None) -> np.ndarray:
        return keys if owners is None else keys[owners == self._ranks.rank]

    def _of_all_ranks(self, values: np.ndarray, owners: np.ndarray | None, name: str) -> np.ndarray:
        if owners is None:
            return values
        return self._ranks.of_owners(values, owners, f"{name}.{self.name}")

    def set_flags(self, filters: bool, but: np.ndarray | None = None) -> None:
        """Sends the flags of saturated rows to the store.

        Args:
            filters: Whether gradients of saturated rows are masked or deferred. If not, all flags
                are cleared.
            but: Keys int64 [n] that get no flag, whatever their state.
        """
        keys = self.saturated_keys if filters else self.states.keys[:0]
        if but is not None:
            keys = keys[~np.isin(keys, but)]
        if keys.size or self._has_flags is not False:
            self._store.set_row_flags(self.name, keys, np.full(keys.shape, SATURATED))
        self._has_flags = bool(keys.size)

    def set_policy(self) -> None:
        """Sends the update policy to the store if the store has another policy."""
        if self.policy != self._store.policy_of(self.name):
            self._store.set_update_policy(self.name, self.policy)

    def take_counts(self) -> UpdateCounts:
        """Returns the counts of gradient rows since the last call.

        `deferred_now` and `deferred_bytes` are the current values.
        """
        before, self._counts = self._counts, self._store.update_counts(self.name)
        return _since(self._counts, before)

    def state(self) -> dict[str, Any]:
        """Returns the state of the table, at any time during a window.

        Returns:
            JSON-serializable values and arrays: "dim"; the fields of `KeyStates` by name; "policy";
            "counts" of this window so far; "snapshot_keys" int64 [n] and "snapshot" float32 [n,
            dim] of the hot keys that this rank owns; and "unmarked" int64 [m], the keys among
            these that were evicted and created again in this window and therefore have no flag.
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
        """Returns keys that were evicted and created again without flags."""
        # In a sharded table only the replicas have flags, and they save them separately.
        if not self._store.forgets_flags or self._owners(keys) is not None:
            return keys[:0]
        _, found = self._store.gather(self.name, keys)
        return keys[np.asarray(found, bool) & (self._store.row_flags(self.name, keys) == 0)]

    def restore(self, state: Mapping[str, Any], configured: UpdatePolicy) -> None:
        """Restores the state that `state` returned, without setting flags.

        Args:
            state: State of this table, with the snapshots of all ranks.
            configured: The configured update policy of the table after the warm-up. It limits the
                restored policy, because the store may not support `decay_skipped`.
        """
        self.states = KeyStates(**{f.name: state[f.name] for f in dataclasses.fields(KeyStates)})
        policy = UpdatePolicy(**state["policy"])
        decays = policy.decay_skipped and configured.decay_skipped
        self.policy = dataclasses.replace(policy, decay_skipped=decays)
        self._has_flags = None
        self._snapshot = tf.constant(state["snapshot"][self._own_rows(state)], tf.float32)
        before, now = UpdateCounts(**state["counts"]), self._store.update_counts(self.name)
        self._counts = _since(now, before)

    def _own_rows(self, state: Mapping[str, Any]) -> np.ndarray:
        """Returns the snapshot indices of hot keys that this rank owns."""
        order = np.argsort(state["snapshot_keys"])
        found = np.searchsorted(state["snapshot_keys"], self._own_keys, sorter=order)
        return order[found]


def _since(now: UpdateCounts, before: UpdateCounts) -> UpdateCounts:
    """Returns the difference of two counts.

    The deferred sums and their bytes are the current values, not differences.
    """
    old = {**dataclasses.asdict(before), "deferred_now": 0, "deferred_bytes": 0}
    return UpdateCounts(**{name: n - old[name] for name, n in dataclasses.asdict(now).items()})


def tables_to_track(
    tables: Sequence[Table], settings: EngineSettings, specs: Sequence[FeatureSpec]
) -> list[Table]:
    """Returns the used tables that the settings do not exclude.

    Args:
        tables: Tables of the store.
        settings: Settings of the engine.
        specs: Features of an example.

    Returns:
        The tables in the order of the store.

    Raises:
        ValueError: There is no feature, the table of a feature is not in the store, a setting names
            a table that no feature uses, a budget is too small for one row, or no table remains.
    """
    if not specs:
        raise invalid("specs", specs, "SaturationTracker", "at least one feature")
    known = [table.name for table in tables]
    for spec in specs:
        if spec.table not in known:
            allowed = "one of the tables " + ", ".join(known)
            raise invalid("table", spec.table, f"feature {spec.name!r}", allowed)
    used = {spec.table for spec in specs}
    hot_set = settings.hot_set
    for setting, names in (("exclude", hot_set.exclude), ("table_memory", hot_set.table_memory)):
        for name in names:
            if name not in used:
                allowed = "a table that a feature uses, one of " + ", ".join(sorted(used))
                raise invalid(setting, name, "HotSet", allowed)
    tracked = [t for t in tables if t.name in used and t.name not in hot_set.exclude]
    if not tracked:
        allowed = "at least one used table that is not in `exclude`"
        raise invalid("exclude", hot_set.exclude, "HotSet", allowed)
    needed = min(snapshot_bytes(table.dim) for table in tracked)
    if (settings.snapshot_bytes if settings.goes_by_keys else hot_set.memory_bytes) < needed:
        allowed = (
            f"at least {needed} bytes in addition to the memory of a pilot, because the snapshot "
            f"of one row takes {needed} bytes"
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
    """Concatenates keys and numbers of all tables and adds table indices.

    Args:
        keys: For each table, int64 [n].
        numbers: For each table, float32 [n].

    Returns:
        The index of each key's table, int32 [n], the keys and the numbers, table by table.
    """
    # Concatenates tensors, because a NumPy array of this size would be copied into a tensor.
    with tf.device("CPU:0"):
        tables = np.repeat(np.arange(len(keys), dtype=np.int32), [k.size for k in keys])
        return tf.constant(tables), tf.concat(keys, 0), tf.concat(numbers, 0)


Result = TypeVar("Result")
# Minimum number of hot keys of all tables for which threads save time.
FEW_KEYS = 1 << 16
# The limit bounds memory, because measuring a table needs the memory of its snapshot twice.
MAX_AT_ONCE = 4


def tables_at_once(store: TrackedStore, ranks: int) -> int:
    """Returns the number of tables to process at the same time.

    The result is 1 if the store does not support parallel calls, or with multiple ranks, because
    all ranks must run the collectives of the tables in the same order. Otherwise it is the number
    of intra-op threads of TensorFlow, at most `MAX_AT_ONCE`.

    Args:
        store: The store.
        ranks: Number of ranks.
    """
    if ranks > 1 or not store.takes_tables_at_once:
        return 1
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    return min(threads or len(os.sched_getaffinity(0)), MAX_AT_ONCE)


def for_each(work: Callable[..., Result], threads: int, *arguments: Iterable[Any]) -> list[Result]:
    """Returns `list(map(work, *arguments))`, computed by multiple threads.

    The calling thread and up to `threads` - 1 helper threads run the calls. If the system cannot
    start a thread, fewer are used. For example, an interpreter that shuts down starts no thread,
    therefore the executors of the standard library are not used. After a call fails, no further
    call starts.

    Args:
        work: The function to call.
        threads: Maximum number of threads.
        *arguments: Arguments of the calls, as for `map`, with equal lengths.

    Raises:
        BaseException: The first error of a call, after all started calls have ended.
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
