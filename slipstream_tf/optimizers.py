"""Sparse optimizers: they belong to the tables of a store and run inside the backward pass.

Gradients of a key that occurs several times in a batch are summed, in a fixed order, before the
rule is applied once. Rows absent from a batch are left as they are.
"""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, ClassVar

from slipstream_tf import _compat
from slipstream_tf.errors import invalid, require_number
from slipstream_tf.serialization import deserialize


@dataclasses.dataclass(frozen=True)
class SparseOptimizer:
    """What every rule has: a learning rate. Use one of the subclasses.

    Attributes:
        learning_rate: factor of every step, at least 0: a number; a variable of shape (), which is
            read in every update; or a `keras.optimizers.schedules.LearningRateSchedule`, of the
            number of the table's updates so far.
        follow: whether a rate that is a number follows the dense layers' optimizer in `fit`: it is
            multiplied by what the dense rate is over what it was when training began. Variables and
            schedules follow nothing.
    """

    learning_rate: Any = 0.01
    follow: bool = dataclasses.field(default=True, kw_only=True)
    rule: ClassVar[str] = ""

    def __post_init__(self) -> None:
        place = type(self).__name__
        object.__setattr__(self, "learning_rate", _checked_rate(self.learning_rate, place))
        if not isinstance(self.follow, bool):
            raise invalid("follow", self.follow, place, "True or False")

    @property
    def follows(self) -> bool:
        """Whether the rate follows the dense layers' optimizer."""
        return self.follow and isinstance(self.learning_rate, float)

    def _require(self, name: str, minimum: float, **bounds: Any) -> None:
        """Checks a number, and keeps it as Python's."""
        number = require_number(
            name, getattr(self, name), minimum, place=type(self).__name__, **bounds
        )
        object.__setattr__(self, name, number)

    def op_parameters(self) -> tuple[float, float, float]:
        """Returns the rule's three parameters in the order of the table op (unused ones are 0)."""
        shared = [field.name for field in dataclasses.fields(SparseOptimizer)]
        names = [field.name for field in dataclasses.fields(self) if field.name not in shared]
        first, second, third, *_ = (*(getattr(self, name) for name in names), 0.0, 0.0, 0.0)
        return first, second, third

    def slots_per_row(self, dim: int) -> int:
        """Returns how many float32 values the rule keeps beside a row of `dim` values."""
        return 0


def _checked_rate(rate: Any, place: str) -> Any:
    """Returns a float, a variable or a schedule."""
    if isinstance(rate, numbers.Real):
        return float(require_number("learning_rate", rate, minimum=0.0, place=place))
    if isinstance(rate, dict):
        rate = _compat.deserialized(rate)
    if _compat.is_schedule(rate):
        return rate
    variable = None if rate is None else _compat.tensorflow_variable(rate)
    if variable is None or not variable.dtype.is_floating or variable.shape.rank != 0:
        allowed = (
            "a finite number >= 0, a floating-point variable of shape (), or a "
            "keras.optimizers.schedules.LearningRateSchedule"
        )
        raise invalid("learning_rate", rate, place, allowed)
    return rate


@dataclasses.dataclass(frozen=True)
class SGD(SparseOptimizer):
    """row -= learning_rate * gradient.

    Gradients of a mean loss carry the factor 1/batch, and a row is in few inputs of a batch: rates
    of 10 to 100 train click models at batches of 1,024. The default is that of Keras.
    """

    rule: ClassVar[str] = "sgd"


