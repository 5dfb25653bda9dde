"""Initializers of embedding rows.

A row is drawn from a counter-based generator that is keyed by (seed, key). Therefore a row does not
depend on the time of its first lookup, on the rest of the batch or on the number of threads.
"""

import dataclasses
import numbers
from typing import Any

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid, require_integer, require_number
from slipstream_tf._utils.serialization import Serializable, deserialize
from slipstream_tf._utils.serialization import serialize as serialize


@dataclasses.dataclass(frozen=True)
class RandomUniform(Serializable):
    """Draws values uniformly from [minval, maxval), as `keras.initializers.RandomUniform`.

    Example:

    >>> table = slip.Table("item", 16, initializer=slip.initializers.RandomUniform(-0.01, 0.01))

    Attributes:
        minval: Lower bound.
        maxval: Upper bound, at least `minval`.
        seed: Seed of the generator. The same seed and key always give the same row. None derives
            the seed from the table name.
    """

    minval: float = -0.05
    maxval: float = 0.05
    seed: int | None = None

    def __post_init__(self) -> None:
        low = require_number("minval", self.minval)
        _keep(self, minval=low, maxval=require_number("maxval", self.maxval, minimum=low))
        _require_seed(self)


def _check_normal(initializer: Any) -> None:
    _keep(initializer, mean=require_number("mean", initializer.mean))
    _keep(initializer, stddev=require_number("stddev", initializer.stddev, minimum=0.0))
    _require_seed(initializer)


@dataclasses.dataclass(frozen=True)
class RandomNormal(Serializable):
    """Draws values from a normal distribution, as `keras.initializers.RandomNormal`.

    Example:

    >>> table = slip.Table("item", 16, initializer=slip.initializers.RandomNormal(stddev=0.01))

    Attributes:
        mean: Mean of the values.
        stddev: Standard deviation of the values, at least 0.
        seed: Seed of the generator. The same seed and key always give the same row. None derives
            the seed from the table name.
    """

    mean: float = 0.0
    stddev: float = 0.05
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_normal(self)


@dataclasses.dataclass(frozen=True)
class TruncatedNormal(Serializable):
    """Draws normal values within two deviations, as `keras.initializers.TruncatedNormal`.

    A value further than `2 * stddev` from the mean is drawn again.

    Example:

    >>> table = slip.Table("item", 16, initializer=slip.initializers.TruncatedNormal(stddev=0.01))

    Attributes:
        mean: Mean of the values.
        stddev: Standard deviation before the values are truncated, at least 0.
        seed: Seed of the generator. The same seed and key always give the same row. None derives
            the seed from the table name.
    """

    mean: float = 0.0
    stddev: float = 0.05
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_normal(self)


@dataclasses.dataclass(frozen=True)
class Zeros(Serializable):
    """Sets all values to 0.

    Example:

    >>> table = slip.Table("item", 16, initializer=slip.initializers.Zeros())
    """


@dataclasses.dataclass(frozen=True)
class Constant(Serializable):
    """Sets all values to `value`.

    Example:

    >>> table = slip.Table("item", 16, initializer=slip.initializers.Constant(0.1))

    Attributes:
        value: A finite number.
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        _keep(self, value=require_number("value", self.value))


def _keep(initializer: Any, **values: Any) -> None:
    """Sets attributes of a frozen object to their validated values."""
    for name, value in values.items():
        object.__setattr__(initializer, name, value)


def _require_seed(initializer: Any) -> None:
    if initializer.seed is not None:
        seed = require_integer("seed", initializer.seed, -(1 << 63), (1 << 63) - 1)
        _keep(initializer, seed=seed)


Initializer = RandomUniform | RandomNormal | TruncatedNormal | Zeros | Constant
_KINDS: dict[type, str] = {
    **{RandomUniform: "uniform", RandomNormal: "normal", TruncatedNormal: "truncated_normal"},
    **{Constant: "constant", Zeros: "zeros"},
}
CLASSES = tuple(_KINDS)


def op_attributes(initializer: Initializer) -> tuple[str, float, float]:
    """Returns the initializer as (kind, first, second) for the table op.

    The numbers are (minval, maxval) for "uniform", (mean, stddev) for "normal" and
    "truncated_normal", (value, 0) for "constant" and (0, 0) for "zeros".
    """
    values = [v for name, v in vars(initializer).items() if name != "seed"]
    first, second, *_ = (*values, 0.0, 0.0)
    return next(_KINDS[cls] for cls in type(initializer).__mro__ if cls in _KINDS), first, second


# Names that `keras.initializers.get` also accepts.
_BY_NAME: dict[str, Initializer] = {
    **{"zeros": Zeros(), "ones": Constant(1.0), "constant": Constant()},
    **{"uniform": RandomUniform(), "random_uniform": RandomUniform()},
    **{"normal": RandomNormal(), "random_normal": RandomNormal()},
    "truncated_normal": TruncatedNormal(),
}
_OF_KERAS: dict[str, Any] = {cls.__name__: cls for cls in _KINDS}
KERAS_CLASSES = ("Ones", *_OF_KERAS)
"""The classes of `keras.initializers` that `get` accepts, because they draw single values."""


def get(identifier: Any) -> Initializer:
    """Returns an initializer for an identifier.

    Example:

    >>> slip.initializers.get("ones")
    Constant(value=1.0)

    Args:
        identifier: An initializer of this module; the dictionary that `serialize` returned; a name
            as in Keras, such as `"uniform"`; or a `Zeros`, `Ones`, `Constant`, `RandomUniform`,
            `RandomNormal` or `TruncatedNormal` object of `keras.initializers`.

    Raises:
        ValueError: The identifier is unknown. Functions and Keras initializers that depend on the
            shape of a matrix (Glorot, He, orthogonal) are not supported, because a table has no
            fixed number of rows. `slip.keras.Embedding` with `input_dim` accepts them.
    """
    if isinstance(identifier, str):
        key = "".join("_" + c.lower() if c.isupper() else c for c in identifier).lstrip("_")
        if key in _BY_NAME:
            return _BY_NAME[key]
    found = _compat.keras_object(identifier, "initializers", "Initializer")
    if found is not None:
        return _of_keras(*found)
    if isinstance(identifier, (*CLASSES, dict)):
        return deserialize("initializer", identifier, CLASSES, "initializers", "a table")
    raise invalid("initializer", identifier, "a table", _allowed())


def _of_keras(name: str, config: dict[str, Any]) -> Initializer:
    if name == "Ones":
        return Constant(1.0)
    is_matrix = not isinstance(config.get("value", 0.0), numbers.Real)
    if name not in _OF_KERAS or is_matrix:
        raise invalid("initializer", f"keras.initializers.{name}", "a table", _allowed())
    made: Initializer = _OF_KERAS[name](**config)
    return made


def _allowed() -> str:
    names = ", ".join(repr(name) for name in _BY_NAME)
    classes = ", ".join(f"{name}(...)" for name in _OF_KERAS)
    return (
        f"one of {names}, or an object of slipstream_tf.initializers: {classes}. For rows that a "
        "function computes or that are pretrained, pass input_dim and a matrix as "
        "embeddings_initializer of slip.keras.Embedding, or write them with "
        "slip.tables.from_embedding"
    )
