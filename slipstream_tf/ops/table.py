"""Typed wrappers of the native store's ops: one embedding table behind a resource handle."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import initializers
from slipstream_tf._utils.errors import require_choice
from slipstream_tf.config import DRIFT_METRICS, Table
from slipstream_tf.ops import _loader
from slipstream_tf.ops.features import PackedFeatures
from slipstream_tf.optimizers import SparseOptimizer


def create(config: Table, optimizer: SparseOptimizer) -> tf.Tensor:
    """Makes a table that lives as long as its last handle.

    Args:
        config: the table.
        optimizer: the rule of its rows.

    Returns:
        A scalar resource handle.

    Raises:
        ValueError: an option is out of its range, or does not go with another.
    """
    kind, first, second = initializers.op_attributes(config.initializer)
    rule, parameters = optimizer.op_rule()
    retention = config.retention
    expire_after, by_seconds = (0, False) if retention is None else retention.expiry
    try:
        return _loader.library().slipstream_table(
            table_name=config.name,
            dim=config.dim,
            capacity=config.capacity or 0,
            eviction=config.eviction,
            initializer=kind,
            initializer_a=first,
            initializer_b=second,
            seed=config.seed,
            rule=rule,
            rule_parameters=list(parameters),
            transforms=list(optimizer.op_transforms()),
            dtype=config.storage.dtype,
            slot_dtype=config.storage.slot_dtype,
            memory=config.storage.memory_bytes,
            spill=config.storage.spill or "",
            admit_after=1 if retention is None else retention.admit_after,
            expire_after=expire_after,
            expires_by_seconds=by_seconds,
        )
    except tf.errors.InvalidArgumentError as error:
        # Without what TensorFlow says of the op.
        told = re.sub(r"^\{\{.*?\}\} | \[Op:\w+\].*$", "", error.message)
        raise ValueError(f"Invalid Table: {told}.") from None


@dataclasses.dataclass(frozen=True)
class LookupLayout:
    """What of a lookup stays the same from batch to batch.

    Attributes:
        feature_table: per feature, the index of its table among the handles.
        combiners: per feature, "sum", "mean" or "sqrtn"; None: rows come out unpooled.
        table_dims: the dim of each table.
        is_stacked: one output [batch, features, dim] instead of one [batch, dim] per feature.
    """

    feature_table: tuple[int, ...]
    combiners: tuple[str | None, ...]
    table_dims: tuple[int, ...]
    is_stacked: bool

    def arguments(self, packed: PackedFeatures) -> dict[str, Any]:
        """Returns the arguments of a lookup of `packed`, but for the tables."""
        return {
            **packed.arguments(),
            "feature_table": list(self.feature_table),
            "combiners": [combiner or "none" for combiner in self.combiners],
            "table_dims": list(self.table_dims),
            "is_stacked": self.is_stacked,
            "num_outputs": 1 if self.is_stacked else len(self.feature_table),
        }


def lookup(
    handles: Sequence[tf.Tensor], packed: PackedFeatures, layout: LookupLayout
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Looks up a training batch: missing keys get rows, accesses are counted.

    Args:
        handles: the tables, each once.
        packed: the batch's keys.
        layout: of this lookup.

    Returns:
        (pooled, plan): float32 [batch, dim] per feature, or one [batch, features, dim]; of a
        feature without a combiner [keys, dim], padding included; and the plan for
        `apply_gradients`, a scalar variant.

    Raises:
        tf.errors.InvalidArgumentError: row splits decrease, weights are of another length, ...
        tf.errors.ResourceExhaustedError: a bounded table cannot hold the batch's keys.
    """
    op = _loader.library().slipstream_lookup
    result = op(handles=list(handles), **layout.arguments(packed))
    return list(result.pooled), result.plan


def evaluation_lookup(
    handles: Sequence[tf.Tensor], packed: PackedFeatures, layout: LookupLayout
) -> list[tf.Tensor]:
    """Looks up keys without making or counting any; see `lookup`.

    Returns:
        The pooled vectors; an absent key counts with the row its initializer would give.
    """
    op = _loader.library().slipstream_evaluation_lookup
    return list(op(handles=list(handles), **layout.arguments(packed)))


