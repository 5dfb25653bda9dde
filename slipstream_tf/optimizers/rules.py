"""Optimizers of embedding rows, with update rules in `cc_ops/core/update/rules/`."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from slipstream_tf._utils.errors import invalid, require_choice
from slipstream_tf.optimizers.base import SparseOptimizer

BIAS_CORRECTIONS = ("table", "row")


@dataclasses.dataclass(frozen=True)
class SGD(SparseOptimizer):
    """Stochastic gradient descent, optionally with momentum, on the rows of a batch.

    The update without momentum is row -= learning_rate * gradient. With momentum it is, as in
    `keras.optimizers.SGD`:

    - velocity = momentum * velocity - learning_rate * gradient
    - row += velocity, or with `nesterov` row += momentum * velocity - learning_rate * gradient

    In contrast to Keras, rows that the batch does not contain keep their value and their velocity.

    Note: the default learning rate is the default of Keras and is too low for most click models.
    Gradients of a mean loss contain the factor 1/batch, and a row occurs in few examples of a
    batch. At batches of 1,024, learning rates of 10 to 100 are common.

    Example:

    >>> slip.optimizers.SGD(10.0, momentum=0.9).momentum
    0.9

    Args:
        learning_rate: Learning rate; see `SparseOptimizer`.
        momentum: Decay of the velocity per update of the row, in [0, 1). 0 disables momentum.
        nesterov: Whether to use Nesterov momentum. Requires `momentum`.
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
            allowed = "False. Pass `momentum` > 0 with nesterov=True"
            raise invalid("nesterov", True, "SGD without momentum", allowed)

    def op_rule(self) -> tuple[str, tuple[float, ...]]:
        if not self.momentum:
            return "sgd", ()
        return "momentum", (self.momentum, float(self.nesterov))

    def op_transforms(self) -> tuple[float, ...]:
        clips = self.clip_value is not None or self.clip_norm is not None
        if self.decay == "batch" or self.l2 is None or self.momentum or clips:
            return super().op_transforms()
        # For plain SGD the penalty equals weight decay, which needs no pass over all rows.
        decay = 2.0 * self.l2 + (self.weight_decay or 0.0)
        return dataclasses.replace(self, l2=None, weight_decay=decay).op_transforms()

    @property
    def layout(self) -> str:
        return "Momentum" if self.momentum else "SGD"

    def initial_slots(self, dim: int) -> np.ndarray:
        return np.zeros(dim if self.momentum else 0, np.float32)


@dataclasses.dataclass(frozen=True)
class Adagrad(SparseOptimizer):
    """Adagrad on the rows of a batch, with defaults for click models.

    The update is accumulator += gradient^2, row -= learning_rate * gradient / sqrt(accumulator +
    epsilon).

    Note: the initial accumulator of `keras.optimizers.Adagrad` is 0.1. Gradients of a mean loss
    contain the factor 1/batch and are small compared with it, so that rows hardly move. Therefore
    the default here is 0. To reproduce the updates of Keras, pass
    `initial_accumulator_value=0.1`. The results are bitwise equal if each key occurs once per
    batch. For repeated keys, Keras adds the squares of the gradients and this optimizer adds the
    square of their sum.

    `epsilon` shortens the first updates of rare rows. If it is close to 0, the first updates are as
    long as the learning rate, however small the gradient, which costs AUC. Tune it between 1e-8 and
    1e-5 together with the learning rate.

    Example:

    >>> optimizer = slip.optimizers.Adagrad(0.05)
    >>> optimizer.learning_rate
    0.05
    >>> optimizer.slots_per_row(dim=8)
    8

    Args:
        learning_rate: Learning rate; see `SparseOptimizer`.
        initial_accumulator_value: Initial value of the accumulators of a new row, at least 0.
        epsilon: Added to the accumulator under the square root, above 0.
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
    """Adagrad with one accumulator per row, to save memory.

    The update of the accumulator is accumulator += mean(gradient^2 over the row). The arguments are
    the same as for `Adagrad`.

    Example:

    >>> slip.optimizers.RowWiseAdagrad(0.05).slots_per_row(dim=8)
    1
    """

    rule: ClassVar[str] = "rowwise_adagrad"

    def initial_slots(self, dim: int) -> np.ndarray:
        return np.full(1, self.initial_accumulator_value, np.float32)


@dataclasses.dataclass(frozen=True)
class Adam(SparseOptimizer):
    """Lazy Adam: rows that a batch does not contain stay unchanged.

    Neither the values nor the moments of such rows change. As in Keras, epsilon is added outside
    the square root and is not bias-corrected. If a key occurs once in every batch, its row is
    updated as by `keras.optimizers.Adam`.

    Example:

    >>> optimizer = slip.optimizers.Adam(0.001)
    >>> optimizer.beta_1
    0.9
    >>> optimizer.slots_per_row(dim=8)
    16

    Args:
        learning_rate: Learning rate; see `SparseOptimizer`.
        beta_1: Decay of the first moment per update of the row, in [0, 1).
        beta_2: Decay of the second moment per update of the row, in [0, 1).
        epsilon: Added to the square root of the second moment, above 0.
        bias_correction: "table" corrects by the number of updates of the table, as
            `tf.compat.v1.train.AdamOptimizer` does. The first updates of a row that is created late
            are then longer. "row" corrects by the number of updates of the row and needs two more
            slots per row.
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
    """`Adam` with decoupled weight decay, by default 0.004.

    The default is the default of `keras.optimizers.AdamW`. Note: Keras decays all rows of a table
    in each step, but this optimizer only decays the rows of the batch. Pass `decay="all"` for the
    behavior of Keras.

    Example:

    >>> slip.optimizers.AdamW(0.001).weight_decay
    0.004
    """

    weight_decay: float | None = dataclasses.field(default=0.004, kw_only=True)
    rule: ClassVar[str] = "adamw"


