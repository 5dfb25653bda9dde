"""What every rule of embedding rows has. In: its settings. Out: its rate and the op's rule."""

import dataclasses
import numbers
from typing import Any, ClassVar

import numpy as np

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid, require_choice, require_number

# In the order of the op, in which they are done.
BEFORE_RULE = ("l2", "clip_value", "clip_norm", "weight_decay")
TRANSFORMS = (*BEFORE_RULE, "max_norm")
DECAYS = ("batch", "all")


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
        l2: of the penalty l2 * |row|^2, once for each row of a batch, as `keras.regularizers.L2`
            has it: 2 * l2 * row is added to the gradient. None: there is none, as below.
        clip_value: the gradient's values are cut to this size.
        clip_norm: the gradient is shortened to this norm, each row's by itself. (Norms of tables,
            and of all gradients together, are `keras.optimizers`' `clipnorm` and `global_clipnorm`
            with apply="step".)
        weight_decay: row -= learning_rate * weight_decay * row, of each row of a batch, beside the
            rule (Loshchilov and Hutter, ICLR 2019); at most to 0.
        max_norm: a row is shortened to this norm after its step.
        decay: of which rows `l2` and `weight_decay` are: "batch", those of a batch; or "all", every
            row that the table has, in each step of the table, as if it were dense. With "all" a
            weight decay costs nothing: rows lie in memory beside one number, the product of what
            each step left of them. So does `l2` with plain `SGD`, which is the same. With other
            rules `l2` updates row after row of the table in every step: for small tables.

    What is given is done in this order, the rule before `max_norm`. Rows whose gradient is masked
    are not penalised, and decay with "all" alone; `MaskGradients` is refused where `l2` updates all
    rows. Gradients are not deferred beside them, `max_norm` apart: a sum would be clipped, or
    penalised, as one gradient.
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
            raise invalid("decay", "all", place, "with l2 or weight_decay, or 'batch'")

    @property
    def follows(self) -> bool:
        """Whether the rate follows the dense layers' optimizer."""
        return self.follow and isinstance(self.learning_rate, float)

    @property
    def updates_all_rows(self) -> bool:
        """Whether each step updates the table row by row, also rows that the batch lacks."""
        return self.decay == "all" and self.op_transforms()[0] > 0.0

    def _require(self, name: str, minimum: float, **bounds: Any) -> None:
        """Checks a number, and keeps it as Python's."""
        number = require_number(
            name, getattr(self, name), minimum, place=type(self).__name__, **bounds
        )
        # The op computes in float32, where such a number may be an end that is excluded.
        if bounds.get("open_minimum") and not np.float32(number) > minimum:
            allowed = f"a number > {minimum:g} in float32, too"
            raise invalid(name, number, type(self).__name__, allowed)
        object.__setattr__(self, name, number)

    def _require_below_1(self, *names: str) -> None:
        """Checks numbers of at least 0 and below 1."""
        for name in names:
            self._require(name, 0.0)
            if np.float32(getattr(self, name)) >= 1.0:
                allowed = "a finite number >= 0 and < 1, in float32, too"
                raise invalid(name, getattr(self, name), type(self).__name__, allowed)

    def op_rule(self) -> tuple[str, tuple[float, ...]]:
        """Returns the rule of the table op and its parameters; a file of `core/update/rules/`."""
        shared = [field.name for field in dataclasses.fields(SparseOptimizer)]
        names = [field.name for field in dataclasses.fields(self) if field.name not in shared]
        return self.rule, tuple(getattr(self, name) for name in names)

    def op_transforms(self) -> tuple[float, ...]:
        """Returns what the table op does beside the rule: empty, or a number for each; 0: not."""
        numbers = tuple(getattr(self, name) or 0.0 for name in TRANSFORMS)
        return (*numbers, float(self.decay == "all")) if any(numbers) else ()

    @property
    def layout(self) -> str:
        """What tells checkpoints of its slots from those of other rules."""
        return type(self).__name__

    def initial_slots(self, dim: int) -> np.ndarray:
        """Returns what the rule keeps beside a new row of `dim` values, float32 [slots]."""
        return np.zeros(0, np.float32)

    def slots_per_row(self, dim: int) -> int:
        """Returns how many float32 values the rule keeps beside a row of `dim` values."""
        return self.initial_slots(dim).size


def _checked_rate(rate: Any, place: str) -> Any:
    """Returns a float, a variable or a schedule."""
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
