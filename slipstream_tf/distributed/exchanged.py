"""What native stores of several ranks share: gradients are collected, then delivered.

A collection runs the tables' policies (mask, defer) and gives out what they let go; where that
goes, and is applied, is the placement's matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf.config import TableConfig
from slipstream_tf.distributed.comm import KINDS, Communicator
from slipstream_tf.distributed.exchange import Names, Rounds, Wire
from slipstream_tf.distributed.settings import require_same
from slipstream_tf.errors import invalid
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.update_policy import UpdateCounts, UpdatePolicy
from slipstream_tf.stores.native import NativeStore


class ExchangedStore(NativeStore):
    """Base of the stores that ranks train together; with one rank it is a `NativeStore`.

    Gradients are those of a loss that is a mean over the rank's batch, scaled by `scale_loss` where
    the ranks' batches differ: they are averaged over the ranks, as Horovod does. Held sums are a
    rank's own.

    Attributes:
        comm: the ranks.
        wire: how rows travel.
    """

    lists_hot_keys_by_key = False  # Ranks publish the most accessed ones first.
    takes_tables_at_once = False  # Ranks meet for each, in one order.

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: optimizers.SparseOptimizer,
        comm: Communicator,
        wire: Wire,
        placement: str,
        settings: Mapping[str, Any],
    ):
        """Makes empty tables; a collective.

        Args:
            tables: at least one, of distinct names.
            optimizer: the rule of all tables.
            comm: the ranks.
            wire: how rows travel.
            placement: where rows are, for names and errors.
            settings: others that must be the same on all ranks.

        Raises:
            ValueError: as `NativeStore`; or the ranks' settings differ: the error says in what.
        """
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
    def _holder(self) -> NativeStore:
        """The store whose lookups make plans and whose tables hold sums; this one by default."""
        return self

    @property
    def _owners(self) -> int:
        """How many ranks own the keys; 1: all rows are everybody's."""
        return 1

    def _deliver(
        self,
        collected: exchange_ops.SendBuffer,
        what: str,
        kind: Any,
        rounds: Rounds,
    ) -> tf.Operation | None:
        """Sends collected rows to where they belong, and applies those that come here."""
        raise NotImplementedError

    def _rounds(self) -> Rounds:
        """Whether rows are rounded now, between two updates."""
        return self.wire.rounds(self._steps.read_value())

    def apply_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tf.Operation | None:
        """See `EmbeddingStore.apply_gradients`; averages over the ranks. A collective."""
        if self.comm.size == 1:
            return super().apply_gradients(plan, gradients)
        # Before they are held, so that a held sum moves its row as far as it will when applied.
        shares = [gradient / self.comm.size for gradient in gradients]
        collected = exchange_ops.collect_gradients(
            plan, shares, self.learning_rate, self._owners, advance_step=self._holder is not self
        )
        return self._deliver(collected, "gradients", self._kind, self._count_update(collected))

    def _count_update(self, collected: exchange_ops.SendBuffer) -> Rounds:
        """Whether the rows of this update are rounded."""
        # Behind what was collected: a step that has no batch, since its data has ended, stops
        # there, but runs whatever does not wait for the batch.
        with tf.control_dependencies([collected.sizes]):
            return self.wire.rounds(self._steps.assign_add(1) - 1)

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """See `EmbeddingStore.set_update_policy`; a collective if sums may be held."""
        index = self._index_of(table)
        if self.comm.size == 1:
            return super().set_update_policy(table, policy)
        if policy.decay_skipped:
            place = f"table {table!r} of {self.comm.size} ranks"
            raise invalid("decay_skipped", True, place, "False: ranks meet different keys")
        policy = dataclasses.replace(policy, is_exchanged=True)
        before = self._policies[table]
        if not policy.keeps_sums_of(before):
            self.flush()
        NativeStore.set_update_policy(self._holder, self.tables[index].name, policy)
        self._policies[table] = policy
        holds = any(p.mode == "defer" and not p.is_shadow for p in self._policies.values())
        self._kind.assign(KINDS.index("deferred" if holds else "gradients"))

    def flush(self) -> None:
        """Exchanges and applies all deferred gradients of all ranks; a collective."""
        if self.comm.size == 1:
            return super().flush()
        held = exchange_ops.collect_deferred(self._holder._handles, self._owners)
        # An update, too, as the tables count.
        self._deliver(held, "flush", "deferred", self._count_update(held))

    @property
    def num_updates(self) -> int:
        """How often the tables were updated, flushes included; the same on all ranks."""
        return int(self._steps)

    def update_counts(self, table: str) -> UpdateCounts:
        """See `EmbeddingStore.update_counts`; of this rank's gradient rows."""
        return NativeStore.update_counts(self._holder, table)

    def export_table(self, table: str, flush: bool = True) -> dict[str, np.ndarray]:
        """See `NativeStore.export_table`; of the rows on this rank.

        Raises:
            RuntimeError: deferred gradients are to be in, and this rank holds some back.
        """
        if flush:
            self._require_flushed(table)
        return super().export_table(table, flush)

    def export_pending(self, table: str) -> dict[str, np.ndarray]:
        """See `NativeStore.export_pending`; of what this rank holds back."""
        pending = NativeStore.export_pending(self._holder, table)
        if self._holder is not self:
            # Copies are never updated.
            pending["learning_rate"] = np.float32(self.learning_rate.numpy())
        return pending

    def import_pending(self, table: str, contents: Mapping[str, Any]) -> None:
        """See `NativeStore.import_pending`; of what this rank is to hold back."""
        NativeStore.import_pending(self._holder, table, contents)

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """See `EmbeddingStore.import_table`; of the rows on this rank."""
        self._require_flushed(table)
        super().import_table(table, contents)
        self._steps.assign(contents["steps"][0])

    def _require_flushed(self, table: str) -> None:
        self._index_of(table)
        if self.comm.size == 1 or self._policies[table].is_shadow:
            return
        pending = self.update_counts(table).pending
        if pending:
            raise RuntimeError(
                f"Rank {self.comm.rank} holds back {pending} gradient sums of table {table!r}. "
                "Call flush() of the store on all ranks first."
            )
