"""What the engine tells the log. In: what a window brought. Out: warnings, where one is due."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from absl import logging

from slipstream_tf.config import SaturationConfig
from slipstream_tf.saturation.tracked_table import Measured


def warn_of_first_window(
    config: SaturationConfig, warmup_steps: int | None, rows_offered: int, inputs_seen: int
) -> None:
    """Warns at the end of the first window if nothing will ever be skipped.

    Args:
        config: settings of the engine.
        warmup_steps: None if the length of the warm-up is not known.
        rows_offered: gradient rows that came in the window.
        inputs_seen: inputs that were classified; by them T is found.
    """
    if config.skip == "none":
        return
    if warmup_steps is None:
        logging.warning(
            "The warm-up is a share of the planned steps, whose number is not known: nothing "
            "is skipped. Give planned_steps or warmup_steps to SaturationConfig, or data whose "
            "length is known (tf.data.experimental.assert_cardinality)."
        )
    if config.judges_keys and config.threshold is None and rows_offered > 0 and not inputs_seen:
        logging.warning(
            "Gradients came in, but no input went through Slipstream.apply: the threshold is "
            "found on inputs, so it stays 0 and no key is saturated. Put slipstream.apply(...) "
            "last in the training data's pipeline, or set `threshold`."
        )


def log_anomalies(
    window: int, step: int, tables: Sequence[str], measured: Sequence[Measured]
) -> None:
    """Warns of hot keys whose drift is not finite.

    Args:
        window: number of the window that ends.
        step: trained steps.
        tables: names of the tracked tables.
        measured: their drifts.
    """
    for table, found in zip(tables, measured, strict=True):
        is_anomaly = ~np.isfinite(found.drift)
        if is_anomaly.any():
            logging.warning(
                "Window %d, step %d: %d hot keys of table %r have a drift that is not finite "
                "and count as varying. First: key %d.",
                window,
                step,
                int(is_anomaly.sum()),
                table,
                int(found.keys[is_anomaly][0]),
            )
