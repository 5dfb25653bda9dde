"""The native store: C++ hash tables on the CPU.

One lookup call and one update call serve all tables.
"""

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf._utils.memory import require_room
from slipstream_tf.config import DTYPE_BYTES, Table
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops import sealed_rows, update_policy
from slipstream_tf.ops import table as table_ops
from slipstream_tf.ops.features import PackedFeatures
from slipstream_tf.optimizers import Adagrad, SparseOptimizer
from slipstream_tf.optimizers import get as get_optimizer
from slipstream_tf.optimizers.base import BEFORE_RULE
from slipstream_tf.tables.base import EmbeddingStore, SavedStore
from slipstream_tf.tables.rates import Rates


class NativeStore(EmbeddingStore):
    """Embedding tables in C++ hash tables on the CPU.

    A table grows as new keys arrive, or evicts rows to stay within its capacity.

    Note: access counts are float32. They are exact up to 16,777,216 lookups of a key (after decay).

    Example:

    >>> store = slip.tables.NativeStore([slip.Table("items", dim=16)], slip.optimizers.Adagrad())
    >>> store.size("items")
    0
    """

    lists_hot_keys_by_key = True
    takes_tables_at_once = True
    collects_gradients = True
    forgets_flags = True
    writes_rows = True

    def __init__(self, tables: Sequence[Table], optimizer: SparseOptimizer | None = None):
        """Creates empty tables.

        Args:
            tables: At least one table. The names must be distinct.
            optimizer: Sparse optimizer of tables that have no `optimizer` setting. Defaults to
                `Adagrad()`.

        Raises:
            ValueError: There is no table, a name occurs twice, the optimizer is not a sparse
                optimizer, or the capacities need more than the machine's memory.
        """
        self.tables = tuple(tables)
        self.optimizer = Adagrad() if optimizer is None else get_optimizer(optimizer)
        names = [config.name for config in self.tables]
        if not names or len(set(names)) != len(names):
            raise invalid("tables", names, "a store", "at least one table, with distinct names")
        self.rates = Rates(self.tables, self.optimizer, self._step_of)
        _require_room(self.tables, self.rates.optimizers)
        self._policies = dict.fromkeys(names, update_policy.UpdatePolicy())
        self.spills = any(table.storage.spill is not None for table in self.tables)
        with tf.init_scope():
            self._handles = [
                table_ops.create(config, own)
                for config, own in zip(self.tables, self.rates.optimizers, strict=True)
            ]
        # A traced graph may outlive the store, because TensorFlow keeps the graph of every
        # `tf.custom_gradient`, for example of `tf.nn.silu`. It must not keep the rows.
        weakref.finalize(self, table_ops.release, self._handles).atexit = False

    def _step_of(self, index: int) -> tf.Tensor:
        return table_ops.step(self._handles[index])

    def _handle_of(self, table: str) -> tf.Tensor:
        return self._handles[self.index_of(table)]

    def _layout(self, packed: PackedFeatures, stacked: bool) -> table_ops.LookupLayout:
        feature_table = tuple(self.index_of(spec.table) for spec in packed.specs)
        dims = {self.tables[t].dim for t in feature_table}
        if stacked and len(dims) > 1:
            allowed = "False, or tables with equal dims"
            raise invalid("stacked", True, f"tables with the dims {sorted(dims)}", allowed)
        return table_ops.LookupLayout(
            feature_table=feature_table,
            combiners=tuple(spec.combiner for spec in packed.specs),
            table_dims=tuple(config.dim for config in self.tables),
            is_stacked=stacked,
        )

    def lookup(
        self,
        packed: PackedFeatures,
        training: bool,
        stacked: bool = False,
        joins_step: bool = False,
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        layout = self._layout(packed, stacked)
        if training:
            return table_ops.lookup(self._handles, packed, layout, joins_step)
        return table_ops.evaluation_lookup(self._handles, packed, layout), None

    def apply_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tf.Operation | None:
        return table_ops.apply_gradients(
            plan,
            gradients,
            self.rates.now(plan),
            self._handles,
            advice="" if gradients else self.advice,
        )

    def collect_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> exchange_ops.SendBuffer:
        """Sums the gradients of a lookup per key, without applying them.

        Pass the result to `exchange_collected` and then to `apply_collected`. Note: a policy with
        `decay_skipped` already decays the optimizer slots of masked rows here.

        Args:
            plan: Plan from `lookup`.
            gradients: As in `apply_gradients`.

        Returns:
            The gradient rows to apply now: rows that the tables' policies neither mask nor defer,
            and deferred sums that are due; sizes int64 [1, tables]. If any gradient is not finite,
            all values are NaN, so that a `LossScaleOptimizer` skips the step.
        """
        return exchange_ops.collect_gradients(
            plan,
            gradients,
            self.rates.now(plan),
            passes_non_finite=True,
            handles=self._handles,
        )

    def exchange_collected(self, rows: exchange_ops.SendBuffer) -> exchange_ops.SendBuffer:
        """Exchanges collected gradients between ranks.

        This version, for a single process, returns them unchanged.

        Args:
            rows: Result of `collect_gradients`.

        Returns:
            The rows of all ranks, each scaled to its part of the average; sizes int64 [ranks,
            tables].
        """
        return rows

    def apply_collected(
        self, rows: exchange_ops.SendBuffer, scale: Any = ()
    ) -> tf.Operation | None:
        """Sums collected gradients per key and applies each table's update rule.

        Gradients of a key are summed in the given order.

        Args:
            rows: Keys and gradients of each table, from `exchange_collected`.
            scale: float32 [tables], factors for the sums. If empty, the sums are not scaled.

        Returns:
            The operation in a graph; None in eager mode.

        Raises:
            tf.errors.InvalidArgumentError: A value or a scale is not finite. No row is changed.
        """
        # With retention, a key may have no row: the row was evicted since the lookup, or was not
        # admitted. A gradient must not create such a row.
        keeps_all = all(table.retention is None for table in self.tables)
        return exchange_ops.apply_rows(
            self._handles, rows, self.rates.now(rows.sizes), scale, create_missing=keeps_all
        )

    def sum_of_parts(self, values: tf.Tensor) -> tf.Tensor:
        """Sums values that each rank computed from the rows that it applies.

        This version returns the values, because it applies the rows of all ranks.

        Args:
            values: float32, of the same shape on all ranks.
        """
        return values

    def prefetch_rows(self, packed: PackedFeatures) -> None:
        for table, handle in zip(self.tables, self._handles, strict=True):
            if table.storage.spill is None:
                continue
            specs = enumerate(packed.specs)
            keys = [packed.of(i)[0] for i, spec in specs if spec.table == table.name]
            if keys:
                flat = [tf.reshape(part, [-1]) for part in keys]
                table_ops.prefetch_rows(
                    handle, tf.concat(flat, axis=0) if len(flat) > 1 else flat[0]
                )

    def spill_statistics(self, table: str) -> table_ops.SpillStatistics:
        """Returns numbers of rows in memory, on disk and transferred."""
        return table_ops.spill_statistics(self._handle_of(table))

    def size(self, table: str) -> int:
        return self.statistics(table).rows

    def statistics(self, table: str) -> table_ops.TableStatistics:
        """Returns numbers of rows, bytes, evictions and dropped updates of a table."""
        return table_ops.statistics(self._handle_of(table))

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        dim = self.tables[self.index_of(table)].dim
        return table_ops.gather(self._handle_of(table), keys, dim)

    def keys_of(self, table: str) -> np.ndarray:
        return table_ops.keys(self._handle_of(table)).numpy()

    def write_rows(self, table: str, keys: np.ndarray, rows: np.ndarray) -> None:
        """Replaces the values of rows and creates missing rows; see `ops.table.write`.

        Args:
            table: Name of the table.
            keys: int64 [n], distinct.
            rows: float32 [n, dim].
        """
        table_ops.write(self._handle_of(table), keys, rows)

    def remove_rows(self, table: str, keys: np.ndarray) -> int:
        """Removes the rows of keys, with their slots, counts and deferred gradients.

        Args:
            table: Name of the table.
            keys: int64 [n]. Keys without a row are ignored.

        Returns:
            The number of removed rows.
        """
        return int(table_ops.remove(self._handle_of(table), keys))

    def clear_rows(self, table: str) -> None:
        """Removes all rows with their state and frees their memory; see `ops.table.clear`."""
        table_ops.clear(self._handle_of(table))

    def shrink_rows(self, table: str) -> int:
        """Frees the memory of removed rows; returns its bytes. See `ops.table.shrink`."""
        return int(table_ops.shrink(self._handle_of(table)))

    def measure(
        self, table: str, keys: Any, snapshot: tf.Tensor, metric: str
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return table_ops.measure(self._handle_of(table), keys, snapshot, metric)

    def hot_keys(self, table: str, k: int, by_key: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Returns the most accessed keys; see `TrackedStore.hot_keys`.

        With `by_key=True` the keys are ascending, which takes less time.
        """
        keys, counts = table_ops.hot_keys(self._handle_of(table), k, by_key)
        return keys.numpy(), counts.numpy()

    def decay_counts(self, factor: float) -> None:
        for handle in self._handles:
            table_ops.decay_counts(handle, factor)

    def set_update_policy(self, table: str, policy: update_policy.UpdatePolicy) -> None:
        optimizer = self.rates.optimizers[self.index_of(table)]
        others = [name for name in BEFORE_RULE if getattr(optimizer, name) is not None]
        if policy.mode == "defer" and others:
            settings = ", ".join(f"{name}={getattr(optimizer, name)}" for name in others)
            place = f"table {table!r} with {type(optimizer).__name__}({settings})"
            allowed = (
                "no DeferGradients, because a sum of gradients would be clipped or penalized like "
                f"a single gradient. Remove DeferGradients or {', '.join(others)}"
            )
            raise invalid("policies", "DeferGradients", place, allowed)
        if policy.mode == "mask" and optimizer.updates_all_rows:
            place = (
                f"table {table!r} with {type(optimizer).__name__}(l2={optimizer.l2}, decay='all')"
            )
            allowed = (
                "no MaskGradients, because this l2 updates all rows. Set decay='batch', or use "
                "weight_decay instead of l2"
            )
            raise invalid("policies", "MaskGradients", place, allowed)
        update_policy.set_policy(self._handle_of(table), policy)
        self._policies[table] = policy

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        update_policy.set_row_flags(self._handle_of(table), keys, flags)

    def update_counts(self, table: str) -> update_policy.UpdateCounts:
        counts = update_policy.update_counts(self._handle_of(table))
        return dataclasses.replace(counts, **self._rows_left(table))

    def _rows_left(self, table: str) -> dict[str, int]:
        """Returns the fields of `UpdateCounts` that count evicted, expired and refused rows."""
        found = self.statistics(table)
        return {
            "rows_evicted": found.evicted_rows,
            "rows_expired": found.expired_rows,
            "not_admitted": found.not_admitted,
        }

    def flush(self) -> None:
        for handle in self._handles:
            update_policy.flush(handle)

    def export_table(self, table: str, flush: bool = True) -> dict[str, np.ndarray]:
        return table_ops.export_table(self._handle_of(table), flush)

    def export_changes(self, table: str, since: int) -> table_ops.TableChanges:
        return table_ops.export_changes(self._handle_of(table), since)

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        table_ops.import_table(self._handle_of(table), contents)

    def seal_rows(self, table: str) -> sealed_rows.SealedRows:
        return sealed_rows.seal(self._handle_of(table))

    def add_rows(self, table: str, contents: Mapping[str, Any]) -> None:
        table_ops.import_table(self._handle_of(table), contents, adds=True)

    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        handle = self._handle_of(table)
        keys, counts = table_ops.hot_keys(handle, NativeStore.size(self, table), True)
        return {"keys": keys.numpy(), "counts": counts.numpy()}

    def export_admission(self, table: str) -> dict[str, np.ndarray]:
        return table_ops.export_admission(self._handle_of(table))

    def import_admission(self, table: str, contents: Mapping[str, Any]) -> None:
        table_ops.import_admission(self._handle_of(table), contents)

    def export_deferred(self, table: str) -> dict[str, np.ndarray]:
        return table_ops.export_deferred(self._handle_of(table))

    def import_deferred(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the deferred gradients; see `ops.table.import_deferred`.

        A learning rate of 0 in `contents` means that the saving store did not know its rate. It is
        replaced by this store's rate, because a flush before the next update would otherwise
        multiply the sums by 0.
        """
        contents = _with_rate(contents, self, table)
        table_ops.import_deferred(self._handle_of(table), contents)

    def row_flags(self, table: str, keys: Any) -> np.ndarray:
        return update_policy.row_flags(self._handle_of(table), keys)


class CollectingStore(SavedStore):
    """Base of stores that sum and defer gradients in local native tables.

    The native tables of a rank return the gradient rows that are due. The store then sends them to
    the ranks that apply them.
    """

    @property
    def _collector(self) -> NativeStore:
        """The native store that makes lookup plans and defers gradients."""
        raise NotImplementedError

    def _collect_by(self, table: str, policy: update_policy.UpdatePolicy) -> bool:
        """Sets the policy that collects the gradients of a table.

        Sums that were deferred under an incompatible policy are flushed first.

        Returns:
            Whether gradients of any table may really be deferred now (not only in a dry run).
        """
        if not policy.keeps_sums_of(self.policy_of(table)):
            self.flush()
        exchanged = dataclasses.replace(policy, is_exchanged=True)
        NativeStore.set_update_policy(self._collector, table, exchanged)
        self._policies[table] = policy
        return any(p.mode == "defer" and not p.is_shadow for p in self._policies.values())

    def hot_keys(self, table: str, k: int, by_key: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys that this rank's batches access most; see `NativeStore.hot_keys`."""
        return NativeStore.hot_keys(self._collector, table, k, by_key)

    def update_counts(self, table: str) -> update_policy.UpdateCounts:
        """Returns the counts of this rank's gradient rows; see `TrackedStore.update_counts`."""
        return NativeStore.update_counts(self._collector, table)

    def export_deferred(self, table: str) -> dict[str, np.ndarray]:
        """Returns the gradients that this rank defers, from its batches.

        See `NativeStore.export_deferred`.
        """
        deferred = NativeStore.export_deferred(self._collector, table)
        if self._collector is not self:
            # Replicas are never updated, so their tables record no learning rate.
            deferred["learning_rate"] = np.float32(self.learning_rate_of(table))
        return deferred

    def import_deferred(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the gradients that this rank defers; see `NativeStore.import_deferred`."""
        contents = _with_rate(contents, self, table)
        NativeStore.import_deferred(self._collector, table, contents)


def _with_rate(contents: Mapping[str, Any], store: Any, table: str) -> Mapping[str, Any]:
    """Replaces a rate of 0 in deferred gradients by the store's rate."""
    if contents.get("learning_rate", True):
        return contents
    return {**contents, "learning_rate": store.learning_rate_of(table)}


# Index bytes per row: 16-byte entries in an index that is at most 4/5 full.
_INDEX_BYTES = 20
_LAST_USE_BYTES = 8


def _require_room(tables: Sequence[Table], optimizers: Sequence[SparseOptimizer]) -> None:
    """Raises ValueError if capacities, single or summed, exceed the memory."""
    together, sums = 0, []
    for table, optimizer in zip(tables, optimizers, strict=True):
        if table.capacity is None:
            continue
        width = {
            "values": DTYPE_BYTES[table.storage.dtype] * table.dim,
            "slots": DTYPE_BYTES[table.storage.slot_dtype] * optimizer.slots_per_row(table.dim),
        }
        width["index"] = _INDEX_BYTES
        if table.tracks_use:
            width["last use"] = _LAST_USE_BYTES
        parts = " + ".join(f"{nbytes} {what}" for what, nbytes in width.items())
        sum_up = f"{table.capacity} rows x ({parts}) bytes"
        nbytes = table.capacity * sum(width.values())
        require_room("capacity", table.capacity, nbytes, sum_up, f"table {table.name!r}")
        together += nbytes
        sums.append((table.capacity, nbytes, f"{table.name!r}: {sum_up}"))
    if len(sums) > 1:
        rows = sum(capacity for capacity, _, _ in sums)
        largest = [text for _, _, text in sorted(sums, key=lambda entry: -entry[1])[:3]]
        details = "; ".join(largest) + ("; ..." if len(sums) > 3 else "")
        require_room("capacity", rows, together, details, f"{len(sums)} tables together")
