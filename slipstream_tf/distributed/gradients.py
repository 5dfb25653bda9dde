"""A gradient tape that masks, defers and averages gradients over ranks.

Method: Slipstream, arXiv 2404.04270. Masked and deferred rows are removed from sparse gradients
before they are sent or applied.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.comm import (
    KINDS,
    WIRE_DTYPES,
    CollectiveNames,
    Communicator,
    SingleProcess,
)
from slipstream_tf._utils.errors import invalid
from slipstream_tf.distributed.exchange import Wire, exchange_rows, require_one_dtype, resolve
from slipstream_tf.ops.exchange import SendBuffer
from slipstream_tf.ops.mask import KeySet, mask_gradients
from slipstream_tf.tables.variable import VariableStore

# Assumed number of values per row for "auto", because the fastest dtype depends little on it.
_USUAL_FLOATS = 32
# Shared by all tapes, because each trace of a training step creates a tape.
_TAPE_NAMES = CollectiveNames("gradients")


class GradientExchange:
    """Averages gradients over the ranks, and masks or defers watched gradients."""

    def __init__(
        self,
        comm: Communicator,
        store: VariableStore | None,
        wire_dtype: str,
        names: CollectiveNames,
    ):
        """Creates the exchange.

        Args:
            comm: The communicator of the job.
            store: The store that watches the variables with masked or deferred gradients, or None.
            wire_dtype: The dtype of sparse rows in messages, one of `config.WIRE_DTYPES`, or
                "auto".
            names: The names of the collectives. An exchange that is created while a function is
                traced needs an object that existed before, because ranks can trace a function
                different numbers of times.
        """
        self._comm, self._store = comm, store
        require_one_dtype(wire_dtype, "gradients of variables")
        dtype = resolve(wire_dtype, comm, _USUAL_FLOATS, is_spread=False)
        self._wire_dtype = WIRE_DTYPES.index(Wire.of(dtype).gradients)
        self._names = names
        self._nothing: dict[str, KeySet] = {}

    # AutoGraph of the user's step would otherwise convert all that this method calls.
    @tf.autograph.experimental.do_not_convert
    def average(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """Returns the averaged gradients, after the policies of watched tables.

        Args:
            gradients: The gradients of this rank: dense tensors, `tf.IndexedSlices` or None. A
                gradient that is None must be None on all ranks.
            sources: The differentiated variables, in the same order.

        Returns:
            The gradients in the same order and of the same types. Sparse gradients have unique
            ascending indices if there are multiple ranks or the store watches the variable.

        Raises:
            TypeError: If the gradient of a watched variable is dense.
        """
        # An anchor is a weight that only makes TensorFlow run the backward pass of an embedding
        # layer, see `keras.row_gradients`. Its dense gradient is always 0, so it needs no exchange.
        # Its sparse gradient is exchanged by the `CombinedOptimizer` that applies it.
        others = [i for i, source in enumerate(sources) if not hasattr(source, "slipstream_anchor")]
        tables = [None if self._store is None else self._store.table_of(s) for s in sources]
        averaged = list(gradients)
        for index in others:
            averaged[index] = self._filter(self._exchanged(gradients[index]), tables[index])
        if self._comm.size == 1:
            return averaged
        passed = list(averaged)
        dense: dict[tf.DType, list[int]] = {}
        sparse = [i for i in others if isinstance(passed[i], tf.IndexedSlices)]
        for index in others:
            if passed[index] is not None and index not in sparse:
                dense.setdefault(tf.as_dtype(passed[index].dtype), []).append(index)
        if sparse:
            kinds = [self._kind_of(tables[index]) for index in sparse]
            added = self._add_rows([passed[index] for index in sparse], kinds)
            for index, rows in zip(sparse, added, strict=True):
                averaged[index] = rows
        for dtype, indices in dense.items():
            values = self._average_dense([passed[index] for index in indices], dtype.name)
            for index, value in zip(indices, values, strict=True):
                averaged[index] = value
        return averaged

    def _exchanged(self, gradient: Any) -> Any:
        """Divides a sparse gradient by the number of ranks; returns others unchanged.

        Dense gradients are divided after the sum. Sparse gradients are divided before deferring, so
        that the movement of a deferred sum is estimated correctly.
        """
        if self._comm.size == 1 or not isinstance(gradient, tf.IndexedSlices):
            return gradient
        values = gradient.values / tf.cast(self._comm.size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)

    def _kind_of(self, table: str | None) -> Any:
        """Returns "deferred" while the table can defer, else "gradients"."""
        if self._store is None or table is None:
            return "gradients"
        deferred, gradients = (
            tf.constant(KINDS.index(kind), tf.int64) for kind in ("deferred", "gradients")
        )
        return tf.where(self._store.is_deferring(table), deferred, gradients)

    def _filter(self, gradient: Any, table: str | None) -> Any:
        if self._store is None or table is None or gradient is None:
            return gradient
        if not isinstance(gradient, tf.IndexedSlices):
            raise TypeError(
                f"The gradient of table {table!r} is dense ({type(gradient).__name__} of shape "
                f"{gradient.shape}), therefore its rows cannot be masked or deferred. Read the "
                "variable only by tf.gather, tf.nn.embedding_lookup or keras.layers.Embedding: a "
                "matmul (one-hot or tied weights), a regularizer, a cast of the whole variable or "
                "`unconnected_gradients='zero'` makes the gradient dense. Otherwise, remove the "
                "variable from the store."
            )
        return self._store.filter_gradient(table, gradient)

    def _average_dense(self, gradients: Sequence[Any], name: str) -> list[tf.Tensor]:
        """Averages dense gradients of the same dtype in one collective.

        Their concatenation is summed as one tensor. The order of additions then does not depend on
        the order in which the gradients become available.
        """
        flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)
        total = self._sum(flat, f"dense.{name}")
        parts = tf.split(
            total / tf.cast(self._comm.size, total.dtype),
            [tf.size(gradient) for gradient in gradients],
        )
        return [
            tf.reshape(part, tf.shape(gradient))
            for part, gradient in zip(parts, gradients, strict=True)
        ]

    def _sum(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        name = self._names.of(name)
        if self._comm.size > 2:
            return self._comm.sum(flat, "dense", name)
        # With two ranks, a sum and a gather send the same number of bytes, but the gather needs
        # fewer messages.
        sent = tf.reshape(tf.bitcast(flat, tf.uint8), [-1])
        both = tf.reshape(self._comm.gather(sent, "dense", name), [2, -1, flat.dtype.size])
        first, second = tf.unstack(tf.bitcast(both, flat.dtype))
        return first + second

    def _add_rows(
        self, gradients: Sequence[tf.IndexedSlices], kinds: list[Any]
    ) -> list[tf.IndexedSlices]:
        """Sums sparse gradients over the ranks by key.

        All gradients share one message.
        """
        own = [self._add_up(gradient) for gradient in gradients]
        widths = [_row_floats(gradient) for gradient in gradients]
        with tf.device("CPU:0"):
            sizes = tf.stack([tf.size(part.indices, tf.int64) for part in own])
            keys = tf.concat([tf.cast(part.indices, tf.int64) for part in own], 0)
            values = tf.concat([tf.reshape(part.values, [-1]) for part in own], 0)
            rows = SendBuffer(sizes[tf.newaxis], keys, values)
            how = (self._names, "rows", kinds, self._wire_dtype, False)
            got = exchange_rows(self._comm, rows, widths, *how)
            received = got.of_tables(widths)
        summed = []
        for part, (keys, values) in zip(own, received, strict=True):
            rows = tf.reshape(values, tf.concat([[-1], tf.shape(part.values)[1:]], 0))
            indices = tf.cast(keys, part.indices.dtype)
            summed.append(self._add_up(tf.IndexedSlices(rows, indices, part.dense_shape)))
        return summed

    def _add_up(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Sums the rows of each index in a fixed order.

        Otherwise Horovod would send duplicate rows.
        """
        device = slices.values.device or "CPU:0"
        nothing = self._nothing.setdefault(device, KeySet(device))
        return mask_gradients(slices, nothing).slices


