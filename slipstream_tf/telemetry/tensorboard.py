"""Writes window reports as TensorBoard scalars and histograms."""

import os
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from slipstream_tf.engine.report import Totals, WindowReport, added_up

SUB_FOLDER = "slipstream"
# Same metadata as `tf.summary.scalar` and `tf.summary.histogram`. These functions are not used,
# because they need the tensorboard package, which some TensorFlow builds do not include.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data={"plugin_name": "scalars"}, data_class="DATA_CLASS_SCALAR"
)
_HISTOGRAM = tf.compat.v1.SummaryMetadata(
    plugin_data={"plugin_name": "histograms"}, data_class="DATA_CLASS_TENSOR"
)


def scalars(report: WindowReport) -> Mapping[str, float]:
    """Returns the plotted values of a window by name, without undefined values."""
    rows = Totals([report]).rows
    states = added_up(table.states for table in report.tables)
    values: dict[str, float | None] = {
        "examples/seen": report.examples_seen,
        "examples/skipped": report.examples_skipped,
        "examples/skipped_fraction": report.skipped_fraction,
        "examples/kept_by_subsampling": report.examples_kept,
        "rows/offered": rows.offered,
        "rows/sent": rows.sent,
        "rows/sent_fraction": rows.sent / rows.offered if rows.offered else None,
        "rows/masked": rows.masked,
        "rows/deferred_now": rows.deferred_now,
        "keys/hot": report.hot_keys,
        "keys/saturated": report.saturated_keys,
        "keys/saturated_fraction": report.saturated_fraction,
        "keys/hot_set_overlap": report.hot_set_overlap,
        "threshold": report.threshold,
        "threshold/target_fraction": report.target_fraction,
        "progressive/log_loss": report.log_loss,
        "progressive/auc": report.auc,
        "window_end_seconds": report.seconds,
        **{f"bytes/{kind}": count for kind, count in report.traffic.items()},
    }
    for own in report.policies.values():
        values.update({f"policies/{name}": value for name, value in own.items()})
    keys = sum(states.values())
    values.update({f"states/{name}_fraction": n / keys for name, n in states.items() if keys})
    return {name: float(value) for name, value in values.items() if value is not None}


def log10_drift(report: WindowReport) -> np.ndarray:
    """Returns the drift histogram over log10(drift), in TensorBoard's format.

    Returns:
        float64 [buckets, 3]: lower bound, upper bound, number of keys. The bucket of drifts near 0
            has no lower bound, so it gets the width of the other buckets.
    """
    buckets = np.array(report.drift_histogram, np.float64).reshape(-1, 3)
    with np.errstate(divide="ignore"):
        buckets[:, :2] = np.log10(buckets[:, :2])
    lowest = np.isneginf(buckets[:, 0])
    buckets[lowest, 0] = buckets[lowest, 1] - 0.25
    return buckets


class WindowWriter:
    """Writes windows to the sub-folder "slipstream", by number of trained steps.

    Tags start with "saturation/". The scalars are the values of `scalars`. The histogram
    "log10_drift" contains the drifts of the hot keys, for windows that have a histogram.

    Args:
        folder: Log folder, created if missing. Pass the `log_dir` of `keras.callbacks.TensorBoard`
            to show both in one TensorBoard.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer = tf.summary.create_file_writer(os.path.join(folder, SUB_FOLDER))

    def write(self, report: WindowReport) -> None:
        """Writes one window and flushes the file."""
        with self._writer.as_default(step=report.step):
            for name, value in scalars(report).items():
                tag, tensor = f"saturation/{name}", tf.constant(value, tf.float32)
                tf.summary.write(tag, tensor, metadata=_SCALAR)
            if report.drift_histogram:
                buckets = tf.constant(log10_drift(report))
                tf.summary.write("saturation/log10_drift", buckets, metadata=_HISTOGRAM)
        self._writer.flush()
