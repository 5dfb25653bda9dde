"""Reports the savings of a run, per window and in total, or why there are none.

A `SavingsReport` prints as text and converts to JSON.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream_tf.engine.report import Totals, WindowReport, fraction_of
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.telemetry.dry_run import DryRunEstimate
from slipstream_tf.telemetry.table import format_table

_KEPT_ARE_HARDER = (
    "Training metrics are computed on the kept examples, which are harder than average"
)
_WEIGHTED_METRICS = ". Pass weighted_metrics to compile() to correct for this."
# Counts of evicted, expired and refused rows. Their columns are shown only if nonzero.
_RETENTION_COUNTS = ("rows_evicted", "rows_expired", "not_admitted")


def _of_tables(report: WindowReport, name: str) -> int:
    """Returns the sum of an `UpdateCounts` field over the tables."""
    return sum(getattr(table.rows, name) for table in report.tables)


# Maps a column to its title and a function that formats a window's cell.
_CELLS: Mapping[str, tuple[str, Callable[[WindowReport], str]]] = {
    "window": ("window", lambda report: str(report.window)),
    "step": ("step", lambda report: f"{report.step:,}"),
    "examples": ("examples", lambda report: f"{report.examples_seen:,}"),
    "skipped": ("skipped", lambda report: f"{report.examples_skipped:,}"),
    "skipped fraction": ("fraction", lambda report: f"{report.skipped_fraction:.1%}"),
    "kept": ("kept", lambda report: f"{report.examples_kept:,}"),
    "rows": ("rows", lambda report: f"{report.rows_offered:,}"),
    "masked": ("masked", lambda report: f"{report.rows_masked:,}"),
    "masked fraction": ("fraction", lambda r: f"{fraction_of(r.rows_masked, r.rows_offered):.1%}"),
    "sent": ("sent", lambda report: f"{report.rows_sent:,}"),
    "sent fraction": ("fraction", lambda r: f"{fraction_of(r.rows_sent, r.rows_offered):.1%}"),
    "hot keys": ("hot keys", lambda report: f"{report.hot_keys:,}"),
    "saturated": ("saturated", lambda report: f"{report.saturated_keys:,}"),
    "T": ("T", lambda report: _threshold(report)),
    "evicted": ("evicted", lambda report: f"{_of_tables(report, 'rows_evicted'):,}"),
    "expired": ("expired", lambda report: f"{_of_tables(report, 'rows_expired'):,}"),
    "not admitted": ("not admitted", lambda report: f"{_of_tables(report, 'not_admitted'):,}"),
    "seconds": ("seconds", lambda report: f"{report.seconds:.3f}"),
}
_TOTALS = (
    "examples_seen", "examples_skipped", "examples_skippable", "examples_kept", "skipped_fraction",
    "bytes_offered", "bytes_sent", "traffic", "seconds",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SavingsReport(Totals):
    """The savings of a run: print it, or call `table` or `to_dict`.

    Attributes:
        reports: The reports of the windows that have ended, in order.
        settings: The engine's settings. They select the columns of `table` and the sentences.
        warmup_steps: Number of steps before the policies take effect. None if unknown.
        steps: Number of trained steps.
        dry_run: Estimated savings. None if this is not a dry run.
        current_window: Description of the current window. Empty at its start.
    """

    settings: EngineSettings = dataclasses.field(default_factory=EngineSettings)
    warmup_steps: int | None = None
    steps: int = 0
    dry_run: DryRunEstimate | None = None
    current_window: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns totals, windows and estimate as JSON-serializable values."""
        return {
            **{name: getattr(self, name) for name in _TOTALS},
            "rows": dataclasses.asdict(self.rows),
            "windows": [report.to_dict() for report in self.reports],
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "dry_run": None if self.dry_run is None else self.dry_run.to_dict(),
            "no_savings_reason": self.no_savings_reason(),
            "current_window": self.current_window,
        }

    def write_json_lines(self, path: str | os.PathLike[str]) -> None:
        """Writes one JSON object per window; replaces an existing file."""
        with open(path, "w", encoding="utf-8") as file:
            for report in self.reports:
                file.write(json.dumps(report.to_dict()) + "\n")

    def _columns(self) -> list[str]:
        """Returns the columns that the policies need."""
        shown = {"window", "step", "examples", "seconds"}
        shown.update(name for policy in self.settings.policies for name in policy.columns)
        if self.settings.goes_by_keys:
            shown.update(("hot keys", "saturated", "T"))
        for name in _RETENTION_COUNTS:
            if any(_of_tables(report, name) for report in self.reports):
                shown.add(name.removeprefix("rows_").replace("_", " "))
        return [name for name in _CELLS if name in shown]

    def table(self) -> str:
        """Returns a table with one line per window, and a line with the totals."""
        columns = self._columns()
        cells = [[_CELLS[name][1](report) for name in columns] for report in self.reports]
        table = format_table([_CELLS[name][0] for name in columns], cells, left_columns=0)
        rows, parts = self.rows, []
        if "skipped" in columns:
            counts = f"{self.examples_skipped:,} of {self.examples_seen:,}"
            parts.append(f"{counts} examples skipped ({self.skipped_fraction:.1%})")
        for name, count in (("masked", rows.masked), ("sent", rows.sent)):
            if name in columns:
                fraction = f"{fraction_of(count, rows.offered):.1%}"
                parts.append(f"{count:,} of {rows.offered:,} gradient rows {name} ({fraction})")
        parts.append(f"{len(self.reports)} window ends took {self.seconds:.2f} s")
        return f"{table}\n{'; '.join(parts)}"

    def __str__(self) -> str:
        if self.dry_run is not None and self.dry_run.refusal:
            return str(self.dry_run)
        active = Totals([report for report in self.reports if not report.is_warming_up])
        lines = []
        if active.reports:
            lines.append(
                f"Windows after the warm-up: {len(active.reports)} of {len(self.reports)}; "
                f"{active.examples_seen:,} examples, {active.rows.offered:,} gradient rows."
            )
            lines += [f"- {line}" for line in self._lines(active)]
        lines += [line for line in (self.no_savings_reason(), self.current_window) if line]
        if self.reports:
            lines.append(f"Window ends took {self.seconds:.2f} s.")
        text = "\n".join(lines)
        return text if self.dry_run is None else f"{text}\n\n{self.dry_run}"

    def _lines(self, active: Totals) -> list[str]:
        """Returns sentences about the savings after the warm-up, and remarks."""
        is_dry_run, rows, lines = self.settings.dry_run, active.rows, []
        did = "would have" if is_dry_run else "have"
        for policy in self.settings.policies:
            if policy.verb == "skipped":
                lines.append(_skipped(active, did, is_dry_run))
                if policy.correction and not is_dry_run:
                    lines.append(
                        _KEPT_ARE_HARDER + (_WEIGHTED_METRICS if policy.weighs_examples else ".")
                    )
            elif policy.loses_gradients:
                fraction = f"{fraction_of(rows.masked, rows.offered):.1%}"
                lines.append(f"{rows.masked:,} gradient rows ({fraction}) {did} been masked.")
            elif policy.verb:
                saved = active.bytes_offered - active.bytes_sent
                fraction = f"{fraction_of(rows.sent, rows.offered):.1%}"
                lines.append(
                    f"{rows.sent:,} gradient rows ({fraction}) {did} been sent: "
                    f"{policy.report_text(rows)}. {saved / 2**20:,.1f} MiB {did} been saved."
                )
        if active.traffic:
            parts = [f"{kind} {n / 2**20:,.1f}" for kind, n in active.traffic.items() if n]
            lines.append(f"MiB between ranks: {', '.join(parts)}.")
        last, reports = active.reports[-1], self.reports
        lines += [f"max_auc_loss: {last.auc_loss_plan}"] * bool(last.auc_loss_plan)
        if anomalies := sum(report.anomalies for report in reports):
            lines.append(
                f"{anomalies:,} drifts were not finite, because the rows contain NaN or infinity. "
                "Their keys count as varying."
            )
        if any(report.is_threshold_capped for report in reports):
            lines.append("In at least one window, max_threshold limited the threshold T.")
        return lines

    def no_savings_reason(self) -> str:
        """Explains in a sentence why the policies saved neither examples nor gradients.

        The string is empty if something was saved after the warm-up, or if no policy saves anything
        and a window has ended.
        """
        settings, reports = self.settings, self.reports
        if not any(policy.verb for policy in settings.policies):
            return "" if reports else "No window has ended yet."
        active = [report for report in reports if not report.is_warming_up]
        if not active:
            return f"Nothing was saved: {self._no_window_reason(reports)}"
        rows = Totals(active).rows
        if (
            any(r.examples_skippable or r.examples_skipped for r in active)
            or rows.sent < rows.offered
        ):
            return ""
        return f"Nothing was saved: {_no_savings_reason(settings, active)}"

    def _no_window_reason(self, reports: Sequence[WindowReport]) -> str:
        if self.warmup_steps is None:
            return (
                "the warm-up is a fraction of the planned steps, and their number is unknown. Pass "
                "Window(planned_steps=...), Window(warmup=...) in steps, or data of known length."
            )
        if self.steps < self.warmup_steps:
            return f"the warm-up has {self.warmup_steps:,} steps; only {self.steps:,} were trained."
        return (
            f"no window has ended after the warm-up of {self.warmup_steps:,} steps ({len(reports)} "
            f"windows, {self.steps:,} steps). Use shorter windows (Window(steps=...)), smaller "
            "batches, more examples or more epochs."
        )