def _row_floats(gradient: tf.IndexedSlices) -> int:
    """Returns the number of values per row of a sparse gradient."""
    count = gradient.values.shape[1:].num_elements()
    if count is None:
        shape = tf.get_static_value(gradient.dense_shape)
        count = None if shape is None else math.prod(int(size) for size in shape[1:])
    if count is None:
        allowed = "a shape in which only the first dimension is unknown"
        raise invalid("gradient", gradient.values.shape, "an exchange between ranks", allowed)
    return int(count)


def store_of(watched: Any, place: str) -> VariableStore:
    """Returns `watched` if it is a variable store, else its attribute `store`.

    Args:
        watched: The argument `store` of a public function.
        place: Name of that function, for the error.

    Raises:
        ValueError: If neither is a `VariableStore`.
    """
    found = getattr(watched, "store", watched)
    if not isinstance(found, VariableStore):
        allowed = "a VariableStore, or an object with a VariableStore as its attribute `store`"
        raise invalid("store", type(found).__name__, place, allowed)
    return found


class DistributedGradientTape:
    """A `tf.GradientTape` that masks, defers and averages gradients.

    Use it in place of the tape, in eager code or in a `tf.function`.

    Gradients of the store's variables are returned with unique ascending indices and without
    saturated keys. The store counts accesses and gradient rows. Gradients of other variables are
    neither masked nor deferred. The set of saturated keys is read at run time, so a new set causes
    no retracing.

    If the store's policy defers gradients, `gradient` returns the deferred sums that are due. Their
    rows can differ from the rows of the current batch. Call `flush_deferred(store, optimizer,
    comm)` after the last step. Deferring by movement uses the optimizer's state before the update,
    therefore build the optimizer first: `optimizer.build(model.trainable_variables)`.

    With multiple ranks (`comm`), all gradients are averaged. Each rank sums sparse gradients by key
    and masks or defers them before they are sent. The result is the gradient of the mean of the
    ranks' losses. Scale the loss with `scale_loss` if the batches of the ranks differ in size.
    Every rank must call `gradient` in every step, with an empty batch if it has no examples.

    `gradient` does not average the gradients of layers with `apply="step"`, because the
    `CombinedOptimizer` that applies them does.

    Note: masking keeps rows and slots unchanged only if the optimizer ignores rows without a
    gradient. These optimizers do:

    - Keras 3: `SGD` without momentum and `Adagrad`, also with gradient clipping.
    - `tf.compat.v1.train`: `GradientDescentOptimizer`, `MomentumOptimizer`, `AdagradOptimizer`,
      `RMSPropOptimizer`, `FtrlOptimizer`, `AdadeltaOptimizer` and the proximal optimizers. They
      require a tf.Variable. For a Keras variable, pass its `value`.

    The other Keras 3 optimizers and `tf.compat.v1.train.AdamOptimizer` convert sparse gradients to
    dense ones, so masked rows get zero gradients. Slots then decay. Optimizers with momentum
    (`SGD(momentum=...)`, `Adam`, `AdamW`, `Adamax`, `Nadam`, `Lion`, `Lamb`, `Muon`) also move the
    rows. `Ftrl` sets rows that never had a gradient to zero. `weight_decay`, `use_ema` and
    `gradient_accumulation_steps` of a Keras optimizer also affect masked rows.

    Clipping by norm uses only the remaining rows. A deferred sum is applied as one gradient. With
    SGD, the result equals separate updates.

    Keras 3's `Adagrad` squares duplicate rows of a key separately, as they are returned by a plain
    tape. This tape returns their sum, which matches `tf.compat.v1.train` and dense gradients.

    Example:

    >>> weight = tf.Variable(3.0)
    >>> comm = slip.distributed.init()
    >>> with slip.distributed.DistributedGradientTape(tf.GradientTape(), comm=comm) as tape:
    ...     loss = weight * weight
    >>> float(tape.gradient(loss, weight))
    6.0
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        store: Any = None,
        comm: Communicator | None = None,
        wire_dtype: str = "float32",
    ):
        """Wraps a tape.

        Args:
            tape: A `tf.GradientTape` that has not been entered. It can be persistent.
            store: A `VariableStore`, or an object with an attribute `store` of this type. None
                means that no gradient is masked or deferred.
            comm: The communicator from `init`. None means a single process.
            wire_dtype: The dtype of sparse rows in messages, one of `config.WIRE_DTYPES`, or
                "auto".

        Raises:
            ValueError: If `tape` is not a `tf.GradientTape`, if `store` is of another type, or if
                both `store` and `comm` are None.
        """
        place = "DistributedGradientTape"
        if not isinstance(tape, tf.GradientTape):
            raise invalid("tape", type(tape).__name__, place, "a tf.GradientTape")
        if store is None and comm is None:
            raise invalid("store", None, place, "a VariableStore if `comm` is None, too")
        self._tape = tape
        self._exchange = GradientExchange(
            comm or SingleProcess(),
            None if store is None else store_of(store, place),
            wire_dtype,
            _TAPE_NAMES,
        )

    def __enter__(self) -> "DistributedGradientTape":
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        # Forward `watch`, `stop_recording`, `reset`, `jacobian` and others to the tape.
        if name == "_tape":  # `copy.copy` calls this before `__init__`.
            raise AttributeError(name)
        return getattr(self._tape, name)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Returns averaged gradients; see `tf.GradientTape.gradient`.

        Every call counts the accesses of its gradients. With a persistent tape, call it once per
        step for the variables of the store.

        Args:
            target: The tensor or structure of tensors to differentiate.
            sources: Tensors, tf.Variables or Keras variables, in any structure.
            output_gradients: The gradient of each target. Defaults to ones.
            unconnected_gradients: The gradient of sources without a path to the target: None or
                zeros.

        Returns:
            Gradients in the structure of `sources`. Gradients of the store's variables can be
            masked or deferred.

        Raises:
            TypeError: If the gradient of a variable of the store is dense.
        """
        gradients = self._tape.gradient(target, sources, output_gradients, unconnected_gradients)
        exchanged = self._exchange.average(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, exchanged)
