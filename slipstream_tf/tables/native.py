"""The native store: C++ hash tables on the CPU, one lookup and one update call for all tables."""

import dataclasses
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
    """Embedding tables in C++ hash tables that grow as keys arrive or stay within a capacity.

    Access counts are kept in float32: exact up to 16,777,216 lookups of a key (after decay).
    """

    lists_hot_keys_by_key = True
    takes_tables_at_once = True
    collects_gradients = True
    forgets_flags = True
    writes_rows = True

    def __init__(self, tables: Sequence[Table], optimizer: SparseOptimizer | None = None):
        """Makes empty tables.

        Args:
            tables: at least one, of distinct names.
            optimizer: the rule of the tables without one of their own; None: `Adagrad`.

        Raises:
            ValueError: no table, a name twice, something that is no sparse optimizer, or capacities
                that all of the memory could not hold.
        """
        self.tables = tuple(tables)
        self.optimizer = Adagrad() if optimizer is None else get_optimizer(optimizer)
        names = [config.name for config in self.tables]
        if not names or len(set(names)) != len(names):
            raise invalid("tables", names, "a store", "one table or more, of distinct names")
        self.rates = Rates(self.tables, self.optimizer, self._step_of)
        _require_room(self.tables, self.rates.rules)
        self.spills = any(table.storage.spill is not None for table in self.tables)
        with tf.init_scope():
            self._handles = [
                table_ops.create(config, rule)
                for config, rule in zip(self.tables, self.rates.rules, strict=True)
            ]

    def _step_of(self, index: int) -> tf.Tensor:
        return table_ops.step(self._handles[index])

    def _handle_of(self, table: str) -> tf.Tensor:
        return self._handles[self.index_of(table)]

    def _layout(self, packed: PackedFeatures, stacked: bool) -> table_ops.LookupLayout:
        feature_table = tuple(self.index_of(spec.table) for spec in packed.specs)
        dims = {self.tables[t].dim for t in feature_table}
        if stacked and len(dims) > 1:
            raise invalid("stacked", True, f"tables of dims {sorted(dims)}", "tables of equal dim")
        return table_ops.LookupLayout(
            feature_table=feature_table,
            combiners=tuple(spec.combiner for spec in packed.specs),
            table_dims=tuple(config.dim for config in self.tables),
            is_stacked=stacked,
        )

    def lookup(
        self, packed: PackedFeatures, training: bool, stacked: bool = False
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """See `EmbeddingStore.lookup`."""
        layout = self._layout(packed, stacked)
        if training:
            return table_ops.lookup(self._handles, packed, layout)
        return table_ops.evaluation_lookup(self._handles, packed, layout), None

    def apply_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tf.Operation | None:
        """See `EmbeddingStore.apply_gradients`."""
        return table_ops.apply_gradients(plan, gradients, self.rates.now(plan))

    def collect_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> exchange_ops.SendBuffer:
        """Sums the gradients of each key of a lookup, for `apply_collected`; changes no row.

        Args:
            plan: from `lookup`.
            gradients: as `apply_gradients` takes them.

        Returns:
            What the tables' policies pass on; sizes int64 [1, tables]. Of gradients that are not
            all finite, NaN: a `LossScaleOptimizer` is to skip such a step.
        """
        return exchange_ops.collect_gradients(
            plan, gradients, self.rates.now(plan), passes_non_finite=True
        )

    def share_collected(self, rows: exchange_ops.SendBuffer) -> exchange_ops.SendBuffer:
        """Returns what ranks collected, each its part of the average; here, of this process.

        Args:
            rows: from `collect_gradients`.

        Returns:
            sizes int64 [ranks, tables].
        """
        return rows

    def apply_collected(
        self, rows: exchange_ops.SendBuffer, scale: Any = ()
    ) -> tf.Operation | None:
        """Adds up the gradients of each key, in the order given, and applies its table's rule.

        Args:
            rows: keys and gradients of each table, as `share_collected` gives them.
            scale: float32 [tables], multiplies the sums; empty: they stay.

        Returns:
            The operation in a graph, None in eager mode.

        Raises:
            tf.errors.InvalidArgumentError: a value or scale is not finite; no row is changed then.
        """
        # A row that left since it was looked up, or was not admitted, is not made by its gradient.
        keeps_all = all(table.retention is None for table in self.tables)
        return exchange_ops.apply_rows(
            self._handles, rows, self.rates.now(rows.sizes), scale, create_missing=keeps_all
        )

    def sum_of_parts(self, values: tf.Tensor) -> tf.Tensor:
        """Adds up what each rank computed of the rows that it owns; here, of all rows already.

        Args:
            values: float32, of the same shape on all ranks.
        """
        return values

    def announce_rows(self, packed: PackedFeatures) -> None:
        """See `EmbeddingStore.announce_rows`."""
        for table, handle in zip(self.tables, self._handles, strict=True):
            if table.storage.spill is None:
                continue
            specs = enumerate(packed.specs)
            keys = [packed.of(i)[0] for i, spec in specs if spec.table == table.name]
            if keys:
                flat = [tf.reshape(part, [-1]) for part in keys]
                table_ops.announce(handle, tf.concat(flat, axis=0) if len(flat) > 1 else flat[0])

    def spill_statistics(self, table: str) -> table_ops.SpillStatistics:
        """Returns where the rows of a table are; see `ops.table.SpillStatistics`."""
        return table_ops.spill_statistics(self._handle_of(table))

    def size(self, table: str) -> int:
        """See `EmbeddingStore.size`."""
        return self.statistics(table).rows

    def statistics(self, table: str) -> table_ops.TableStatistics:
        """Returns rows, bytes, evictions and dropped updates of a table."""
        return table_ops.statistics(self._handle_of(table))

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """See `EmbeddingStore.gather`."""
        dim = self.tables[self.index_of(table)].dim
        return table_ops.gather(self._handle_of(table), keys, dim)

    def keys_of(self, table: str) -> np.ndarray:
        """See `SavedStore.keys_of`."""
        return table_ops.keys(self._handle_of(table)).numpy()

    def write_rows(self, table: str, keys: np.ndarray, rows: np.ndarray) -> None:
        """Replaces the values of rows, and makes those of absent keys; see `ops.table.write`.

        Args:
            table: name of the table.
            keys: int64 [n], each once.
            rows: float32 [n, dim].
        """
        table_ops.write(self._handle_of(table), keys, rows)

    def remove_rows(self, table: str, keys: np.ndarray) -> int:
        """Removes the rows of keys int64 [n], and all about them; returns how many there were."""
        return int(table_ops.remove(self._handle_of(table), keys))

    def measure(
        self, table: str, keys: Any, snapshot: tf.Tensor, metric: str
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Reads rows and how far they are from a snapshot, in one pass; see `ops.table.measure`."""
        return table_ops.measure(self._handle_of(table), keys, snapshot, metric)

    def hot_keys(self, table: str, k: int, by_key: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """See `EmbeddingStore.hot_keys`; `by_key`: ascending by key, which takes less time."""
        keys, counts = table_ops.hot_keys(self._handle_of(table), k, by_key)
        return keys.numpy(), counts.numpy()

    def decay_counts(self, factor: float) -> None:
        """See `EmbeddingStore.decay_counts`."""
        for handle in self._handles:
            table_ops.decay_counts(handle, factor)

    def set_update_policy(self, table: str, policy: update_policy.UpdatePolicy) -> None:
        """See `EmbeddingStore.set_update_policy`."""
        rule = self.rates.rules[self.index_of(table)]
        beside = [name for name in BEFORE_RULE if getattr(rule, name) is not None]
        if policy.mode == "defer" and beside:
            place = f"table {table!r}, whose {type(rule).__name__} has {', '.join(beside)}"
            allowed = "no DeferGradients: a sum would be clipped or penalised as one gradient"
            raise invalid("policies", "DeferGradients", place, allowed)
        if policy.mode == "mask" and rule.updates_all_rows:
            place = f"table {table!r}, all rows of which {type(rule).__name__} penalises"
            allowed = "no MaskGradients, decay='batch', or weight_decay in place of l2"
            raise invalid("policies", "MaskGradients", place, allowed)
        update_policy.set_policy(self._handle_of(table), policy)

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        """See `EmbeddingStore.set_row_flags`."""
        update_policy.set_row_flags(self._handle_of(table), keys, flags)

    def update_counts(self, table: str) -> update_policy.UpdateCounts:
        """See `EmbeddingStore.update_counts`."""
        counts = update_policy.update_counts(self._handle_of(table))
        return dataclasses.replace(counts, **self._rows_left(table))

    def _rows_left(self, table: str) -> dict[str, int]:
        """The fields of `UpdateCounts` that are of rows."""
        found = self.statistics(table)
        return {
            "rows_evicted": found.evicted_rows,
            "rows_expired": found.expired_rows,
            "not_admitted": found.not_admitted,
        }

    def flush(self) -> None:
        """See `EmbeddingStore.flush`."""
        for handle in self._handles:
            update_policy.flush(handle)

    def export_table(self, table: str, flush: bool = True) -> dict[str, np.ndarray]:
        """See `EmbeddingStore.export_table`; the arrays are those of `ops.table.export_table`.

        Args:
            table: name of the table.
            flush: whether deferred gradients are applied before; else they stay, and are not in.
        """
        return table_ops.export_table(self._handle_of(table), flush)

    def export_changes(self, table: str, since: int) -> table_ops.Changes:
        """See `SavedStore.export_changes`."""
        return table_ops.export_changes(self._handle_of(table), since)

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """See `EmbeddingStore.import_table`."""
        table_ops.import_table(self._handle_of(table), contents)

    def seal_rows(self, table: str) -> sealed_rows.SealedRows:
        """See `SavedStore.seal_rows`."""
        return sealed_rows.seal(self._handle_of(table))

    def add_rows(self, table: str, contents: Mapping[str, Any]) -> None:
        """See `SavedStore.add_rows`."""
        table_ops.import_table(self._handle_of(table), contents, adds=True)

    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        """See `SavedStore.export_accesses`."""
        handle = self._handle_of(table)
        keys, counts = table_ops.hot_keys(handle, NativeStore.size(self, table), True)
        return {"keys": keys.numpy(), "counts": counts.numpy()}

    def export_admission(self, table: str) -> dict[str, np.ndarray]:
        """See `SavedStore.export_admission`."""
        return table_ops.export_admission(self._handle_of(table))

    def import_admission(self, table: str, contents: Mapping[str, Any]) -> None:
        """See `SavedStore.import_admission`."""
        table_ops.import_admission(self._handle_of(table), contents)

    def export_deferred(self, table: str) -> dict[str, np.ndarray]:
        """Returns the deferred gradients; see `ops.table.export_deferred`."""
        return table_ops.export_deferred(self._handle_of(table))

    def import_deferred(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the deferred gradients; see `ops.table.import_deferred`.

        A learning rate of 0, as of a store that does not know the rate, stands for this store's:
        a flush before the next update would apply them without moving a row.
        """
        contents = _with_rate(contents, self, table)
        table_ops.import_deferred(self._handle_of(table), contents)

    def row_flags(self, table: str, keys: Any) -> np.ndarray:
        """Returns uint8 [n], the flags that rows still have; see `ops.update_policy.row_flags`."""
        return update_policy.row_flags(self._handle_of(table), keys)


class CollectingStore(SavedStore):
    """Base of stores whose ranks sum and defer gradients in native tables of their own.

    What these tables give out is sent to where it is applied.
    """

    _policies: dict[str, update_policy.UpdatePolicy]

    @property
    def _collector(self) -> NativeStore:
        """The store whose lookups make plans, and whose tables defer gradients."""
        raise NotImplementedError

    def _policy_of(self, table: str) -> update_policy.UpdatePolicy:
        return self._policies[self._require(table)]

    def _collect_by(self, table: str, policy: update_policy.UpdatePolicy) -> bool:
        """Sets the policy of a table, after a flush where that cannot keep what is deferred.

        Returns:
            Whether gradients of any table may be deferred now, a dry run's aside.
        """
        policy = dataclasses.replace(policy, is_exchanged=True)
        if not policy.keeps_sums_of(self._policy_of(table)):
            self.flush()
        NativeStore.set_update_policy(self._collector, table, policy)
        self._policies[table] = policy
        return any(p.mode == "defer" and not p.is_shadow for p in self._policies.values())

    def hot_keys(self, table: str, k: int, by_key: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """See `NativeStore.hot_keys`; of this rank's own batches."""
        return NativeStore.hot_keys(self._collector, table, k, by_key)

    def update_counts(self, table: str) -> update_policy.UpdateCounts:
        """See `EmbeddingStore.update_counts`; of this rank's gradient rows."""
        return NativeStore.update_counts(self._collector, table)

    def export_deferred(self, table: str) -> dict[str, np.ndarray]:
        """See `NativeStore.export_deferred`; of what this rank defers, of its own batches."""
        deferred = NativeStore.export_deferred(self._collector, table)
        if self._collector is not self:
            # Replicas are never updated.
            deferred["learning_rate"] = np.float32(self.learning_rate_of(table))
        return deferred

    def import_deferred(self, table: str, contents: Mapping[str, Any]) -> None:
        """See `NativeStore.import_deferred`; of what this rank is to defer."""
        contents = _with_rate(contents, self, table)
        NativeStore.import_deferred(self._collector, table, contents)


def _with_rate(contents: Mapping[str, Any], store: Any, table: str) -> Mapping[str, Any]:
    """Returns deferred gradients with a learning rate: that of a store where they have none."""
    if contents.get("learning_rate", True):
        return contents
    return {**contents, "learning_rate": store.learning_rate_of(table)}


# Of a row: 16 bytes of an index that is at most 4/5 full.
_INDEX_BYTES = 20
_LAST_USE_BYTES = 8


def _require_room(tables: Sequence[Table], rules: Sequence[SparseOptimizer]) -> None:
    """Refuses capacities that cannot be reached, of one table or of all together."""
    together, sums = 0, []
    for table, rule in zip(tables, rules, strict=True):
        if table.capacity is None:
            continue
        width = {
            "values": DTYPE_BYTES[table.storage.dtype] * table.dim,
            "slots": DTYPE_BYTES[table.storage.slot_dtype] * rule.slots_per_row(table.dim),
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
        told = "; ".join(largest) + ("; ..." if len(sums) > 3 else "") + "; together"
        require_room("capacity", rows, together, told, f"{len(sums)} tables together")
