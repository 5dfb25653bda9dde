"""Quality of predicted clicks: exact AUC, log loss and calibration. Pure NumPy.

In: labels and logits of a whole test part. Out: numbers; NaN where one is not defined.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from slipstream_tf._utils.errors import invalid
from slipstream_tf.telemetry.run_record import to_json


@dataclasses.dataclass(frozen=True)
class ClickMetrics:
    """How good predictions are.

    Attributes:
        auc: probability that a random click ranks above a random non-click, ties counting half;
            NaN without a click or without a non-click.
        log_loss: mean negative log likelihood, nats per example.
        calibration: mean prediction / mean label; 1 is best; NaN without a click.
        examples: how many there were.
        clicks: how many of them have label 1.
    """

    auc: float
    log_loss: float
    calibration: float
    examples: int
    clicks: int

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields; NaN becomes None, which JSON can say."""
        return to_json(dataclasses.asdict(self))


def click_metrics(labels: Any, logits: Any) -> ClickMetrics:
    """Measures predictions given as logits, so that no probability has to be clipped.

    Args:
        labels: [n], each 0 or 1.
        logits: float [n], finite.

    Returns:
        The metrics, computed in float64.

    Raises:
        ValueError: shapes differ, nothing is given, a label is neither 0 nor 1, or a logit is not
            finite.
    """
    is_click, values = _checked(labels, logits, "click_metrics")
    # log(1 + exp(x)) without overflow; the loss of a click is that of -logit.
    signed = np.where(is_click, -values, values)
    log_loss = float(np.mean(np.logaddexp(0.0, signed)))
    predictions = 0.5 * (1.0 + np.tanh(0.5 * values))
    clicks = int(is_click.sum())
    calibration = float(predictions.sum()) / clicks if clicks else math.nan
    auc = exact_auc(labels, logits)
    return ClickMetrics(auc, log_loss, calibration, examples=int(values.size), clicks=clicks)


def exact_auc(labels: Any, scores: Any) -> float:
    """Area under the ROC curve by one sort; pairs with equal scores count half.

    Args:
        labels: [n], each 0 or 1.
        scores: float [n], finite; only their order matters.

    Returns:
        The area, 0 to 1; NaN if all labels are equal.

    Raises:
        ValueError: as `click_metrics`.
    """
    is_click, values = _checked(labels, scores, "exact_auc")
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    # First position of every run of equal scores.
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    clicks = np.add.reduceat(is_click[order].astype(np.int64), starts)
    others = np.diff(np.r_[starts, values.size]) - clicks
    num_clicks, num_others = int(clicks.sum()), int(others.sum())
    if not num_clicks or not num_others:
        return math.nan
    others_below = np.cumsum(others) - others
    # Twice the number of pairs in the right order, as an integer: no rounding.
    twice = int(np.dot(clicks, 2 * others_below + others))
    return twice / (2 * num_clicks * num_others)


def _checked(labels: Any, scores: Any, place: str) -> tuple[np.ndarray, np.ndarray]:
    labels, scores = np.asarray(labels), np.asarray(scores, np.float64)
    if labels.shape != scores.shape or labels.ndim != 1 or not labels.size:
        allowed = f"one dimension, not empty, like the scores {scores.shape}"
        raise invalid("labels", labels.shape, place, allowed)
    is_click = labels == 1
    wrong = ~is_click & (labels != 0)
    if wrong.any():
        raise invalid("labels", labels[wrong][0].item(), place, "0 or 1")
    is_bad = ~np.isfinite(scores)
    if is_bad.any():
        position = int(np.flatnonzero(is_bad)[0])
        where = f"{place}, input {position}"
        raise invalid("scores", scores[position].item(), where, "finite numbers")
    return is_click, scores
