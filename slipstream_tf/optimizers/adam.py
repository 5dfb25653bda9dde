"""Adam, lazily."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from slipstream_tf.errors import require_choice
from slipstream_tf.optimizers.base import SparseOptimizer

BIAS_CORRECTIONS = ("table", "row")


@dataclasses.dataclass(frozen=True)
class Adam(SparseOptimizer):
    """Lazy Adam: moments of rows absent from a batch do not decay, and the rows do not move.

    Epsilon is outside the square root and uncorrected, as in Keras. A row that is in every batch
    moves as by `keras.optimizers.Adam`.

    Attributes:
        learning_rate: factor of every step; see `SparseOptimizer`.
        beta_1: decay of the first moment per update of the row, 0 to below 1.
        beta_2: decay of the second moment per update of the row, 0 to below 1.
        epsilon: added to the root of the second moment, above 0.
        bias_correction: "table": by the number of updates of the table, as
            `tf.compat.v1.train.AdamOptimizer` does: first steps of a row that comes late are
            longer. "row": by those of the row, which takes two more values beside each.
    """

    learning_rate: Any = 0.003
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    bias_correction: str = "table"
    rule: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_below_1("beta_1", "beta_2")
        self._require("epsilon", 0.0, open_minimum=True)
        require_choice("bias_correction", self.bias_correction, BIAS_CORRECTIONS, "Adam")

    @property
    def _is_by_row(self) -> bool:
        return self.bias_correction == "row"

    def op_rule(self) -> tuple[str, tuple[float, ...]]:
        rule = "adam_per_row" if self._is_by_row else "adam"
        return rule, (self.beta_1, self.beta_2, self.epsilon)

    @property
    def layout(self) -> str:
        return "AdamPerRow" if self._is_by_row else "Adam"

    def initial_slots(self, dim: int) -> np.ndarray:
        return np.zeros(2 * dim + (2 if self._is_by_row else 0), np.float32)
