"""What was offered, sent and skipped, window by window and in all: printable and JSON.

In: window reports. Out: a frozen `Ledger`, a summary in words, JSON lines.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf.config import SaturationConfig
from slipstream_tf.ops.update_policy import UpdateCounts
from slipstream_tf.saturation.report import WindowReport, added_up, share_of
from slipstream_tf.saturation.threshold import LARGEST_THRESHOLD
from slipstream_tf.telemetry.table import format_table

_COLUMNS = (
    *("window", "step", "inputs seen", "skipped", "share", "kept", "rows offered", "sent", "share"),
    *("hot keys", "saturated", "T", "seconds"),
)
_TOTALS = (
    *("inputs_seen", "inputs_skipped", "inputs_skippable", "inputs_kept", "skipped_share"),
    *("bytes_offered", "bytes_sent", "traffic", "seconds"),
)


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Account of the windows that have ended; inputs of the present window are not in it.

    Attributes:
        reports: the windows' reports, in order.
    """

    reports: tuple[WindowReport, ...]

    def __init__(self, reports: Sequence[WindowReport]) -> None:
        object.__setattr__(self, "reports", tuple(reports))

    @property
    def inputs_seen(self) -> int:
        """Inputs classified (kept and skipped)."""
        return sum(report.inputs_seen for report in self.reports)

    @property
    def inputs_skipped(self) -> int:
        """Inputs left out of training."""
        return sum(report.inputs_skipped for report in self.reports)

    @property
    def inputs_skippable(self) -> int:
        """Inputs that could have been left out."""
        return sum(report.inputs_skippable for report in self.reports)

    @property
    def inputs_kept(self) -> int:
        """Skippable inputs that thinning kept."""
        return sum(report.inputs_kept for report in self.reports)

    @property
    def seconds(self) -> float:
        """Time spent at window ends (drift, threshold, hot set)."""
        return sum(report.seconds for report in self.reports)

    @property
    def skipped_share(self) -> float:
        """Skipped inputs as a share of the inputs seen, 0 to 1."""
        return share_of(self.inputs_skipped, self.inputs_seen)

    @property
    def rows(self) -> UpdateCounts:
        """Gradient rows of all tables over all windows; `pending` as of the last window's end."""
        tables = (table for report in self.reports for table in report.tables)
        total = added_up(dataclasses.asdict(table.rows) for table in tables)
        last = self.reports[-1].tables if self.reports else ()
        total["pending"] = sum(table.rows.pending for table in last)
        total["pending_bytes"] = sum(table.rows.pending_bytes for table in last)
        return UpdateCounts(**total)

    @property
    def traffic(self) -> Mapping[str, int]:
        """Bytes by kind that the ranks gave to the network; empty for one process."""
        return added_up(report.traffic for report in self.reports)

    @property
    def bytes_offered(self) -> int:
        """Bytes of all gradient rows: what an exchange without skipping would carry."""
        return sum(t.rows.offered * t.row_bytes for r in self.reports for t in r.tables)

    @property
    def bytes_sent(self) -> int:
        """Bytes of the gradient rows that were applied, or would be exchanged."""
        return sum(t.rows.sent * t.row_bytes for r in self.reports for t in r.tables)

    def to_dict(self) -> dict[str, Any]:
        """Returns the totals and all windows as JSON-serialisable values."""
        return {
            **{name: getattr(self, name) for name in _TOTALS},
            "rows": dataclasses.asdict(self.rows),
            "windows": [report.to_dict() for report in self.reports],
        }

    def write_json_lines(self, path: str | os.PathLike[str]) -> None:
        """Writes one JSON object per window to a file, which is replaced."""
        with open(path, "w", encoding="utf-8") as file:
            for report in self.reports:
                file.write(json.dumps(report.to_dict()) + "\n")

    def __str__(self) -> str:
        table = format_table(_COLUMNS, list(map(_cells, self.reports)), left_columns=0)
        rows = self.rows
        total = (
            f"{self.inputs_skipped:,} of {self.inputs_seen:,} inputs skipped "
            f"({self.skipped_share:.1%}), {rows.sent:,} of {rows.offered:,} gradient rows sent "
            f"({share_of(rows.sent, rows.offered):.1%}) in {len(self.reports)} windows; "
            f"window ends took {self.seconds:.2f} s"
        )
        return f"{table}\n{total}"


