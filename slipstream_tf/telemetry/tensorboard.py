"""Windows as TensorBoard's scalars and histograms. In: window reports. Out: an event file."""

import os
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from slipstream_tf.engine.report import WindowReport, added_up
from slipstream_tf.telemetry.ledger import Ledger

SUB_FOLDER = "slipstream"
# What `tf.summary.scalar` and `histogram` write; these need TensorBoard, which not every TensorFlow
# comes with.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data={"plugin_name": "scalars"}, data_class="DATA_CLASS_SCALAR"
)
_HISTOGRAM = tf.compat.v1.SummaryMetadata(
    plugin_data={"plugin_name": "histograms"}, data_class="DATA_CLASS_TENSOR"
)


def scalars(report: WindowReport) -> Mapping[str, float]:
    """The numbers of a window that are worth a curve: name -> value, all finite."""
    rows = Ledger([report]).rows
    states = added_up(table.states for table in report.tables)
    values: dict[str, float | None] = {
        "examples/seen": report.examples_seen,
        "examples/skipped": report.examples_skipped,
        "examples/skipped_share": report.skipped_share,
        "examples/kept_by_thinning": report.examples_kept,
        "rows/offered": rows.offered,
        "rows/sent": rows.sent,
        "rows/sent_share": rows.sent / rows.offered if rows.offered else None,
        "rows/masked": rows.masked,
        "rows/deferred_now": rows.deferred_now,
        "keys/hot": report.hot_keys,
        "keys/saturated": report.saturated_keys,
        "keys/saturated_share": report.saturated_share,
        "keys/hot_set_overlap": report.hot_set_overlap,
        "threshold": report.threshold,
        "threshold/target_share": report.target_share,
        "progressive/log_loss": report.log_loss,
        "progressive/auc": report.auc,
        "window_end_seconds": report.seconds,
        **{f"bytes/{kind}": count for kind, count in report.traffic.items()},
    }
    for own in report.policies.values():
        values.update({f"policies/{name}": value for name, value in own.items()})
    keys = sum(states.values())
    values.update({f"states/{name}_share": n / keys for name, n in states.items() if keys})
    return {name: float(value) for name, value in values.items() if value is not None}


def log10_drift(report: WindowReport) -> np.ndarray:
    """The drift histogram over decimal logarithms, as TensorBoard takes one.

    Returns:
        float64 [buckets, 3]: lower bound, upper bound, keys. The bucket of drifts near 0 has no
        lower bound; it is made as wide as the others.
    """
    buckets = np.array(report.drift_histogram, np.float64).reshape(-1, 3)
    with np.errstate(divide="ignore"):
        buckets[:, :2] = np.log10(buckets[:, :2])
    lowest = np.isneginf(buckets[:, 0])
    buckets[lowest, 0] = buckets[lowest, 1] - 0.25
    return buckets


class WindowWriter:
    """Writes windows, by trained steps, to the sub-folder "slipstream" of a folder.

    Tags begin with "saturation/". Scalars are those of `scalars`; the histogram "log10_drift" has
    the hot keys' drifts of windows that have any.

    Args:
        folder: created if need be; `keras.callbacks.TensorBoard`'s `log_dir` puts them beside its
            own.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer = tf.summary.create_file_writer(os.path.join(folder, SUB_FOLDER))

    def write(self, report: WindowReport) -> None:
        """Writes one window and flushes."""
        with self._writer.as_default(step=report.step):
            for name, value in scalars(report).items():
                tag, tensor = f"saturation/{name}", tf.constant(value, tf.float32)
                tf.summary.write(tag, tensor, metadata=_SCALAR)
            if report.drift_histogram:
                buckets = tf.constant(log10_drift(report))
                tf.summary.write("saturation/log10_drift", buckets, metadata=_HISTOGRAM)
        self._writer.flush()
