"""Embedding stores of multiple ranks: collect gradients, then deliver them.

Collecting gradients applies the tables' policies (mask, defer). The subclasses for replicated and
sharded tables define the destination of the collected rows.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf._utils.agreement import require_same
from slipstream_tf._utils.comm import KINDS, CollectiveNames, Communicator
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
    """Base class of the stores that multiple ranks train together.

    With a single process it behaves like `NativeStore`. Gradients are averaged over the ranks, as
    in Horovod. The loss must be a mean over the rank's batch, scaled by `scale_loss` if the batches
    of the ranks differ in size. Each rank defers its gradients independently.

    Attributes:
        comm: The communicator of the job.
        wire: The dtypes of rows in messages.
    """

    _owners = 1  # Number of ranks among which keys are divided. 1 if all ranks have all rows.
    lists_hot_keys_by_key = False  # Ranks publish the most accessed keys first.
    takes_tables_at_once = False  # Ranks process the tables one by one in the same order.

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
        """Creates empty tables; a collective.

        Args:
            tables: At least one table, with unique names.
            optimizer: The optimizer of tables that have no `optimizer` setting. None means
                `Adagrad`.
            comm: The communicator of the job.
            wire_dtype: A setting for `Wire.of`, or "auto".
            wire_warmup_steps: See `Wire`.
            placement: The placement of rows, for the names of collectives and for errors.
            settings: Further settings that must be the same on all ranks.

        Raises:
            ValueError: As `NativeStore`, or if the settings of the ranks differ. The error names
                the setting.
        """
        # Compare the setting first. Otherwise only the ranks with "auto" would call the collectives
        # of the measurement.
        require_same(comm, [str(wire_dtype)], "slipstream.wire", "wire_dtype of an embedding store")
        floats = sum(table.dim for table in tables) / max(len(tables), 1)
        wire = Wire.of(resolve(wire_dtype, comm, floats, self.is_spread), wire_warmup_steps)
        super().__init__(tables, optimizer)
        self.comm, self.wire = comm, wire
        self._dims = [table.dim for table in self.tables]
        self._names = CollectiveNames(placement)
        everything = {
            "placement": placement,
            "tables": [table.get_config() for table in tables],
            "optimizer": optimizers.serialize(self.optimizer),
            "wire": dataclasses.asdict(wire),
            **settings,
        }
        require_same(comm, everything, self._names.of("settings"), "an embedding store")
        with tf.device("CPU:0"):
            self._kind = tf.Variable(KINDS.index("gradients"), dtype=tf.int64, trainable=False)
            # Number of table updates, the same on all ranks.
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    @property
    def _collector(self) -> NativeStore:
        return self

    def _exchanged(
        self, collected: exchange_ops.SendBuffer, what: str, kind: Any, wire_dtype: WireDtype
    ) -> exchange_ops.SendBuffer:
        """Sends collected rows to the ranks that apply them; returns received rows."""
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
        """Averages gradients over the ranks and applies them; a collective.

        See `EmbeddingStore.apply_gradients`.
        """
        if self.comm.size == 1:
            return super().apply_gradients(plan, gradients)
        collected = self._collect(plan, gradients)
        return self._deliver(collected, "gradients", self._kind, self._count_update(collected))

    def collect_gradients(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> exchange_ops.SendBuffer:
        """Returns this rank's part of the averaged gradients.

        See `NativeStore.collect_gradients`. The gradients are divided by the number of ranks.
        """
        if self.comm.size == 1:
            return super().collect_gradients(plan, gradients)
        return self._collect(plan, gradients, passes_non_finite=True)

    def exchange_collected(self, rows: exchange_ops.SendBuffer) -> exchange_ops.SendBuffer:
        """Exchanges gradient rows from `collect_gradients` between ranks; a collective.

        With sharded tables, a rank receives the gradient rows of the keys that it owns, from all
        ranks. With replicated tables, it receives all gradient rows of all ranks. See
        `NativeStore.exchange_collected`.
        """
        if self.comm.size == 1:
            return rows
        dtype = self.wire.dtype_of(self.wire.gradients, self._steps.read_value())
        return self._exchanged(rows, "collected", self._kind, dtype)

    def apply_collected(
        self, rows: exchange_ops.SendBuffer, scale: Any = ()
    ) -> tf.Operation | None:
        """Applies rows from `exchange_collected`; every rank must call it.

        See `NativeStore.apply_collected`. `scale` must be the same on all ranks.
        """
        if self.comm.size > 1:
            self._count_update(rows)
        return super().apply_collected(rows, scale)

    def _collect(
        self, plan: tf.Tensor, gradients: Sequence[tf.Tensor], passes_non_finite: bool = False
    ) -> exchange_ops.SendBuffer:
        """Returns this rank's part of the average, after the policies are applied."""
        # Divide before deferring, so that the movement of a deferred sum is estimated correctly.
        shares = [gradient / self.comm.size for gradient in gradients]
        return exchange_ops.collect_gradients(
            plan,
            shares,
            self.rates.now(plan),
            self._owners,
            advance_step=self._collector is not self,
            passes_non_finite=passes_non_finite,
            handles=self._collector._handles,
            # The optimizer applies gradients that may not be finite.
            advice="" if gradients or passes_non_finite else self.advice,
        )

    def _count_update(self, collected: exchange_ops.SendBuffer) -> WireDtype:
        """Counts an update and returns the wire dtype of its gradients."""
        # Wait for the collected rows. TensorFlow also runs the operations of a step that do not
        # depend on its batch, even if the dataset has ended and the step fails. Such a step must
        # not be counted.
        with tf.control_dependencies([collected.sizes]):
            return self.wire.dtype_of(self.wire.gradients, self._steps.assign_add(1) - 1)

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Sets the policy of a table.

        It is a collective, because it can flush gradients that the previous policy deferred. Pass
        the same policy on all ranks.
        """
        self._require(table)
        if self.comm.size == 1:
            return super().set_update_policy(table, policy)
        if policy.decay_skipped:
            place = f"table {table!r} on {self.comm.size} ranks"
            raise invalid(
                "decay_moments", True, place, "False, because ranks look up different keys"
            )
        kind = "deferred" if self._collect_by(table, policy) else "gradients"
        self._kind.assign(KINDS.index(kind))

    def update_counts(self, table: str) -> UpdateCounts:
        """Returns the counts of this rank's gradient rows and table rows."""
        return dataclasses.replace(super().update_counts(table), **self._rows_left(table))

    def flush(self) -> None:
        """Applies the deferred gradients of all ranks; a collective."""
        if self.comm.size == 1:
            return super().flush()
        deferred = exchange_ops.collect_deferred(self._collector._handles, self._owners)
        if not int(self.comm.sum(tf.size(deferred.keys), "control", self._names.of("deferred"))):
            return
        # A flush counts as an update, because the tables count it as one.
        self._deliver(deferred, "flush", "deferred", self._count_update(deferred))

    @property
    def num_updates(self) -> int:
        """Number of table updates, including flushes; the same on all ranks."""
        return int(self._steps)

    def write_rows(self, table: str, keys: np.ndarray, rows: np.ndarray) -> None:
        """Writes the same keys and rows on all ranks; a collective.

        Raises:
            ValueError: If the arguments of the ranks differ.
        """
        self._require_same_rows(table, keys, rows)
        super().write_rows(table, keys, rows)

    def remove_rows(self, table: str, keys: np.ndarray) -> int:
        """Removes the same keys on all ranks; a collective.

        Returns the number of rows that were removed on this rank.
        """
        self._require_same_rows(table, keys)
        return super().remove_rows(table, keys)

    def clear_rows(self, table: str) -> None:
        """Removes all rows on all ranks; a collective."""
        self._require_same_rows(table)
        super().clear_rows(table)

    def _require_same_rows(self, table: str, *arrays: np.ndarray) -> None:
        digests = [table, *(hashlib.sha256(array.tobytes()).hexdigest() for array in arrays)]
        require_same(
            self.comm, digests, self._names.of("changed"), "a call that writes or removes rows"
        )

    def export_table(self, table: str, flush: bool = True) -> dict[str, np.ndarray]:
        """Returns the rows of a table that are stored on this rank.

        See `SavedStore.export_table` for the arrays.

        Args:
            table: The name of the table.
            flush: Whether the rows must include deferred gradients. With multiple ranks they are
                not applied here, because that is a collective.

        Raises:
            RuntimeError: If `flush` is True, there are multiple ranks, and this rank has deferred
                gradients. Call the method `flush` on all ranks first.
        """
        if flush:
            self._require_flushed(table)
        return super().export_table(table, flush)

    def import_table(self, table: str, contents: Mapping[str, Any]) -> None:
        """Replaces the rows of a table that are stored on this rank.

        Raises:
            RuntimeError: If there are multiple ranks, and this rank has deferred gradients.
        """
        self._require_flushed(table)
        super().import_table(table, contents)
        self._steps.assign(contents["steps"][0])


