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
    """Returns the test AUC of a run at its evaluations.

    Args:
        record: Contents of metrics.json.
        axis: EXAMPLES or SECONDS.

    Returns:
        (position on the axis, AUC) pairs. The first is (0, CHANCE).
    """
    return [(0.0, CHANCE), *((one[axis], one["auc"]) for one in record["evaluations"])]


def auc_at(points: Curve, at: float) -> float:
    """Returns the AUC of a curve at a position, by linear interpolation.

    Args:
        points: The curve.
        at: Position: number of examples, or seconds. After the last point, the last AUC is
            returned.
    """
    return float(np.interp(at, *np.transpose(points)))
