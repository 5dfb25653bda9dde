"""Applies what a `VariableStore` holds back. In: store, optimizer, ranks. Out: no held sums."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from slipstream_tf._compat import tensorflow_variable
from slipstream_tf.distributed.averaging import GradientExchange, store_of
from slipstream_tf.distributed.comm import Communicator, SingleProcess
from slipstream_tf.distributed.exchange import Names
from slipstream_tf.errors import invalid

_NAMES = Names("flush_held")


def flush_held(store: Any, optimizer: Any, comm: Communicator | None = None) -> int:
    """Applies all gradient sums that are held back, each as one gradient; a collective, eager.

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
            What is held stays held then.
    """
    found = store_of(store, "flush_held")
    if found is None:
        raise invalid("store", None, "flush_held", "a VariableStore")
    # Policies, and so this, are the same on all ranks.
    deferring = [t.name for t in found.tables if found.is_deferring(t.name).numpy()]
    if not deferring:
        return 0
    if getattr(optimizer, "gradient_accumulation_steps", None):
        steps = optimizer.gradient_accumulation_steps
        raise invalid("gradient_accumulation_steps", steps, "flush_held", "None")
    of_optimizer = getattr(optimizer, "slipstream_comm", None)
    comm = comm or of_optimizer or SingleProcess()
    if of_optimizer is not None and of_optimizer.size != comm.size:
        allowed = f"the {of_optimizer.size} rank(s) of the optimizer"
        raise invalid("comm", f"{comm.size} rank(s)", "flush_held", allowed)
    held = found.pending()
    own = tf.constant([held[name] for name in deferring], tf.int64)
    pending = comm.sum(own, "control", _NAMES.of("pending")).numpy()
    names = [name for name, count in zip(deferring, pending, strict=True) if count]
    if not names:
        return 0
    variables = [found.variable(name) for name in names]
    _require_known(optimizer, variables)
    found.let_go()
    nothing = [
        tf.IndexedSlices(tf.zeros([0, v.shape[1]]), tf.zeros([0], tf.int64), tf.constant(v.shape))
        for v in variables
    ]
    sums = GradientExchange(comm, found, "float32", _NAMES).average(nothing, variables)
    _apply(optimizer, sums, variables)
    return int(pending.sum())


def _apply(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
    apply = getattr(optimizer, "apply_averaged", None) or getattr(optimizer, "apply", None)
    if apply is None:
        # An optimizer of tf.compat.v1.train.
        inner = map(tensorflow_variable, variables)
        optimizer.apply_gradients(zip(gradients, inner, strict=True))
        return
    apply(gradients, variables)
    optimizer.iterations.assign_sub(1)


def _require_known(optimizer: Any, variables: list[Any]) -> None:
    """Refuses a Keras optimizer that was built without one of the variables."""
    known = getattr(optimizer, "_trainable_variables_indices", None)
    for variable in variables:
        if known is not None and optimizer.built and optimizer._var_key(variable) not in known:
            allowed = "variables that the optimizer was built with, as they were given to the store"
            raise invalid("optimizer", type(optimizer).__name__, "flush_held", allowed)
