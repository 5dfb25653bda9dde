"""An embedding store with rows distributed over the ranks by hash.

In each step, keys are sent to their owners, which return the rows. The batch is looked up in a
table of replicas, and gradients are sent to the owners.
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

_NOT_PREFETCHED = (
    "The keys of this batch are not the prefetched keys (`next_inputs` or `prefetch_keys`). Look "
    "up the prefetched batch, or call discard_prefetched() of the store on all ranks, for example "
    "at the end of an epoch. Sizes of layout and keys, prefetched and given:"
)
_PREFETCHED_TWICE = (
    "A batch is already prefetched and has not been looked up, and a store prefetches only one "
    "batch. Prefetch the next batch once per step, after the lookup of the current batch."
)


class KeyRequest(NamedTuple):
    """The keys that all ranks request from this rank.

    Attributes:
        sizes: int64 [ranks, tables], the number of keys that each rank requests.
        keys: int64 [n], ordered by rank, then by table.
    """

    sizes: tf.Tensor
    keys: tf.Tensor


class PrefetchedKeys:
    """Stores the key request of the next batch when it is prefetched.

    All ranks prefetch in the same steps, so the presence of a request never depends on the keys of
    a rank.
    """

    def __init__(self, ranks: int, tables: int):
        """Allocates the variables of one request.

        Args:
            ranks: The number of ranks.
            tables: The number of tables of the store.
        """
        with tf.device("CPU:0"):
            self._is_prefetched = tf.Variable(False, trainable=False)
            self._batch, keys = (
                tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)
                for _ in range(2)
            )
            sizes = tf.Variable(tf.zeros([ranks, tables], tf.int64), trainable=False)
            self._request = KeyRequest(sizes, keys)

    def put(self, batch: tf.Tensor, request: Callable[[], KeyRequest]) -> None:
        """Stores the request of the next batch.

        Args:
            batch: The identity of the batch, from `identity_of`.
            request: A collective that requests the keys of the batch from the other ranks.

        Raises:
            tf.errors.InvalidArgumentError: If another batch is prefetched already.
        """
        with tf.device("CPU:0"):
            is_taken = self._is_prefetched.read_value()
            free = tf.debugging.Assert(~is_taken, [_PREFETCHED_TWICE])
            # If a graph assigns a value of known size to a variable, TensorFlow assumes that size
            # in the whole graph, even for reads before the assignment, when the variable contains
            # another batch. Therefore the size must be unknown until the graph runs.
            size = tf.where(is_taken, 0, tf.size(batch))
            # Wait for the batch, too. TensorFlow also runs the operations of a step that do not
            # depend on its batch, even if the dataset has ended and the step fails.
            with tf.control_dependencies([batch] if free is None else [free, batch]):
                for variable, value in zip(self._request, request(), strict=True):
                    variable.assign(value)
                self._batch.assign(batch[:size])
                self._is_prefetched.assign(True)

    def take(self, batch: tf.Tensor, request: Callable[[], KeyRequest]) -> KeyRequest:
        """Returns and removes the request of a batch.

        Args:
            batch: The identity of the batch, from `identity_of`.
            request: A collective that requests the keys of the batch. It is called if no batch was
                prefetched.

        Raises:
            tf.errors.InvalidArgumentError: If another batch was prefetched.
        """
        with tf.device("CPU:0"):
            prefetched = self._batch.read_value()
            is_prefetched = self._is_prefetched.read_value()
            is_right = ~is_prefetched | _are_equal(prefetched, batch)
            details = [_NOT_PREFETCHED, tf.size(prefetched), tf.size(batch)]
            checked = tf.debugging.Assert(is_right, details)
            with tf.control_dependencies([] if checked is None else [checked]):
                there = KeyRequest(*(variable.read_value() for variable in self._request))
                given = KeyRequest(*_either(is_prefetched, there, request))
                self.forget()
        return given

    def forget(self) -> None:
        """Removes the request, so that any batch can be next."""
        with tf.device("CPU:0"):
            self._is_prefetched.assign(False)


def identity_of(packed: PackedFeatures, feature_table: Sequence[int]) -> tf.Tensor:
    """Returns a tensor that identifies the keys of a batch, int64 [n].

    Two batches have equal tensors if and only if they have the same keys in the same layout.
    Weights are ignored.

    Args:
        packed: The batch.
        feature_table: The index of the table of each feature.
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
    """Returns `there` if a condition holds, else the result of `make`.

    It replaces `tf.cond(condition, lambda: there, make)`. `tf.cond` inlines its branches into the
    graph and numbers their nodes by the rest of the graph. The numbers differ between ranks that
    traced a function for batches of other sizes, and these ranks would wait for each other's
    collectives forever. Here, `make` stays a separate function.
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
    """Embedding tables with rows distributed over the ranks by key hash.

    Every lookup (also in evaluation), update, `flush` and change of policy is a collective. Ranks
    without examples take part with an empty batch (see `pad_to_equal_steps`). A lookup reads the
    current rows of their owners, rounded to the wire dtype.

    Each rank caches replicas of rows, and marks the replicas of saturated keys. At most half of the
    replicas can be marked. Gradients of further keys, and of keys with an evicted replica, are
    neither masked nor deferred by interval until the next window.

    Deferring by movement needs the optimizer's slots to estimate the movement of a row. Owners send
    one number per row for this: the smallest accumulator (Adagrad) or second moment (Adam) of the
    row, rounded down. The movement is therefore never underestimated, apart from the rounding of
    gradients to `wire_dtype`. A row with a value that never had a gradient is hardly ever deferred.
    While any table of the store defers by movement, also in a dry run, this number is sent with
    every row of all tables.

    With `prefetch=True`, the keys of a batch can be sent to their owners one step ahead
    (`prefetch_keys`), in parallel with the rest of the previous step. The rows are still read
    during the lookup.

    `size`, `gather` and `export_table` cover the rows that this rank owns. `hot_keys` and
    `update_counts` cover this rank's batches. The capacity of a table applies to each rank's part.

    Example:

    >>> comm = slip.distributed.init()
    >>> store = slip.distributed.ShardedStore([slip.Table("item", 2)], None, comm)
    >>> store.size("item")
    0
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
        """Creates empty tables; a collective.

        Args:
            tables: At least one table, with unique names.
            optimizer: The optimizer of tables that have no `optimizer` setting. None means
                `Adagrad`.
            comm: The communicator of the job.
            wire_dtype: The dtype of rows and gradients in messages, for example "bfloat16", or two
                dtypes, for example "bfloat16,int8". See `Wire.of`. "auto" chooses the fastest dtype
                for the network between the ranks.
            cache_bytes: The maximum size of all replicas on a rank in bytes. The distinct keys of a
                batch must fit. Defaults to 256 MiB.
            wire_warmup_steps: The number of table updates before rows and gradients are rounded.
                Rounding disturbs the first updates most.
            prefetch: Whether batches can be prefetched.

        Raises:
            ValueError: As `NativeStore`, if `cache_bytes` is less than two replicas per table or
                more than the machine's memory, or if the settings of the ranks differ. The error
                names the setting.
        """
        rows = rows_within(cache_bytes, tables, optimizer, "ShardedStore")
        settings = {"cache_bytes": cache_bytes, "prefetch": bool(prefetch)}
        super().__init__(
            tables, optimizer, comm, wire_dtype, wire_warmup_steps, "sharded", settings
        )
        self._replicas, self._owners = Replicas(self.tables, self.optimizer, rows), comm.size
        with tf.device("CPU:0"):
            # Whether rows are sent with a number that summarizes their slots, see the class. It is
            # the same on all ranks.
            self._with_summary = tf.Variable(False, trainable=False)
        self._prefetched = PrefetchedKeys(comm.size, len(self.tables))
        self.prefetches = bool(prefetch)

    @property
    def _collector(self) -> NativeStore:
        return self if self.comm.size == 1 else self._replicas

    def lookup(
        self,
        packed: PackedFeatures,
        training: bool,
        stacked: bool = False,
        joins_step: bool = False,
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Looks up a batch like `EmbeddingStore.lookup`; a collective."""
        if self.comm.size == 1:
            return super().lookup(packed, training, stacked, joins_step)
        what = "lookup" if training else "evaluation"
        layout, routed = self._route(packed, stacked)
        request = functools.partial(self._request, routed, what)
        if self.prefetches and training:
            requested = self._prefetched.take(self._identity_of(packed), request)
        else:
            requested = request()
        # Send the rows that other ranks requested, and receive the rows that this rank requested.
        dtype = self.wire.dtype_of(self.wire.rows, self._steps.read_value())
        messages, lengths, row_bytes = exchange_ops.pull_rows(
            self._handles,
            *requested,
            training,
            self._with_summary.read_value(),
            dtype,
            joins_step,
        )
        kinds = Mixed([("rows", tf.reduce_sum(row_bytes) - row_bytes[self.comm.rank])])
        name = self._names.of(f"{what}.rows")
        received, _ = self.comm.exchange(messages, lengths, kinds, name)
        pooled, plan = exchange_ops.look_up_pulled(
            self._replicas._handles, packed, layout, routed, received, training, joins_step
        )
        return pooled, plan if training else None

    def prefetch_keys(self, packed: PackedFeatures) -> None:
        """Sends the next training batch's keys to their owners; a collective.

        Owners start to read requested rows from disk if a table spills (`Storage`). Call it after
        the lookup of the previous batch. The next training lookup must have the same keys,
        otherwise it raises an error.

        Args:
            packed: The keys of the batch. Weights are ignored.

        Raises:
            ValueError: If the store was created without `prefetch=True`.
            tf.errors.InvalidArgumentError: If a batch is prefetched already.
        """
        if not self.prefetches:
            allowed = "True. Create the store with prefetch=True"
            raise invalid("prefetch", False, "prefetch_keys of a ShardedStore", allowed)
        if self.comm.size == 1:
            return
        _, routed = self._route(packed)
        request = functools.partial(self._request_ahead, routed)
        self._prefetched.put(self._identity_of(packed), request)

    def discard_prefetched(self) -> None:
        """Discards prefetched keys, for example at the end of an epoch.

        Call it on all ranks.
        """
        self._prefetched.forget()

    def _identity_of(self, packed: PackedFeatures) -> tf.Tensor:
        return identity_of(packed, [self.index_of(spec.table) for spec in packed.specs])

    def _route(
        self, packed: PackedFeatures, stacked: bool = False
    ) -> tuple[LookupLayout, exchange_ops.Routed]:
        """Plans a lookup and groups its keys by owner."""
        layout, handles = self._replicas._layout(packed, stacked), self._replicas._handles
        return layout, exchange_ops.route_keys(handles, packed, layout, self.comm.size)

    def _request(self, routed: exchange_ops.Routed, what: str) -> KeyRequest:
        """Exchanges keys; returns the keys requested from this rank."""
        request = exchange_ops.SendBuffer(routed.sizes, routed.keys, tf.zeros([0]))
        widths = [0] * len(self.tables)
        theirs = exchange_rows(self.comm, request, widths, self._names, f"{what}.keys")
        return KeyRequest(theirs.sizes, theirs.keys)

    def _request_ahead(self, routed: exchange_ops.Routed) -> KeyRequest:
        """Exchanges the keys of the next batch.

        It also starts to read the rows from disk that other ranks request from this rank.
        """
        request = self._request(routed, "next")
        if not self.spills:
            return request
        of_rank = tf.tile(tf.range(len(self.tables)), [self.comm.size])
        table_of_key = tf.repeat(of_rank, tf.reshape(request.sizes, [-1]))
        for index, (table, handle) in enumerate(zip(self.tables, self._handles, strict=True)):
            if table.storage.spill is not None:
                keys = tf.boolean_mask(request.keys, table_of_key == index)
                table_ops.prefetch_rows(handle, keys)
        return request

    def exchange_collected(self, rows: exchange_ops.SendBuffer) -> exchange_ops.SendBuffer:
        """Sends collected rows to their owners; a collective.

        See `NativeStore.exchange_collected`. If any value on any rank is not finite, all values on
        all ranks are NaN.
        """
        shared = super().exchange_collected(rows)
        if self.comm.size == 1:
            return shared
        # All ranks must skip the update, including owners without non-finite rows.
        lost = tf.reduce_sum(tf.cast(~tf.math.is_finite(shared.values), tf.float32))
        is_lost = self.sum_of_parts(lost) > 0
        values = tf.where(is_lost, float("nan"), shared.values)
        return exchange_ops.SendBuffer(shared.sizes, shared.keys, values)

    def sum_of_parts(self, values: tf.Tensor) -> tf.Tensor:
        """Sums values over the ranks; a collective."""
        return self.comm.sum(values, "control", self._names.of("parts"))

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        """Sets the policy of a table; a collective."""
        super().set_update_policy(table, policy)
        policies = self._policies.values()
        by_movement = any(p.mode == "defer" and p.trigger == "movement" for p in policies)
        self._with_summary.assign(by_movement)

    def write_rows(self, table: str, keys: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows at their owners, and removes their replicas.

        This method is a collective, with the same keys and rows on all ranks. Deferred gradients of
        the rows are dropped on all ranks.
        """
        self._require_same_rows(table, keys, rows)
        own = self.owners(table, keys) == self.comm.rank
        NativeStore.write_rows(self, table, keys[own], rows[own])
        self._replicas.remove_rows(table, keys)

    def remove_rows(self, table: str, keys: np.ndarray) -> int:
        """Removes rows; returns the number of removed rows on all ranks.

        This method is a collective, with the same keys on all ranks.
        """
        self._require_same_rows(table, keys)
        own = self.owners(table, keys) == self.comm.rank
        removed = NativeStore.remove_rows(self, table, keys[own])
        self._replicas.remove_rows(table, keys)
        return int(self.comm.sum(tf.constant(removed), "control", self._names.of("removed")))

    def clear_rows(self, table: str) -> None:
        """Removes all rows and replicas on all ranks; a collective."""
        super().clear_rows(table)
        self._replicas.clear_rows(table)

    def shrink_rows(self, table: str) -> int:
        """Frees the memory of removed rows and replicas of this rank; returns its bytes."""
        return super().shrink_rows(table) + self._replicas.shrink_rows(table)

    def owners(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns int64 [n], the rank that owns each key.

        Args:
            table: The name of the table.
            keys: int64 [n].
        """
        self.index_of(table)
        return owner_of(keys, self.comm.size)

    def decay_counts(self, factor: float) -> None:
        """Multiplies the access counts of rows and replicas by a factor."""
        super().decay_counts(factor)
        self._replicas.decay_counts(factor)

    def set_row_flags(self, table: str, keys: Any, flags: Any) -> None:
        """Replaces the row flags of a table.

        Pass the same arguments on all ranks.
        """
        if self.comm.size == 1:
            return super().set_row_flags(table, keys, flags)
        self._replicas.set_saturated(table, np.asarray(keys, np.int64), np.asarray(flags, np.uint8))


def owner_of(keys: np.ndarray, ranks: int) -> np.ndarray:
    """Returns the owners of keys of a sharded table, int64 [n].

    Args:
        keys: int64 [n].
        ranks: The number of ranks.
    """
    return (mix64(hash_keys(keys)) % np.uint64(ranks)).astype(np.int64)
