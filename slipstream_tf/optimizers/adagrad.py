"""Adagrad, with a sum of squared gradients for each value."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from slipstream_tf.optimizers.base import SparseOptimizer


@dataclasses.dataclass(frozen=True)
class Adagrad(SparseOptimizer):
    """Keras's Adagrad on the rows of a batch, with defaults for click models.

    accumulator += gradient^2; row -= learning_rate * gradient / sqrt(accumulator + epsilon).

    Gradients of a mean loss are small: they carry the factor 1/batch. Beside the initial
    accumulator of `keras.optimizers.Adagrad` they hardly move rows. For its steps, to the bit where
    each key comes once in a batch, give `Adagrad(rate, initial_accumulator_value=0.1)`. (Keras adds
    up the squares of a key's gradients one by one, these rules the square of their sum.)

    Epsilon shortens the first steps of rare rows. Near 0 they are as long as the learning rate,
    whatever their gradients, which costs AUC; tune it between 1e-8 and 1e-5 with the rate.

    Attributes:
        learning_rate: factor of every step; see `SparseOptimizer`.
        initial_accumulator_value: of every element of a new row, at least 0.
        epsilon: added to the accumulator below the root, above 0.
    """

    learning_rate: Any = 0.1
    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-7
    rule: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("initial_accumulator_value", 0.0)
        self._require("epsilon", 0.0, open_minimum=True)

    def initial_slots(self, dim: int) -> np.ndarray:
        return np.full(dim, self.initial_accumulator_value, np.float32)
