"""T as an exact quantile of sampled skip scores, and what the classifier is told. Pure NumPy.

Slipstream (arXiv 2404.04270, sampling block) bisects until the skipped share is near the target;
one sort gives the same quantile exactly, and cannot fail.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream_tf.config import SaturationConfig
from slipstream_tf.saturation.states import search_keys
from slipstream_tf.saturation.steering import Steering

# Relative; a product this close to an integer is meant to be it (0.29 * 100 is 29, not 28).
_ROUNDING_ERROR = 1e-12
# Of a float32; drifts are below it.
LARGEST_THRESHOLD = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class ThresholdResult:
    """A threshold, and how it was found.

    Attributes:
        threshold: T, a float32 value; inputs with a score strictly below it are skippable.
        is_capped: whether `max_threshold` lowered T.
    """

    threshold: float
    is_capped: bool = False

    def scaled(self, factor: float) -> "ThresholdResult":
        """Returns T times `factor`, 0 to 1."""
        return dataclasses.replace(self, threshold=float(np.float32(self.threshold * factor)))


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


def counts_all_keys(config: SaturationConfig) -> bool:
    """Whether every hot key counts as saturated, however far it moves."""
    by_share = config.threshold is None and config.max_threshold is None
    return by_share and config.score == "remembered_loss" and config.saturated_share == 1.0


def sampled_drifts(
    window: Mapping[str, np.ndarray], keys: Sequence[np.ndarray], drifts: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Picks the drifts of keys that sampled inputs have: a small part of the millions that are hot.

    Args:
        window: "tables" and "keys" of the sampled inputs' lookups, as
            `ops.classifier.InputClassifier.export_window` gives them.
        keys: of each table int64 [n], ascending.
        drifts: of each table float32 [n], along its keys.

    Returns:
        The index of each key's table, int32 [m], keys int64 [m], drifts float32 [m], each key of a
        table once: arguments of `InputClassifier.reservoir_scores`.
    """
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for table, (hot, drift) in enumerate(zip(keys, drifts, strict=True)):
        sampled = np.unique(window["keys"][window["tables"] == table])
        indices, is_hot = search_keys(hot, sampled)
        sampled = sampled[is_hot]
        found.append((np.full(sampled.size, table, np.int32), sampled, drift[indices[is_hot]]))
    tables, sampled, drift = (np.concatenate(part) for part in zip(*found, strict=True))
    return tables, sampled, drift


def threshold_of_keys(
    config: SaturationConfig, scores: np.ndarray, steering: Steering, read_only_drift: float
) -> ThresholdResult:
    """Finds T, by share or as set, times what the guard leaves of it.

    Args:
        config: settings of the engine.
        scores: float32 [n], skip scores by drift of the window's sampled inputs.
        steering: of the next window.
        read_only_drift: T where states of keys decide on read-only replicas alone.
    """
    if not config.needs_key_states:
        return fixed_threshold(read_only_drift)
    if config.threshold is not None:
        found = fixed_threshold(config.threshold)
    elif counts_all_keys(config) and np.isfinite(scores).any():
        # All keys, not those below the largest score of a sample: over the windows of an epoch
        # one key of many would drift further now and then, and no remembered loss would count.
        found = fixed_threshold(LARGEST_THRESHOLD)
    else:
        by_loss = config.score == "remembered_loss"
        share = config.saturated_share if by_loss else steering.share
        found = find_threshold(scores, share, config.max_threshold)
    return found if steering.scale == 1.0 else found.scaled(steering.scale)


def classifier_settings(
    config: SaturationConfig,
    window: int,
    threshold: float,
    loss_threshold: float | None,
    windows_after_warmup: int | None,
) -> tuple[dict[str, Any], bool]:
    """Finds what is skippable in a window.

    Args:
        config: settings of the engine.
        window: number of the window.
        threshold: T.
        loss_threshold: bound of the remembered loss; None with another score.
        windows_after_warmup: windows that began after the warm-up, this one included; None: it is
            warming up.

    Returns:
        Arguments of `ops.classifier.InputClassifier.configure`, and whether inputs may be skipped.
    """
    if windows_after_warmup is None or config.skip in ("none", "defer"):
        # Losses are remembered all the same, as from this window.
        return {"mode": "none", "window": window}, False
    if config.skip == "random":
        shares = config.random_shares
        share = shares[min(windows_after_warmup, len(shares)) - 1]
        settings = {"mode": "random", "random_share": share}
        may_skip = share > 0.0 and not config.shadow
        return {**settings, "shadow": config.shadow, "window": window}, may_skip
    mode = "drift"
    if loss_threshold is not None:
        mode, threshold = "remembered_loss", loss_threshold
    # A mask leaves inputs alone; those that it could skip are noted for the guard.
    shadow = config.shadow or not config.skips_inputs
    settings = {"mode": mode, "threshold": threshold, "keep_rate": config.keep_rate}
    return {**settings, "shadow": shadow, "window": window}, threshold > 0.0 and not shadow


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
