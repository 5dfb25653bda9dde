"""Policies that decide which examples and gradients a window skips.

Each policy is a frozen dataclass with its settings. At the end of a window the engine
(`slipstream_tf.engine`) passes the results of the window to every policy. The policy returns rules
for the next window: which examples the input classifier drops, and which gradients the tables mask
or defer. The engine only uses the `Policy` interface.
"""

from slipstream_tf.policies.gradients import DeferGradients, Interval, MaskGradients, Movement
from slipstream_tf.policies.predicted_loss import PredictedLoss
from slipstream_tf.policies.skip_examples import SkipExamples

__all__ = [
    "DeferGradients",
    "Interval",
    "MaskGradients",
    "Movement",
    "PredictedLoss",
    "SkipExamples",
]
