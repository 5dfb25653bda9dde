"""A Keras optimizer for multiple ranks, and the flush of deferred gradients."""

from typing import Any

import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.comm import CollectiveNames, Communicator, SingleProcess
from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf.distributed.gradients import GradientExchange, store_of

_FLUSH_NAMES = CollectiveNames("flush_deferred")


def DistributedOptimizer(
    optimizer: Any,
    comm: Communicator,
    store: Any = None,
    wire_dtype: str = "float32",
    backward_passes_per_step: int = 1,
) -> Any:
    """Returns a Keras optimizer that averages gradients over the ranks.

    The result is an instance of a subclass of the optimizer's class, with the same configuration
    and without state. It is saved like the original class.

    Note: rows of the native store are updated in the backward pass, not by this optimizer.

    Example:

    >>> comm = slip.distributed.init()
    >>> optimizer = slip.distributed.DistributedOptimizer(keras.optimizers.SGD(0.5), comm)
    >>> variable = keras.Variable(3.0)
    >>> _ = optimizer.apply([tf.constant(2.0)], [variable])
    >>> float(variable.numpy())
    2.0

    Args:
        optimizer: A Keras optimizer without state.
        comm: The communicator from `init`.
        store: A `VariableStore`, or an object with an attribute `store` of this type. Its gradients
            are masked or deferred before they are sent. The store then uses this optimizer (see
            `VariableStore.use_optimizer`). None means that no gradient is masked or deferred.
        wire_dtype: The dtype of sparse rows in messages: "float32", "bfloat16", "float16", "int8"
            with a scale per row, or "auto" for the fastest on this network. With "auto", this
            function is a collective.
        backward_passes_per_step: The number of steps of `fit` over which each rank accumulates
            gradients before their mean is exchanged and applied, like Horovod's
            `average_aggregated_gradients=True`. It sets the optimizer's
            `gradient_accumulation_steps`. Rows of an embedding layer take part if the layer was
            created with `apply="step"`.

    Returns:
        The wrapped optimizer.

    Raises:
        ValueError: If `optimizer` is not a Keras 3 optimizer, has state, or has a different
            `gradient_accumulation_steps`, or if the store defers by movement and cannot estimate
            the movement under this optimizer.
    """
    place = "DistributedOptimizer"
    base = type(optimizer)
    if not hasattr(optimizer, "apply") or not hasattr(optimizer, "get_config"):
        raise invalid("optimizer", base.__name__, place, "a Keras 3 optimizer")
    if base.__name__ == "CombinedOptimizer":
        allowed = "a Keras 3 optimizer. Use CombinedOptimizer(DistributedOptimizer(...)) instead"
        raise invalid("optimizer", base.__name__, place, allowed)
    if getattr(optimizer, "built", False):
        allowed = "an optimizer without state. Wrap it before it is built"
        raise invalid("optimizer", f"a built {base.__name__}", place, allowed)
    require_integer("backward_passes_per_step", backward_passes_per_step, 1, None, place)
    config = optimizer.get_config()
    if backward_passes_per_step > 1:
        accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
        if accumulates not in (None, backward_passes_per_step):
            allowed = f"None or the value of backward_passes_per_step={backward_passes_per_step}"
            raise invalid("gradient_accumulation_steps", accumulates, place, allowed)
        config["gradient_accumulation_steps"] = backward_passes_per_step
    found = None if store is None else store_of(store, place)
    exchange = GradientExchange(comm, found, wire_dtype, CollectiveNames("optimizer"))

    class Distributed(base):  # type: ignore[misc, valid-type]
        """The optimizer with gradients averaged over the ranks."""

        slipstream_comm = comm
        # The variables whose accumulated gradients are averaged in a step that updates.
        _late: "list[Any] | None" = None

        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            """Averages gradients over the ranks and applies them."""
            variables = trainable_variables
            if variables is None:
                variables = self._trainable_variables
            elif not self.built:
                # The base class would build it below. Deferring needs the optimizer's state
                # earlier.
                with _compat.require_keras().name_scope(self.name, caller=self):
                    self.build(list(variables))
            given, variables = list(grads), list(variables)
            pairs = [(g, v) for g, v in zip(given, variables, strict=True) if g is not None]
            # Keras accumulates only dense gradients of variables that gradients do not overwrite.
            is_plain = not any(
                isinstance(g, tf.IndexedSlices) or getattr(v, "overwrite_with_gradient", False)
                for g, v in pairs
            )
            if self.gradient_accumulation_steps and comm.size > 1 and is_plain:
                # Bypass Keras's attribute tracking.
                object.__setattr__(self, "_late", [v for _, v in pairs])
                try:
                    return super().apply(given, trainable_variables)
                finally:
                    object.__setattr__(self, "_late", None)
            return super().apply(exchange.average(given, variables), trainable_variables)

        def _clip_gradients(self, grads: Any) -> Any:
            """Averages accumulated gradients, then clips; Keras calls it in update steps."""
            if self._late is not None:
                count = len(self._late)
                # A `CombinedOptimizer` appends values for clipping rows to the gradients of the
                # weights. They have been exchanged already.
                grads = [*exchange.average(list(grads[:count]), self._late), *grads[count:]]
            return super()._clip_gradients(grads)

        def apply_averaged(self, grads: Any, trainable_variables: Any) -> Any:
            """Applies gradients that are already averaged."""
            return super().apply(grads, trainable_variables)

    # Use the original name, so that Keras saves and shows the original class.
    Distributed.__name__, Distributed.__qualname__ = base.__name__, base.__qualname__
    Distributed.__module__ = base.__module__
    made = Distributed.from_config(config)
    _compat.copy_exclusions(optimizer, made)
    if found is not None:
        found.use_optimizer(made)
    return made