@dataclasses.dataclass(frozen=True)
class RowWiseAdam(SparseOptimizer):
    """Lazy Adam with one second moment per row, to save memory.

    The second moment is a moving average of mean(gradient^2 over the row). FBGEMM calls this
    optimizer PARTIAL_ROWWISE_ADAM. It has dim + 1 slots per row, compared with 2 * dim slots of
    `Adam`. The bias is corrected by the number of updates of the table.

    Example:

    >>> slip.optimizers.RowWiseAdam(0.001).slots_per_row(dim=8)
    9

    Args:
        learning_rate: Learning rate; see `SparseOptimizer`.
        beta_1: Decay of the first moment per update of the row, in [0, 1).
        beta_2: Decay of the second moment per update of the row, in [0, 1).
        epsilon: Added to the square root of the second moment, above 0.
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
    """FTRL-proximal on the rows of a batch, as `keras.optimizers.Ftrl`.

    Source: McMahan et al., KDD 2013. With `l1_regularization_strength`, values with little effect
    become exactly 0. A learning rate of 0 changes nothing, whereas Keras divides by it.

    Note: FTRL computes a row from sums over all its past gradients, scaled by the learning rate.
    This has two consequences. When the learning rate falls, the rows shrink, therefore `follow`
    must be False. A row without these sums, for example a row that was written or loaded without
    slots, is overwritten by its next update, unless the initial accumulator is small compared with
    the gradient.

    Example:

    >>> slip.optimizers.Ftrl(0.1).slots_per_row(dim=8)
    16

    Args:
        learning_rate: Learning rate; see `SparseOptimizer`. A schedule also scales the rows.
        follow: Must be False, because rows would shrink with the learning rate.
        learning_rate_power: Exponent p, at most 0. The effective learning rate of a value is
            learning_rate * accumulator^p. 0 keeps it constant.
        initial_accumulator_value: Initial value of the accumulators of a new row, above 0. The
            default of Keras is 0.1, with which the small gradients of a mean loss hardly move rows
            (see `Adagrad`).
        l1_regularization_strength: L1 penalty, at least 0.
        l2_regularization_strength: L2 penalty, at least 0.
        l2_shrinkage_regularization_strength: L2 penalty of the current row, which is added to the
            gradient, at least 0.
        beta: Added to the square root of the accumulator, at least 0.
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
            allowed = "False, because the rows of FTRL shrink when the learning rate falls"
            raise invalid("follow", True, "Ftrl", allowed)
        if self.weight_decay is not None:
            allowed = (
                "None, because FTRL computes rows from sums of gradients. Use "
                "`l2_regularization_strength`"
            )
            raise invalid("weight_decay", self.weight_decay, "Ftrl", allowed)
        self._require("learning_rate_power", float("-inf"), maximum=0.0)
        self._require("initial_accumulator_value", 0.0, open_minimum=True)
        strengths = ("l1", "l2", "l2_shrinkage")
        for name in (*(f"{kind}_regularization_strength" for kind in strengths), "beta"):
            self._require(name, 0.0)

    def initial_slots(self, dim: int) -> np.ndarray:
        sums = np.full(dim, self.initial_accumulator_value, np.float32)
        return np.concatenate([sums, np.zeros(dim, np.float32)])
