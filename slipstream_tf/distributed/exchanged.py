"""What native stores of several ranks share: gradients are collected, then delivered.

A collection runs the tables' policies (mask, defer) and gives out what they pass on; where that
goes, and is applied, is the placement's matter.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf._utils.agreement import require_same
from slipstream_tf._utils.comm import KINDS, Communicator, Names
from slipstream_tf._utils.errors import invalid
from slipstream_tf.config import Table
from slipstream_tf.distributed.exchange import (
    Wire,
    WireDtype,
    exchange_rows,
    require_one_dtype,
    resolve,
)
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.update_policy import UpdateCounts, UpdatePolicy
from slipstream_tf.tables.native import CollectingStore, NativeStore


class ExchangedStore(CollectingStore, NativeStore):
    """Base of the stores that ranks train together; with one rank it is a `NativeStore`.

    Gradients are those of a loss that is a mean over the rank's batch, scaled by `scale_loss` where
    the ranks' batches differ: they are averaged over the ranks, as Horovod does. Deferred gradients
    are a rank's own.

    Attributes:
        comm: the ranks.
        wire: how rows travel.
    """

    _owners = 1  # Ranks that own keys; 1: all rows are everybody's.
    lists_hot_keys_by_key = False  # Ranks publish the most accessed ones first.
    takes_tables_at_once = False  # Ranks meet for each, in one order.

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: optimizers.SparseOptimizer | None,
        comm: Communicator,
        wire_dtype: str,
        wire_warmup_steps: int,
        placement: str,
        settings: Mapping[str, Any],
    ):
        """Makes empty tables; a collective.

        Args:
            tables: at least one, of distinct names.
            optimizer: the rule of the tables without one of their own; None: `Adagrad`.
            comm: the ranks.
            wire_dtype: of `Wire.of`, or "auto".
            wire_warmup_steps: see `Wire`.
            placement: where rows are, for names and errors.
            settings: others that must be the same on all ranks.

        Raises:
            ValueError: as `NativeStore`; or the ranks' settings differ: the error says in what.
        """
        # Before a rank measures the link alone.
        require_same(comm, [str(wire_dtype)], "slipstream.wire", "wire_dtype of an embedding store")
        floats = sum(table.dim for table in tables) / max(len(tables), 1)
        wire = Wire.of(resolve(wire_dtype, comm, floats, self.is_spread), wire_warmup_steps)
        super().__init__(tables, optimizer)
        self.comm, self.wire = comm, wire
        self._dims = [table.dim for table in self.tables]
        self._names = Names(placement)
        everything = {
            "placement": placement,
            "tables": [table.get_config() for table in tables],
            "optimizer": optimizers.serialize(self.optimizer),
            "wire": dataclasses.asdict(wire),
            **settings,
        }
        require_same(comm, everything, self._names.of("settings"), "an embedding store")
        self._policies = {table.name: UpdatePolicy() for table in self.tables}
        with tf.device("CPU:0"):
            self._kind = tf.Variable(KINDS.index("gradients"), dtype=tf.int64, trainable=False)
            # Updates of the tables, the same on all ranks.
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    @property
    def _collector(self) -> NativeStore:
        return self

    def _exchanged(
        self, collected: exchange_ops.SendBuffer, what: str, kind: Any, wire_dtype: WireDtype
    ) -> exchange_ops.SendBuffer:
        """Sends collected rows to where they are applied; returns those that come here."""
        how = (self._names, what, kind, wire_dtype, self.is_spread)
        return exchange_rows(self.comm, collected, self._dims, *how)

    def _deliver(
        self, collected: exchange_ops.SendBuffer, what: str, kind: Any, wire_dtype: WireDtype
    ) -> tf.Operation | None:
        arrived = self._exchanged(collected, what, kind, wire_dtype)
        return NativeStore.apply_collected(self, arrived)

    def apply_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tf.Operation | None:
        """See `EmbeddingStore.apply_gradients`; averages over the ranks. A collective."""
        if self.comm.size == 1:
            return super().apply_gradients(plan, gradients)
        collected = self._collect(plan, gradients)
        return self._deliver(collected, "gradients", self._kind, self._count_update(collected))

    def collect_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> exchange_ops.SendBuffer:
        """See `NativeStore.collect_gradients`; this rank's part of the average."""
        if self.comm.size == 1:
            return super().collect_gradients(plan, gradients)
        return self._collect(plan, gradients, passes_non_finite=True)

    def share_collected(self, rows: exchange_ops.SendBuffer) -> exchange_ops.SendBuffer:
        """See `NativeStore.share_collected`; a collective. Where rows are spread, of own rows."""
        if self.comm.size == 1:
            return rows
        dtype = self.wire.dtype_of(self.wire.gradients, self._steps.read_value())
        return self._exchanged(rows, "collected", self._kind, dtype)

    def apply_collected(
        self, rows: exchange_ops.SendBuffer, scale: Any = ()
    ) -> tf.Operation | None:
        """See `NativeStore.apply_collected`; on all ranks alike."""
        if self.comm.size > 1:
            self._count_update(rows)
        return super().apply_collected(rows, scale)

    def _collect(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor], passes_non_finite: bool = False
    ) -> exchange_ops.SendBuffer:
        """This rank's part of the average, of what the policies pass on."""
        # Before they are deferred, so that a sum moves its row as far as it will when applied.
        shares = [gradient / self.comm.size for gradient in gradients]
        return exchange_ops.collect_gradients(
            plan,
            shares,
            self.rates.now(plan),
            self._owners,
            advance_step=self._collector is not self,
            passes_non_finite=passes_non_finite,
        )

    def _count_update(self, collected: exchange_ops.SendBuffer) -> WireDtype:
        """In what the gradients of this update travel."""
        # Behind what was collected: a step that has no batch, since its data has ended, stops
        # there, but runs whatever does not wait for the batch.
        with tf.control_dependencies([collected.sizes]):
            return self.wire.dtype_of(self.wire.gradients, self._steps.assign_add(1) - 1)

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """See `EmbeddingStore.set_update_policy`; a collective if gradients may be deferred."""
        self._require(table)
        if self.comm.size == 1:
            return super().set_update_policy(table, policy)
        if policy.decay_skipped:
            place = f"table {table!r} of {self.comm.size} ranks"
            raise invalid("decay_moments", True, place, "False: ranks meet different keys")
        kind = "deferred" if self._collect_by(table, policy) else "gradients"
        self._kind.assign(KINDS.index(kind))

    def update_counts(self, table: str) -> UpdateCounts:
        """See `EmbeddingStore.update_counts`; of this rank's gradient rows, and of its rows."""
        return dataclasses.replace(super().update_counts(table), **self._rows_left(table))

    def flush(self) -> None:
        """Exchanges and applies all deferred gradients of all ranks; a collective."""
        if self.comm.size == 1:
            return super().flush()
        deferred = exchange_ops.collect_deferred(self._collector._handles, self._owners)
        if not int(self.comm.sum(tf.size(deferred.keys), "control", self._names.of("deferred"))):
            return
        # An update, too, as the tables count.
        self._deliver(deferred, "flush", "deferred", self._count_update(deferred))

    @property
    def num_updates(self) -> int:
        """How often the tables were updated, also by a flush; the same on all ranks."""
        return int(self._steps)

    def write_rows(self, table: str, keys: np.ndarray, rows: np.ndarray) -> None:
        """See `NativeStore.write_rows`; a collective, with the same keys and rows on all ranks."""
        self._require_same_rows(table, keys, rows)
        super().write_rows(table, keys, rows)

    def remove_rows(self, table: str, keys: np.ndarray) -> int:
        """See `NativeStore.remove_rows`; a collective, with the same keys on all ranks."""
        self._require_same_rows(table, keys)
        return super().remove_rows(table, keys)

    def _require_same_rows(self, table: str, *arrays: np.ndarray) -> None:
        told = [table, *(hashlib.sha256(array.tobytes()).hexdigest() for array in arrays)]
        require_same(self.comm, told, self._names.of("changed"), "keys and rows that are changed")

    def export_table(self, table: str, flush: bool = True) -> dict[str, np.ndarray]:
        """See `NativeStore.export_table`; of the rows on this rank.

        Raises:
            RuntimeError: deferred gradients are to be in, and this rank has some.
        """
        if flush:
            self._require_flushed(table)
        return super().export_table(table, flush)

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """See `EmbeddingStore.import_table`; of the rows on this rank."""
        self._require_flushed(table)
        super().import_table(table, contents)
        self._steps.assign(contents["steps"][0])