def flush_deferred(store: Any, optimizer: Any, comm: Communicator | None = None) -> int:
    """Applies all deferred gradients of a store; a collective for eager code.

    Call it at the end of training and before rows are saved. In `fit`, the callbacks call it. Each
    deferred sum is applied as one gradient and sent in float32. The optimizer takes one step for
    the variables with deferred gradients. Their other rows get no gradient (see
    `DistributedGradientTape` for the optimizers that move such rows). `optimizer.iterations` does
    not change.

    Example:

    >>> store = slip.tables.VariableStore({"item": tf.Variable(tf.zeros([4, 2]))})
    >>> slip.distributed.flush_deferred(store, keras.optimizers.SGD())
    0

    Args:
        store: A `VariableStore`, or an object with an attribute `store` of this type.
        optimizer: The optimizer of the variables, with or without `DistributedOptimizer`.
        comm: The communicator of the job. None uses the communicator of a `DistributedOptimizer`,
            or a single process for other optimizers.

    Returns:
        The number of applied sums on all ranks.

    Raises:
        ValueError: If there is no such store, or if the optimizer has another number of ranks, was
            not built with the variables, or has `gradient_accumulation_steps`, which would delay
            the sums. The deferred gradients are then unchanged.
    """
    found = store_of(store, "flush_deferred")
    # All ranks have the same policies, so they take the same branch.
    deferring = [t.name for t in found.tables if found.is_deferring(t.name).numpy()]
    if not deferring:
        return 0
    if getattr(optimizer, "gradient_accumulation_steps", None):
        steps = optimizer.gradient_accumulation_steps
        allowed = "None, because accumulation would delay the deferred gradients"
        raise invalid("gradient_accumulation_steps", steps, "flush_deferred", allowed)
    of_optimizer = getattr(optimizer, "slipstream_comm", None)
    comm = comm or of_optimizer or SingleProcess()
    if of_optimizer is not None and of_optimizer.size != comm.size:
        allowed = f"the communicator of the optimizer, which has {of_optimizer.size} rank(s)"
        raise invalid("comm", f"{comm.size} rank(s)", "flush_deferred", allowed)
    own = found.deferred_rows()
    counts = tf.constant([own[name] for name in deferring], tf.int64)
    deferred = comm.sum(counts, "control", _FLUSH_NAMES.of("pending")).numpy()
    if not deferred.any():
        return 0
    names = [name for name, count in zip(deferring, deferred, strict=True) if count]
    variables = [found.variable(name) for name in names]
    known: Any = getattr(optimizer, "_trainable_variables_indices", None)
    is_built = known is not None and optimizer.built
    if is_built and not {optimizer._var_key(variable) for variable in variables} <= set(known):
        allowed = (
            f"an optimizer that is built with the variables of the tables {names}. Call "
            "optimizer.build with the same variables as in the store"
        )
        raise invalid("optimizer", type(optimizer).__name__, "flush_deferred", allowed)
    found.flush_with_next_gradients()
    nothing = [
        tf.IndexedSlices(tf.zeros([0, v.shape[1]]), tf.zeros([0], tf.int64), tf.constant(v.shape))
        for v in variables
    ]
    sums = GradientExchange(comm, found, "float32", _FLUSH_NAMES).average(nothing, variables)
    apply = getattr(optimizer, "apply_averaged", None) or getattr(optimizer, "apply", None)
    if apply is not None:
        apply(sums, variables)
        optimizer.iterations.assign_sub(1)
    else:
        # An optimizer from `tf.compat.v1.train`.
        inner = map(_compat.tensorflow_variable, variables)
        optimizer.apply_gradients(zip(sums, inner, strict=True))
    return int(deferred.sum())
