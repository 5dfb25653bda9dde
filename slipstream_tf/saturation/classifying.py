"""What the input classifier is told of a window. Pure. In: settings and T. Out: its arguments."""

from __future__ import annotations

from typing import Any

from slipstream_tf.config import SaturationConfig


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