@dataclasses.dataclass(frozen=True)
class Adagrad(SparseOptimizer):
    """Keras's Adagrad on the rows of a batch, with defaults for click models.

    accumulator += gradient^2; row -= learning_rate * gradient / sqrt(accumulator + epsilon).

    The first step of a row is as long as the learning rate, whatever the size of its gradient.
    Gradients of a mean loss are small (they carry the factor 1/batch): beside the initial
    accumulator of `keras.optimizers.Adagrad` they hardly move rows. For its steps, to the bit, give
    `Adagrad(rate, initial_accumulator_value=0.1, epsilon=1e-7)`.

    Attributes:
        learning_rate: factor of every step; see `SparseOptimizer`.
        initial_accumulator_value: of every element of a new row, at least 0.
        epsilon: added to the accumulator below the root, above 0.
    """

    learning_rate: Any = 0.1
    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-10
    rule: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("initial_accumulator_value", 0.0)
        self._require("epsilon", 0.0, open_minimum=True)

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
        learning_rate: factor of every step; see `SparseOptimizer`.
        beta_1: decay of the first moment per update of the row, 0 to below 1.
        beta_2: decay of the second moment per update of the row, 0 to below 1.
        epsilon: added to the root of the second moment, above 0.
    """

    learning_rate: Any = 0.003
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    rule: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta_1", "beta_2"):
            self._require(name, 0.0)
            if getattr(self, name) >= 1.0:
                raise invalid(name, getattr(self, name), "Adam", "a finite number >= 0 and < 1")
        self._require("epsilon", 0.0, open_minimum=True)

    def slots_per_row(self, dim: int) -> int:
        return 2 * dim


_RULES = (SGD, Adagrad, RowWiseAdagrad, Adam)
# Of `keras.optimizers`: rows of a batch move exactly as by these rules, absent rows not at all.
_SAME_AS_KERAS = {
    "SGD": (SGD, ()),
    "Adagrad": (Adagrad, ("initial_accumulator_value", "epsilon")),
}
# Settings of Keras optimizers that a rule here does not have, where they do something.
_BEYOND = (
    *("momentum", "nesterov", "weight_decay", "clipnorm", "clipvalue", "global_clipnorm"),
    *("use_ema", "loss_scale_factor", "gradient_accumulation_steps"),
)


def get(identifier: Any) -> SparseOptimizer:
    """Returns a sparse optimizer.

    Args:
        identifier: an instance; the dictionary that `serialize` made; a name such as "adagrad", for
            a rule with its defaults; or a `keras.optimizers.SGD` or `Adagrad`, whose rows move
            exactly as those of the rule here.

    Raises:
        ValueError: anything else. `keras.optimizers.Adam` and others move the rows that are absent
            from a batch, too: the error names the rules.
    """
    names = {cls.__name__.lower(): cls for cls in _RULES} | {cls.rule: cls for cls in _RULES}
    if isinstance(identifier, str) and identifier.lower() in names:
        return names[identifier.lower()]()
    found = _compat.keras_optimizer(identifier)
    if found is not None:
        return _of_keras(*found)
    return deserialize("optimizer", identifier, _RULES, "optimizers", "embedding tables")


def _of_keras(name: str, config: dict[str, Any]) -> SparseOptimizer:
    place = "embedding tables"
    if name not in _SAME_AS_KERAS:
        rules = ", ".join(f"{cls.__name__}(...)" for cls in _RULES)
        allowed = f"slipstream_tf.optimizers.{rules}, which leave rows that a batch lacks alone"
        raise invalid("optimizer", f"keras.optimizers.{name}", place, allowed)
    rule, settings = _SAME_AS_KERAS[name]
    for setting in _BEYOND:
        if config.get(setting):
            allowed = f"a keras.optimizers.{name} without it, or slipstream_tf.optimizers.{name}"
            raise invalid(setting, config[setting], f"keras.optimizers.{name} of {place}", allowed)
    return rule(config["learning_rate"], **{setting: config[setting] for setting in settings})


def serialize(optimizer: SparseOptimizer) -> dict[str, Any]:
    """Returns {"class_name", "config"} for JSON; of a variable the rate is what it is now."""
    config = {field.name: getattr(optimizer, field.name) for field in dataclasses.fields(optimizer)}
    rate = optimizer.learning_rate
    if _compat.is_schedule(rate):
        config["learning_rate"] = _compat.serialized(rate)
    elif not isinstance(rate, float):
        config["learning_rate"] = float(_compat.tensorflow_variable(rate).numpy())
    return {"class_name": type(optimizer).__name__, "config": config}


def rule_of(table: Any, optimizer: Any) -> SparseOptimizer:
    """Returns the rule of a `Table`: its own, or that of its store.

    Args:
        table: the table.
        optimizer: of the tables without one of their own; None: `Adagrad` with its defaults.
    """
    if table.optimizer is not None:
        return get(table.optimizer)
    return Adagrad() if optimizer is None else get(optimizer)


def the_one_of(tables: Sequence[Any], optimizer: Any, place: str) -> SparseOptimizer:
    """Returns the rule that all tables share.

    Raises:
        ValueError: they have several, which `place` cannot have.
    """
    rules = [rule_of(table, optimizer) for table in tables]
    if any(serialize(rule) != serialize(rules[0]) for rule in rules):
        told = {table.name: rule for table, rule in zip(tables, rules, strict=True)}
        raise invalid("optimizer", told, place, "the same rule and rate for all tables")
    return rules[0]
