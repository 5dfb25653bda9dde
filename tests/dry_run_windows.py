"""Generated window reports of a dry run."""

from __future__ import annotations

import math
from typing import Any

from slipstream_tf.engine.report import TableWindow, WindowReport
from slipstream_tf.ops.update_policy import UpdateCounts

SLOPE, INPUTS, WINDOWS, WARMUP = 0.03, 1000, 20, 5
SKIPPABLE, KEPT = 500, 100


def reports(value: float = 0.5, auc: bool = True, **rows: Any) -> list[WindowReport]:
    """Returns reports with an AUC linear in the logarithm of trained examples."""
    made = []
    for window in range(WINDOWS):
        is_warming_up = window < WARMUP
        trained = INPUTS * window
        counts = UpdateCounts(offered=200, sent=200)
        if rows and not is_warming_up:
            counts = UpdateCounts(offered=200, **rows)
        made.append(
            WindowReport(
                window=window,
                step=10 * (window + 1),
                is_warming_up=is_warming_up,
                hot_keys=20,
                snapshot_bytes=320,
                evicted=0,
                anomalies=0,
                drift_quantiles={},
                threshold=0.25,
                is_threshold_capped=False,
                is_skipping=False,
                saturated_keys=5,
                examples_seen=INPUTS,
                examples_skipped=0,
                examples_skippable=0 if is_warming_up else SKIPPABLE,
                examples_kept=0 if is_warming_up else KEPT,
                hot_examples=900,
                next_hot_keys=20,
                hot_set_overlap=1.0,
                seconds=0.5,
                auc=0.5 + SLOPE * math.log(trained + INPUTS / 2) if auc else None,
                skippable_value=value,
                tables=(TableWindow("user", 3, 3, {}, counts),),
            )
        )
    return made
