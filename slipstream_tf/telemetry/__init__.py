"""What a run tells: quality of predictions, progress, the record of a run, plain text tables.

No Keras in here. In: NumPy arrays and plain values. Out: numbers, JSON files and text.
"""

from slipstream_tf.telemetry.metrics import ClickMetrics, click_metrics, exact_auc
from slipstream_tf.telemetry.progress import TrainingBar
from slipstream_tf.telemetry.run_record import write_json
from slipstream_tf.telemetry.table import format_table

__all__ = [
    "ClickMetrics",
    "TrainingBar",
    "click_metrics",
    "exact_auc",
    "format_table",
    "write_json",
]
