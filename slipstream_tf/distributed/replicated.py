"""A native store of which every rank holds all rows; gradients are masked or deferred, then sent.

In: each rank's batches. Out: the same rows on all ranks. What the policies let go (sums of this
batch, or held ones that are due) is gathered, added in the order of ranks, and applied as one
gradient per key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf.config import TableConfig
from slipstream_tf.distributed.comm import Communicator
from slipstream_tf.distributed.exchange import Rounds, Wire, gather_rows
from slipstream_tf.distributed.exchanged import ExchangedStore
from slipstream_tf.errors import invalid
from slipstream_tf.ops import exchange as exchange_ops


class ReplicatedStore(ExchangedStore):
    """Embedding tables of which every rank of a job holds all rows.

    Every rank must take part in every update, `flush` and change of policy; ranks without inputs do
    so with an empty batch (see `even_ends`). Evaluation lookups, `gather`, `hot_keys` (of this
    rank's own accesses) and `export_table` are no collectives: an evaluation on one rank is fine.
    It sees rows as they are, without what ranks hold back: `flush` first for the last bit of
    movement.

    Rows and slots of all ranks are bitwise the same.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: optimizers.SparseOptimizer,
        comm: Communicator,
        wire_dtype: str = "float32",
        wire_warmup_steps: int = 0,
    ):
        """Makes empty tables; a collective.

        Args:
            tables: at least one, of distinct names, without a capacity.
            optimizer: the rule of all tables.
            comm: the ranks.
            wire_dtype: "float32" or "bfloat16", to which gradient rows are rounded before they are
                sent; they are added up in float32.
            wire_warmup_steps: updates of the tables before rows are rounded: rounding disturbs
                the first ones most.

        Raises:
            ValueError: as `NativeStore`; a table has a capacity; or the ranks' settings differ, in
                which case the error says in what.
        """
        for table in tables:
            if table.capacity is not None and comm.size > 1:
                place = f"replicated table {table.name!r}"
                allowed = "None: ranks would evict different rows (sharded tables may be bounded)"
                raise invalid("capacity", table.capacity, place, allowed)
        wire = Wire(wire_dtype, wire_warmup_steps)
        super().__init__(tables, optimizer, comm, wire, "replicated", {})

    def _deliver(
        self,
        collected: exchange_ops.SendBuffer,
        what: str,
        kind: Any,
        rounds: Rounds,
    ) -> tf.Operation | None:
        rows = gather_rows(self.comm, collected, self._names, what, kind, rounds)
        return exchange_ops.apply_rows(self._handles, rows, self.learning_rate)

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
