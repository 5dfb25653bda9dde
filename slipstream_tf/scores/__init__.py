"""By what an example is judged skippable: scores, each a frozen object with its own settings."""

from slipstream_tf.scores.base import Score
from slipstream_tf.scores.foreseen_loss import ForeseenLoss
from slipstream_tf.scores.row_drift import RowDrift

__all__ = ["ForeseenLoss", "RowDrift", "Score"]
