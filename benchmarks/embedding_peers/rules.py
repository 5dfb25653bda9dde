"""Update rules by the names that benchmarks give them; needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Class of `slip.optimizers`, and settings beside the rate.
RULES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "adagrad": ("Adagrad", {}),
    "rowwise_adagrad": ("RowWiseAdagrad", {}),
    "adam": ("Adam", {}),
    "adam_per_row": ("Adam", {"bias_correction": "row"}),
    "adamw": ("AdamW", {}),
    "rowwise_adam": ("RowWiseAdam", {}),
    "ftrl": ("Ftrl", {}),
    "adagrad_l2": ("Adagrad", {"l2": 1e-3}),
    "adagrad_clip_value": ("Adagrad", {"clip_value": 1.0}),
    "adagrad_clip_norm": ("Adagrad", {"clip_norm": 1.0}),
    "adagrad_weight_decay": ("Adagrad", {"weight_decay": 1e-3}),
    "adagrad_max_norm": ("Adagrad", {"max_norm": 1.0}),
    "adagrad_decay_all": ("Adagrad", {"weight_decay": 1e-3, "decay": "all"}),
}
# The rules beside which something is done, and those that they are then.
ALONE: Mapping[str, str] = {name: "adagrad" for name in RULES if name.startswith("adagrad_")}


def make(optimizers: Any, name: str, rate: float) -> Any:
    """Returns the rule of a name.

    Args:
        optimizers: the module `slip.optimizers`.
        name: of `RULES`.
        rate: its learning rate.
    """
    kind, settings = RULES[name]
    return getattr(optimizers, kind)(rate, **settings)
