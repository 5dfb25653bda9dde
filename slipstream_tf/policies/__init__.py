"""What is saved: policies, each a frozen object with only its own settings.

In: settings; at a window's end what the window brought. Out: rules for the input classifier and for
the tables' gradients. The engine (`slipstream_tf.engine`) asks every policy the same questions,
and knows none of them by name.
"""

from slipstream_tf.policies.foreseen_loss import ForeseenLoss
from slipstream_tf.policies.gradients import DeferGradients, Interval, MaskGradients, Movement
from slipstream_tf.policies.skip_examples import SkipExamples

__all__ = [
    "DeferGradients",
    "ForeseenLoss",
    "Interval",
    "MaskGradients",
    "Movement",
    "SkipExamples",
]
