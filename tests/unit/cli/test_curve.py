"""Tests of `cli.callbacks.CurveCallback`."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream_tf.cli.callbacks import CurveCallback, StepCount
from slipstream_tf.distributed import SingleProcess
from slipstream_tf.telemetry.metrics import click_metrics


@pytest.mark.parametrize(("steps", "points"), [(99, 99), (100, 50), (101, 51), (199, 100)])
def test_curve_has_at_most_100_points_with_the_last_step(steps: int, points: int) -> None:
    count, final = StepCount(), click_metrics([0, 1], [0.2, 0.6])
    curve = CurveCallback(count, lambda: count.steps, lambda: final, None, lambda seconds: None)
    logs: dict[str, Any] = {"loss": 0.5, "auc": 0.5}
    for step in range(1, steps + 1):
        count.steps = step
        curve.on_train_batch_end(step, {**logs, "trained": step})
    curve.on_epoch_end(0, {**logs, "trained": steps})
    entries = curve.entries(SingleProcess(), final, {"seen": steps, "trained": steps})
    assert len(entries["progress"]) == points
    assert entries["progress"][-1]["step"] == steps
