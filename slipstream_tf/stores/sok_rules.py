"""What an optimizer of the user's keeps of rows in SOK, and what it counts.

In: what `sok.wrap_optimizer` returned. Out: the update rule of this package whose slots these are,
if there is one; the slots; steps and powers, as they are saved and restored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from slipstream_tf.stores.sok import SokTable, slots_of

# Of this package's rules: their slots by SOK's names, in the order of a native table's.
SLOTS: Mapping[str, tuple[str, ...]] = {"SGD": (), "Adagrad": ("accumulator",), "Adam": ("m", "v")}
_RULES = {"GradientDescent": "SGD"}
# Steps after which a power of Adam's is 0 in float32, and tells no more.
_MANY_STEPS = 1 << 20


class SlotLayout(NamedTuple):
    """The slots of a table's rows.

    Attributes:
        rule: whose they are: a class of `slipstream_tf.optimizers`, or an optimizer's own name;
            None: nobody knows them.
        initial: float32 [slots per row], of a new row.
    """

    rule: str | None
    initial: np.ndarray


class UserRule:
    """The rule of an optimizer that `SokStore` was given."""

    def __init__(self, optimizer: Any) -> None:
        """Takes the optimizer; None: there is none."""
        self._optimizer = optimizer
        # `sok.SGD` has no slots, nor names of any.
        names: list[str] = getattr(optimizer, "get_slot_names", list)()
        kind = type(getattr(optimizer, "_optimizer", optimizer)).__name__
        kind = kind.removesuffix("Optimizer")
        self._name = _RULES.get(kind, kind)
        self._slots = tuple(sorted(names))
        if sorted(SLOTS.get(self._name, ())) == sorted(names):
            self._slots = SLOTS.get(self._name, ())
        else:
            # Not those of this package's rule, as of SGD with momentum.
            self._name = f"{self._name}({', '.join(self._slots)})"

    def layout(self, table: SokTable) -> SlotLayout:
        """Returns the slots of a table's rows; unknown are those of a `sok.Variable`."""
        if self._optimizer is None or not table.is_dynamic:
            return SlotLayout(None, np.empty(0, np.float32))
        return SlotLayout(
            self._name, np.repeat(np.array(self.initial_slots(), np.float32), table.dim)
        )

    def initial_slots(self) -> list[float]:
        """Returns the value of each new slot."""
        if not self._slots:
            return []
        made = self._optimizer._initial_vals
        return [float(np.ravel(made[name].numpy())[0]) for name in self._slots]

    def slots(self, table: SokTable) -> list[Any]:
        """Returns the variables that are a table's slots; makes them where a step would."""
        if self._optimizer is None or not table.is_dynamic or not self._slots:
            return []
        self._optimizer._create_slots([table.variable])
        slots = slots_of(self._optimizer, table.variable)
        return [slots[name] for name in self._slots]

    def export(self) -> dict[str, np.ndarray]:
        """Returns "steps" int64 [2], updates and 0, and "powers" float32, of Adam's bias."""
        steps = 0
        powers = [float(power.numpy()) for power in self._powers()]
        if hasattr(self._optimizer, "_iterations"):
            steps = int(self._optimizer._iterations.numpy())
        elif powers:
            beta, power = self._betas()[-1], powers[-1]
            steps = _MANY_STEPS
            if 0.0 < beta < 1.0 and power > 0.0:
                steps = max(round(math.log(power) / math.log(beta)) - 1, 0)
        return {"steps": np.array([steps, 0]), "powers": np.array(powers, np.float32)}

    def replace(self, contents: Mapping[str, Any]) -> None:
        """Goes on from the steps and powers of any store's contents; "powers" may be missing."""
        steps, own = int(contents["steps"][0]), self._powers()
        if hasattr(self._optimizer, "_iterations"):
            self._optimizer._iterations.assign(steps)
        powers = contents.get("powers")
        if powers is None or len(powers) != len(own):
            powers = [beta ** (steps + 1) for beta in self._betas()] if own else []
        for variable, value in zip(own, powers, strict=True):
            variable.assign(value)

    def _powers(self) -> list[Any]:
        return powers_of(self._optimizer) if self._name == "Adam" else []

    def _betas(self) -> list[float]:
        inner = self._optimizer._optimizer
        values = (inner._call_if_callable(beta) for beta in (inner._beta1, inner._beta2))
        return [float(value) for value in values]


def powers_of(optimizer: Any) -> list[Any]:
    """Returns the variables of Adam's betas to the power of its updates and one, the first first.

    Args:
        optimizer: SOK's wrapper of one of `tf.compat.v1.train`; of others there are none.
    """
    by_name = getattr(optimizer, "_non_slot_dict", {})
    return [power for _, power in sorted(by_name.items(), key=lambda item: item[0][0])]
