"""Typed wrappers of the ops of native embedding tables.

A table is a C++ resource. `create` returns its handle, a scalar resource tensor, which most other
functions take as `handle`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import _compat, initializers
from slipstream_tf._utils.errors import require_choice
from slipstream_tf.config import DRIFT_METRICS, Table
from slipstream_tf.ops import _loader
from slipstream_tf.ops.features import PackedFeatures
from slipstream_tf.optimizers import SparseOptimizer


def create(config: Table, optimizer: SparseOptimizer) -> tf.Tensor:
    """Creates a table, which is released with its last handle.

    Args:
        config: The table.
        optimizer: The optimizer of its rows.

    Returns:
        A scalar resource handle.

    Raises:
        ValueError: An option is out of range, or conflicts with another option.
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
        details = _loader.message_of(error)
        raise ValueError(f"Invalid table {config.name!r}: {details}.") from None


@dataclasses.dataclass(frozen=True)
class LookupLayout:
    """The part of a lookup that is the same for all batches.

    Attributes:
        feature_table: For each feature, the index of its table among the handles.
        combiners: For each feature, "sum", "mean" or "sqrtn", or None to return rows without
            pooling.
        table_dims: Number of values per row, for each handle.
        is_stacked: Whether to return one output [batch, features, dim] instead of one [batch, dim]
            per feature.
    """

    feature_table: tuple[int, ...]
    combiners: tuple[str | None, ...]
    table_dims: tuple[int, ...]
    is_stacked: bool

    def arguments(self, packed: PackedFeatures) -> dict[str, Any]:
        """Returns the arguments of a lookup of `packed`, except for the tables."""
        return {
            **packed.arguments(),
            "feature_table": list(self.feature_table),
            "combiners": [combiner or "none" for combiner in self.combiners],
            "table_dims": list(self.table_dims),
            "is_stacked": self.is_stacked,
            "num_outputs": 1 if self.is_stacked else len(self.feature_table),
        }


