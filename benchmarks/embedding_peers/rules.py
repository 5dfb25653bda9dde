"""Optimizers by the names that the benchmarks use. Does not require TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Class name in `slip.optimizers`, and its arguments except the learning rate.
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
# Maps each variant of Adagrad (clipping, decay, norms) to the plain optimizer to compare with.
ALONE: Mapping[str, str] = {name: "adagrad" for name in RULES if name.startswith("adagrad_")}


def make(optimizers: Any, name: str, rate: float) -> Any:
    """Returns the optimizer of a name.

    Args:
        optimizers: The module `slip.optimizers`.
        name: A key of `RULES`.
        rate: Learning rate.
    """
    kind, settings = RULES[name]
    return getattr(optimizers, kind)(rate, **settings)
