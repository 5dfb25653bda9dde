"""A gradient tape that masks the sparse gradients of saturated keys.

In: a `tf.GradientTape` and a `VariableStore`. Out: its gradients, of which those of watched tables
have lost the rows of saturated keys. Method: Slipstream, arXiv 2404.04270, with rows compacted away
before the optimizer sees them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from slipstream_tf.errors import invalid
from slipstream_tf.stores.variable import VariableStore


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

    It works in one process: gradients are neither averaged nor exchanged between processes.

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
    are left.

    Keras 3's `Adagrad` squares the rows of one key apart if it is given them apart, as a plain tape
    does; here it is given their sum, as `tf.compat.v1.train` and dense gradients have it.
    """

    def __init__(self, tape: tf.GradientTape, store: Any):
        """Wraps a tape.

        Args:
            tape: not yet entered; persistent or not.
            store: a `VariableStore`, or an object that has one as its `store`.

        Raises:
            ValueError: the tape is no `tf.GradientTape`, or there is no such store.
        """
        if not isinstance(tape, tf.GradientTape):
            allowed = "a tf.GradientTape"
            raise invalid("tape", type(tape).__name__, "DistributedGradientTape", allowed)
        found = getattr(store, "store", store)
        if not isinstance(found, VariableStore):
            allowed = "a VariableStore, or an object that has one as its `store`"
            raise invalid("store", type(found).__name__, "DistributedGradientTape", allowed)
        self._tape = tape
        self._store = found

    def __enter__(self) -> DistributedGradientTape:
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
        """See `tf.GradientTape.gradient`; sparse gradients of the store's variables are masked.

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
        masked = [
            self._masked(source, gradient)
            for source, gradient in zip(
                tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True
            )
        ]
        return tf.nest.pack_sequence_as(sources, masked)

    def _masked(self, source: Any, gradient: Any) -> Any:
        table = self._store.table_of(source)
        if table is None or gradient is None:
            return gradient
        if not isinstance(gradient, tf.IndexedSlices):
            raise TypeError(
                f"The gradient of table {table!r} is dense ({type(gradient).__name__} of shape "
                f"{gradient.shape}), so that its saturated rows cannot be left out. Rows must be "
                "read by tf.gather, tf.nn.embedding_lookup or keras.layers.Embedding alone: a "
                "matmul (one-hot or tied weights), a regularizer, a cast of the whole variable, "
                "or `unconnected_gradients='zero'` makes it dense. Or leave the variable out of "
                "the store."
            )
        return self._store.mask_gradients(table, gradient)
