"""Adagrad with one sum for a row."""

import dataclasses
from typing import ClassVar

import numpy as np

from slipstream_tf.optimizers.adagrad import Adagrad


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator per row: accumulator += mean(gradient^2 over the row)."""

    rule: ClassVar[str] = "rowwise_adagrad"

    def initial_slots(self, dim: int) -> np.ndarray:
        return np.full(1, self.initial_accumulator_value, np.float32)
