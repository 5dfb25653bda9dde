"""FTRL-proximal."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from slipstream_tf.errors import invalid
from slipstream_tf.optimizers.base import SparseOptimizer


@dataclasses.dataclass(frozen=True)
class Ftrl(SparseOptimizer):
    """`keras.optimizers.Ftrl` on the rows of a batch (McMahan et al., KDD 2013).

    With `l1_regularization_strength` values that do little become 0. With a rate of 0, by which
    Keras divides, nothing changes.

    A row is computed anew from sums over all its gradients, times the rate. So a rate that falls
    shrinks the rows themselves: it follows no other optimizer's. And a row that comes without these
    sums, as one that was written or loaded without slots, is forgotten by its next step, as far as
    the initial accumulator is large beside its gradient.

    Attributes:
        learning_rate: factor of every step; see `SparseOptimizer`. A schedule scales the rows, too.
        follow: False: see above.
        learning_rate_power: how the rate falls with the accumulator, at most 0; 0: not at all.
        initial_accumulator_value: of every element of a new row, above 0. Keras's is 0.1, beside
            which the small gradients of a mean loss hardly move rows (see `Adagrad`).
        l1_regularization_strength: at least 0.
        l2_regularization_strength: at least 0.
        l2_shrinkage_regularization_strength: at least 0; of the row as it is, in its gradient.
        beta: at least 0; added to the accumulator's root.
    """

    learning_rate: Any = 0.1
    follow: bool = dataclasses.field(default=False, kw_only=True)
    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 1e-10
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    l2_shrinkage_regularization_strength: float = 0.0
    beta: float = 0.0
    rule: ClassVar[str] = "ftrl"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.follow:
            allowed = "False: the rows of this rule shrink with the rate"
            raise invalid("follow", True, "Ftrl", allowed)
        if self.weight_decay is not None:
            allowed = "None: its rows are computed anew; l2_regularization_strength is theirs"
            raise invalid("weight_decay", self.weight_decay, "Ftrl", allowed)
        self._require("learning_rate_power", float("-inf"), maximum=0.0)
        self._require("initial_accumulator_value", 0.0, open_minimum=True)
        strengths = ("l1", "l2", "l2_shrinkage")
        for name in (*(f"{kind}_regularization_strength" for kind in strengths), "beta"):
            self._require(name, 0.0)

    def initial_slots(self, dim: int) -> np.ndarray:
        sums = np.full(dim, self.initial_accumulator_value, np.float32)
        return np.concatenate([sums, np.zeros(dim, np.float32)])
