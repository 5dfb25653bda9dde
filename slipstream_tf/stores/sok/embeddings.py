"""Embedding tables in SOK's hash tables, behind a store's contract: lookup, update, checkpoint.

In: each rank's batches. The distinct keys of a batch go through SOK's lookup, their rows are pooled
in a native table of replicas; gradients are summed, masked or deferred there, and what is left goes
to the ranks that own the rows, and through `sok.OptimizerWrapper`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf.config import Table
from slipstream_tf.errors import invalid
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.features import FeatureSpec, PackedFeatures
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.stores.replicas import Replicas, ReplicatingStore, rows_within
from slipstream_tf.stores.sok.library import slots_of
from slipstream_tf.stores.sok.table import FLOAT_BYTES, KEY_BYTES, SokTable
from slipstream_tf.stores.sok.tables import SokTables


class SokEmbeddingStore(ReplicatingStore, SokTables):
    """Embedding tables whose rows SOK holds, spread over the ranks by key modulo their number.

    Every lookup (evaluation, too), update, `flush`, `set_read_only` and change of policy is a
    collective; ranks without inputs take part with an empty batch. Gradients are averaged over the
    ranks. What SOK sends is in the communicator's traffic.

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
            settings: of HKV, for all tables; see `stores.sok.hkv.NAMES`.
            cache_bytes: of the copies on this rank; must hold the distinct keys of a batch. Frozen
                copies take at most half of it.

        Raises:
            ImportError: SOK cannot be loaded here.
            ValueError: a table or setting that SOK cannot have, or a rule that it does not know.
        """
        # Gradients pass through the replicas' tables, but rows are not updated there.
        rule = optimizers.SGD(0.0)
        replicated = [dataclasses.replace(table, optimizer=None) for table in tables]
        rows = rows_within(cache_bytes, replicated, rule, "SokEmbeddingStore")
        super().__init__(tables, optimizer, comm, var_type, settings)
        self._policies = {table.name: UpdatePolicy() for table in self.tables}
        self._saturated = {table.name: np.empty(0, np.int64) for table in self.tables}
        self._replicas = Replicas(replicated, rule, rows)
        self._handles = self._replicas._handles
        with tf.device("CPU:0"):
            self._defers = tf.Variable(False, trainable=False)

    def lookup(
        self,
        packed: PackedFeatures,
        specs: Sequence[FeatureSpec],
        training: bool,
        stacked: bool = False,
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """See `EmbeddingStore.lookup`; a collective."""
        layout = self._replicas._layout(specs, stacked)
        # Keys with a read-only replica are left out: they never enter SOK's exchange.
        routed = exchange_ops.route_keys(
            self._handles, packed, layout, ranks=1, skip_read_only=training
        )
        parts = tf.split(routed.keys, routed.sizes[0], num=len(self.tables))
        fetched = [
            self._with_initial(found.name, part, self._lookup(found, part))
            for found, part in zip(self._opened.values(), parts, strict=True)
        ]
        pooled, plan = exchange_ops.look_up_pulled(
            self._handles, packed, layout, routed, exchange_ops.pack_rows(fetched), training
        )
        return pooled, plan if training else None

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
        sizes = collected.sizes[0]
        dims = [table.dim for table in self.tables]
        keys = tf.split(collected.keys, sizes, num=len(dims))
        values = tf.split(collected.values, sizes * dims, num=len(dims))
        pairs = []
        for table, own_keys, own_values in zip(self._opened.values(), keys, values, strict=True):
            rows = tf.reshape(own_values, [-1, table.dim])
            pairs.append((self._to_owners(table, own_keys, rows, is_deferred), table.variable))
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
                row_bytes = others * (FLOAT_BYTES * table.dim)
                deferred = row_bytes * tf.cast(is_deferred, tf.int64)
                self._count_sent(others * KEY_BYTES, "keys")
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
                "owner's; SokPooledStore, where the owner defers them, knows Adagrad, too"
            )
            raise invalid("until", "Movement", place, allowed)
        self._require_policy(table, policy)
        self._defers.assign(self._collect_by(table, policy))

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        """See `EmbeddingStore.set_row_flags`; none of the table's replicas is read-only then."""
        keys, flags = np.asarray(keys, np.int64), np.asarray(flags, np.uint8)
        found, before = self._table(table), self._saturated[table]
        own = found.own(self._replicas.withhold(table, keys, flags))
        slots = slots_of(self._updater, found.variable).values()
        found.touch(np.union1d(before, own), slots)
        self._saturated[table] = own

    def set_read_only(self, hot: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Gives every rank replicas of rows that it reads without a request until `set_row_flags`.

        A collective; call it on all ranks alike, after `set_row_flags`. See
        `ShardedStore.set_read_only`.

        Args:
            hot: table -> keys int64 [n] and access counts float32 [n] over all ranks, by count
                descending; tables not named freeze nothing.
        """
        if self._ranks == 1:
            return
        for handle, (name, found) in zip(self._handles, self._opened.items(), strict=True):
            keys = self._replicas.choose_read_only(name, hot, self.least_accesses)
            everyones, trained = self._everyones(found, keys)
            rows = self._with_initial(name, everyones, trained)
            size = tf.reshape(tf.size(everyones, tf.int64), [1, 1])
            exchange_ops.store_read_only(
                [handle],
                exchange_ops.SendBuffer(size, everyones, exchange_ops.pack_rows([rows])),
            )

    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        """See `SokTables.export_accesses`."""
        return self._replicas.export_accesses(table)

    def import_accesses(self, table: str, accesses: Mapping[str, np.ndarray]) -> None:
        """See `SokTables.import_accesses`; nothing is read-only, flagged or deferred then."""
        self._replicas.import_accesses(table, accesses)
        self._replicas.read_only[table] = 0

    def decay_counts(self, factor: float) -> None:
        """See `EmbeddingStore.decay_counts`."""
        self._replicas.decay_counts(factor)