def _skipped(active: Totals, did: str, is_dry_run: bool) -> str:
    skipped = active.examples_skipped
    if is_dry_run:
        skipped = active.examples_skippable - active.examples_kept
    fraction = f"{fraction_of(skipped, active.examples_seen):.1%}"
    line = f"{skipped:,} examples ({fraction}) {did} been skipped"
    if active.examples_kept:
        kept = "would have been" if is_dry_run else "were"
        line += (
            f"; {active.examples_kept:,} more were skippable and {kept} kept with larger weights"
        )
    return line + "."


def _no_savings_reason(settings: EngineSettings, active: Sequence[WindowReport]) -> str:
    if settings.goes_by_keys and not any(report.saturated_keys for report in active):
        if not any(report.examples_seen for report in active):
            return (
                "no example passed through Slipstream.apply, so no threshold T was found. Call it "
                "last in the training pipeline, or pass Saturation(threshold=...)."
            )
        if not any(report.hot_keys for report in active):
            return "no key was hot. Pass a larger HotSet(memory=...), or use longer windows."
        return "no key was saturated in any window."
    if active[-1].auc_loss_plan:
        return active[-1].auc_loss_plan
    return "no example was skippable, and no gradient was masked or deferred."


def _threshold(report: WindowReport) -> str:
    return f"{report.threshold:.3g}" + (" (cap)" if report.is_threshold_capped else "")