class ReplicatedStore(ExchangedStore):
    """Embedding tables of which every rank of a job holds all rows.

    Every rank must take part in every update, `flush` and change of policy; ranks without inputs do
    so with an empty batch (see `even_ends`). Evaluation lookups, `gather`, `hot_keys` (of this
    rank's own accesses) and `export_table` are no collectives: an evaluation on one rank is fine.
    It sees rows as they are, without what ranks defer: `flush` first for the last bit of
    movement.

    Rows and slots of all ranks are bitwise the same.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: optimizers.SparseOptimizer | None,
        comm: Communicator,
        wire_dtype: str = "float32",
        wire_warmup_steps: int = 0,
    ):
        """Makes empty tables; a collective.

        Args:
            tables: at least one, of distinct names, without a retention.
            optimizer: the rule of the tables without one of their own; None: `Adagrad`.
            comm: the ranks.
            wire_dtype: of gradient rows on their way, see `Wire`; they are added up in float32.
                "auto": what is soonest on the ranks' link.
            wire_warmup_steps: updates of the tables before rows are rounded: rounding disturbs
                the first ones most.

        Raises:
            ValueError: as `NativeStore`; a table has a retention; or the ranks' settings differ, in
                which case the error says in what.
        """
        for table in tables:
            if table.retention is not None and comm.size > 1:
                place = f"replicated table {table.name!r}"
                allowed = "None: ranks would keep different rows (sharded tables may have one)"
                raise invalid("retention", table.retention, place, allowed)
        require_one_dtype(wire_dtype, "replicated tables")
        super().__init__(tables, optimizer, comm, wire_dtype, wire_warmup_steps, "replicated", {})

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """See `EmbeddingStore.gather`; no row is ever lost, so that every key counts as found.

        A key that this rank has not met yet, but another has, gives its initial row: what it is on
        all ranks until its first gradient is exchanged.
        """
        rows, found = super().gather(table, keys)
        return rows, self._as_found(found)

    def measure(
        self, table: str, keys: Any, snapshot: tf.Tensor, metric: str
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """See `NativeStore.measure`; every key counts as found, as in `gather`."""
        rows, found, drift = super().measure(table, keys, snapshot, metric)
        return rows, self._as_found(found), drift

    def _as_found(self, found: tf.Tensor) -> tf.Tensor:
        return found if self.comm.size == 1 else tf.ones_like(found)
