"""Base class of the sparse optimizers: settings, validation and op arguments."""

import dataclasses
import numbers
from typing import Any, ClassVar

import numpy as np

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid, require_choice, require_number
from slipstream_tf._utils.serialization import Serializable

# Transforms of gradients and rows, in the order in which the op expects and applies them.
BEFORE_RULE = ("l2", "clip_value", "clip_norm", "weight_decay")
TRANSFORMS = (*BEFORE_RULE, "max_norm")
DECAYS = ("batch", "all")


@dataclasses.dataclass(frozen=True)
class SparseOptimizer(Serializable):
    """Base class of the optimizers of embedding rows; use a subclass.

    The base class has the learning rate and optional transforms of gradients and rows. For each row
    of a batch the transforms are applied in the order of the arguments: `l2`, `clip_value`,
    `clip_norm` and `weight_decay` before the update rule, `max_norm` after it.

    Note: `DeferGradients` cannot be combined with transforms other than `max_norm`, because the sum
    of deferred gradients would be clipped or penalized as one gradient. `MaskGradients` cannot be
    combined with an `l2` that updates all rows. A masked row is not penalized, and it only decays
    with `decay="all"`.

    Example:

    >>> optimizer = slip.optimizers.Adagrad(0.05, clip_norm=1.0)
    >>> isinstance(optimizer, slip.optimizers.SparseOptimizer)
    True

    Args:
        learning_rate: Learning rate, at least 0. A number, a variable of shape () that is read in
            every update, or a `keras.optimizers.schedules.LearningRateSchedule` over the number of
            updates of the table.
        follow: Whether a numeric learning rate follows the optimizer of the dense layers in `fit`.
            The rate of the rows is then multiplied by the current dense learning rate, divided by
            the dense learning rate at the start of training. A factor above 10 raises an error.
            Variables and schedules are never changed.
        l2: Factor of the penalty l2 * |row|^2, as in `keras.regularizers.L2`: 2 * l2 * row is added
            to the gradient, once for each row of a batch. None, as for the arguments below,
            disables the transform.
        clip_value: Clips every value of the gradient to [-clip_value, clip_value].
        clip_norm: Scales the gradient of each row to at most this norm. For norms over tables or
            over all gradients, use `clipnorm` and `global_clipnorm` of `keras.optimizers` with
            apply="step".
        weight_decay: Decoupled weight decay (Loshchilov and Hutter, ICLR 2019): row -=
            learning_rate * weight_decay * row for each row of a batch. The factor is limited so
            that a row decays to 0 at most.
        max_norm: Scales a row to at most this norm after the update.
        decay: Rows to which `l2` and `weight_decay` apply. "batch": the rows of a batch. "all": all
            rows of the table in every step, as for a dense weight. With "all", weight decay has no
            cost per row, because the decay is stored as one factor for the whole table. The same
            holds for `l2` with plain `SGD`, which is equivalent to weight decay. With other
            optimizers, `l2` updates every row in every step, therefore use it for small tables
            only.
    """

    learning_rate: Any = 0.01
    follow: bool = dataclasses.field(default=True, kw_only=True)
    l2: float | None = dataclasses.field(default=None, kw_only=True)
    clip_value: float | None = dataclasses.field(default=None, kw_only=True)
    clip_norm: float | None = dataclasses.field(default=None, kw_only=True)
    weight_decay: float | None = dataclasses.field(default=None, kw_only=True)
    max_norm: float | None = dataclasses.field(default=None, kw_only=True)
    decay: str = dataclasses.field(default="batch", kw_only=True)
    rule: ClassVar[str] = ""

    def __post_init__(self) -> None:
        place = type(self).__name__
        object.__setattr__(self, "learning_rate", _checked_rate(self.learning_rate, place))
        if not isinstance(self.follow, bool):
            raise invalid("follow", self.follow, place, "True or False")
        for name in TRANSFORMS:
            if getattr(self, name) is not None:
                self._require(name, 0.0, open_minimum=True)
        require_choice("decay", self.decay, DECAYS, place)
        if self.decay == "all" and self.l2 is None and self.weight_decay is None:
            place += " without `l2` and `weight_decay`"
            raise invalid("decay", "all", place, "'batch'. Pass `l2` or `weight_decay` with 'all'")

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary for `from_config`.

        A learning rate variable is replaced by its current value.
        """
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rate = self.learning_rate
        if _compat.is_schedule(rate):
            saving = _compat.require_keras().saving
            config["learning_rate"] = dict(saving.serialize_keras_object(rate))
        elif not isinstance(rate, float):
            config["learning_rate"] = float(_compat.tensorflow_variable(rate).numpy())
        return config

    @property
    def follows(self) -> bool:
        """Whether the learning rate follows the optimizer of the dense layers."""
        return self.follow and isinstance(self.learning_rate, float)

    @property
    def updates_all_rows(self) -> bool:
        """Whether each step writes all rows: `l2` with `decay="all"`.

        False for weight decay, which is stored as one factor for all rows, and for `l2` with plain
        `SGD`, which equals weight decay.
        """
        return self.decay == "all" and self.op_transforms()[0] > 0.0

    def _require(self, name: str, minimum: float, **bounds: Any) -> None:
        """Validates a number and stores it as a Python number."""
        number = require_number(
            name, getattr(self, name), minimum, place=type(self).__name__, **bounds
        )
        # The op computes in float32, in which a small positive number may round to the excluded
        # minimum.
        if bounds.get("open_minimum") and not np.float32(number) > minimum:
            allowed = f"a number > {minimum:g} after rounding to float32"
            raise invalid(name, number, type(self).__name__, allowed)
        object.__setattr__(self, name, number)

    def _require_below_1(self, *names: str) -> None:
        """Validates numbers in [0, 1)."""
        for name in names:
            self._require(name, 0.0)
            if np.float32(getattr(self, name)) >= 1.0:
                allowed = "a finite number >= 0 and < 1 after rounding to float32"
                raise invalid(name, getattr(self, name), type(self).__name__, allowed)

    def op_rule(self) -> tuple[str, tuple[float, ...]]:
        """Returns the update rule for the table op.

        Returns:
            The name of the update rule in `cc_ops/core/update/rules/`, and its parameters: by
            default the fields of the subclass in order.
        """
        shared = [field.name for field in dataclasses.fields(SparseOptimizer)]
        names = [field.name for field in dataclasses.fields(self) if field.name not in shared]
        return self.rule, tuple(getattr(self, name) for name in names)

    def op_transforms(self) -> tuple[float, ...]:
        """Returns the transforms for the table op, or () for none.

        Returns:
            One number for each name in `TRANSFORMS`, with 0 for a disabled transform, followed by 1
            for `decay="all"` or 0.
        """
        numbers = tuple(getattr(self, name) or 0.0 for name in TRANSFORMS)
        return (*numbers, float(self.decay == "all")) if any(numbers) else ()

    @property
    def layout(self) -> str:
        """Name of the slot layout in checkpoints.

        Optimizers with different slots have different names, so that slots are not restored into
        the wrong optimizer.
        """
        return type(self).__name__

    def initial_slots(self, dim: int) -> np.ndarray:
        """Returns the initial slots of a new row, float32 [slots].

        Args:
            dim: Number of values of the row.
        """
        return np.zeros(0, np.float32)

    def slots_per_row(self, dim: int) -> int:
        """Returns the number of slots (optimizer values) of a row.

        Args:
            dim: Number of values of the row.
        """
        return self.initial_slots(dim).size


def _checked_rate(rate: Any, place: str) -> Any:
    """Returns the validated learning rate: a float, a variable or a schedule."""
    if isinstance(rate, numbers.Real):
        return float(require_number("learning_rate", rate, minimum=0.0, place=place))
    if isinstance(rate, dict):
        rate = _compat.require_keras().saving.deserialize_keras_object(rate)
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