def lookup(
    handles: Sequence[tf.Tensor],
    packed: PackedFeatures,
    layout: LookupLayout,
    joins_step: bool = False,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Looks up a training batch, creates missing rows and counts accesses.

    Args:
        handles: The tables, without duplicates.
        packed: Keys of the batch.
        layout: Layout of the lookup.
        joins_step: Whether the lookup belongs to the training step of earlier lookups, if the
            tables were not updated since. Then it does not count in the age of rows.

    Returns:
        (pooled, plan). pooled: float32 [batch, dim] per feature, or one tensor [batch, features,
        dim]. A feature without a combiner returns [keys, dim], including padding. plan: a scalar
        variant that holds the rows of this lookup, for `apply_gradients`.

    Raises:
        tf.errors.InvalidArgumentError: The inputs are inconsistent, for example row splits decrease
            or weights have another length.
        tf.errors.ResourceExhaustedError: A bounded table cannot hold the keys of the batch.
    """
    result = _loader.library().slipstream_lookup(
        handles=list(handles), joins_step=joins_step, **layout.arguments(packed)
    )
    return list(result.pooled), result.plan


def count_accesses(
    handles: Sequence[tf.Tensor], packed: PackedFeatures, feature_table: Sequence[int]
) -> tf.Operation | None:
    """Counts the accesses of a training batch and creates missing rows, without a lookup.

    Args:
        handles: The tables, without duplicates.
        packed: Keys of the batch. Weights are ignored.
        feature_table: For each feature, the index of its table among the handles.

    Returns:
        The operation in a graph, None in eager mode.

    Raises:
        tf.errors.InvalidArgumentError: The inputs are inconsistent, for example row splits
            decrease.
        tf.errors.ResourceExhaustedError: A bounded table cannot hold the new keys of the batch.
    """
    return _loader.library().slipstream_table_count_accesses(
        handles=list(handles), feature_table=list(feature_table), **packed.arguments()
    )


def evaluation_lookup(
    handles: Sequence[tf.Tensor], packed: PackedFeatures, layout: LookupLayout
) -> list[tf.Tensor]:
    """Looks up keys without creating rows or counting accesses.

    Args:
        handles: The tables, without duplicates.
        packed: Keys of the batch.
        layout: Layout of the lookup.

    Returns:
        The pooled vectors. A key without a row contributes the row that its initializer would
        create.
    """
    op = _loader.library().slipstream_evaluation_lookup
    return list(op(handles=list(handles), **layout.arguments(packed)))


def apply_gradients(
    plan: tf.Tensor,
    gradients: Sequence[tf.Tensor],
    learning_rate: Any,
    handles: Sequence[tf.Tensor] = (),
    advice: str = "",
) -> tf.Operation | None:
    """Sums the gradients of each key and applies the update rule once.

    The gradients are summed in batch order.

    Args:
        plan: Plan from `lookup`. Alternatively a sum of `ops.row_gradients.row_gradients`: its
            lookups are one update, in the order of their calls, and `gradients` is empty.
        gradients: Gradients of the pooled vectors of that lookup, float32 with equal shapes.
        learning_rate: float32, a scalar for all tables or [tables] in the order of the lookup.
        handles: The tables. They order the update between the lookups of a graph.
        advice: If not empty, a table that was updated since one of the lookups is an error, which
            ends with this text.

    Returns:
        The operation in a graph, None in eager mode.

    Raises:
        tf.errors.InvalidArgumentError: A gradient, the sum of a key's gradients or an updated row
            is not finite. No row is changed then.
    """
    return _loader.library().slipstream_apply_gradients(
        plan=plan,
        gradients=list(gradients),
        handles=list(handles),
        learning_rate=learning_rate,
        advice=advice,
    )


def gather(handle: tf.Tensor, keys: Any, dim: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads rows by key.

    Args:
        handle: The table.
        keys: int64 [n].
        dim: Number of values per row.

    Returns:
        (rows float32 [n, dim], found bool [n]). For a missing key, rows contains its initial row.
    """
    return _loader.library().slipstream_table_gather(handle=handle, keys=keys, dim=dim)


def measure(
    handle: tf.Tensor, keys: Any, snapshot: tf.Tensor, metric: str
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Reads rows by key and measures their distance from a snapshot.

    Args:
        handle: The table.
        keys: int64 [n].
        snapshot: float32 [n, dim], the rows at the start of the window.
        metric: "linf" or "l2", as in `ops.drift.row_drift`.

    Returns:
        (rows float32 [n, dim], found bool [n], drift float32 [n]). For a missing key, rows contains
        its initial row.

    Raises:
        ValueError: `metric` is unknown.
        tf.errors.InvalidArgumentError: The snapshot does not have the shape [n, dim].
    """
    require_choice("metric", metric, DRIFT_METRICS, "measure")
    return _loader.library().slipstream_table_measure(
        handle=handle, keys=keys, snapshot=snapshot, metric=metric
    )


def hot_keys(handle: tf.Tensor, k: int, by_key: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns up to k most accessed keys and their counts.

    Args:
        handle: The table.
        k: Maximum number of keys.
        by_key: Whether to sort by ascending key only, which is faster. If not, keys are sorted by
            descending count, then by ascending key.

    Returns:
        keys int64 [m] and counts float32 [m]. Keys with a count of 0 are omitted.
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
        rows: Number of keys with a row.
        allocated_bytes: Allocated memory. Pages that were never written use no physical memory.
        evicted_rows: Number of rows evicted so far.
        dropped_updates: Number of updates that were dropped because their key was evicted between
            lookup and update.
        index_places: Number of entries of the hash index from keys to rows. The index grows when
            more than 4/5 of its entries are used.
        expired_rows: Number of rows removed so far because they were not accessed.
        not_admitted: Number of accesses so far of keys that were too rare to get a row. A key
            counts once per batch.
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
    """Returns the named results of an export op as arrays (eager only).

    Args:
        result: Result of the op.
        kinds: Names of the results.
    """
    return {name: getattr(result, name).numpy() for name in kinds}


def to_tensors(contents: Mapping[str, Any], kinds: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the arguments of an import op as tensors.

    Args:
        contents: Arrays by name.
        kinds: Maps each expected name to its dtype.
        place: Name of the function that imports the contents, for the error message.

    Raises:
        ValueError: An array is missing or unknown.
    """
    if set(contents) != set(kinds):
        raise ValueError(
            f"Invalid `contents`: arrays {sorted(contents)} for {place}. Expected exactly the "
            f"arrays {sorted(kinds)}."
        )
    return {name: tf.constant(np.asarray(contents[name], t)) for name, t in kinds.items()}


@dataclasses.dataclass(frozen=True)
class SpillStatistics:
    """Locations of a table's rows, and row transfers since its creation.

    Attributes:
        rows_in_memory: Number of rows in memory.
        rows_on_disk: Number of rows that are only on disk.
        disk_bytes: Bytes of the files.
        rows_read: Number of rows read from disk by lookups and other operations.
        rows_read_ahead: Part of `rows_read` that was already being read because the keys were
            prefetched.
        rows_written: Number of rows written to disk, including compaction.
    """

    rows_in_memory: int
    rows_on_disk: int
    disk_bytes: int
    rows_read: int
    rows_read_ahead: int
    rows_written: int


def spill_statistics(handle: tf.Tensor) -> SpillStatistics:
    """Returns the spill statistics of a table (eager only)."""
    values = _loader.library().slipstream_table_spill_statistics(handle=handle).numpy()
    return SpillStatistics(*(int(v) for v in values))


def prefetch_rows(handle: tf.Tensor, keys: Any) -> tf.Operation | None:
    """Starts to read the rows of keys int64 [n] from disk.

    The call does not wait for the rows. It has no effect on a table with all rows in memory.
    """
    return _loader.library().slipstream_table_prefetch_rows(handle=handle, keys=keys)


def step(handle: tf.Tensor) -> tf.Tensor:
    """Returns the number of updates of a table so far, int64 scalar."""
    return _loader.library().slipstream_table_step(handle=handle)


def keys(handle: tf.Tensor) -> tf.Tensor:
    """Returns the keys that have a row, int64 [n], ascending."""
    return _loader.library().slipstream_table_keys(handle=handle)


def write(handle: tf.Tensor, keys: Any, rows: Any) -> None:
    """Writes rows float32 [n, dim] and creates missing rows.

    Slots, counts and flags of existing rows are kept. Their deferred gradients are dropped.

    Args:
        handle: The table.
        keys: int64 [n], unique.
        rows: float32 [n, dim], finite.

    Raises:
        tf.errors.InvalidArgumentError: A key occurs twice, or a value is not finite.
        tf.errors.ResourceExhaustedError: A bounded table cannot hold the keys.
    """
    _loader.library().slipstream_table_write(handle=handle, keys=keys, rows=rows)


def remove(handle: tf.Tensor, keys: Any) -> tf.Tensor:
    """Removes the rows of keys int64 [n].

    Slots, counts, flags and deferred gradients of the keys are removed, too. Keys without a row are
    ignored.

    Returns:
        The number of removed rows, a scalar.
    """
    return _loader.library().slipstream_table_remove(handle=handle, keys=keys)


def clear(handle: tf.Tensor) -> None:
    """Removes all rows with their slots, counts, flags and deferred gradients, and frees memory.

    The counters of keys without a row are cleared, too. The numbers of steps do not change.
    """
    _loader.library().slipstream_table_clear(handle=handle)


def shrink(handle: tf.Tensor) -> tf.Tensor:
    """Moves the rows to new memory, so that the memory of removed rows is freed.

    The new memory is allocated before the old memory is freed. A table that spills does not change.

    Returns:
        The number of freed bytes, a scalar.
    """
    return _loader.library().slipstream_table_shrink(handle=handle)


EXPORTED = {
    "keys": np.int64,
    "rows": np.float32,
    "slots": np.float32,
    "counts": np.float32,
    "last_used": np.int64,
    "steps": np.int64,
}


def export_table(handle: tf.Tensor, flush: bool = True) -> dict[str, np.ndarray]:
    """Returns the contents of a table, sorted by key (eager only).

    Args:
        handle: The table.
        flush: Whether to apply deferred gradients first. If not, they stay deferred and are not
            part of the result.

    Returns:
        keys int64 [n]; rows float32 [n, dim]; slots float32 [n, slots per row]; counts float32 [n];
        last_used int64 [n], in lookups or in seconds since 1970, for tables that are bounded by LRU
        or have rows that expire, else [0]; and steps int64 [2], the numbers of updates and lookups
        so far.
    """
    result = _loader.library().slipstream_table_export(handle=handle, flushes=flush)
    return to_arrays(result, EXPORTED)


def export_replicas(handle: tf.Tensor) -> dict[str, np.ndarray]:
    """Returns keys, access counts and flags of replicas (eager only).

    Replicas are copies of rows that other ranks own. The result is sorted by key. Deferred
    gradients are not applied.

    Args:
        handle: The table of replicas, with all rows in memory.

    Returns:
        As `export_table`, without rows and slots, because the next lookups request them from their
        owners again; and marks uint8 [n], the row flags.

    Raises:
        tf.errors.InvalidArgumentError: Rows of the table spill to disk.
    """
    result = _loader.library().slipstream_table_export_replicas(handle=handle)
    without_values = {name: of for name, of in EXPORTED.items() if name not in ("rows", "slots")}
    return {**to_arrays(result, without_values), "marks": result.flags.numpy()}


@dataclasses.dataclass(frozen=True)
class TableChanges:
    """Changes of a table's rows since an earlier call of `export_changes`.

    Attributes:
        contents: Changed and new rows, as returned by `export_table`.
        removed: Keys int64 [m] that were removed. A key that was created again is also in
            `contents`.
        decays: float32 [d], factors by which the counts of all other rows must be multiplied, in
            order.
        is_all: Whether `contents` has all rows, changed or not.
        number: Number of this call. 0 means that the next call will return all rows, too.
    """

    contents: dict[str, np.ndarray]
    removed: np.ndarray
    decays: np.ndarray
    is_all: bool
    number: int


def export_changes(handle: tf.Tensor, since: int) -> TableChanges:
    """Returns the rows that changed since an earlier call (eager only).

    The result is sorted by key. Deferred gradients are not applied.

    Args:
        handle: The table, with all rows in memory.
        since: The `number` of the last call. 0, or the number of any other call, returns all rows.

    Raises:
        tf.errors.InvalidArgumentError: Rows of the table spill to disk.
    """
    result = _loader.library().slipstream_table_export_changes(handle=handle, since=since)
    removed, decays = result.removed.numpy(), result.decays.numpy()
    contents, number = to_arrays(result, EXPORTED), int(result.number)
    return TableChanges(contents, removed, decays, bool(result.is_all), number)


def import_table(handle: tf.Tensor, contents: Mapping[str, Any], adds: bool = False) -> None:
    """Replaces the contents of a table by a result of `export_table`.

    The table is unchanged if an error is raised.

    Args:
        handle: The table.
        contents: The arrays.
        adds: Whether to add the rows to the existing rows, which must have other keys. The steps
            are ignored then. Only for tables that spill. Note: if memory runs out, a part of the
            rows may have been added.

    Raises:
        ValueError: An array is missing or unknown.
        tf.errors.InvalidArgumentError: The shapes do not fit the table, or a key occurs twice.
    """
    tensors = to_tensors(contents, EXPORTED, "import_table")
    _loader.library().slipstream_table_import(handle=handle, adds=adds, **tensors)


def release(handles: Sequence[tf.Tensor]) -> None:
    """Frees the memory of tables, even if a graph still references their handles.

    Later uses of the tables raise `tf.errors.FailedPreconditionError`.
    """
    # Garbage collection can call this function while any graph is being built.
    with _compat.eager_mode():
        for handle in handles:
            _loader.library().slipstream_table_release(handle=handle)


ADMISSION = {"counters": np.uint8, "added": np.int64}


def export_admission(handle: tf.Tensor) -> dict[str, np.ndarray]:
    """Returns the access counters of keys without a row (eager only).

    Returns:
        counters uint8 [n], the counters of a filter, where n is 0 if no such key was accessed; and
        added int64 [shards], the accesses of each shard since its counters were halved.
    """
    return to_arrays(_loader.library().slipstream_table_export_admission(handle=handle), ADMISSION)


def import_admission(handle: tf.Tensor, contents: Mapping[str, Any]) -> None:
    """Replaces the access counters of keys without a row.

    Args:
        handle: The table.
        contents: Result of `export_admission`.

    Raises:
        ValueError: An array is missing or unknown.
        tf.errors.InvalidArgumentError: The arrays have unexpected lengths.
    """
    tensors = to_tensors(contents, ADMISSION, "import_admission")
    _loader.library().slipstream_table_import_admission(handle=handle, **tensors)


DEFERRED = {
    "keys": np.int64,
    "ages": np.int64,
    "ranks": np.int32,
    "sums": np.float32,
    "learning_rate": np.float32,
}


def export_deferred(handle: tf.Tensor) -> dict[str, np.ndarray]:
    """Returns the deferred gradients of a table, which stay deferred (eager only).

    Returns:
        keys int64 [n]; ages int64 [n], updates of the table since the sum began; ranks int32 [n],
        simulated ranks; sums float32 [n, dim]; and learning_rate float32 [], the rate of the last
        update, or 0 before the first update.
    """
    result = _loader.library().slipstream_table_export_deferred(handle=handle)
    return to_arrays(result, DEFERRED)


def import_deferred(handle: tf.Tensor, contents: Mapping[str, Any]) -> None:
    """Replaces the deferred gradients of a table.

    The policy of the table must defer gradients, unless `contents` is empty. The table is unchanged
    if an error is raised.

    Args:
        handle: The table.
        contents: Result of `export_deferred`.

    Raises:
        ValueError: An array is missing or unknown.
        tf.errors.InvalidArgumentError: The shapes do not fit, a key has no row, a key occurs twice
            for a rank, the ages are not in descending order, or the policy does not defer such
            gradients.
    """
    tensors = to_tensors(contents, DEFERRED, "import_deferred")
    _loader.library().slipstream_table_import_deferred(handle=handle, **tensors)
