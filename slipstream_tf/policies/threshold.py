"""Finds thresholds as exact quantiles of sampled scores, in NumPy.

Slipstream (arXiv 2404.04270, sampling block) bisects until the skipped fraction is near the target.
Sorting the scores once returns the same quantile exactly and cannot fail to converge.
"""

import dataclasses
import math
from typing import Any

import numpy as np

# Relative. A product this close to an integer is rounded to it, so that 0.29 * 100 gives 29.
_ROUNDING_ERROR = 1e-12


@dataclasses.dataclass(frozen=True)
class ThresholdResult:
    """Holds a threshold and whether it was capped.

    Attributes:
        threshold: T, a float32 value. Examples with a score strictly below T are skippable.
        is_capped: Whether `max_threshold` lowered T.
    """

    threshold: float
    is_capped: bool = False


def fixed_threshold(threshold: float) -> ThresholdResult:
    """Returns a threshold that the user set, rounded down to float32.

    Args:
        threshold: T, at least 0.
    """
    return ThresholdResult(float(_float32_at_most(threshold)))


def find_threshold(
    scores: Any, target_skip: float, max_threshold: float | None = None
) -> ThresholdResult:
    """Finds T with at most the target fraction of scores below.

    Let n be the number of finite scores in ascending order and k = floor(target_skip * n). T is the
    score at index k, so that examples tied with T are not skipped. For k = n, T is the smallest
    float32 above the largest score. For k = 0, T is 0. This includes an empty sample and a sample
    without hot examples.

    Args:
        scores: float32 [n], skip scores of sampled examples. Hot examples have a finite score.
        target_skip: Fraction of the hot examples to skip, in [0, 1].
        max_threshold: Upper bound of T, or None.

    Returns:
        The threshold, and whether `max_threshold` lowered it.
    """
    scores = np.asarray(scores, np.float32).ravel()
    hot = np.sort(scores[np.isfinite(scores)])
    rank = _floor_of_fraction(target_skip, hot.size)
    if rank == 0:
        threshold = np.float32(0.0)
    elif rank == hot.size:
        threshold = np.nextafter(hot[-1], np.float32(np.inf))
    else:
        threshold = hot[rank]
    is_capped = False
    if max_threshold is not None:
        cap = _float32_at_most(max_threshold)
        is_capped = bool(threshold > cap)
        threshold = min(threshold, cap)
    return ThresholdResult(float(threshold), is_capped)


def find_subsampling_threshold(scores: Any, kept: float, minimum: float) -> float:
    """Finds the threshold T of a subsampling that keeps a given fraction.

    An example is kept with probability min(1, max(minimum, score / T)). T is chosen so that the
    mean of these probabilities is `kept`.

    Args:
        scores: float32 [n], at least 0, scores of sampled examples.
        kept: Fraction to keep, in (0, 1].
        minimum: Minimum keep probability, in [0, kept].

    Returns:
        T, a float32 value. 0 keeps all examples and is returned for an empty sample or if all
        scores are 0.
    """
    scores = np.asarray(scores, np.float64).ravel()
    if not scores.size or kept == 1.0 or not scores.max() > 0.0:
        return 0.0
    # The kept fraction falls as T rises. At `low` all examples except those with score 0 are kept.
    # At `high` all probabilities equal the minimum.
    low, high = 0.0, float(scores.max()) / max(minimum, 1e-6)
    for _ in range(60):
        middle = 0.5 * (low + high)
        if np.clip(scores / middle, minimum, 1.0).mean() > kept:
            low = middle
        else:
            high = middle
    return float(np.float32(high))


def value_of_dropped(scores: Any, threshold: float, minimum: float) -> float | None:
    """Estimates the training value of a dropped example.

    If examples are kept with probability q and weighted by 1 / q, the variance of the gradient is
    as large as with a random fraction sum(s^2) / sum(s^2 / q) of all examples, where s is the score
    |label - prediction| (Fithian & Hastie, 2014). The value is the lost fraction, 1 minus this
    fraction, divided by the fraction of dropped examples. It is 1 for random dropping.

    Args:
        scores: float32 [n], at least 0, scores of sampled examples.
        threshold: Score from which all examples are kept.
        minimum: Minimum keep probability.

    Returns:
        The value, at least 0, or None if no example is dropped.
    """
    scores = np.asarray(scores, np.float64).ravel()
    if not scores.size or not threshold > 0.0:
        return None
    kept = np.clip(scores / threshold, minimum, 1.0)
    squares = np.square(scores)
    if kept.mean() == 1.0 or not squares.sum() > 0.0:
        return None
    effective = squares.sum() / (squares / kept).sum()
    return float((1.0 - effective) / (1.0 - kept.mean()))


def _floor_of_fraction(fraction: float, count: int) -> int:
    product = fraction * count
    nearest = round(product)
    if abs(product - nearest) <= _ROUNDING_ERROR * product:
        return nearest
    return math.floor(product)


def _float32_at_most(value: float) -> np.float32:
    """Returns the largest float32 that is at most `value`."""
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return np.nextafter(rounded, np.float32(0.0)) if float(rounded) > value else rounded
