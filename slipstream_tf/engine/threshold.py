"""T from sampled skip scores, as the settings have it. Pure NumPy."""

from collections.abc import Mapping, Sequence

import numpy as np

from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.engine.states import search_keys
from slipstream_tf.engine.steering import Steering
from slipstream_tf.policies.threshold import ThresholdResult, find_threshold, fixed_threshold


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
    settings: EngineSettings, scores: np.ndarray, steering: Steering
) -> ThresholdResult:
    """Returns T: as set, or found by share.

    Args:
        settings: of the engine.
        scores: float32 [n], skip scores by drift of the window's sampled examples.
        steering: of the next window.
    """
    if not settings.goes_by_keys:
        return fixed_threshold(0.0)
    if settings.saturated.threshold is not None:
        return fixed_threshold(settings.saturated.threshold)
    # Foreseen losses have a share of their own, which T does not follow.
    share = settings.key_share if settings.pilot else steering.share
    return find_threshold(scores, share, settings.saturated.max_threshold)
