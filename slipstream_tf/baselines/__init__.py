"""Methods that this project is compared with: the paper's rule, FAE, Hotline, random skipping."""

from slipstream_tf.baselines.skipping import RowDrift, SkipAtRandom

__all__ = ["RowDrift", "SkipAtRandom"]
