"""A Keras optimizer that averages gradients over the ranks; what a store has deferred at the end.

In: a Keras optimizer, a `VariableStore`, the ranks. Out: the same optimizer, which exchanges what
it is given.
"""

from typing import Any

import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.comm import Communicator, Names, SingleProcess
from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf.distributed.gradients import GradientExchange, store_of

_OF_FLUSHES = Names("flush_deferred")


def DistributedOptimizer(
    optimizer: Any,
    comm: Communicator,
    store: Any = None,
    wire_dtype: str = "float32",
    backward_passes_per_step: int = 1,
) -> Any:
    """Returns a Keras optimizer that averages gradients over the ranks before it applies them.

        model.compile(slip.distributed.DistributedOptimizer(keras.optimizers.Adam(), comm), ...)

    It is of a subclass of the optimizer's class, with the same configuration and without state, and
    is saved as the optimizer is. Rows of the native store are updated in the backward pass and not
    by it.

    Args:
        optimizer: a Keras optimizer that has no state yet.
        comm: the ranks, from `init`.
        store: a `VariableStore`, or an object that has one as its `store`, whose gradients are
            masked or deferred before they are sent; it then knows the optimizer (see
            `VariableStore.use_optimizer`). None: nothing is withheld.
        wire_dtype: of sparse rows on their way: "float32", "bfloat16", "float16", "int8" with a
            scale per row, or "auto", what is soonest on the ranks' link
            (a collective).
        backward_passes_per_step: steps of `fit` whose gradients each rank adds up before they are
            exchanged and applied, as their mean (Horovod's `average_aggregated_gradients=True`):
            the optimizer's `gradient_accumulation_steps`. Rows take part with apply="step".

    Raises:
        ValueError: this is no Keras 3 optimizer, it was used before, it accumulates over another
            number of steps, or the store defers by movement, which is not known under it.
    """
    place = "DistributedOptimizer"
    base = type(optimizer)
    if not hasattr(optimizer, "apply") or not hasattr(optimizer, "get_config"):
        raise invalid("optimizer", base.__name__, place, "a Keras 3 optimizer")
    if getattr(optimizer, "built", False):
        raise invalid("optimizer", "one that was used", place, "one without state")
    require_integer("backward_passes_per_step", backward_passes_per_step, 1, None, place)
    config = optimizer.get_config()
    if backward_passes_per_step > 1:
        accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
        if accumulates not in (None, backward_passes_per_step):
            allowed = f"None, or as many as backward_passes_per_step={backward_passes_per_step}"
            raise invalid("gradient_accumulation_steps", accumulates, place, allowed)
        config["gradient_accumulation_steps"] = backward_passes_per_step
    found = None if store is None else store_of(store, place)
    exchange = GradientExchange(comm, found, wire_dtype, Names("optimizer"))

    class Distributed(base):  # type: ignore[misc, valid-type]
        """The optimizer, with gradients averaged first."""

        slipstream_comm = comm
        # Those whose gradients are averaged when they have been added up, in a step that updates.
        _late: "list[Any] | None" = None

        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            """Averages, then applies; see the optimizer's class."""
            variables = trainable_variables
            if variables is None:
                variables = self._trainable_variables
            elif not self.built:
                # As the base would below: what may wait is decided by the optimizer's state.
                with _compat.require_keras().name_scope(self.name, caller=self):
                    self.build(list(variables))
            given, variables = list(grads), list(variables)
            pairs = [(g, v) for g, v in zip(given, variables, strict=True) if g is not None]
            # Keras adds up dense gradients alone, and none that overwrite their variables.
            is_plain = not any(
                isinstance(g, tf.IndexedSlices) or getattr(v, "overwrite_with_gradient", False)
                for g, v in pairs
            )
            if self.gradient_accumulation_steps and comm.size > 1 and is_plain:
                # Past Keras, which would track what it is given.
                object.__setattr__(self, "_late", [v for _, v in pairs])
                try:
                    return super().apply(given, trainable_variables)
                finally:
                    object.__setattr__(self, "_late", None)
            return super().apply(exchange.average(given, variables), trainable_variables)

        def _clip_gradients(self, grads: Any) -> Any:
            """Averages what was added up; then clips. Keras calls it in steps that update."""
            if self._late is not None:
                count = len(self._late)
                # Behind those of weights a `StepOptimizer` has what rows are clipped by, exchanged.
                grads = [*exchange.average(list(grads[:count]), self._late), *grads[count:]]
            return super()._clip_gradients(grads)

        def apply_averaged(self, grads: Any, trainable_variables: Any) -> Any:
            """Applies gradients that are averaged already."""
            return super().apply(grads, trainable_variables)

    # Saved, and shown, as the optimizer itself.
    Distributed.__name__, Distributed.__qualname__ = base.__name__, base.__qualname__
    Distributed.__module__ = base.__module__
    made = Distributed.from_config(config)
    _compat.copy_exclusions(optimizer, made)
    if found is not None:
        found.use_optimizer(made)
    return made


