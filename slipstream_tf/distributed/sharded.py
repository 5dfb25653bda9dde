"""A native store whose rows are spread over the ranks by hash.

In: each rank's batches. A batch's keys go to their owners, the rows come back and are looked up in
a table of replicas, gradients go to the owners.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf._utils.comm import Communicator, Mixed
from slipstream_tf._utils.errors import invalid
from slipstream_tf._utils.hashing import hash_keys, mix64
from slipstream_tf.config import Table
from slipstream_tf.distributed.exchange import exchange_rows
from slipstream_tf.distributed.exchanged import ExchangedStore
from slipstream_tf.ops import exchange as exchange_ops
from slipstream_tf.ops import table as table_ops
from slipstream_tf.ops.features import PackedFeatures
from slipstream_tf.ops.table import LookupLayout
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables.native import NativeStore
from slipstream_tf.tables.replicas import Replicas, ReplicatingStore, rows_within

_NOT_ANNOUNCED = (
    "This is not the batch that was announced (next_inputs, or `announce`). Look up the announced "
    "one, or call forget_announced() of the store on all ranks, as where an epoch ends. Numbers of "
    "its layout and keys: announced, given:"
)
_ANNOUNCED_TWICE = (
    "A batch is announced already, and was not looked up. A store has room for one: announce the "
    "next batch once a step, after the lookup of this one."
)


class KeyRequest(NamedTuple):
    """Keys that are requested of this rank.

    Attributes:
        sizes: int64 [ranks, tables], keys that each rank requests.
        keys: int64 [n], by rank, then by table.
    """

    sizes: tf.Tensor
    keys: tf.Tensor


class AnnouncedKeys:
    """The request of the batch that comes next, if it was announced.

    Whether there is one follows from calls that all ranks make alike, never from a rank's own keys.
    """

    def __init__(self, ranks: int, tables: int):
        """Makes room for one request.

        Args:
            ranks: of the job.
            tables: of the store.
        """
        with tf.device("CPU:0"):
            self._is_announced = tf.Variable(False, trainable=False)
            self._batch, keys = (
                tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)
                for _ in range(2)
            )
            sizes = tf.Variable(tf.zeros([ranks, tables], tf.int64), trainable=False)
            self._request = KeyRequest(sizes, keys)

    def announce(self, batch: tf.Tensor, request: Callable[[], KeyRequest]) -> None:
        """Takes in a batch.

        Args:
            batch: from `identity_of`.
            request: requests its keys of the other ranks; a collective.

        Raises:
            tf.errors.InvalidArgumentError: another one is there.
        """
        with tf.device("CPU:0"):
            is_taken = self._is_announced.read_value()
            free = tf.debugging.Assert(~is_taken, [_ANNOUNCED_TWICE])
            # A variable that a graph assigns a value of known size to is taken to have that size
            # wherever the graph reads it, even before, where it holds another batch. So the size is
            # one that TensorFlow cannot know before it runs the graph.
            size = tf.where(is_taken, 0, tf.size(batch))
            # The batch, too: a step whose data has ended runs what does not wait for it.
            with tf.control_dependencies([batch] if free is None else [free, batch]):
                for variable, value in zip(self._request, request(), strict=True):
                    variable.assign(value)
                self._batch.assign(batch[:size])
                self._is_announced.assign(True)

    def take(self, batch: tf.Tensor, request: Callable[[], KeyRequest]) -> KeyRequest:
        """Gives out the request of a batch; there is none after it.

        Args:
            batch: from `identity_of`.
            request: requests its keys of the other ranks, if no batch was announced; a collective.

        Raises:
            tf.errors.InvalidArgumentError: another batch was announced.
        """
        with tf.device("CPU:0"):
            announced = self._batch.read_value()
            is_announced = self._is_announced.read_value()
            is_right = ~is_announced | _are_equal(announced, batch)
            told = [_NOT_ANNOUNCED, tf.size(announced), tf.size(batch)]
            checked = tf.debugging.Assert(is_right, told)
            with tf.control_dependencies([] if checked is None else [checked]):
                there = KeyRequest(*(variable.read_value() for variable in self._request))
                given = KeyRequest(*_either(is_announced, there, request))
                self.forget()
        return given

    def forget(self) -> None:
        """Lets any batch come next."""
        with tf.device("CPU:0"):
            self._is_announced.assign(False)


def identity_of(packed: PackedFeatures, feature_table: Sequence[int]) -> tf.Tensor:
    """Returns int64 [n], equal for batches that request the same keys; weights do not matter.

    Args:
        packed: the batch.
        feature_table: per feature, the index of its table.
    """
    layout = [len(packed.keys), len(packed.row_splits), len(feature_table), *feature_table]
    for name in ("feature_keys", "feature_column", "feature_splits"):
        layout += packed.attrs[name]
    parts = [tf.constant(layout, tf.int64)]
    for tensor in (*packed.keys, *packed.row_splits):
        parts += [tf.shape(tensor, tf.int64), tf.reshape(tensor, [-1])]
    return tf.concat(parts, axis=0)


def _are_equal(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    common = tf.minimum(tf.size(a), tf.size(b))
    are_same = tf.reduce_all(tf.equal(a[:common], b[:common]))
    return tf.equal(tf.size(a), tf.size(b)) & are_same


def _either(
    condition: tf.Tensor, there: Sequence[tf.Tensor], make: Callable[[], Sequence[tf.Tensor]]
) -> Sequence[tf.Tensor]:
    """`tf.cond(condition, lambda: there, make)`, in which collectives keep their names.

    `tf.cond` becomes nodes of the graph around it, numbered by what else that graph has. It differs
    between ranks that traced a function for batches of other sizes: they would wait for each
    other's collectives for ever. Here `make` stays a function of its own.
    """
    if tf.executing_eagerly():
        return there if condition else make()
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in there]
    made = tf.function(lambda given: make(), autograph=False).get_concrete_function(specs)
    inputs = [*there, *made.captured_inputs]
    specs += [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in made.captured_inputs]
    unchanged = tf.function(lambda given: given[: len(there)], autograph=False)
    return tf.raw_ops.If(
        cond=condition,
        input=inputs,
        Tout=[tensor.dtype for tensor in there],
        then_branch=unchanged.get_concrete_function(specs),
        else_branch=made,
        output_shapes=[tensor.shape for tensor in there],
    )


class ShardedStore(ReplicatingStore, ExchangedStore):
    """Embedding tables whose rows are spread over the ranks of a job by a hash of their keys.

    Every lookup (evaluation, too), update, `flush` and change of policy is a collective; ranks
    without inputs take part with an empty batch (see `even_ends`). A lookup reads the rows as their
    owners have them (rounded, if the wire is). Flags of saturated keys are stored with the
    replicas, of at most half of them: further keys, and those whose replica was evicted, are
    not masked until the next window.

    A rank that defers gradients by movement takes how far a sum would move its row from the
    replica's slots: of a row's accumulators (Adagrad) or second moments (Adam) only the smallest
    is sent, beside which the movement is not underestimated (but for the rounding of a bfloat16
    wire). A gradient of a row of which one value never had one is therefore hardly ever deferred.
    That number is sent with every row of the store while the policy of one of its tables defers by
    movement, in shadow mode, too; else only the row's values are.

    With `prefetch=True` a batch's keys can be sent to their owners a step ahead (`announce`),
    beside what the step before still has to do. Its rows are read at its lookup all the same.

    `size`, `gather` and `export_table` are of the rows that this rank owns; `hot_keys` and
    `update_counts` of this rank's own batches. A table's capacity is that of each rank's part.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: optimizers.SparseOptimizer | None,
        comm: Communicator,
        wire_dtype: str = "float32",
        cache_bytes: int = 256 << 20,
        wire_warmup_steps: int = 0,
        prefetch: bool = False,
    ):
        """Makes empty tables; a collective.

        Args:
            tables: at least one, of distinct names.
            optimizer: the rule of the tables without one of their own; None: `Adagrad`.
            comm: the ranks.
            wire_dtype: of rows and gradients on their way, see `Wire.of`; "auto": what is soonest
                on the ranks' link.
            cache_bytes: of all replicas on a rank; the distinct keys of a batch must fit.
            wire_warmup_steps: updates of the tables before rows and gradients are rounded:
                rounding disturbs the first ones most.
            prefetch: whether batches may be announced.

        Raises:
            ValueError: as `NativeStore`; the replicas' budget holds no row; or the ranks' settings
                differ: the error says in what.
        """
        rows = rows_within(cache_bytes, tables, optimizer, "ShardedStore")
        settings = {"cache_bytes": cache_bytes, "prefetch": bool(prefetch)}
        super().__init__(
            tables, optimizer, comm, wire_dtype, wire_warmup_steps, "sharded", settings
        )
        self._replicas, self._owners = Replicas(self.tables, self.optimizer, rows), comm.size
        with tf.device("CPU:0"):
            # Whether rows travel with the summary of their slots; the same on all ranks.
            self._with_summary = tf.Variable(False, trainable=False)
        self._announced = AnnouncedKeys(comm.size, len(self.tables))
        self.prefetches = bool(prefetch)

    @property
    def _collector(self) -> NativeStore:
        return self if self.comm.size == 1 else self._replicas

    def lookup(
        self, packed: PackedFeatures, training: bool, stacked: bool = False
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """See `EmbeddingStore.lookup`; a collective."""
        if self.comm.size == 1:
            return super().lookup(packed, training, stacked)
        what = "lookup" if training else "evaluation"
        layout, routed = self._route(packed, stacked)
        request = functools.partial(self._request, routed, what)
        if self.prefetches and training:
            requested = self._announced.take(self._identity_of(packed), request)
        else:
            requested = request()
        # The rows that others request of this rank are sent, and those come that it requests.
        dtype = self.wire.dtype_of(self.wire.rows, self._steps.read_value())
        messages, lengths, row_bytes = exchange_ops.pull_rows(
            self._handles, *requested, training, self._with_summary.read_value(), dtype
        )
        kinds = Mixed([("rows", tf.reduce_sum(row_bytes) - row_bytes[self.comm.rank])])
        name = self._names.of(f"{what}.rows")
        received, _ = self.comm.exchange(messages, lengths, kinds, name)
        pooled, plan = exchange_ops.look_up_pulled(
            self._replicas._handles, packed, layout, routed, received, training
        )
        return pooled, plan if training else None

    def announce(self, packed: PackedFeatures) -> None:
        """Sends the keys of the next training batch to their owners; a collective.

        The owners begin to read those rows from the disk that are there (`Storage`).

        Call it after the lookup of the batch before. The next training lookup must be of these
        keys: another one is an error.

        Args:
            packed: the batch's keys; weights are not read.

        Raises:
            ValueError: the store was made without `prefetch=True`.
            tf.errors.InvalidArgumentError: a batch is announced already.
        """
        if not self.prefetches:
            raise invalid("prefetch", False, "announce of a ShardedStore", "prefetch=True")
        if self.comm.size == 1:
            return
        _, routed = self._route(packed)
        request = functools.partial(self._request_ahead, routed)
        self._announced.announce(self._identity_of(packed), request)

    def forget_announced(self) -> None:
        """Lets any batch come next, as where an epoch ends; call it on all ranks alike."""
        self._announced.forget()

    def _identity_of(self, packed: PackedFeatures) -> tf.Tensor:
        return identity_of(packed, [self.index_of(spec.table) for spec in packed.specs])

    def _route(
        self, packed: PackedFeatures, stacked: bool = False
    ) -> tuple[LookupLayout, exchange_ops.Routed]:
        """Plans a lookup."""
        layout, handles = self._replicas._layout(packed, stacked), self._replicas._handles
        return layout, exchange_ops.route_keys(handles, packed, layout, self.comm.size)

    def _request(self, routed: exchange_ops.Routed, what: str) -> KeyRequest:
        """Tells the owners which rows a batch needs, and hears which ones others need."""
        request = exchange_ops.SendBuffer(routed.sizes, routed.keys, tf.zeros([0]))
        widths = [0] * len(self.tables)
        theirs = exchange_rows(self.comm, request, widths, self._names, f"{what}.keys")
        return KeyRequest(theirs.sizes, theirs.keys)

    def _request_ahead(self, routed: exchange_ops.Routed) -> KeyRequest:
        """Requests the next batch's rows, and begins to read those of others from the disk."""
        request = self._request(routed, "next")
        if not self.spills:
            return request
        of_rank = tf.tile(tf.range(len(self.tables)), [self.comm.size])
        table_of_key = tf.repeat(of_rank, tf.reshape(request.sizes, [-1]))
        for index, (table, handle) in enumerate(zip(self.tables, self._handles, strict=True)):
            if table.storage.spill is not None:
                keys = tf.boolean_mask(request.keys, table_of_key == index)
                table_ops.announce(handle, keys)
        return request

    def share_collected(self, rows: exchange_ops.SendBuffer) -> exchange_ops.SendBuffer:
        """See `ExchangedStore.share_collected`; where a rank's are not finite, all are NaN."""
        shared = super().share_collected(rows)
        if self.comm.size == 1:
            return shared
        # A rank that owns none of those keys must not update the others.
        lost = tf.reduce_sum(tf.cast(~tf.math.is_finite(shared.values), tf.float32))
        is_lost = self.sum_of_parts(lost) > 0
        values = tf.where(is_lost, float("nan"), shared.values)
        return exchange_ops.SendBuffer(shared.sizes, shared.keys, values)

    def sum_of_parts(self, values: tf.Tensor) -> tf.Tensor:
        """See `NativeStore.sum_of_parts`; a collective."""
        return self.comm.sum(values, "control", self._names.of("parts"))

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """See `EmbeddingStore.set_update_policy`; a collective."""
        super().set_update_policy(table, policy)
        policies = self._policies.values()
        by_movement = any(p.mode == "defer" and p.trigger == "movement" for p in policies)
        self._with_summary.assign(by_movement)

    def write_rows(self, table: str, keys: np.ndarray, rows: np.ndarray) -> None:
        """See `ExchangedStore.write_rows`; replicas of the rows, and what is deferred, go."""
        self._require_same_rows(table, keys, rows)
        own = self.owners(table, keys) == self.comm.rank
        NativeStore.write_rows(self, table, keys[own], rows[own])
        self._replicas.remove_rows(table, keys)

    def remove_rows(self, table: str, keys: np.ndarray) -> int:
        """See `ExchangedStore.remove_rows`; returns how many rows there were on all ranks."""
        self._require_same_rows(table, keys)
        own = self.owners(table, keys) == self.comm.rank
        removed = NativeStore.remove_rows(self, table, keys[own])
        self._replicas.remove_rows(table, keys)
        return int(self.comm.sum(tf.constant(removed), "control", self._names.of("removed")))

    def owners(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns int64 [n]: the rank that owns each key, int64 [n]."""
        self.index_of(table)
        return owner_of(keys, self.comm.size)

    def decay_counts(self, factor: float) -> None:
        """See `EmbeddingStore.decay_counts`."""
        super().decay_counts(factor)
        self._replicas.decay_counts(factor)

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        """See `EmbeddingStore.set_row_flags`; on all ranks alike, with the same keys and flags."""
        if self.comm.size == 1:
            return super().set_row_flags(table, keys, flags)
        self._replicas.withhold(table, np.asarray(keys, np.int64), np.asarray(flags, np.uint8))


def owner_of(keys: np.ndarray, ranks: int) -> np.ndarray:
    """Returns int64 [n], the rank that owns each key of a sharded table.

    Args:
        keys: int64 [n].
        ranks: number of ranks.
    """
    return (mix64(hash_keys(keys)) % np.uint64(ranks)).astype(np.int64)
