"""A run's AUC as a function of trained examples or time.

The points are the "evaluations" in a run's metrics.json. Each has the number of trained examples,
the training seconds (without evaluations) and the AUC. A run without `--evaluate_every` has only
the evaluation at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

EXAMPLES, SECONDS = "examples_trained", "seconds"
CHANCE = 0.5  # AUC of random predictions.
Curve = Sequence[tuple[float, float]]  # (examples or seconds, AUC), in ascending order.


def curve(record: Mapping[str, Any], axis: str) -> Curve:
    """Returns a run's AUC along EXAMPLES or SECONDS, from (0, CHANCE)."""
    return [(0.0, CHANCE), *((one[axis], one["auc"]) for one in record["evaluations"])]


def standing(points: Curve, at: float) -> float:
    """Returns a curve's AUC at a position, by linear interpolation.

    Positions after the last point return the last AUC.
    """
    return float(np.interp(at, *np.transpose(points)))
