"""Methods that this project is compared with: the paper's rule, FAE, Hotline, random skipping."""

from slipstream_tf.baselines.random_skipping import SkipAtRandom, random_shares
from slipstream_tf.baselines.row_drift import RowDrift

__all__ = ["RowDrift", "SkipAtRandom", "random_shares"]