def apply_gradients(
    plan: tf.Tensor, gradients: Sequence[tf.Tensor], learning_rate: Any
) -> tf.Operation | None:
    """Sums the gradients of each key in batch order and applies its table's rule once.

    Args:
        plan: from `lookup`.
        gradients: of its pooled vectors, float32 in their shapes.
        learning_rate: float32, a scalar for all tables or [tables] in the order of the lookup.

    Returns:
        The operation in a graph, None in eager mode.

    Raises:
        tf.errors.InvalidArgumentError: a gradient is not finite (no row is changed then).
    """
    return _loader.library().slipstream_apply_gradients(
        plan=plan, gradients=list(gradients), learning_rate=learning_rate
    )


def gather(handle: tf.Tensor, keys: Any, dim: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads rows by key: (rows float32 [n, dim], found bool [n]); absent keys: initial rows."""
    return _loader.library().slipstream_table_gather(handle=handle, keys=keys, dim=dim)


def measure(
    handle: tf.Tensor, keys: Any, snapshot: tf.Tensor, metric: str
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Reads rows by key, and how far they are from a snapshot, in one pass.

    Args:
        handle: the table.
        keys: int64 [n].
        snapshot: float32 [n, dim], the rows at the start of the window.
        metric: "linf" or "l2", as in `ops.drift.row_drift`.

    Returns:
        (rows float32 [n, dim], found bool [n], drift float32 [n]); absent keys: initial rows.

    Raises:
        ValueError: `metric` is unknown.
        tf.errors.InvalidArgumentError: the snapshot is not [n, dim].
    """
    require_choice("metric", metric, DRIFT_METRICS, "measure")
    return _loader.library().slipstream_table_measure(
        handle=handle, keys=keys, snapshot=snapshot, metric=metric
    )


def hot_keys(handle: tf.Tensor, k: int, by_key: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the at most k most accessed keys, int64 [m], and their counts, float32 [m].

    Sorted by count descending, then key ascending; with `by_key`, which takes less time, by key
    alone. Keys with a count of 0 are left out.
    """
    return _loader.library().slipstream_table_hot_keys(
        handle=handle, k=tf.constant(k, tf.int64), by_key=by_key
    )


def decay_counts(handle: tf.Tensor, factor: float) -> None:
    """Multiplies all access counts of a table by `factor`, 0 to 1."""
    _loader.library().slipstream_table_decay_counts(handle=handle, factor=factor)


@dataclasses.dataclass(frozen=True)
class TableStatistics:
    """Size of a table.

    Attributes:
        rows: keys it holds.
        allocated_bytes: memory asked for (pages never touched cost nothing).
        evicted_rows: rows that left so far.
        dropped_updates: updates whose key was evicted between lookup and update.
        index_places: keys that the index has places for; it grows at a load of 4/5 at the latest.
        expired_rows: rows that left so far as they were not accessed.
        not_admitted: accesses of keys without a row so far, each batch's of a key once.
    """

    rows: int
    allocated_bytes: int
    evicted_rows: int
    dropped_updates: int
    index_places: int
    expired_rows: int
    not_admitted: int


def statistics(handle: tf.Tensor) -> TableStatistics:
    """Returns the statistics of a table (eager only)."""
    values = _loader.library().slipstream_table_statistics(handle=handle).numpy()
    return TableStatistics(*(int(v) for v in values))


def to_arrays(result: Any, kinds: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns what an op that exports gave, by name, of those in `kinds` (eager only)."""
    return {name: getattr(result, name).numpy() for name in kinds}


def to_tensors(contents: Mapping[str, Any], kinds: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Returns what an op that imports takes, each array as the type that `kinds` has for it.

    Raises:
        ValueError: an array is missing or unknown; `what` names all of them.
    """
    if set(contents) != set(kinds):
        raise ValueError(
            f"Invalid {what}: arrays {sorted(contents)}. Allowed: exactly {sorted(kinds)}."
        )
    return {name: tf.constant(np.asarray(contents[name], t)) for name, t in kinds.items()}


@dataclasses.dataclass(frozen=True)
class SpillStatistics:
    """Where the rows of a table are, and how many moved since it was made.

    Attributes:
        rows_in_memory: rows there.
        rows_on_disk: rows that are on disk alone.
        disk_bytes: of the files.
        rows_read: that lookups, and whatever else needs rows, had to read.
        rows_read_ahead: those of them whose reading had begun before: they were announced.
        rows_written: to the disk; that of compaction is in it.
    """

    rows_in_memory: int
    rows_on_disk: int
    disk_bytes: int
    rows_read: int
    rows_read_ahead: int
    rows_written: int


def spill_statistics(handle: tf.Tensor) -> SpillStatistics:
    """Returns where the rows of a table are (eager only)."""
    values = _loader.library().slipstream_table_spill_statistics(handle=handle).numpy()
    return SpillStatistics(*(int(v) for v in values))


def announce(handle: tf.Tensor, keys: Any) -> tf.Operation | None:
    """Begins to read rows of keys, int64 [n], from the disk, where they spill; waits for none."""
    return _loader.library().slipstream_table_announce(handle=handle, keys=keys)


def step(handle: tf.Tensor) -> tf.Tensor:
    """Returns how often a table was updated, int64 scalar."""
    return _loader.library().slipstream_table_step(handle=handle)


def keys(handle: tf.Tensor) -> tf.Tensor:
    """Returns the keys that have a row, int64 [n], ascending."""
    return _loader.library().slipstream_table_keys(handle=handle)


def write(handle: tf.Tensor, keys: Any, rows: Any) -> None:
    """Replaces the values of rows, float32 [n, dim], and makes those of absent keys.

    Slots, counts and flags of rows that are there stay; their deferred gradients go.

    Raises:
        tf.errors.InvalidArgumentError: a key comes twice, or a value is not finite.
        tf.errors.ResourceExhaustedError: a bounded table cannot hold the keys.
    """
    _loader.library().slipstream_table_write(handle=handle, keys=keys, rows=rows)


def remove(handle: tf.Tensor, keys: Any) -> tf.Tensor:
    """Removes the rows of keys int64 [n], and all about them; returns how many there were."""
    return _loader.library().slipstream_table_remove(handle=handle, keys=keys)


EXPORTED = {
    "keys": np.int64,
    "rows": np.float32,
    "slots": np.float32,
    "counts": np.float32,
    "last_used": np.int64,
    "steps": np.int64,
}


def export_table(handle: tf.Tensor, flush: bool = True) -> dict[str, np.ndarray]:
    """Returns all of a table, sorted by key (eager only).

    Args:
        handle: the table.
        flush: whether held gradient sums are applied before; else they stay, and are not in.

    Returns:
        keys int64 [n]; rows float32 [n, dim]; slots float32 [n, slots per row]; counts float32
        [n]; last_used int64 [n] (tables bounded by LRU or whose rows expire: lookups, or seconds
        since 1970; else [0]); steps int64 [2] (updates and
        lookups so far).
    """
    result = _loader.library().slipstream_table_export(handle=handle, flushes=flush)
    return to_arrays(result, EXPORTED)


def export_replicas(handle: tf.Tensor) -> dict[str, np.ndarray]:
    """Returns keys, access counts and flags of replicas, sorted by key; nothing is flushed.

    Args:
        handle: the table, whose rows are in memory (eager only).

    Returns:
        As `export_table`, without rows and slots, because lookups request them again; and marks
        uint8 [n], row flags.

    Raises:
        tf.errors.InvalidArgumentError: rows of the table spill to the disk.
    """
    result = _loader.library().slipstream_table_export_replicas(handle=handle)
    without_values = {name: of for name, of in EXPORTED.items() if name not in ("rows", "slots")}
    return {**to_arrays(result, without_values), "marks": result.flags.numpy()}


@dataclasses.dataclass(frozen=True)
class Changes:
    """What became of a table's rows since an earlier look at them.

    Attributes:
        contents: as `export_table` returns them, of rows that changed or are new.
        removed: keys int64 [m] that have left; some may be back, and among these rows.
        decays: float32 [d], factors that the counts of all other rows were multiplied by, in turn.
        is_all: whether they are all rows, whatever changed.
        number: of this look; 0: the next one will have all rows, too.
    """

    contents: dict[str, np.ndarray]
    removed: np.ndarray
    decays: np.ndarray
    is_all: bool
    number: int


def export_changes(handle: tf.Tensor, since: int) -> Changes:
    """Returns the rows that changed since an earlier call, sorted by key; nothing is flushed.

    Args:
        handle: the table, whose rows are in memory (eager only).
        since: number of the last call; of any other one, or 0, all rows come.

    Raises:
        tf.errors.InvalidArgumentError: rows of the table spill to the disk.
    """
    result = _loader.library().slipstream_table_export_changes(handle=handle, since=since)
    removed, decays = result.removed.numpy(), result.decays.numpy()
    contents, number = to_arrays(result, EXPORTED), int(result.number)
    return Changes(contents, removed, decays, bool(result.is_all), number)


def import_table(handle: tf.Tensor, contents: Mapping[str, Any], adds: bool = False) -> None:
    """Replaces all of a table by what `export_table` gave; all or nothing.

    Args:
        handle: the table.
        contents: the arrays.
        adds: the rows come beside those that are there, of other keys, and the steps do not
            matter; of a table whose rows spill, which may have some of them if there is no room.

    Raises:
        ValueError: an array is missing or unknown.
        tf.errors.InvalidArgumentError: shapes do not fit the table or a key comes twice.
    """
    tensors = to_tensors(contents, EXPORTED, "table contents")
    _loader.library().slipstream_table_import(handle=handle, adds=adds, **tensors)


ADMISSION = {"counters": np.uint8, "added": np.int64}


def export_admission(handle: tf.Tensor) -> dict[str, np.ndarray]:
    """Returns what a table knows of keys without a row (eager only).

    Returns:
        counters uint8 [n], 0 if there was no such key; added int64 [shards].
    """
    return to_arrays(_loader.library().slipstream_table_export_admission(handle=handle), ADMISSION)


def import_admission(handle: tf.Tensor, contents: Mapping[str, Any]) -> None:
    """Replaces what a table knows of keys without a row by what `export_admission` gave.

    Raises:
        ValueError: an array is missing or unknown.
        tf.errors.InvalidArgumentError: they are of other lengths.
    """
    tensors = to_tensors(contents, ADMISSION, "counts of keys without a row")
    _loader.library().slipstream_table_import_admission(handle=handle, **tensors)


DEFERRED = {
    "keys": np.int64,
    "ages": np.int64,
    "ranks": np.int32,
    "sums": np.float32,
    "learning_rate": np.float32,
}


def export_deferred(handle: tf.Tensor) -> dict[str, np.ndarray]:
    """Returns the deferred gradients of a table; they stay (eager only).

    Returns:
        keys int64 [n]; ages int64 [n], updates of the table since the sum began; ranks int32 [n],
        simulated ranks; sums float32 [n, dim]; learning_rate float32 [], of the last update, or 0
        before the first.
    """
    result = _loader.library().slipstream_table_export_deferred(handle=handle)
    return to_arrays(result, DEFERRED)


def import_deferred(handle: tf.Tensor, contents: Mapping[str, Any]) -> None:
    """Replaces the deferred gradients of a table by what `export_deferred` gave.

    All or nothing. The table's policy must defer, unless there are none.

    Raises:
        ValueError: an array is missing or unknown.
        tf.errors.InvalidArgumentError: shapes do not fit, a key has no row or comes twice for a
            rank, ages are not the oldest first, or the policy defers none such.
    """
    tensors = to_tensors(contents, DEFERRED, "deferred gradients")
    _loader.library().slipstream_table_import_deferred(handle=handle, **tensors)
