"""slipstream_tf: saturation-aware embedding training for TensorFlow.

All public names are loaded on first use. Importing the package is therefore cheap, and the parts
that do not need the compiled ops work without them.
"""

import importlib
from typing import Any

from slipstream_tf._version import __version__

_EXPORTS = {
    **dict.fromkeys(
        (
            "DryRun",
            "HotSet",
            "Retention",
            "Saturation",
            "Storage",
            "Table",
            "Window",
        ),
        "slipstream_tf.config",
    ),
    **dict.fromkeys(
        (
            "DeferGradients",
            "PredictedLoss",
            "Interval",
            "MaskGradients",
            "Movement",
            "SkipExamples",
        ),
        "slipstream_tf.policies",
    ),
    "RowDrift": "slipstream_tf.baselines",
    "FeatureSpec": "slipstream_tf.ops.features",
    "Slipstream": "slipstream_tf.keras",
}
_MODULES = (
    "baselines",
    "checkpoint",
    "data",
    "distributed",
    "engine",
    "export",
    "initializers",
    "keras",
    "models",
    "ops",
    "optimizers",
    "policies",
    "sampling",
    "tables",
    "telemetry",
)

__all__ = ["__version__", *_EXPORTS, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"slipstream_tf.{name}")
    raise AttributeError(f"module 'slipstream_tf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
