"""How far a Keras optimizer would move the rows of a variable. In: summed gradients. Out: lengths.

Known of optimizers whose step follows from one gradient and the state of its row: Keras 3's SGD
without momentum, and Adagrad.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

KNOWN = "keras.optimizers.SGD without momentum, or keras.optimizers.Adagrad"
_RULES = ("SGD", "Adagrad")
# Their gradients are not those that the step is made of.
_REFUSED_SETTINGS = ("gradient_accumulation_steps", "loss_scale_factor")


def unknown_optimizer(optimizer: Any) -> str | None:
    """Returns what an optimizer is, if the movement under it is not known, else None.

    Args:
        optimizer: a Keras optimizer, one wrapped by `distributed.DistributedOptimizer`, or None.
    """
    name = type(optimizer).__name__
    if optimizer is None:
        return "no optimizer"
    if _rule_of(optimizer) is None:
        return name
    if getattr(optimizer, "momentum", 0):
        return f"{name} with momentum"
    for setting in _REFUSED_SETTINGS:
        if getattr(optimizer, setting, None):
            return f"{name} with {setting}"
    return None


def movement(optimizer: Any, variable: tf.Variable, keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
    """Returns float32 [n]: how far applying each sum would move a value of its row at most.

    Weight decay moves rows besides, and clipping may leave them closer.

    Args:
        optimizer: one of the `KNOWN`.
        variable: that it updates.
        keys: int64 [n], rows of the variable.
        sums: float32 [n, dim], summed gradients.

    Raises:
        ValueError: the optimizer has no state for the variable yet.
    """
    if _rule_of(optimizer) == "SGD":
        most = tf.reduce_max(tf.abs(sums), axis=1)
    else:
        squares = tf.square(sums)
        accumulated = tf.gather(_accumulator(optimizer, variable), keys)
        denominators = accumulated + squares + optimizer.epsilon
        most = tf.sqrt(tf.reduce_max(squares / denominators, axis=1))
    return tf.cast(optimizer.learning_rate, tf.float32) * most


def _rule_of(optimizer: Any) -> str | None:
    """The name of the Keras optimizer whose step this is; a subclass may have a step of its own."""
    for base in type(optimizer).__mro__:
        if "update_step" in vars(base):
            is_keras = base.__module__.split(".")[0] == "keras"
            return base.__name__ if is_keras and base.__name__ in _RULES else None
    return None


def _accumulator(optimizer: Any, variable: tf.Variable) -> tf.Variable:
    if not optimizer.built:
        raise ValueError(
            f"The optimizer {type(optimizer).__name__} of a VariableStore has no state yet, so "
            "that nobody knows how far it would move a row. Call "
            "optimizer.build(model.trainable_variables) before the first step."
        )
    accumulator = optimizer._accumulators[optimizer._get_variable_index(variable)]
    return getattr(accumulator, "value", accumulator)
