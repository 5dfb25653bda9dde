"""Sparse optimizers: they belong to the tables of a store and run inside the backward pass.

Gradients of a key that occurs several times in a batch are summed, in a fixed order, before the
rule is applied once. Rows absent from a batch are left as they are.
"""

import dataclasses
from typing import Any, ClassVar

from slipstream_tf.errors import invalid, require_number
from slipstream_tf.serialization import deserialize
from slipstream_tf.serialization import serialize as serialize


@dataclasses.dataclass(frozen=True)
class SparseOptimizer:
    """What every rule has: a learning rate. Use one of the subclasses.

    Attributes:
        learning_rate: factor of every step, at least 0.
    """

    learning_rate: float = 0.01
    rule: ClassVar[str] = ""

    def __post_init__(self) -> None:
        require_number("learning_rate", self.learning_rate, minimum=0.0, place=type(self).__name__)

    def op_parameters(self) -> tuple[float, float, float]:
        """Returns the rule's three parameters in the order of the table op (unused ones are 0)."""
        first, second, third, *_ = (*dataclasses.astuple(self)[1:], 0.0, 0.0, 0.0)
        return first, second, third

    def slots_per_row(self, dim: int) -> int:
        """Returns how many float32 values the rule keeps beside a row of `dim` values."""
        return 0


@dataclasses.dataclass(frozen=True)
class SGD(SparseOptimizer):
    """row -= learning_rate * gradient."""

    rule: ClassVar[str] = "sgd"


@dataclasses.dataclass(frozen=True)
class Adagrad(SparseOptimizer):
    """Keras's Adagrad on the rows of a batch.

    accumulator += gradient^2; row -= learning_rate * gradient / sqrt(accumulator + epsilon).

    The defaults are those of `keras.optimizers.Adagrad`. Gradients of a mean loss are small (they
    carry the factor 1/batch), and beside an initial accumulator of 0.1 they move rows very slowly:
    for click models set `initial_accumulator_value=0.0` and a small `epsilon`, as FBGEMM does.

    Attributes:
        initial_accumulator_value: of every element of a new row, at least 0.
        epsilon: added to the accumulator below the root, above 0.
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7
    rule: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        place = type(self).__name__
        require_number(
            "initial_accumulator_value", self.initial_accumulator_value, minimum=0.0, place=place
        )
        require_number("epsilon", self.epsilon, minimum=0.0, place=place, open_minimum=True)

    def slots_per_row(self, dim: int) -> int:
        return dim


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator per row: accumulator += mean(gradient^2 over the row)."""

    rule: ClassVar[str] = "rowwise_adagrad"

    def slots_per_row(self, dim: int) -> int:
        return 1


@dataclasses.dataclass(frozen=True)
class Adam(SparseOptimizer):
    """Lazy Adam: moments of rows absent from a batch do not decay.

    Bias correction uses the number of updates of the table (as `tf.compat.v1.train.AdamOptimizer`
    keeps it), not of the row. Epsilon is outside the square root and uncorrected, as in Keras.

    Attributes:
        learning_rate: factor of every step, at least 0.
        beta_1: decay of the first moment per update of the row, 0 to below 1.
        beta_2: decay of the second moment per update of the row, 0 to below 1.
        epsilon: added to the root of the second moment, above 0.
    """

    learning_rate: float = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    rule: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta_1", "beta_2"):
            value = getattr(self, name)
            require_number(name, value, minimum=0.0, place="Adam")
            if value >= 1.0:
                raise invalid(name, value, "Adam", "a finite number >= 0 and < 1")
        require_number("epsilon", self.epsilon, minimum=0.0, place="Adam", open_minimum=True)

    def slots_per_row(self, dim: int) -> int:
        return 2 * dim


def get(identifier: Any) -> SparseOptimizer:
    """Returns a sparse optimizer from an instance or the dictionary that `serialize` made.

    Raises:
        ValueError: anything else, a Keras optimizer included (Keras densifies sparse gradients).
    """
    rules = (SGD, Adagrad, RowWiseAdagrad, Adam)
    return deserialize("optimizer", identifier, rules, "optimizers", "embedding tables")