class ReplicatedStore(ExchangedStore):
    """Embedding tables with all rows on every rank of a job.

    Rows and slots are bitwise the same on all ranks. Every rank must take part in every update,
    every `flush` and every change of policy. A rank without examples does so with an empty batch
    (see `pad_to_equal_steps`).

    Evaluation lookups, `gather`, `hot_keys` and `export_table` are not collectives, so a single
    rank can evaluate. `hot_keys` counts the accesses of this rank only.

    Note: evaluation does not include deferred gradients. Call `flush` first for exact values.

    Example:

    >>> comm = slip.distributed.init()
    >>> store = slip.distributed.ReplicatedStore([slip.Table("item", 2)], None, comm)
    >>> store.size("item")
    0
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: optimizers.SparseOptimizer | None,
        comm: Communicator,
        wire_dtype: str = "float32",
        wire_warmup_steps: int = 0,
    ):
        """Creates empty tables; a collective.

        Args:
            tables: At least one table, with unique names and without a retention. In a single
                process, a retention is allowed.
            optimizer: The optimizer of tables that have no `optimizer` setting. None means
                `Adagrad`.
            comm: The communicator of the job.
            wire_dtype: The dtype of gradient rows in messages: "float32", "bfloat16", "float16" or
                "int8" with a scale per row. Gradients are summed in float32. "auto" chooses the
                fastest dtype for the network between the ranks.
            wire_warmup_steps: The number of table updates before gradients are rounded. Rounding
                disturbs the first updates most.

        Raises:
            ValueError: As `NativeStore`, if a table has a retention, or if the settings of the
                ranks differ. The error names the setting.
        """
        for table in tables:
            if table.retention is not None and comm.size > 1:
                place = f"replicated table {table.name!r}"
                allowed = (
                    "None, because ranks would keep different rows. Use sharded tables to limit "
                    "the number of rows"
                )
                raise invalid("retention", table.retention, place, allowed)
        require_one_dtype(wire_dtype, "replicated tables")
        super().__init__(tables, optimizer, comm, wire_dtype, wire_warmup_steps, "replicated", {})

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the rows of keys; every key counts as found.

        Another rank can have looked up a key that is new on this rank. The key then returns its
        initial row, which is the same on all ranks until the first gradient of the key is
        exchanged.

        Args:
            table: The name of the table.
            keys: int64 [n].

        Returns:
            The rows, float32 [n, dim], and bool [n], True for all keys if there are multiple ranks.
        """
        rows, found = super().gather(table, keys)
        return rows, self._as_found(found)

    def measure(
        self, table: str, keys: Any, snapshot: tf.Tensor, metric: str
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Measures the drift of rows; keys count as found as in `gather`."""
        rows, found, drift = super().measure(table, keys, snapshot, metric)
        return rows, self._as_found(found), drift

    def _as_found(self, found: tf.Tensor) -> tf.Tensor:
        return found if self.comm.size == 1 else tf.ones_like(found)
