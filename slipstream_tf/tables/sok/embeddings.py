"""An embedding store with rows in SOK's GPU hash tables.

A lookup fetches the rows of the batch's distinct keys through SOK, writes them to a native table of
replicas, and pools them there. Gradients are summed, masked or deferred in the replica table. The
remaining gradient rows are sent to the ranks that own the rows, and applied through
`sok.OptimizerWrapper`.

SOK sends its messages outside of this package's communicator, so this module counts their
bytes. For a key of another rank, the requesting rank counts the key and the row of the lookup, and
the gradient row of the update.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf._utils.errors import invalid, require_choice
from slipstream_tf.config import Storage, Table
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.features import PackedFeatures
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables.base import EmbeddingStore, table_contents
from slipstream_tf.tables.native import NativeStore
from slipstream_tf.tables.rates import Rates
from slipstream_tf.tables.replicas import Replicas, ReplicatingStore, counts_of, rows_within
from slipstream_tf.tables.sok import hkv
from slipstream_tf.tables.sok.optimizers import SokRule, same_rule
from slipstream_tf.tables.sok.table import (
    SokTable,
    SpreadStore,
    free_when_deleted,
    open_sok,
    slots_of,
    wrap_optimizer,
)

# Sizes in SOK's messages.
_KEY_BYTES = 8
_FLOAT_BYTES = 4
_VAR_TYPES = ("hybrid", "hbm")


class SokEmbeddingStore(ReplicatingStore, SpreadStore, EmbeddingStore):
    """Embedding tables stored in SOK and sharded over the ranks.

    A key's owner is the key modulo the number of ranks. Gradients are averaged over the ranks. The
    traffic of SOK is included in the communicator's counts.

    Note: every lookup (evaluation included), every update, `flush` and every policy change is a
    collective. Ranks without inputs must take part with an empty batch.

    A SOK variable starts with zeros. It stores the difference between a trained row and the key's
    initial row, which depends only on the table's seed. `gather` and `export_table` return complete
    rows.

    SOK creates a row for every requested key, even in evaluation, and does not report which keys
    existed before. Therefore `gather` reports every key as found.

    A full "hybrid" table, which is a HierarchicalKV (HKV) table, evicts the rows with the oldest
    write. Masked rows would be evicted although they are in use, so they and their slots are
    rewritten unchanged once per window.

    Example:

    >>> from slipstream_tf.tables import SokEmbeddingStore
    >>> tables = [slip.Table("user", 8, retention=slip.Retention(1024, eviction="lru"))]
    >>> store = SokEmbeddingStore(tables, slip.optimizers.SGD(0.1))  # doctest: +SKIP

    Attributes:
        tables: The tables as passed to the constructor.
        optimizer: The sparse optimizer of all tables.
        rates: The learning rates; all tables share one rate.
        comm: The communicator, or None for a single process.
    """

    _moments_owner = "SOK stores the moments"

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: optimizers.SparseOptimizer,
        comm: Any = None,
        var_type: str = "hybrid",
        settings: Mapping[str, Any] | None = None,
        cache_bytes: int = 256 << 20,
    ):
        """Creates empty tables.

        Args:
            tables: At least one table. The names must be distinct. With "hybrid", `capacity` must
                be a power of two and is the capacity per rank, and `eviction` must be "lru". It may
                be None if `settings` has "init_capacity" and "max_capacity". With "hbm", `capacity`
                must be None.
            optimizer: Sparse optimizer of all tables: `SGD` without momentum, `Adagrad` with a
                negligible epsilon, or `Adam` with `bias_correction="table"`. See
                `tables.sok.optimizers.same_rule`.
            comm: Communicator from `distributed.init()`. None means a single process.
            var_type: "hybrid" (HierarchicalKV, in GPU and host memory) or "hbm" (GPU memory only).
            settings: HKV settings for all tables with "hybrid", see `tables.sok.hkv.NAMES`.
            cache_bytes: Budget for the replicas on this rank, in bytes. Must hold the distinct keys
                of a batch. Defaults to 256 MiB.

        Raises:
            ImportError: SOK cannot be loaded.
            ValueError: SOK does not support a table, a setting or the optimizer.
        """
        # Gradients pass through the replica tables but are not applied there.
        placeholder = optimizers.SGD(0.0)
        replicated = [dataclasses.replace(table, optimizer=None) for table in tables]
        rows = rows_within(cache_bytes, replicated, placeholder, "SokEmbeddingStore")
        require_choice("var_type", var_type, _VAR_TYPES, type(self).__name__)
        self.tables, self.comm = tuple(tables), comm
        self.optimizer = optimizers.shared_optimizer(tables, optimizer, "SOK's tables")
        self._settings = {t.name: _settings_of(t, var_type, settings or {}) for t in self.tables}
        self._sok = open_sok()
        self._require_ranks(int(self._sok.communication.num_ranks()))
        with tf.device("CPU:0"):
            self._steps = tf.Variable([0, 0], dtype=tf.int64, trainable=False)
        # Only returns initial rows; no row is ever created in it.
        self._initial = NativeStore(
            [dataclasses.replace(t, optimizer=None, retention=None) for t in self.tables],
            optimizers.SGD(0.0),
        )
        shared = [dataclasses.replace(t, optimizer=None) for t in self.tables]
        self.rates = Rates(shared, self.optimizer, lambda _: self._steps[0])
        with tf.init_scope():
            self._opened = {table.name: self._made(table, var_type) for table in self.tables}
            optimizer = same_rule(self.optimizer, lambda: tf.convert_to_tensor(self.rates.now()))
            self._updater = wrap_optimizer(optimizer)
            # Create the slots now, because a traced step cannot create variables.
            variables = [table.variable for table in self._opened.values()]
            self._updater._create_slots(variables)
            for variable in variables:
                for owned in (variable, *slots_of(self._updater, variable).values()):
                    free_when_deleted(owned)
        self._rule = SokRule(self._updater)
        self._policies = {table.name: UpdatePolicy() for table in self.tables}
        self._saturated = {table.name: np.empty(0, np.int64) for table in self.tables}
        self._replicas = Replicas(replicated, placeholder, rows)
        self._handles = self._replicas._handles
        with tf.device("CPU:0"):
            self._defers = tf.Variable(False, trainable=False)

    def _made(self, table: Table, var_type: str) -> SokTable:
        variable = self._sok.DynamicVariable(
            dimension=table.dim,
            initializer="0.0",
            var_type=var_type,
            name=f"slipstream_{table.name}",
            # Gradients are applied through `apply_gradients`, not by the model's optimizer.
            trainable=False,
            **self._settings[table.name],
        )
        return SokTable(table.name, variable, self._sok)

    def variable(self, table: str) -> Any:
        """Returns a table's `sok.DynamicVariable`, which stores differences to initial rows."""
        return self._table(table).variable

    def _with_initial(self, table: str, keys: Any, trained: tf.Tensor) -> tf.Tensor:
        """Adds the initial rows of keys to their trained differences."""
        with tf.device("CPU:0"):
            rows, _ = self._initial.gather(table, keys)
            return rows + trained

    def _read(self, found: SokTable, keys: np.ndarray) -> tf.Tensor:
        return self._with_initial(found.name, keys, found.read(keys))

    def lookup(
        self,
        packed: PackedFeatures,
        training: bool,
        stacked: bool = False,
        joins_step: bool = False,
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Looks up and pools the rows of a batch; a collective.

        See `EmbeddingStore.lookup`.
        """
        layout = self._replicas._layout(packed, stacked)
        routed = exchange_ops.route_keys(self._handles, packed, layout, ranks=1)
        parts = tf.split(routed.keys, routed.sizes[0], num=len(self.tables))
        fetched = [
            self._with_initial(found.name, part, self._lookup(found, part))
            for found, part in zip(self._opened.values(), parts, strict=True)
        ]
        pooled, plan = exchange_ops.look_up_pulled(
            self._handles,
            packed,
            layout,
            routed,
            exchange_ops.pack_rows(fetched),
            training,
            joins_step,
        )
        return pooled, plan if training else None

    def _lookup(self, found: SokTable, keys: tf.Tensor) -> tf.Tensor:
        """Calls `SokTable.lookup` and counts the bytes that SOK sends."""
        if self._ranks > 1:
            with tf.device("CPU:0"):
                others = tf.math.count_nonzero(found.spread(keys) != found.rank)
                self._count_sent(others * _KEY_BYTES, "keys")
                self._count_sent(others * (_FLOAT_BYTES * found.dim), "rows")
        return found.lookup(keys)

    def _count_sent(self, nbytes: Any, kind: str) -> None:
        """Adds bytes, an int64 scalar, to a kind of traffic ("keys")."""
        self.comm.count_sent(nbytes, kind, f"slipstream.sok.{kind}")

    def apply_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tf.Operation | None:
        """Averages gradients over the ranks and applies them; a collective.

        See `EmbeddingStore.apply_gradients`.
        """
        # Divide here, because SOK sums over the ranks.
        shares = [gradient / self._ranks for gradient in gradients]
        collected = exchange_ops.collect_gradients(
            plan,
            shares,
            self.rates.now(plan),
            advance_step=True,
            handles=self._handles,
            advice="" if gradients else self.advice,
        )
        self._steps.assign_add([1, 1])
        return self._deliver(collected, self._defers.read_value())

    def _deliver(self, collected: exchange_ops.SendBuffer, is_deferred: Any) -> tf.Operation | None:
        """Sends gradient rows to the owners of their keys, which apply them."""
        parts = collected.of_tables([table.dim for table in self.tables])
        pairs = []
        for table, (keys, values) in zip(self._opened.values(), parts, strict=True):
            rows = tf.reshape(values, [-1, table.dim])
            pairs.append((self._to_owners(table, keys, rows, is_deferred), table.variable))
        return self._updater.apply_gradients(pairs)

    def _to_owners(
        self, table: SokTable, keys: tf.Tensor, rows: tf.Tensor, is_deferred: Any
    ) -> tf.IndexedSlices:
        """Sends gradient rows to their owners; returns the received rows.

        SOK's gradient function does the same, but it accepts only the keys of a lookup. The
        collected keys can differ, because sums of earlier steps can be due.
        """
        ops, talk = self._sok.raw_ops, self._sok.communication
        selected, order, splits = ops.dist_select(keys, num_splits=table.ranks)
        if table.ranks > 1:
            with tf.device("CPU:0"):
                counts = tf.cast(splits, tf.int64)
                others = tf.reduce_sum(counts) - counts[table.rank]
                row_bytes = others * (_FLOAT_BYTES * table.dim)
                deferred = row_bytes * tf.cast(is_deferred, tf.int64)
                self._count_sent(others * _KEY_BYTES, "keys")
                self._count_sent(deferred, "deferred")
                self._count_sent(row_bytes - deferred, "gradients")
        own_keys, _ = talk.alltoall(selected, splits)
        own_rows, _ = talk.alltoall(ops.gather_ex(rows, order), splits)
        shape = tf.stack([tf.shape(own_keys)[0], table.dim])
        return tf.IndexedSlices(own_rows, own_keys, shape)

    def flush(self) -> None:
        """Applies all deferred gradients of all ranks; a collective."""
        self._apply_deferred(
            lambda: self._deliver(exchange_ops.collect_deferred(self._handles), True)
        )

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Sets a table's policy; a collective if gradients may be deferred.

        Raises:
            ValueError: The policy defers by movement with an optimizer that has slots. A rank
                decides on the sums of its batches before they are sent, but the slots are stored on
                the owner. Or the policy decays moments or simulates ranks.
        """
        place = self._place_of(table)
        by_movement = policy.mode == "defer" and policy.trigger == "movement"
        if by_movement and not isinstance(self.optimizer, optimizers.SGD):
            allowed = (
                "Interval(...) or the optimizer SGD, because a rank cannot read the slots of rows "
                "on other ranks. SokStore also supports Movement with Adagrad"
            )
            raise invalid("until", "Movement", place, allowed)
        self._require_policy(table, policy)
        self._defers.assign(self._collect_by(table, policy))

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        """Replaces the row flags of a table.

        Only as many rows are flagged as the replicas have room for. See
        `TrackedStore.set_row_flags`.
        """
        keys, flags = np.asarray(keys, np.int64), np.asarray(flags, np.uint8)
        found, before = self._table(table), self._saturated[table]
        own = found.own(self._replicas.set_saturated(table, keys, flags))
        slots = slots_of(self._updater, found.variable).values()
        found.touch(np.union1d(before, own), slots)
        self._saturated[table] = own

    def export_table(self, table: str, flush: bool = True) -> dict[str, np.ndarray]:
        """Returns this rank's rows of a table as arrays.

        Args:
            table: Name of the table.
            flush: Whether to apply deferred gradients first. If False they stay deferred and the
                rows do not include them.

        Returns:
            The arrays of `ops.table.export_table`, which a native table can import. In addition
            "trained", float32 [n, dim], the values in SOK, and "powers", float32, the powers for
            Adam's bias correction. With multiple ranks the access counts are 0, because a rank
            counts only the keys of its batches, see `export_accesses`.

        Raises:
            RuntimeError: `flush` is True, there are multiple ranks, and this rank has deferred
                gradients.
        """
        found = self._table(table)
        if flush:
            self._require_flushed(table)
            if self._num_unapplied(table):
                self.flush()
        own = self._rule.export_rows(found)
        keys, trained = own["keys"], own["rows"]
        counts = counts_of(keys, **self.export_accesses(table)) if self._ranks == 1 else None
        rows = self._with_initial(table, keys, tf.constant(trained)).numpy()
        return {
            **table_contents(keys, rows, own["slots"], counts, self._steps.numpy()),
            "trained": trained,
            "powers": self._rule.export()[1],
        }

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces a table by contents of any store and rank count.

        SOK cannot remove keys. Keys that are in the table but not in the contents are reset to
        their initial rows and still take memory. With a single process the access counts are
        restored too.

        Note: SOK stores the difference to the initial row. For contents of other stores this
        difference is rounded, so that a row is restored to within 2^-23 of the magnitudes of both
        values.

        Args:
            table: Name of the table.
            contents: Result of `export_table`. Keys of other ranks are ignored. "trained" and
                "powers" are optional; contents of a native table do not have them.

        Raises:
            ValueError: An array is missing or has another shape, or SOK reserves one of the keys.
                The table stays unchanged.
            RuntimeError: The table is too small, and SOK evicted rows of the contents.
        """
        found = self._table(table)
        own = self._rule.own_part(found, contents, optional=("trained",))
        own["rows"] = self._trained(found, own)
        self._rule.replace_rows(found, own)
        self._steps.assign(contents["steps"])
        self._rule.replace(contents)
        if self._ranks == 1:
            is_accessed = np.asarray(contents["counts"]) > 0.0
            self.import_accesses(
                table, {n: np.asarray(contents[n])[is_accessed] for n in ("keys", "counts")}
            )

    def _trained(self, found: SokTable, own: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the values to store in SOK, float32 [n, dim].

        These are the saved "trained" values of each row if they reproduce it exactly, otherwise the
        difference to its initial row.
        """
        keys, rows = own["keys"], np.asarray(own["rows"], np.float32)
        difference = rows - self._with_initial(found.name, keys, tf.zeros(rows.shape)).numpy()
        if "trained" not in own:
            return difference
        # With another seed or initializer, "trained" would give another row.
        trained = np.asarray(own["trained"], np.float32)
        sums = self._with_initial(found.name, keys, tf.constant(trained)).numpy()
        return np.where((sums == rows).all(axis=1, keepdims=True), trained, difference)

    def _apply_deferred(self, apply: Callable[[], Any]) -> None:
        """Applies deferred gradients without counting an update.

        During the call, Adam's powers have the values of the last update, so that its bias
        correction is used. Before the first update, they have the values of the first update.

        Args:
            apply: Collects, sends and applies the gradients.
        """
        powers = self._rule.powers()
        before = [power.read_value() for power in powers]
        for power, beta in zip(powers, self._rule.betas(), strict=True):
            last = tf.math.divide_no_nan(power, beta)
            power.assign(tf.where(self._steps[0] > 0, last, power))
        apply()
        for power, value in zip(powers, before, strict=True):
            power.assign(value)

    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        return self._replicas.export_accesses(table)

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """Replaces the access counts; clears flags and deferred gradients."""
        self._replicas.import_accesses(table, accesses)

    def decay_counts(self, factor: float) -> None:
        self._replicas.decay_counts(factor)


def _settings_of(table: Table, var_type: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the validated keyword arguments of a table's SOK variable."""
    place = f"table {table.name!r} in SOK"
    if table.storage != Storage():
        allowed = (
            "Storage(), because SOK stores rows as float32. Set settings['max_hbm_for_vectors'] to "
            "the GiB of rows in GPU memory; the other rows are in host memory"
        )
        raise invalid("storage", table.storage, place, allowed)
    if table.admits or (table.retention is not None and table.retention.expire_after is not None):
        allowed = "Retention without admit_after and expire_after, which SOK does not support"
        raise invalid("retention", table.retention, place, allowed)
    if var_type == "hbm":
        if table.capacity is not None or settings:
            has_capacity = table.capacity is not None
            name, given = ("capacity", table.capacity) if has_capacity else ("settings", settings)
            raise invalid(
                name, given, place, "None, because hbm tables of SOK grow without a limit"
            )
        return {}
    found = dict(settings)
    if table.capacity is not None:
        if table.eviction != "lru":
            allowed = "'lru', because HKV evicts the rows that were written longest ago"
            raise invalid("eviction", table.eviction, place, allowed)
        hkv.require_power_of_two("capacity", table.capacity, place)
        found = {"init_capacity": table.capacity, **found, "max_capacity": table.capacity}
    elif "max_capacity" not in found:
        allowed = f"a power of two. Otherwise, SOK reserves {hkv.DEFAULT_CAPACITY:,} rows"
        raise invalid("capacity", None, place, allowed)
    hkv.require_settings(found, place, are_capacities_needed=True)
    return found
