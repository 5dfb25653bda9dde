"""Gradients averaged over the ranks, and a gradient tape that gives them.

In: a `tf.GradientTape`, a `VariableStore`, the ranks. Out: gradients of which those of watched
tables are masked or deferred, averaged over the ranks. Method: Slipstream, arXiv 2404.04270, with
rows compacted away before they are sent or applied.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.comm import KINDS, WIRE_DTYPES, Communicator, Names, SingleProcess
from slipstream_tf._utils.errors import invalid
from slipstream_tf.distributed.exchange import Wire, exchange_rows, require_one_dtype, resolve
from slipstream_tf.ops.exchange import SendBuffer
from slipstream_tf.ops.mask import KeySet, mask_gradients
from slipstream_tf.tables.variable import VariableStore

# Of a row, for "auto": what is soonest depends little on it.
_USUAL_FLOATS = 32
# Of all tapes: each trace of a step makes one of its own.
_OF_TAPES = Names("gradients")


class GradientExchange:
    """Averages all gradients over the ranks; those of a store's tables are masked or deferred."""

    def __init__(
        self,
        comm: Communicator,
        store: VariableStore | None,
        wire_dtype: str,
        names: Names,
    ):
        """Takes the ranks.

        Args:
            comm: the ranks.
            store: watches the variables whose gradients are masked or deferred, or None.
            wire_dtype: of sparse rows on their way, one of `link.WIRE_DTYPES`, or "auto".
            names: names the collectives. An exchange that is made while a function is traced takes
                one that was there before: other ranks may have traced it more or less often.
        """
        self._comm, self._store = comm, store
        require_one_dtype(wire_dtype, "gradients of variables")
        dtype = resolve(wire_dtype, comm, _USUAL_FLOATS, is_spread=False)
        self._wire_dtype = WIRE_DTYPES.index(Wire.of(dtype).gradients)
        self._names = names
        self._nothing: dict[str, KeySet] = {}

    def average(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """Returns the gradients to apply: of watched tables what their policies pass on, averaged.

        Args:
            gradients: of this rank: dense, `tf.IndexedSlices` or None; None must be so on all
                ranks.
            sources: what they are the gradients of.

        Raises:
            TypeError: the gradient of a watched variable is dense.
        """
        tables = [None if self._store is None else self._store.table_of(s) for s in sources]
        passed = [
            self._withhold(self._share(gradient), table)
            for gradient, table in zip(gradients, tables, strict=True)
        ]
        if self._comm.size == 1:
            return passed
        averaged = list(passed)
        dense: dict[tf.DType, list[int]] = {}
        sparse = [i for i, gradient in enumerate(passed) if isinstance(gradient, tf.IndexedSlices)]
        for index, (gradient, source) in enumerate(zip(passed, sources, strict=True)):
            # An anchor's is 0, and there when rows have been exchanged: nothing else waits for it.
            is_anchor = hasattr(source, "slipstream_anchor")
            if gradient is not None and index not in sparse and not is_anchor:
                dense.setdefault(tf.as_dtype(gradient.dtype), []).append(index)
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

    def _share(self, gradient: Any) -> Any:
        """A sparse gradient's part of the average; dense ones are divided when they are summed.

        Before it is deferred, so that a sum moves its row as far as it will when applied.
        """
        if self._comm.size == 1 or not isinstance(gradient, tf.IndexedSlices):
            return gradient
        values = gradient.values / tf.cast(self._comm.size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)

    def _kind_of(self, table: str | None) -> Any:
        """What rows are counted as: as deferred ones while any of the table's may be."""
        if self._store is None or table is None:
            return "gradients"
        deferred, gradients = (
            tf.constant(KINDS.index(kind), tf.int64) for kind in ("deferred", "gradients")
        )
        return tf.where(self._store.is_deferring(table), deferred, gradients)

    def _withhold(self, gradient: Any, table: str | None) -> Any:
        if self._store is None or table is None or gradient is None:
            return gradient
        if not isinstance(gradient, tf.IndexedSlices):
            raise TypeError(
                f"The gradient of table {table!r} is dense ({type(gradient).__name__} of shape "
                f"{gradient.shape}), so that single rows cannot be withheld. Rows must be "
                "read by tf.gather, tf.nn.embedding_lookup or keras.layers.Embedding alone: a "
                "matmul (one-hot or tied weights), a regularizer, a cast of the whole variable, "
                "or `unconnected_gradients='zero'` makes it dense. Or leave the variable out of "
                "the store."
            )
        return self._store.mask_gradients(table, gradient)

    def _average_dense(self, gradients: Sequence[Any], name: str) -> list[tf.Tensor]:
        """In one sum, so that the order in which ranks' values are added is always the same."""
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
        # Of two ranks, as many bytes either way; a gather takes fewer messages, and goes together
        # with that of the rows.
        sent = tf.reshape(tf.bitcast(flat, tf.uint8), [-1])
        both = tf.reshape(self._comm.gather(sent, "dense", name), [2, -1, flat.dtype.size])
        first, second = tf.unstack(tf.bitcast(both, flat.dtype))
        return first + second

    def _add_rows(
        self, gradients: Sequence[tf.IndexedSlices], kinds: list[Any]
    ) -> list[tf.IndexedSlices]:
        """The sums of all ranks' rows of each key; all gradients travel in one message."""
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
        """The sum of each index's rows, in their order; Horovod would send them all."""
        device = slices.values.device or "CPU:0"
        nothing = self._nothing.setdefault(device, KeySet(device))
        return mask_gradients(slices, nothing).slices


def _row_floats(gradient: tf.IndexedSlices) -> int:
    """How many values a row of a gradient has."""
    count = gradient.values.shape[1:].num_elements()
    if count is None:
        shape = tf.get_static_value(gradient.dense_shape)
        count = None if shape is None else math.prod(int(size) for size in shape[1:])
    if count is None:
        allowed = "a shape that is known but for its first size"
        raise invalid("gradient", gradient.values.shape, "an exchange between ranks", allowed)
    return int(count)


def store_of(watched: Any, place: str) -> VariableStore:
    """Returns the variable store that `watched` is or has as its `store`.

    Raises:
        ValueError: there is none.
    """
    found = getattr(watched, "store", watched)
    if not isinstance(found, VariableStore):
        allowed = "a VariableStore, or an object that has one as its `store`"
        raise invalid("store", type(found).__name__, place, allowed)
    return found


class DistributedGradientTape:
    """Wraps a `tf.GradientTape`; use it in its place, eagerly or in a `tf.function`.

        store = VariableStore({"item": layer.embeddings})
        with DistributedGradientTape(tf.GradientTape(), store) as tape:
            loss = ...
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    Gradients of the store's variables come back with ascending indices, each once, without the
    saturated keys; accesses and rows are counted in the store. Other gradients are untouched. The
    saturated keys are read at run time: a new set retraces nothing.

    Where the store's policy defers, gradients come back when they are due, as the sum of a row's
    gradients: of this batch's rows or others. After the last step, `flush_deferred(store,
        optimizer, comm)` applies what is left. How far a sum would move its row is decided before
        the optimizer applies it, by its state: build it first
        (`optimizer.build(model.trainable_variables)`).

    With several ranks (`comm`) all gradients come back averaged over them: sparse ones are summed
    per key and masked, or deferred by each rank, before they are sent. The average is that of the
    ranks' losses: scale the loss with `scale_loss` where their batches differ in size. Every rank
    must call `gradient` at every step, with an empty batch if it has no inputs.

    What the optimizer does with rows that are absent is the optimizer's matter. Rows and slots of
    masked keys stay bit for bit what they were with

    - Keras 3: `SGD` without momentum and `Adagrad`, with gradient clipping too;
    - `tf.compat.v1.train`: `GradientDescentOptimizer`, `MomentumOptimizer`, `AdagradOptimizer`,
      `RMSPropOptimizer`, `FtrlOptimizer`, `AdadeltaOptimizer` and the proximal ones. They take
      tf.Variables: of a Keras variable, its `value`.

    They do not with Keras 3's others, which make sparse gradients dense and so see zeros: slots
    decay, and with momentum of any kind (`SGD(momentum=...)`, `Adam`, `AdamW`, `Adamax`, `Nadam`,
    `Lion`, `Lamb`, `Muon`) the rows move too; `Ftrl` sets rows without a gradient so far to zero.
    The same holds for `tf.compat.v1.train.AdamOptimizer`, and for `weight_decay`, `use_ema` and
    `gradient_accumulation_steps` of any Keras optimizer. Clipping by norm sees only the rows that
    are left. A deferred sum is applied as one gradient: with SGD, the row ends where it would have.

    Keras 3's `Adagrad` squares the rows of one key apart if it is given them apart, as a plain tape
    does; here it is given their sum, as `tf.compat.v1.train` and dense gradients have it.
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
            tape: not yet entered; persistent or not.
            store: a `VariableStore`, or an object that has one as its `store`; None: nothing is
                withheld.
            comm: the ranks, from `init`; None: gradients stay in this process.
            wire_dtype: of sparse rows on their way, one of `link.WIRE_DTYPES`, or "auto".

        Raises:
            ValueError: the tape is no `tf.GradientTape`, there is no such store, or neither a store
                nor ranks are given.
        """
        place = "DistributedGradientTape"
        if not isinstance(tape, tf.GradientTape):
            raise invalid("tape", type(tape).__name__, place, "a tf.GradientTape")
        if store is None and comm is None:
            raise invalid("store", None, place, "a VariableStore, unless comm is given")
        self._tape = tape
        self._exchange = GradientExchange(
            comm or SingleProcess(),
            None if store is None else store_of(store, place),
            wire_dtype,
            _OF_TAPES,
        )

    def __enter__(self) -> "DistributedGradientTape":
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        # `watch`, `stop_recording`, `reset`, `jacobian`, ... are the tape's own.
        if name == "_tape":  # before __init__, e.g. in copy.copy
            raise AttributeError(name)
        return getattr(self._tape, name)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """See `tf.GradientTape.gradient`; those of the store's variables may be withheld.

        Every call counts the accesses of its gradients: with a persistent tape, call it once a
        step for the variables of the store.

        Args:
            target: tensor or structure of tensors to differentiate.
            sources: tensors, tf.Variables or Keras variables, in any structure.
            output_gradients: of each target; default: ones.
            unconnected_gradients: what a source without a path to the target gets: None or zeros.

        Returns:
            Gradients in the structure of `sources`.

        Raises:
            TypeError: the gradient of a variable of the store is dense.
        """
        gradients = self._tape.gradient(target, sources, output_gradients, unconnected_gradients)
        exchanged = self._exchange.average(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, exchanged)
