"""Row initializers: how a key's row starts.

A row is drawn from a counter-based generator keyed by (seed, key), so it does not depend on
when the key arrives, on what else is in the batch or on the number of threads.
"""

import dataclasses
from typing import Any

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid, require_integer, require_number
from slipstream_tf._utils.serialization import deserialize
from slipstream_tf._utils.serialization import serialize as serialize


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
        low = require_number("minval", self.minval)
        _keep(self, minval=low, maxval=require_number("maxval", self.maxval, minimum=low))
        _require_seed(self)


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
        _keep(self, mean=require_number("mean", self.mean))
        _keep(self, stddev=require_number("stddev", self.stddev, minimum=0.0))
        _require_seed(self)


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
        _keep(self, value=require_number("value", self.value))


def _keep(initializer: Any, **values: Any) -> None:
    """Sets attributes of a frozen object to what they were checked to be."""
    for name, value in values.items():
        object.__setattr__(initializer, name, value)


def _require_seed(initializer: Any) -> None:
    if initializer.seed is not None:
        seed = require_integer("seed", initializer.seed, -(1 << 63), (1 << 63) - 1)
        _keep(initializer, seed=seed)


Initializer = RandomUniform | RandomNormal | Zeros | Constant


def op_attributes(initializer: Initializer) -> tuple[str, float, float]:
    """Returns (kind, first parameter, second parameter) as the table op takes them."""
    kinds = {RandomUniform: "uniform", RandomNormal: "normal", Constant: "constant", Zeros: "zeros"}
    values = [v for name, v in vars(initializer).items() if name != "seed"]
    first, second, *_ = (*values, 0.0, 0.0)
    return next(kinds[cls] for cls in type(initializer).__mro__ if cls in kinds), first, second


# As `keras.initializers.get` knows them.
_BY_NAME: dict[str, Initializer] = {
    **{"zeros": Zeros(), "ones": Constant(1.0), "constant": Constant()},
    **{"uniform": RandomUniform(), "random_uniform": RandomUniform()},
    **{"normal": RandomNormal(), "random_normal": RandomNormal()},
}
_OF_KERAS: dict[str, Any] = {
    cls.__name__: cls for cls in (Zeros, Constant, RandomUniform, RandomNormal)
}


def get(identifier: Any) -> Initializer:
    """Returns an initializer.

    Args:
        identifier: an instance; the dictionary that `serialize` made; a name as Keras has it, such
            as "uniform"; or a `keras.initializers` object `Zeros`, `Ones`, `Constant`,
            `RandomUniform` or `RandomNormal`.

    Raises:
        ValueError: anything else. Those of Keras that go by the shape of a matrix (Glorot, He,
            orthogonal) say nothing of a table that grows.
    """
    if isinstance(identifier, str):
        key = "".join("_" + c.lower() if c.isupper() else c for c in identifier).lstrip("_")
        if key in _BY_NAME:
            return _BY_NAME[key]
    found = _compat.keras_object(identifier, "initializers", "Initializer")
    if found is not None:
        return _of_keras(*found)
    if identifier is None or isinstance(identifier, str):
        raise invalid("initializer", identifier, "", _allowed())
    kinds = (RandomUniform, RandomNormal, Zeros, Constant)
    return deserialize("initializer", identifier, kinds, "initializers")


def _of_keras(name: str, config: dict[str, Any]) -> Initializer:
    if name == "Ones":
        return Constant(1.0)
    if name not in _OF_KERAS:
        raise invalid("initializer", f"keras.initializers.{name}", "", _allowed())
    made: Initializer = _OF_KERAS[name](**config)
    return made


def _allowed() -> str:
    names = ", ".join(repr(name) for name in _BY_NAME)
    classes = ", ".join(f"{name}(...)" for name in _OF_KERAS)
    return f"one of {names}, or an object of slipstream_tf.initializers: {classes}"
