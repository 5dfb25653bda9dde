"""slipstream_tf: saturation-aware embedding training for TensorFlow.

All public names are loaded on first use. Importing the package is therefore cheap, and the parts
that do not need the compiled ops work without them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from slipstream_tf._version import __version__

# Type checkers need the names that are imported on first use. `as` marks them as public.
if TYPE_CHECKING:
    from slipstream_tf import baselines as baselines
    from slipstream_tf import checkpoint as checkpoint
    from slipstream_tf import data as data
    from slipstream_tf import distributed as distributed
    from slipstream_tf import engine as engine
    from slipstream_tf import export as export
    from slipstream_tf import initializers as initializers
    from slipstream_tf import keras as keras
    from slipstream_tf import models as models
    from slipstream_tf import ops as ops
    from slipstream_tf import optimizers as optimizers
    from slipstream_tf import policies as policies
    from slipstream_tf import sampling as sampling
    from slipstream_tf import tables as tables
    from slipstream_tf import telemetry as telemetry
    from slipstream_tf.baselines import RowDrift as RowDrift
    from slipstream_tf.config import DryRun as DryRun
    from slipstream_tf.config import HotSet as HotSet
    from slipstream_tf.config import Retention as Retention
    from slipstream_tf.config import Saturation as Saturation
    from slipstream_tf.config import Storage as Storage
    from slipstream_tf.config import Table as Table
    from slipstream_tf.config import Window as Window
    from slipstream_tf.keras import Slipstream as Slipstream
    from slipstream_tf.ops.features import FeatureSpec as FeatureSpec
    from slipstream_tf.policies import DeferGradients as DeferGradients
    from slipstream_tf.policies import Interval as Interval
    from slipstream_tf.policies import MaskGradients as MaskGradients
    from slipstream_tf.policies import Movement as Movement
    from slipstream_tf.policies import PredictedLoss as PredictedLoss
    from slipstream_tf.policies import SkipExamples as SkipExamples

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


# Hidden from type checkers, so that they report unknown names.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _EXPORTS:
            return getattr(importlib.import_module(_EXPORTS[name]), name)
        if name in _MODULES:
            return importlib.import_module(f"slipstream_tf.{name}")
        raise AttributeError(f"module 'slipstream_tf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
