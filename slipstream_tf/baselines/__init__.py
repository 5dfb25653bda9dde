"""Baseline methods: the rule of the paper, FAE, Hotline, and random skipping."""

from slipstream_tf.baselines.skipping import RowDrift, SkipAtRandom

__all__ = ["RowDrift", "SkipAtRandom"]
