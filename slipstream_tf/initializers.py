"""Row initializers: how a key's row starts.

A row is drawn from a counter-based generator keyed by (seed, key), so it does not depend on
when the key arrives, on what else is in the batch or on the number of threads.
"""

import dataclasses
from typing import Any

from slipstream_tf.errors import require_integer, require_number
from slipstream_tf.serialization import deserialize
from slipstream_tf.serialization import serialize as serialize


@dataclasses.dataclass(frozen=True)
class RandomUniform:
    """Uniform on [minval, maxval), as `keras.initializers.RandomUniform`.

    Attributes:
        minval: lower bound.
        maxval: upper bound, at least `minval`.
        seed: of the generator; the same (seed, key) always gives the same row. None: a number that
            the table's name gives.
    """

    minval: float = -0.05
    maxval: float = 0.05
    seed: int | None = None

    def __post_init__(self) -> None:
        require_number("minval", self.minval)
        require_number("maxval", self.maxval, minimum=self.minval)
        _require_seed(self.seed)


@dataclasses.dataclass(frozen=True)
class RandomNormal:
    """Normal with the given mean and standard deviation, as `keras.initializers.RandomNormal`.

    Attributes:
        mean: of the values.
        stddev: their standard deviation, at least 0.
        seed: of the generator; the same (seed, key) always gives the same row. None: a number that
            the table's name gives.
    """

    mean: float = 0.0
    stddev: float = 0.05
    seed: int | None = None

    def __post_init__(self) -> None:
        require_number("mean", self.mean)
        require_number("stddev", self.stddev, minimum=0.0)
        _require_seed(self.seed)


@dataclasses.dataclass(frozen=True)
class Zeros:
    """All zeros."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """Every element is `value`.

    Attributes:
        value: any finite number.
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        require_number("value", self.value)


def _require_seed(seed: int | None) -> None:
    if seed is not None:
        require_integer("seed", seed, -(1 << 63), (1 << 63) - 1)


Initializer = RandomUniform | RandomNormal | Zeros | Constant


def op_attributes(initializer: Initializer) -> tuple[str, float, float]:
    """Returns (kind, first parameter, second parameter) as the table op takes them."""
    kinds = {RandomUniform: "uniform", RandomNormal: "normal", Constant: "constant", Zeros: "zeros"}
    values = [v for name, v in vars(initializer).items() if name != "seed"]
    first, second, *_ = (*values, 0.0, 0.0)
    return next(kinds[cls] for cls in type(initializer).__mro__ if cls in kinds), first, second


def get(identifier: Any) -> Initializer:
    """Returns an initializer from an instance or the dictionary that `serialize` made.

    Raises:
        ValueError: the name is unknown or the value is of another type.
    """
    kinds = (RandomUniform, RandomNormal, Zeros, Constant)
    return deserialize("initializer", identifier, kinds, "initializers")