def summarise(config: SaturationConfig, reports: Sequence[WindowReport]) -> str:
    """Says in words what a run skipped, or in shadow mode would have skipped.

    Args:
        config: of the run.
        reports: of its windows.

    Returns:
        A few lines, without a newline at the end.
    """
    ledger = Ledger(reports)
    active = Ledger([report for report in reports if not report.is_warming_up])
    if not active.reports:
        return (
            f"No window has ended after the warm-up yet (windows: {len(reports)}; inputs seen: "
            f"{ledger.inputs_seen:,}): nothing was skipped."
        )
    did = "would have" if config.shadow else "have"
    rows = active.rows
    lines = [
        f"Windows after the warm-up: {len(active.reports)} of {len(reports)}; "
        f"{active.inputs_seen:,} inputs, {rows.offered:,} gradient rows:"
    ]
    if config.skips_inputs or config.skip == "random":
        skipped = active.inputs_skipped
        if config.shadow:
            skipped = active.inputs_skippable - active.inputs_kept
        line = (
            f"- {skipped:,} inputs ({share_of(skipped, active.inputs_seen):.1%}) {did} been skipped"
        )
        if active.inputs_kept:
            line += f"; thinning kept {active.inputs_kept:,} more, which stand for them"
        lines.append(line + ".")
    if config.masks_gradients:
        lines.append(
            f"- {rows.masked:,} gradient rows ({share_of(rows.masked, rows.offered):.1%}) {did} "
            "been masked."
        )
    if config.defers_gradients:
        saved = active.bytes_offered - active.bytes_sent
        lines.append(
            f"- {rows.sent:,} gradient rows ({share_of(rows.sent, rows.offered):.1%}) {did} been "
            f"sent: {rows.due_by_movement:,} by movement, {rows.due_by_age:,} by age, "
            f"{rows.flushed:,} flushed, {rows.refused:,} without room. {saved / 2**20:,.1f} MiB "
            "saved."
        )
    if active.traffic:
        parts = [f"{kind} {n / 2**20:,.1f}" for kind, n in active.traffic.items() if n]
        lines.append(f"- MiB between ranks: {', '.join(parts)}.")
    last = active.reports[-1]
    for title, words in (("Guard", last.guard), ("Budget", last.budget)):
        if words:
            lines.append(f"- {title}: {words}")
    anomalies = sum(report.anomalies for report in reports)
    if anomalies:
        lines.append(f"- {anomalies:,} drifts were not finite; those keys count as varying.")
    if any(report.is_threshold_capped for report in reports):
        lines.append("- max_threshold lowered T.")
    lines.append(f"Window ends took {ledger.seconds:.2f} s.")
    return "\n".join(lines)


def _cells(report: WindowReport) -> tuple[str, ...]:
    return (
        str(report.window),
        f"{report.step:,}",
        f"{report.inputs_seen:,}",
        f"{report.inputs_skipped:,}",
        f"{report.skipped_share:.1%}",
        f"{report.inputs_kept:,}",
        f"{report.rows_offered:,}",
        f"{report.rows_sent:,}",
        f"{share_of(report.rows_sent, report.rows_offered):.1%}",
        f"{report.hot_keys:,}",
        f"{report.saturated_keys:,}",
        _threshold(report.threshold) + (" (cap)" if report.is_threshold_capped else ""),
        f"{report.seconds:.3f}",
    )


def _threshold(value: float) -> str:
    return f"{value:.3g}" if value < LARGEST_THRESHOLD else "any"
