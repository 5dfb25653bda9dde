"""Adam with one second moment for a row."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from slipstream_tf.optimizers.base import SparseOptimizer


@dataclasses.dataclass(frozen=True)
class RowWiseAdam(SparseOptimizer):
    """Lazy Adam with one second moment per row: it decays to mean(gradient^2 over the row).

    FBGEMM calls it PARTIAL_ROWWISE_ADAM. It takes dim + 1 values beside a row, where `Adam` takes
    2 * dim. Bias correction is by the updates of the table.

    Attributes:
        learning_rate: factor of every step; see `SparseOptimizer`.
        beta_1: decay of the first moment per update of the row, 0 to below 1.
        beta_2: decay of the second moment per update of the row, 0 to below 1.
        epsilon: added to the root of the second moment, above 0.
    """

    learning_rate: Any = 0.003
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    rule: ClassVar[str] = "rowwise_adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_below_1("beta_1", "beta_2")
        self._require("epsilon", 0.0, open_minimum=True)

    def initial_slots(self, dim: int) -> np.ndarray:
        return np.zeros(dim + 1, np.float32)
