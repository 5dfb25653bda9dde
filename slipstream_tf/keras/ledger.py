"""What was skipped, window by window and in all: printable, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream_tf.saturation.report import WindowReport
from slipstream_tf.telemetry.table import format_table

_COLUMNS = (
    "window",
    "step",
    "inputs seen",
    "skipped",
    "share",
    "hot keys",
    "saturated",
    "T",
    "seconds",
)


class Ledger:
    """Summary of the windows that have ended; inputs of the present window are not in it.

    Attributes:
        reports: the windows' reports, in order.
        inputs_seen: inputs classified in those windows (kept and skipped).
        inputs_skipped: inputs left out of training.
        seconds: time spent at window ends (drift, threshold, hot set).
    """

    def __init__(self, reports: Sequence[WindowReport]) -> None:
        self.reports = tuple(reports)
        self.inputs_seen = sum(report.inputs_seen for report in self.reports)
        self.inputs_skipped = sum(report.inputs_skipped for report in self.reports)
        self.seconds = sum(report.seconds for report in self.reports)

    @property
    def skipped_share(self) -> float:
        """Skipped inputs as a share of the inputs seen, 0 to 1."""
        return self.inputs_skipped / self.inputs_seen if self.inputs_seen else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the totals and all windows as JSON-serialisable values."""
        return {
            "inputs_seen": self.inputs_seen,
            "inputs_skipped": self.inputs_skipped,
            "skipped_share": self.skipped_share,
            "seconds": self.seconds,
            "windows": [report.to_dict() for report in self.reports],
        }

    def __str__(self) -> str:
        table = format_table(_COLUMNS, [_cells(report) for report in self.reports], left_columns=0)
        total = (
            f"{self.inputs_skipped:,} of {self.inputs_seen:,} inputs skipped "
            f"({self.skipped_share:.1%}) in {len(self.reports)} windows; "
            f"window ends took {self.seconds:.2f} s"
        )
        return f"{table}\n{total}"


def _cells(report: WindowReport) -> tuple[str, ...]:
    return (
        str(report.window),
        f"{report.step:,}",
        f"{report.inputs_seen:,}",
        f"{report.inputs_skipped:,}",
        f"{report.skipped_share:.1%}",
        f"{report.hot_keys:,}",
        f"{report.saturated_keys:,}",
        f"{report.threshold:.3g}" + (" (cap)" if report.is_threshold_capped else ""),
        f"{report.seconds:.3f}",
    )
