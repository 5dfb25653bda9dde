"""Quality along a run: its AUC at a time.

In: a run's metrics.json, whose "evaluations" tell how far training was (examples trained, seconds
without the evaluations themselves) and the quality. A run without `--evaluate_every` has its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

EXAMPLES, SECONDS = "examples_trained", "seconds"
CHANCE = 0.5  # AUC of a model that knows nothing.
Curve = Sequence[tuple[float, float]]  # (examples trained or seconds, AUC), in order.


def curve(record: Mapping[str, Any], axis: str) -> Curve:
    """Returns the AUC along EXAMPLES or SECONDS of a run, from (0, CHANCE) on."""
    return [(0.0, CHANCE), *((one[axis], one["auc"]) for one in record["evaluations"])]


def standing(points: Curve, at: float) -> float:
    """Returns a curve's AUC somewhere, straight between its points; behind the last, that of it."""
    return float(np.interp(at, *np.transpose(points)))
