"""Baseline methods: Slipstream's published rule, FAE, Hotline, and random skipping.

`RowDrift` is the rule of the Slipstream paper. `segregation` and `hot_rows` implement FAE
(frequently accessed embeddings) and Hotline, for the benchmarks.
"""

from slipstream_tf.baselines.skipping import RowDrift, SkipAtRandom

__all__ = ["RowDrift", "SkipAtRandom"]
