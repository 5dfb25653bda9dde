"""What a run tells: quality of predictions, progress, the record of a run, plain text tables.

No Keras in here. In: NumPy arrays and plain values. Out: numbers, JSON files and text.
"""

from slipstream_tf.telemetry.metrics import ClickMetrics, click_metrics

__all__ = ["ClickMetrics", "click_metrics"]
