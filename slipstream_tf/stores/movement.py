"""How far an optimizer would move rows by their deferred gradients. In: sums. Out: lengths.

Known of optimizers whose step follows from one gradient and the state of its row: SGD without
momentum, and Adagrad.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Movements:
    """The optimizers of one kind, and what is known of their steps.

    Attributes:
        known: the optimizers whose movement is known, for errors.
    """

    known: str

    def unknown(self, optimizer: Any) -> str | None:
        """Returns what an optimizer is, if the movement under it is not known, else None.

        Args:
            optimizer: None: there is none.
        """
        raise NotImplementedError

    def learning_rate(self, optimizer: Any) -> tf.Tensor:
        """Returns the rate, a scalar, by which one of the `known` moves rows now."""
        raise NotImplementedError

    def rule(self, optimizer: Any) -> str | None:
        """Returns "SGD" or "Adagrad", or None for an optimizer that has neither's step."""
        raise NotImplementedError

    def _by_adagrad(
        self, optimizer: Any, variable: Any, keys: tf.Tensor, sums: tf.Tensor
    ) -> tf.Tensor:
        """The largest of a row's steps under Adagrad, float32 [n], by a learning rate of 1."""
        raise NotImplementedError

    def of(self, optimizer: Any, variable: Any, keys: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
        """Returns float32 [n]: how far applying each sum would move a value of its row at most.

        Weight decay moves rows besides, and clipping may leave them closer.

        Args:
            optimizer: one of the `known`.
            variable: that it updates.
            keys: int64 [n], rows of the variable.
            sums: float32 [n, dim], summed gradients.

        Raises:
            ValueError: the optimizer has no state for the variable yet.
        """
        if self.rule(optimizer) == "SGD":
            most = tf.reduce_max(tf.abs(sums), axis=1)
        else:
            most = self._by_adagrad(optimizer, variable, keys, sums)
        return self.learning_rate(optimizer) * most


class KerasMovements(Movements):
    """Optimizers of Keras 3, wrapped by `distributed.DistributedOptimizer` or not."""

    known = "keras.optimizers.SGD without momentum, or keras.optimizers.Adagrad"
    # With these, gradients are not those that the step is made of.
    _refused_settings = ("gradient_accumulation_steps", "loss_scale_factor")

    def unknown(self, optimizer: Any) -> str | None:
        """See `Movements.unknown`."""
        name = type(optimizer).__name__
        if optimizer is None:
            return "no optimizer"
        if self.rule(optimizer) is None:
            return name
        if getattr(optimizer, "momentum", 0):
            return f"{name} with momentum"
        for setting in self._refused_settings:
            if getattr(optimizer, setting, None):
                return f"{name} with {setting}"
        return None

    def learning_rate(self, optimizer: Any) -> tf.Tensor:
        """See `Movements.learning_rate`."""
        return tf.cast(optimizer.learning_rate, tf.float32)

    def rule(self, optimizer: Any) -> str | None:
        """See `Movements.rule`; a subclass of Keras's optimizers may have a step of its own."""
        for base in type(optimizer).__mro__:
            if "update_step" in vars(base):
                is_known = base.__name__ in ("SGD", "Adagrad")
                is_keras = base.__module__.split(".")[0] == "keras"
                return base.__name__ if is_keras and is_known else None
        return None

    def _by_adagrad(
        self, optimizer: Any, variable: Any, keys: tf.Tensor, sums: tf.Tensor
    ) -> tf.Tensor:
        if not optimizer.built:
            raise ValueError(
                f"The optimizer {type(optimizer).__name__} of a VariableStore has no state yet, so "
                "that nobody knows how far it would move a row. Call "
                "optimizer.build(model.trainable_variables) before the first step."
            )
        accumulator = optimizer._accumulators[optimizer._get_variable_index(variable)]
        accumulated = tf.gather(getattr(accumulator, "value", accumulator), keys)
        squares = tf.square(sums)
        denominators = accumulated + squares + optimizer.epsilon
        return tf.sqrt(tf.reduce_max(squares / denominators, axis=1))
