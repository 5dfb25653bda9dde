"""Counts of offered, sent and skipped work, per window and in total.

A `Ledger` prints as a table and converts to JSON.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream_tf.engine.report import WindowReport, added_up, share_of
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.ops.update_policy import UpdateCounts
from slipstream_tf.telemetry.table import format_table

# Counts of evicted, expired and refused rows. Their columns are shown only if nonzero.
_OF_RETENTION = ("rows_evicted", "rows_expired", "not_admitted")


def _of_tables(report: WindowReport, name: str) -> int:
    """Returns the sum of an `UpdateCounts` field over the tables."""
    return sum(getattr(table.rows, name) for table in report.tables)


# Maps a column to its title and a function that formats a window's cell.
_CELLS: Mapping[str, tuple[str, Callable[[WindowReport], str]]] = {
    "window": ("window", lambda report: str(report.window)),
    "step": ("step", lambda report: f"{report.step:,}"),
    "examples": ("examples", lambda report: f"{report.examples_seen:,}"),
    "skipped": ("skipped", lambda report: f"{report.examples_skipped:,}"),
    "skipped share": ("share", lambda report: f"{report.skipped_share:.1%}"),
    "kept": ("kept", lambda report: f"{report.examples_kept:,}"),
    "rows": ("rows", lambda report: f"{report.rows_offered:,}"),
    "masked": ("masked", lambda report: f"{report.rows_masked:,}"),
    "masked share": ("share", lambda r: f"{share_of(r.rows_masked, r.rows_offered):.1%}"),
    "sent": ("sent", lambda report: f"{report.rows_sent:,}"),
    "sent share": ("share", lambda r: f"{share_of(r.rows_sent, r.rows_offered):.1%}"),
    "hot keys": ("hot keys", lambda report: f"{report.hot_keys:,}"),
    "saturated": ("saturated", lambda report: f"{report.saturated_keys:,}"),
    "T": ("T", lambda report: _threshold(report)),
    "evicted": ("evicted", lambda report: f"{_of_tables(report, 'rows_evicted'):,}"),
    "expired": ("expired", lambda report: f"{_of_tables(report, 'rows_expired'):,}"),
    "not admitted": ("not admitted", lambda report: f"{_of_tables(report, 'not_admitted'):,}"),
    "seconds": ("seconds", lambda report: f"{report.seconds:.3f}"),
}
_SUMS = ("examples_seen", "examples_skipped", "examples_skippable", "examples_kept", "seconds")
_TOTALS = (*_SUMS[:4], "skipped_share", "bytes_offered", "bytes_sent", "traffic", "seconds")


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Counts and bytes of windows that have ended, with their totals.

    Attributes:
        reports: The window reports, in order.
        examples_seen: Number of classified examples, kept and skipped.
        examples_skipped: Number of examples that were dropped.
        examples_skippable: Number of examples that the policy allows to drop.
        examples_kept: Number of skippable examples that were kept by subsampling.
        seconds: Time spent at window ends (drift, threshold, hot set).
        columns: Columns of the printed table. If `settings` are passed, only the columns of their
            policies are printed.
    """

    reports: tuple[WindowReport, ...]
    examples_seen: int
    examples_skipped: int
    examples_skippable: int
    examples_kept: int
    seconds: float
    columns: tuple[str, ...] = tuple(_CELLS)

    def __init__(
        self, reports: Sequence[WindowReport], settings: EngineSettings | None = None
    ) -> None:
        object.__setattr__(self, "reports", tuple(reports))
        for name in _SUMS:
            object.__setattr__(self, name, sum(getattr(report, name) for report in reports))
        if settings is not None:
            of_policies = {name for policy in settings.policies for name in policy.columns}
            of_keys = {"hot keys", "saturated", "T"} if settings.goes_by_keys else set()
            shown = {"window", "step", "examples", "seconds"} | of_policies | of_keys
            for name in _OF_RETENTION:
                if any(_of_tables(report, name) for report in reports):
                    shown.add(name.removeprefix("rows_").replace("_", " "))
            object.__setattr__(self, "columns", tuple(name for name in _CELLS if name in shown))

    @property
    def skipped_share(self) -> float:
        """The skipped fraction of the examples seen, 0 to 1."""
        return share_of(self.examples_skipped, self.examples_seen)

    @property
    def rows(self) -> UpdateCounts:
        """Gradient rows, summed over windows and tables.

        `deferred_now` and `deferred_bytes` are the values at the end of the last window.
        """
        tables = (table for report in self.reports for table in report.tables)
        total = added_up(dataclasses.asdict(table.rows) for table in tables)
        last = self.reports[-1].tables if self.reports else ()
        total["deferred_now"] = sum(table.rows.deferred_now for table in last)
        total["deferred_bytes"] = sum(table.rows.deferred_bytes for table in last)
        return UpdateCounts(**total)

    @property
    def traffic(self) -> Mapping[str, int]:
        """Bytes that the ranks sent, by kind; empty for a single process."""
        return added_up(report.traffic for report in self.reports)

    @property
    def bytes_offered(self) -> int:
        """Bytes of all gradient rows, with int64 keys and float32 values."""
        return sum(t.rows.offered * t.row_bytes for r in self.reports for t in r.tables)

    @property
    def bytes_sent(self) -> int:
        """Bytes of the gradient rows that were applied or exchanged."""
        return sum(t.rows.sent * t.row_bytes for r in self.reports for t in r.tables)

    def to_dict(self) -> dict[str, Any]:
        """Returns the totals and all windows as JSON-serializable values."""
        return {
            **{name: getattr(self, name) for name in _TOTALS},
            "rows": dataclasses.asdict(self.rows),
            "windows": [report.to_dict() for report in self.reports],
        }

    def write_json_lines(self, path: str | os.PathLike[str]) -> None:
        """Writes one JSON object per window; replaces an existing file."""
        with open(path, "w", encoding="utf-8") as file:
            for report in self.reports:
                file.write(json.dumps(report.to_dict()) + "\n")

    def __str__(self) -> str:
        cells = [[_CELLS[name][1](report) for name in self.columns] for report in self.reports]
        table = format_table([_CELLS[name][0] for name in self.columns], cells, left_columns=0)
        rows, parts = self.rows, []
        if "skipped" in self.columns:
            counts = f"{self.examples_skipped:,} of {self.examples_seen:,}"
            parts.append(f"{counts} examples skipped ({self.skipped_share:.1%})")
        for name, count in (("masked", rows.masked), ("sent", rows.sent)):
            if name in self.columns:
                share = f"{share_of(count, rows.offered):.1%}"
                parts.append(f"{count:,} of {rows.offered:,} gradient rows {name} ({share})")
        parts.append(f"{len(self.reports)} windows, whose ends took {self.seconds:.2f} s")
        return f"{table}\n{'; '.join(parts)}"


def _threshold(report: WindowReport) -> str:
    return f"{report.threshold:.3g}" + (" (cap)" if report.is_threshold_capped else "")
