"""What the input classifier is told of a window, and the T of its keys. Pure.

In: settings, and the skip scores of a window. Out: T, and the classifier's arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream_tf.config import SaturationConfig
from slipstream_tf.saturation.states import search_keys
from slipstream_tf.saturation.steering import Steering
from slipstream_tf.saturation.threshold import (
    LARGEST_THRESHOLD,
    ThresholdResult,
    find_threshold,
    fixed_threshold,
)


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
        asked = np.unique(window["keys"][window["tables"] == table])
        places, is_hot = search_keys(hot, asked)
        asked = asked[is_hot]
        found.append((np.full(asked.size, table, np.int32), asked, drift[places[is_hot]]))
    tables, asked, drift = (np.concatenate(part) for part in zip(*found, strict=True))
    return tables, asked, drift


def threshold_of_keys(
    config: SaturationConfig, scores: np.ndarray, steering: Steering, freeze_drift: float
) -> ThresholdResult:
    """Finds T, by share or as set, times what the guard leaves of it.

    Args:
        config: settings of the engine.
        scores: float32 [n], skip scores by drift of the window's sampled inputs.
        steering: of the next window.
        freeze_drift: T where keys are judged for freezing alone.
    """
    if not config.judges_keys:
        return fixed_threshold(freeze_drift)
    if config.threshold is not None:
        found = fixed_threshold(config.threshold)
    elif counts_all_keys(config) and np.isfinite(scores).any():
        # All keys, not those below the largest score of a sample: over the windows of an epoch
        # one key of many would drift further now and then, and the memory never hold.
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
    # A mask leaves inputs alone; those that it could skip are marked for the guard.
    shadow = config.shadow or not config.skips_inputs
    settings = {"mode": mode, "threshold": threshold, "keep_rate": config.keep_rate}
    return {**settings, "shadow": shadow, "window": window}, threshold > 0.0 and not shadow
