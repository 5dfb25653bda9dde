"""Embedding tables in SOK's hash tables, behind a store's contract: lookup, update, checkpoint.

In: each rank's batches. The distinct keys of a batch go through SOK's lookup, their rows are pooled
in a native table of replicas; gradients are summed, masked or deferred there, and what is left goes
to the ranks that own the rows, and through `sok.OptimizerWrapper`.

What SOK sends for this package is counted in addition to what the communicator sends itself. For a
key that another rank owns, the key is sent there, its row comes back, and its gradient is sent
there. The rank that requests the row counts all three.
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
from slipstream_tf.tables.sok.table import SokTable, SpreadStore, open_sok, slots_of, wrap_optimizer

# Of what SOK sends.
_KEY_BYTES = 8
_FLOAT_BYTES = 4
_VAR_TYPES = ("hybrid", "hbm")


class SokEmbeddingStore(ReplicatingStore, SpreadStore, EmbeddingStore):
    """Embedding tables whose rows SOK holds, spread over the ranks by key modulo their number.

    Every lookup (evaluation, too), update, `flush` and change of policy is a collective; ranks
    without inputs take part with an empty batch. Gradients are averaged over the ranks. What SOK
    sends is in the communicator's traffic.

    A variable of SOK starts with zeros: it holds what training added to the initial row of a key,
    which follows from the table's seed. Rows as the model reads them come from `gather` and
    `export_table`. SOK makes rows for all keys that are requested, in evaluation, too, and does
    not tell which there were: `gather` says of every key that it was found.

    HKV tables ("hybrid") that are full evict the rows that were written longest ago: masked rows
    and their slots are written once a window, as they are.

    Attributes:
        tables: as given.
        optimizer: the rule of all tables.
        rates: what the tables' rows move by; one for all.
        comm: the ranks, or None.
    """

    _whose_moments = "SOK keeps the moments"

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: optimizers.SparseOptimizer,
        comm: Any = None,
        var_type: str = "hybrid",
        settings: Mapping[str, Any] | None = None,
        cache_bytes: int = 256 << 20,
    ):
        """Makes empty tables.

        Args:
            tables: at least one, of distinct names. With "hybrid": `capacity`, a power of two, is
                that of each rank's part, and `eviction` "lru".
            optimizer: the rule of all tables: `SGD`, `Adagrad` or `Adam`.
            comm: the ranks, from `distributed.init()`; None: this process alone.
            var_type: "hybrid" (HierarchicalKV: GPU and host memory) or "hbm" (GPU memory only).
            settings: of HKV, for all tables; see `tables.sok.hkv.NAMES`.
            cache_bytes: of the copies on this rank; must hold the distinct keys of a batch.

        Raises:
            ImportError: SOK cannot be loaded here.
            ValueError: a table or setting that SOK cannot have, or a rule that it does not know.
        """
        # Gradients pass through the replicas' tables, but rows are not updated there.
        rule = optimizers.SGD(0.0)
        replicated = [dataclasses.replace(table, optimizer=None) for table in tables]
        rows = rows_within(cache_bytes, replicated, rule, "SokEmbeddingStore")
        require_choice("var_type", var_type, _VAR_TYPES, type(self).__name__)
        self.tables, self.comm = tuple(tables), comm
        self.optimizer = optimizers.the_one_of(tables, optimizer, "SOK's tables")
        self._settings = {t.name: _settings_of(t, var_type, settings or {}) for t in self.tables}
        self._sok = open_sok()
        self._require_ranks(int(self._sok.communication.num_ranks()))
        with tf.device("CPU:0"):
            self._steps = tf.Variable([0, 0], dtype=tf.int64, trainable=False)
        # Of which no row is ever made: it gives the initial rows.
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
            # Now, so that no step that is traced has to make variables.
            self._updater._create_slots([table.variable for table in self._opened.values()])
        self._rule = SokRule(self._updater)
        self._policies = {table.name: UpdatePolicy() for table in self.tables}
        self._saturated = {table.name: np.empty(0, np.int64) for table in self.tables}
        self._replicas = Replicas(replicated, rule, rows)
        self._handles = self._replicas._handles
        with tf.device("CPU:0"):
            self._defers = tf.Variable(False, trainable=False)

    def _made(self, table: Table, var_type: str) -> SokTable:
        variable = self._sok.DynamicVariable(
            dimension=table.dim,
            initializer="0.0",
            var_type=var_type,
            name=f"slipstream_{table.name}",
            # Updates happen in the backward pass, not by the model's optimizer.
            trainable=False,
            **self._settings[table.name],
        )
        return SokTable(table.name, variable, self._sok)

    def variable(self, table: str) -> Any:
        """Returns the `sok.DynamicVariable` of a table: what training added to initial rows."""
        return self._table(table).variable

    def _with_initial(self, table: str, keys: Any, trained: tf.Tensor) -> tf.Tensor:
        """Adds the initial rows of keys to what training added to them."""
        with tf.device("CPU:0"):
            rows, _ = self._initial.gather(table, keys)
            return rows + trained

    def _read(self, found: SokTable, keys: np.ndarray) -> tf.Tensor:
        return self._with_initial(found.name, keys, found.read(keys))

    def lookup(
        self, packed: PackedFeatures, training: bool, stacked: bool = False
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """See `EmbeddingStore.lookup`; a collective."""
        layout = self._replicas._layout(packed, stacked)
        routed = exchange_ops.route_keys(self._handles, packed, layout, ranks=1)
        parts = tf.split(routed.keys, routed.sizes[0], num=len(self.tables))
        fetched = [
            self._with_initial(found.name, part, self._lookup(found, part))
            for found, part in zip(self._opened.values(), parts, strict=True)
        ]
        pooled, plan = exchange_ops.look_up_pulled(
            self._handles, packed, layout, routed, exchange_ops.pack_rows(fetched), training
        )
        return pooled, plan if training else None

    def _lookup(self, found: SokTable, keys: tf.Tensor) -> tf.Tensor:
        """Looks rows up as `SokTable.lookup`, and counts the bytes that SOK sends."""
        if self._ranks > 1:
            with tf.device("CPU:0"):
                others = tf.math.count_nonzero(found.spread(keys) != found.rank)
                self._count_sent(others * _KEY_BYTES, "keys")
                self._count_sent(others * (_FLOAT_BYTES * found.dim), "rows")
        return found.lookup(keys)

    def _count_sent(self, nbytes: Any, kind: str) -> None:
        """Counts bytes, int64, of a kind."""
        self.comm.count_sent(nbytes, kind, f"slipstream.sok.{kind}")

    def apply_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tf.Operation | None:
        """See `EmbeddingStore.apply_gradients`; averages over the ranks. A collective."""
        # SOK adds up what the ranks send.
        shares = [gradient / self._ranks for gradient in gradients]
        collected = exchange_ops.collect_gradients(
            plan, shares, self.rates.now(plan), advance_step=True
        )
        self._steps.assign_add([1, 1])
        return self._deliver(collected, self._defers.read_value())

    def _deliver(self, collected: exchange_ops.SendBuffer, is_deferred: Any) -> tf.Operation | None:
        """Sends rows of gradients to the ranks that own their keys, which apply them."""
        parts = collected.of_tables([table.dim for table in self.tables])
        pairs = []
        for table, (keys, values) in zip(self._opened.values(), parts, strict=True):
            rows = tf.reshape(values, [-1, table.dim])
            pairs.append((self._to_owners(table, keys, rows, is_deferred), table.variable))
        return self._updater.apply_gradients(pairs)

    def _to_owners(
        self, table: SokTable, keys: tf.Tensor, rows: tf.Tensor, is_deferred: Any
    ) -> tf.IndexedSlices:
        """What the backward pass of SOK's lookup does, for keys that are not those of a lookup."""
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
        """Sends and applies all deferred gradients of all ranks; a collective."""
        self._apply_deferred(
            lambda: self._deliver(exchange_ops.collect_deferred(self._handles), True)
        )

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """See `EmbeddingStore.set_update_policy`; a collective if gradients may be deferred.

        Raises:
            ValueError: gradients are to be deferred by movement under a rule with slots: a rank
                decides on the sums of its own batches, before they are sent, and slots would have
                to be sent to it; or moments are to decay, or ranks to be simulated.
        """
        place = self._place_of(table)
        by_movement = policy.mode == "defer" and policy.trigger == "movement"
        if by_movement and not isinstance(self.optimizer, optimizers.SGD):
            allowed = (
                "Interval(...), or SGD: each rank decides on its own sums, and slots are the "
                "owner's; SokStore, where the owner defers them, knows Adagrad, too"
            )
            raise invalid("until", "Movement", place, allowed)
        self._require_policy(table, policy)
        self._defers.assign(self._collect_by(table, policy))

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        """See `EmbeddingStore.set_row_flags`."""
        keys, flags = np.asarray(keys, np.int64), np.asarray(flags, np.uint8)
        found, before = self._table(table), self._saturated[table]
        own = found.own(self._replicas.withhold(table, keys, flags))
        slots = slots_of(self._updater, found.variable).values()
        found.touch(np.union1d(before, own), slots)
        self._saturated[table] = own

    def export_table(self, table: str, flush: bool = True) -> dict[str, np.ndarray]:
        """See `EmbeddingStore.export_table`; of the rows on this rank.

        Args:
            table: name of the table.
            flush: whether deferred gradients are to be in; else they stay, and are not in.

        Returns:
            The arrays of `ops.table.export_table`, from which a native table can be made, too;
            "trained", float32 [n, dim], the rows as SOK has them; "powers", float32, what Adam's
            bias correction goes by. Access counts are those of a single rank, and 0 of several:
            a rank knows those of its own batches only (`export_accesses`).

        Raises:
            RuntimeError: deferred gradients are to be in, and one of several ranks has some.
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
        """Replaces all of a table by what `export_table` gave, of any ranks and kind of store.

        SOK cannot take keys out: those that the table has and the contents do not start anew, and
        take room as before. A single rank takes the access counts over. What SOK holds is a row
        less its initial row: of other stores' contents that difference is rounded, so that a row
        comes back to within 2^-23 of the two values' magnitudes.

        Args:
            table: name of the table.
            contents: keys that other ranks own are passed over; of a native table's, "trained" and
                "powers" are missing.

        Raises:
            ValueError: an array is missing, or of another shape, or a key is one that SOK uses.
                Nothing is changed then.
            RuntimeError: the table had no room, and SOK evicted rows of the contents.
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
        """What SOK is to hold of rows, float32 [n, dim]: as it held them, or their difference."""
        keys, rows = own["keys"], np.asarray(own["rows"], np.float32)
        difference = rows - self._with_initial(found.name, keys, tf.zeros(rows.shape)).numpy()
        if "trained" not in own:
            return difference
        # Of a table of another seed or initializer the sum would be another row.
        trained = np.asarray(own["trained"], np.float32)
        sums = self._with_initial(found.name, keys, tf.constant(trained)).numpy()
        return np.where((sums == rows).all(axis=1, keepdims=True), trained, difference)

    def _apply_deferred(self, apply: Callable[[], Any]) -> None:
        """Applies deferred gradients as if they had come with the last update: it counts as none.

        Of before the first update they are a part of it.
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
        """See `SavedStore.export_accesses`."""
        return self._replicas.export_accesses(table)

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """See `SavedStore.import_accesses`; nothing is flagged or deferred then."""
        self._replicas.import_accesses(table, accesses)

    def decay_counts(self, factor: float) -> None:
        """See `EmbeddingStore.decay_counts`."""
        self._replicas.decay_counts(factor)


def _settings_of(table: Table, var_type: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a table's variable, checked."""
    place = f"table {table.name!r} of SOK's"
    if table.storage != Storage():
        allowed = (
            "Storage(): HKV keeps rows as float32; how much of them is in the GPU's memory, and "
            "not the host's, is settings['max_hbm_for_vectors'], in GiB"
        )
        raise invalid("storage", table.storage, place, allowed)
    if table.admits or (table.retention is not None and table.retention.expire_after is not None):
        allowed = "Retention(capacity, eviction): HKV admits every key, and evicts by age alone"
        raise invalid("retention", table.retention, place, allowed)
    if var_type == "hbm":
        if table.capacity is not None or settings:
            given = table.capacity or dict(settings)
            raise invalid("capacity", given, place, "None: SOK's hbm tables grow")
        return {}
    found = dict(settings)
    if table.capacity is not None:
        if table.eviction != "lru":
            allowed = "'lru': HKV evicts the rows that were written longest ago"
            raise invalid("eviction", table.eviction, place, allowed)
        hkv.require_power_of_two("capacity", table.capacity, place)
        found = {"init_capacity": table.capacity, **found, "max_capacity": table.capacity}
    elif "max_capacity" not in found:
        allowed = f"a power of two; without it SOK reserves {hkv.DEFAULT_CAPACITY:,} rows"
        raise invalid("capacity", None, place, allowed)
    hkv.require_settings(found, place, are_capacities_needed=True)
    return found
