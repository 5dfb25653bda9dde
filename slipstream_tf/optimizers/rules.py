"""The optimizers of embedding rows. Each one has a struct in `cc_ops/core/update/rules/`."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from slipstream_tf._utils.errors import invalid, require_choice
from slipstream_tf.optimizers.base import SparseOptimizer

BIAS_CORRECTIONS = ("table", "row")


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


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator per row: accumulator += mean(gradient^2 over the row)."""

    rule: ClassVar[str] = "rowwise_adagrad"

    def initial_slots(self, dim: int) -> np.ndarray:
        return np.full(1, self.initial_accumulator_value, np.float32)


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


@dataclasses.dataclass(frozen=True)
class AdamW(Adam):
    """`Adam` with a `weight_decay` of 0.004, the default of `keras.optimizers.AdamW`.

    The rows of a batch decay. Keras's decays all of a table in each step, as with `decay="all"`.
    """

    weight_decay: float | None = dataclasses.field(default=0.004, kw_only=True)
    rule: ClassVar[str] = "adamw"


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
