"""Settings that work for each data set; every one of them can be overridden by its flag.

No data set has a reference for a small model: these are ordinary values for their size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Preset:
    """Defaults of one data set.

    Attributes:
        model: "dlrm", "dcn" or "deepfm".
        dim: values per embedding row.
        bottom: hidden widths of DLRM's bottom MLP, in front of its last layer of `dim` units.
        mlp: hidden widths of DLRM's top MLP, or DCN-v2's or DeepFM's deep MLP.
        dropout: share of hidden units dropped in training.
        cross_layers: of DCN-v2.
        batch_size: examples per step of each rank.
        epochs: passes over the training part.
        rows_optimizer: rule of the embedding rows.
        rows_learning_rate: of that rule.
        rows_init: rows start uniform between -rows_init and rows_init.
        learning_rate: of Adam on the dense layers.
        window_steps: steps per window; None: see `config.Window`.
        skip_alpha: share of an example's lookups that must be saturated.
        rows_l2, rows_weight_decay: of the rows' rule, see `optimizers.SparseOptimizer`; 0: none,
            but AdamW decays by its own default.
        rows_decay: of which rows they are: "batch" or "all".
        layers_l2: of the penalty on the dense layers' weights, see `models.ClickModel`.
        batch_norm: whether hidden layers have batch normalisation.
        output_bias: whether the output starts at the base rate.
        early_stopping: measurements of the validation part without a gain after which training
            ends; 0: it does not.
        plateau_factor: on the rates after a measurement without a gain; 1: none.
    """

    model: str = "dlrm"
    dim: int = 16
    bottom: tuple[int, ...] = (64,)
    mlp: tuple[int, ...] = (64,)
    dropout: float = 0.0
    cross_layers: int = 3
    batch_size: int = 1024
    epochs: int = 1
    rows_optimizer: str = "adagrad"
    rows_learning_rate: float = 0.05
    rows_init: float = 0.05
    learning_rate: float = 1e-3
    window_steps: int | None = None
    skip_alpha: float = 1.0
    rows_l2: float = 0.0
    rows_weight_decay: float = 0.0
    rows_decay: str = "batch"
    layers_l2: float = 0.0
    batch_norm: bool = False
    output_bias: bool = False
    early_stopping: int = 0
    plateau_factor: float = 1.0


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "criteo": Preset(bottom=(256, 64), mlp=(256, 128)),
        "avazu": Preset(mlp=(256, 128)),
        "generated": Preset(batch_size=512, window_steps=20, skip_alpha=0.8),
    }
)
OTHER = Preset()


def preset(name: str) -> Preset:
    """Returns the defaults for a data set by name; ordinary ones for an unknown name."""
    return PRESETS.get(name, OTHER)


def describe(field: str) -> str:
    """Returns how a default differs by data set, for `--help`, e.g. "1024; generated 512"."""

    def text(value: object) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        return "-".join(map(str, value)) if isinstance(value, tuple) else f"{value}"

    common = text(getattr(OTHER, field))
    other = [
        f"{name} {text(getattr(p, field))}"
        for name, p in PRESETS.items()
        if text(getattr(p, field)) != common
    ]
    return "; ".join([common, *other])