def flush_deferred(store: Any, optimizer: Any, comm: Communicator | None = None) -> int:
    """Applies all deferred gradients of a store, each sum as one gradient; a collective, eager.

    Call it at the end of training, and before rows are saved; in Keras's `fit`, the callbacks do.
    The sums of all ranks travel in float32, and the optimizer takes a step of the variables that
    have any: other rows of theirs see no gradient (see `DistributedGradientTape` for the optimizers
    that move such rows). Its `iterations` stay as they are.

    Args:
        store: a `VariableStore`, or an object that has one as its `store`.
        optimizer: that updates the variables; wrapped by `DistributedOptimizer` or not.
        comm: the ranks. None: those of the optimizer, if it is wrapped; else this process alone.

    Returns:
        How many sums were applied, of all ranks.

    Raises:
        ValueError: there is no such store; the optimizer is of other ranks, does not know the
            variables, or has `gradient_accumulation_steps`, so that the sums would wait in it.
            What is deferred stays so then.
    """
    found = store_of(store, "flush_deferred")
    # Policies, and so this, are the same on all ranks.
    deferring = [t.name for t in found.tables if found.is_deferring(t.name).numpy()]
    if not deferring:
        return 0
    if getattr(optimizer, "gradient_accumulation_steps", None):
        steps = optimizer.gradient_accumulation_steps
        raise invalid("gradient_accumulation_steps", steps, "flush_deferred", "None")
    of_optimizer = getattr(optimizer, "slipstream_comm", None)
    comm = comm or of_optimizer or SingleProcess()
    if of_optimizer is not None and of_optimizer.size != comm.size:
        allowed = f"the {of_optimizer.size} rank(s) of the optimizer"
        raise invalid("comm", f"{comm.size} rank(s)", "flush_deferred", allowed)
    own = found.deferred_rows()
    counts = tf.constant([own[name] for name in deferring], tf.int64)
    deferred = comm.sum(counts, "control", _OF_FLUSHES.of("pending")).numpy()
    if not deferred.any():
        return 0
    names = [name for name, count in zip(deferring, deferred, strict=True) if count]
    variables = [found.variable(name) for name in names]
    known: Any = getattr(optimizer, "_trainable_variables_indices", None)
    is_built = known is not None and optimizer.built
    if is_built and not {optimizer._var_key(variable) for variable in variables} <= set(known):
        allowed = "variables that the optimizer was built with, as they were given to the store"
        raise invalid("optimizer", type(optimizer).__name__, "flush_deferred", allowed)
    found.flush_with_next_gradients()
    nothing = [
        tf.IndexedSlices(tf.zeros([0, v.shape[1]]), tf.zeros([0], tf.int64), tf.constant(v.shape))
        for v in variables
    ]
    sums = GradientExchange(comm, found, "float32", _OF_FLUSHES).average(nothing, variables)
    apply = getattr(optimizer, "apply_averaged", None) or getattr(optimizer, "apply", None)
    if apply is not None:
        apply(sums, variables)
        optimizer.iterations.assign_sub(1)
    else:
        # An optimizer of tf.compat.v1.train.
        inner = map(_compat.tensorflow_variable, variables)
        optimizer.apply_gradients(zip(sums, inner, strict=True))
    return int(deferred.sum())
