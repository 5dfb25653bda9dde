"""How far an optimizer would move rows of SOK's dynamic variables. In: gradients. Out: lengths.

Known of optimizers whose step follows from one gradient and the state of its row: SGD without
momentum, and Adagrad, whose accumulated squares are read where they are: in SOK's tables.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from slipstream_tf.stores.sok import slots_of

KNOWN = (
    "tf.compat.v1.train.GradientDescentOptimizer or AdagradOptimizer, sok.SGD, or "
    "tf_keras.optimizers.legacy.SGD without momentum or Adagrad"
)
_RULES = {
    "GradientDescentOptimizer": "SGD",
    "SGD": "SGD",
    "AdagradOptimizer": "Adagrad",
    "Adagrad": "Adagrad",
}
# Of classes of the same names, whose steps are these: TensorFlow's, Keras's and SOK's own.
_MAKERS = ("tensorflow", "keras", "tf_keras", "sparse_operation_kit")
_SLOT = "accumulator"


def unknown_optimizer(optimizer: Any) -> str | None:
    """Returns what an optimizer is, if the movement under it is not known, else None.

    Args:
        optimizer: what `wrap_optimizer` returned, or None.
    """
    if optimizer is None:
        return "no optimizer"
    inner = _inner(optimizer)
    kind = type(inner)
    if kind.__name__ not in _RULES or kind.__module__.split(".")[0] not in _MAKERS:
        return kind.__name__
    if getattr(inner, "_momentum", False):
        return f"{kind.__name__} with momentum"
    return None


def prepare(optimizer: Any, variables: list[Any]) -> None:
    """Makes what `movement` reads, which a graph cannot make.

    Args:
        optimizer: one of the `KNOWN`.
        variables: `sok.DynamicVariable`s that it updates.
    """
    inner = _inner(optimizer)
    with tf.init_scope():
        if hasattr(inner, "_create_hypers"):
            inner._create_hypers()
        if _rule_of(optimizer) == "Adagrad":
            optimizer._create_slots(variables)


def movement(optimizer: Any, variable: Any, keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
    """Returns float32 [n]: how far applying each sum would move a value of its row at most.

    Clipping may leave rows closer. SOK's read makes slots that are missing, as the optimizer's
    first update of the key would, with the same values: they are no more keys than the variable
    has.

    Args:
        optimizer: one of the `KNOWN`, prepared.
        variable: a `sok.DynamicVariable` that it updates.
        keys: int64 [n], of this rank.
        sums: float32 [n, dim], summed gradients.
    """
    if _rule_of(optimizer) == "SGD":
        steps = tf.abs(sums)
    else:
        accumulated = slots_of(optimizer, variable)[_SLOT].sparse_read(keys)
        epsilon = getattr(_inner(optimizer), "epsilon", 0.0)
        roots = tf.sqrt(accumulated + tf.square(sums)) + epsilon
        steps = tf.math.divide_no_nan(tf.abs(sums), roots)
    return learning_rate(optimizer) * tf.reduce_max(steps, axis=1)


def learning_rate(optimizer: Any) -> tf.Tensor:
    """Returns the rate, a scalar, by which one of the `KNOWN` moves rows now."""
    inner = _inner(optimizer)
    if inner is optimizer:  # sok.SGD
        return tf.cast(optimizer.lr, tf.float32)
    if not hasattr(inner, "_get_hyper"):  # of tf.compat.v1.train
        return tf.cast(inner._call_if_callable(inner._learning_rate), tf.float32)
    # As legacy optimizers reckon it, but by the wrapper's count of updates.
    steps = tf.cast(optimizer._iterations, tf.float32)
    rate = inner._get_hyper("learning_rate", tf.float32)
    if callable(rate):
        rate = tf.cast(rate(steps), tf.float32)
    return rate / (1.0 + inner._initial_decay * steps)


def _inner(optimizer: Any) -> Any:
    """The optimizer that SOK's wrapper has; `sok.SGD` has none."""
    return getattr(optimizer, "_optimizer", optimizer)


def _rule_of(optimizer: Any) -> str:
    return _RULES[type(_inner(optimizer)).__name__]
