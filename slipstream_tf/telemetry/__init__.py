"""Metrics, progress bars, records and reports of training runs.

The modules take NumPy arrays and plain values and return numbers, JSON files and text. They do not
depend on Keras.
"""

from slipstream_tf.telemetry.metrics import ClickMetrics, click_metrics

__all__ = ["ClickMetrics", "click_metrics"]
