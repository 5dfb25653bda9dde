"""Gradient descent, with or without momentum."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from slipstream_tf.errors import invalid
from slipstream_tf.optimizers.base import SparseOptimizer


@dataclasses.dataclass(frozen=True)
class SGD(SparseOptimizer):
    """row -= learning_rate * gradient; with momentum as `keras.optimizers.SGD` on a batch's rows.

    velocity = momentum * velocity - learning_rate * gradient; row += velocity, or with `nesterov`
    row += momentum * velocity - learning_rate * gradient. Of rows that a batch lacks nothing
    changes: they do not move on, as Keras's would, and keep their velocity.

    Gradients of a mean loss carry the factor 1/batch, and a row is in few inputs of a batch: rates
    of 10 to 100 train click models at batches of 1,024. The default is that of Keras.

    Attributes:
        learning_rate: factor of every step; see `SparseOptimizer`.
        momentum: of the velocity per update of the row, 0 to below 1; 0: there is none.
        nesterov: whether the row moves on by the velocity that it will have.
    """

    learning_rate: Any = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    rule: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_below_1("momentum")
        if not isinstance(self.nesterov, bool):
            raise invalid("nesterov", self.nesterov, "SGD", "True or False")
        if self.nesterov and not self.momentum:
            raise invalid("nesterov", True, "SGD without momentum", "False")

    def op_rule(self) -> tuple[str, tuple[float, ...]]:
        if not self.momentum:
            return "sgd", ()
        return "momentum", (self.momentum, float(self.nesterov))

    def op_transforms(self) -> tuple[float, ...]:
        clips = self.clip_value is not None or self.clip_norm is not None
        if self.decay == "batch" or self.l2 is None or self.momentum or clips:
            return super().op_transforms()
        # The same without a pass over all rows: what the penalty takes is a share of the row.
        decay = 2.0 * self.l2 + (self.weight_decay or 0.0)
        return dataclasses.replace(self, l2=None, weight_decay=decay).op_transforms()

    @property
    def layout(self) -> str:
        return "Momentum" if self.momentum else "SGD"

    def initial_slots(self, dim: int) -> np.ndarray:
        return np.zeros(dim if self.momentum else 0, np.float32)
