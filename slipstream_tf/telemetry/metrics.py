"""Quality of click predictions: exact AUC, log loss and calibration.

The functions use only NumPy and take the labels and logits of the whole test data. A metric that is
not defined is NaN.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from slipstream_tf._utils.errors import invalid
from slipstream_tf.telemetry.run_record import to_json


@dataclasses.dataclass(frozen=True)
class ClickMetrics:
    """Quality metrics of click predictions.

    Example:

    >>> slip.telemetry.click_metrics(labels=[1, 0], logits=[2.0, -1.0]).clicks
    1

    Attributes:
        auc: Probability that a random click is ranked above a random non-click; ties count half.
            NaN without clicks or without non-clicks.
        log_loss: Mean negative log likelihood, in nats per example.
        calibration: Mean prediction / mean label; 1 is best. NaN without clicks.
        examples: Number of examples.
        clicks: Number of examples with label 1.
    """

    auc: float
    log_loss: float
    calibration: float
    examples: int
    clicks: int

    @property
    def auc_error(self) -> float:
        """Standard error of the AUC of a random order; NaN if all labels are equal."""
        others = self.examples - self.clicks
        pairs = self.clicks * others
        return math.sqrt((self.examples + 1) / (12 * pairs)) if pairs else math.nan

    @property
    def base_log_loss(self) -> float:
        """Log loss of predicting the click rate for every example."""
        rates = (self.clicks / self.examples, 1.0 - self.clicks / self.examples)
        return -sum(rate * math.log(rate) for rate in rates if rate)

    def no_learning_reason(self, part: str = "test") -> str:
        """Explains in a sentence why the predictions are no better than a constant.

        Args:
            part: Name of the part of the data, for the sentence.

        Returns:
            The sentence, or an empty string if the predictions are better. Predictions are no
            better if the AUC is at most one standard error above 0.5, or if the log loss is above
            `base_log_loss`. If all labels are equal, neither is known.
        """
        if math.isnan(self.auc):
            return (
                f"It is unknown whether the model has learned, because all {self.examples:,} "
                f"labels of the {part} part are {int(self.clicks > 0)}."
            )
        if self.auc <= 0.5 + self.auc_error:
            return (
                f"The model has not learned: the {part} AUC of {self.auc:.4f} is at most one "
                f"standard error ({self.auc_error:.4f}) above 0.5, the AUC of a random order."
            )
        if self.log_loss > self.base_log_loss:
            return (
                f"The model has not learned: the {part} log loss of {self.log_loss:.4f} is above "
                f"{self.base_log_loss:.4f}, the log loss of predicting the click rate for every "
                "example."
            )
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields. NaN becomes None, because JSON has no NaN."""
        return to_json(dataclasses.asdict(self))


def click_metrics(labels: Any, logits: Any) -> ClickMetrics:
    """Computes the quality metrics of predictions.

    Predictions are logits, so that no probability has to be clipped.

    Example:

    >>> metrics = slip.telemetry.click_metrics(labels=[1, 0, 1, 0], logits=[2.0, -1.0, 0.5, 1.0])
    >>> metrics.auc
    0.75

    Args:
        labels: [n], each 0 or 1.
        logits: float [n], finite.

    Returns:
        The metrics, computed in float64.

    Raises:
        ValueError: The shapes differ, the arrays are empty, a label is neither 0 nor 1, or a logit
            is not finite.
    """
    is_click, values = _checked(labels, logits, "click_metrics", "logits")
    # log(1 + exp(x)) without overflow. A click with logit x has the loss of a non-click with -x.
    signed = np.where(is_click, -values, values)
    log_loss = float(np.mean(np.logaddexp(0.0, signed)))
    predictions = 0.5 * (1.0 + np.tanh(0.5 * values))
    clicks = int(is_click.sum())
    calibration = float(predictions.sum()) / clicks if clicks else math.nan
    auc = exact_auc(labels, logits)
    return ClickMetrics(auc, log_loss, calibration, examples=int(values.size), clicks=clicks)


def exact_auc(labels: Any, scores: Any) -> float:
    """Returns the area under the ROC curve; equal scores count half.

    Uses a single sort.

    Args:
        labels: [n], each 0 or 1.
        scores: float [n], finite. Only their order matters.

    Returns:
        The area, 0 to 1. NaN if all labels are equal.

    Raises:
        ValueError: As in `click_metrics`.
    """
    is_click, values = _checked(labels, scores, "exact_auc", "scores")
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    # First position of each run of equal scores.
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    clicks = np.add.reduceat(is_click[order].astype(np.int64), starts)
    others = np.diff(np.r_[starts, values.size]) - clicks
    num_clicks, num_others = int(clicks.sum()), int(others.sum())
    if not num_clicks or not num_others:
        return math.nan
    others_below = np.cumsum(others) - others
    # Twice the number of correctly ordered pairs: an integer, so exact.
    twice = int(np.dot(clicks, 2 * others_below + others))
    return twice / (2 * num_clicks * num_others)


def _checked(labels: Any, scores: Any, place: str, argument: str) -> tuple[np.ndarray, np.ndarray]:
    labels, scores = np.asarray(labels), np.asarray(scores, np.float64)
    if labels.shape != scores.shape or labels.ndim != 1 or not labels.size:
        allowed = f"a shape [n] with n >= 1, equal to the shape {scores.shape} of `{argument}`"
        raise invalid("labels", labels.shape, f"the shape in {place}", allowed)
    is_click = labels == 1
    wrong = ~is_click & (labels != 0)
    if wrong.any():
        where = f"example {int(np.flatnonzero(wrong)[0])} of {place}"
        raise invalid("labels", labels[wrong][0].item(), where, "0 or 1")
    is_bad = ~np.isfinite(scores)
    if is_bad.any():
        position = int(np.flatnonzero(is_bad)[0])
        where = f"example {position} of {place}"
        raise invalid(argument, scores[position].item(), where, "a finite number")
    return is_click, scores
