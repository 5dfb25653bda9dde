"""T as an exact quantile of sampled scores. Pure NumPy.

Slipstream (arXiv 2404.04270, sampling block) bisects until the skipped share is near the target;
one sort gives the same quantile exactly, and cannot fail.
"""

import dataclasses
import math
from typing import Any

import numpy as np

# Relative; a product this close to an integer is meant to be it (0.29 * 100 is 29, not 28).
_ROUNDING_ERROR = 1e-12


@dataclasses.dataclass(frozen=True)
class ThresholdResult:
    """A threshold, and how it was found.

    Attributes:
        threshold: T, a float32 value; inputs with a score strictly below it are skippable.
        is_capped: whether `max_threshold` lowered T.
    """

    threshold: float
    is_capped: bool = False


def fixed_threshold(threshold: float) -> ThresholdResult:
    """Returns a T that was set, at least 0; lowered to a float32."""
    return ThresholdResult(float(_float32_at_most(threshold)))


def find_threshold(
    scores: Any, target_skip: float, max_threshold: float | None = None
) -> ThresholdResult:
    """Finds T such that at most the target share of the hot inputs has a score below it.

    With n finite scores in ascending order and k = floor(target_skip * n), T is the k-th of them
    (counted from 0), so that inputs tied with T are not skipped; for k = n it is the next float32
    above the largest. For k = 0 (also: an empty sample, or no hot input) T is 0.

    Args:
        scores: float32 [n], skip scores of sampled inputs; one that is not finite is not hot.
        target_skip: share of the hot inputs to skip, 0 to 1.
        max_threshold: upper bound of T, or None.

    Returns:
        The threshold, and whether the bound lowered it.
    """
    scores = np.asarray(scores, np.float32).ravel()
    hot = np.sort(scores[np.isfinite(scores)])
    rank = _floor_of_share(target_skip, hot.size)
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


def find_thinning(scores: Any, kept: float, floor: float) -> float:
    """Finds T such that examples kept with probability min(1, max(floor, score / T)) are a share.

    Args:
        scores: float32 [n] from 0, of sampled examples.
        kept: share to keep, above 0, at most 1.
        floor: least probability, 0 to `kept`.

    Returns:
        T, a float32 value; 0, which keeps all, for an empty sample or one of zeros.
    """
    scores = np.asarray(scores, np.float64).ravel()
    if not scores.size or kept == 1.0 or not scores.max() > 0.0:
        return 0.0
    # The share falls as T rises; at `low` all but zeros are kept, at `high` none above the floor.
    low, high = 0.0, float(scores.max()) / max(floor, 1e-6)
    for _ in range(60):
        middle = 0.5 * (low + high)
        if np.clip(scores / middle, floor, 1.0).mean() > kept:
            low = middle
        else:
            high = middle
    return float(np.float32(high))


def value_of_thinned(scores: Any, threshold: float, floor: float) -> float | None:
    """Estimates what an example that thinning leaves out was worth, in average examples.

    Of examples kept with probability q and weighed 1 / q, gradients vary as if they were a share
    sum(s^2) / sum(s^2 / q) of all, s their scores |label - prediction| (Fithian & Hastie, 2014).

    Args:
        scores: float32 [n] from 0, of sampled examples.
        threshold: from which on all are kept.
        floor: least probability to be kept.

    Returns:
        From 0 on; None where nothing is left out.
    """
    scores = np.asarray(scores, np.float64).ravel()
    if not scores.size or not threshold > 0.0:
        return None
    kept = np.clip(scores / threshold, floor, 1.0)
    squares = np.square(scores)
    if kept.mean() == 1.0 or not squares.sum() > 0.0:
        return None
    effective = squares.sum() / (squares / kept).sum()
    return float((1.0 - effective) / (1.0 - kept.mean()))


def _floor_of_share(share: float, count: int) -> int:
    product = share * count
    nearest = round(product)
    if abs(product - nearest) <= _ROUNDING_ERROR * product:
        return nearest
    return math.floor(product)


def _float32_at_most(value: float) -> np.float32:
    """The largest float32 that is not above `value`."""
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return np.nextafter(rounded, np.float32(0.0)) if float(rounded) > value else rounded
