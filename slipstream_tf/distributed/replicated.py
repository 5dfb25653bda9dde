"""A native store of which every rank holds all rows; gradients are masked or deferred, then sent.

In: each rank's batches. Out: the same rows on all ranks. What the policies let go (sums of this
batch, or held ones that are due) is gathered, added in the order of ranks, and applied as one
gradient per key.
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
from slipstream_tf.distributed.exchange import WIRE_DTYPES, Names, gather_rows
from slipstream_tf.distributed.settings import require_same
from slipstream_tf.errors import invalid, require_choice
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.stores.native import NativeStore


class ReplicatedStore(NativeStore):
    """Embedding tables of which every rank of a job holds all rows.

    Gradients are those of a loss that is a mean over the rank's batch, scaled by `scale_loss` where
    the ranks' batches differ: they are averaged over the ranks, as Horovod does.

    Every rank must take part in every update, `flush` and change of policy; ranks without inputs do
    so with an empty batch (see `even_ends`). Evaluation lookups, `gather`, `hot_keys` (of this
    rank's own accesses) and `export_table` are no collectives: an evaluation on one rank is fine.
    It sees rows as they are, without what ranks hold back: `flush` first for the last bit of
    movement.

    Held sums are a rank's own. Rows, slots and update counts of all ranks are bitwise the same.

    Attributes:
        comm: the ranks.
        wire_dtype: in which gradient rows travel.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: optimizers.SparseOptimizer,
        comm: Communicator,
        wire_dtype: str = "float32",
    ):
        """Makes empty tables; a collective.

        Args:
            tables: at least one, of distinct names, without a capacity.
            optimizer: the rule of all tables.
            comm: the ranks.
            wire_dtype: "float32" or "bfloat16", in which gradient rows are rounded before they are
                sent (also between two ranks only; added up in float32).

        Raises:
            ValueError: as `NativeStore`; a table has a capacity; or the ranks' settings differ, in
                which case the error says in what.
        """
        require_choice("wire_dtype", wire_dtype, WIRE_DTYPES, "ReplicatedStore")
        for table in tables:
            if table.capacity is not None and comm.size > 1:
                allowed = "None: ranks would evict different rows (sharded tables may be bounded)"
                raise invalid(
                    "capacity", table.capacity, f"replicated table {table.name!r}", allowed
                )
        super().__init__(tables, optimizer)
        self.comm, self.wire_dtype = comm, wire_dtype
        self._names = Names("replicated")
        settings = {
            "tables": [table.get_config() for table in self.tables],
            "optimizer": optimizers.serialize(self.optimizer),
            "wire_dtype": wire_dtype,
        }
        require_same(comm, settings, self._names.of("settings"), "an embedding store")
        self._policies = {table.name: UpdatePolicy() for table in self.tables}
        with tf.device("CPU:0"):
            self._kind = tf.Variable(KINDS.index("gradients"), dtype=tf.int64, trainable=False)

    def apply_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tf.Operation | None:
        """See `EmbeddingStore.apply_gradients`; averages over the ranks. A collective."""
        if self.comm.size == 1:
            return super().apply_gradients(plan, gradients)
        # Before they are held, so that a held sum moves its row as far as it will when applied.
        shares = [gradient / self.comm.size for gradient in gradients]
        collected = exchange_ops.collect_gradients(plan, shares, self.learning_rate)
        return self._exchange_and_apply(collected, "gradients", self._kind)

    def _exchange_and_apply(
        self, collected: exchange_ops.RowParcels, what: str, kind: Any
    ) -> tf.Operation | None:
        rows = gather_rows(self.comm, collected, self._names, what, self.wire_dtype, kind)
        return exchange_ops.apply_rows(self._handles, rows, self.learning_rate)

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """See `EmbeddingStore.set_update_policy`; a collective if sums may be held."""
        index = self._index_of(table)
        if self.comm.size == 1:
            return super().set_update_policy(table, policy)
        policy = dataclasses.replace(policy, is_exchanged=True)
        before = self._policies[table]
        if before.mode == "defer" and _kind_of(before) != _kind_of(policy):
            self.flush()
        super().set_update_policy(self.tables[index].name, policy)
        self._policies[table] = policy
        holds = any(p.mode == "defer" and not p.is_shadow for p in self._policies.values())
        self._kind.assign(KINDS.index("deferred" if holds else "gradients"))

    def flush(self) -> None:
        """Exchanges and applies all deferred gradients of all ranks; a collective."""
        if self.comm.size == 1:
            return super().flush()
        collected = exchange_ops.collect_held(self._handles)
        self._exchange_and_apply(collected, "flush", "deferred")

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """See `EmbeddingStore.gather`; no row is ever lost, so that every key counts as found.

        A key that this rank has not met yet, but another has, gives its initial row: what it is on
        all ranks until its first gradient is exchanged.
        """
        rows, found = super().gather(table, keys)
        return rows, found if self.comm.size == 1 else tf.ones_like(found)

    def export_table(self, table: str) -> dict[str, np.ndarray]:
        """See `EmbeddingStore.export_table`.

        Raises:
            RuntimeError: this rank holds sums back.
        """
        self._require_flushed(table)
        return super().export_table(table)

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """See `EmbeddingStore.import_table`; every rank must import the same."""
        self._require_flushed(table)
        super().import_table(table, contents)

    def _require_flushed(self, table: str) -> None:
        pending = 0 if self.comm.size == 1 else self.update_counts(table).pending
        if pending and not self._policies[table].is_shadow:
            raise RuntimeError(
                f"Rank {self.comm.rank} holds back {pending} gradient sums of table {table!r}. "
                "Call flush() of the store on all ranks first."
            )


def _kind_of(policy: UpdatePolicy) -> tuple[Any, ...]:
    """What sums that are held depend on."""
    return policy.mode, policy.trigger, policy.is_shadow
