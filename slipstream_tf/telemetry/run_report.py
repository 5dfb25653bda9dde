"""Reports the savings of a run, or why there are none.

A `RunReport` prints as text and converts to JSON.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from slipstream_tf.engine.report import WindowReport, share_of
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.telemetry.dry_run import DryRunEstimate
from slipstream_tf.telemetry.ledger import Ledger

_OF_THE_KEPT = "Metrics of training are those of what is kept, which is harder than all examples"
_AS_OF_ALL = "; weighted_metrics in compile() are as of all."


@dataclasses.dataclass(frozen=True)
class RunReport:
    """The savings of a run; print it or call `to_dict`.

    Attributes:
        settings: The engine's settings.
        ledger: The totals of all ended windows.
        warmup_steps: Number of steps before the policies take effect. None if unknown.
        steps: Number of trained steps.
        dry_run: Estimated savings. None if this is not a dry run.
        present: Description of the current window. Empty at its start.
    """

    settings: EngineSettings
    ledger: Ledger
    warmup_steps: int | None
    steps: int
    dry_run: DryRunEstimate | None = None
    present: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns totals, windows and estimate as JSON-serializable values."""
        estimate = None if self.dry_run is None else self.dry_run.to_dict()
        return {
            **self.ledger.to_dict(),
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "dry_run": estimate,
            "why_nothing": self.why_nothing(),
            "present_window": self.present,
        }

    def __str__(self) -> str:
        reports = self.ledger.reports
        active = Ledger([report for report in reports if not report.is_warming_up])
        lines = []
        if active.reports:
            lines.append(
                f"Windows after the warm-up: {len(active.reports)} of {len(reports)}; "
                f"{active.examples_seen:,} examples, {active.rows.offered:,} gradient rows."
            )
            lines += [f"- {line}" for line in self._lines(active)]
        if reason := self.why_nothing():
            lines.append(reason)
        if self.present:
            lines.append(self.present)
        if reports:
            lines.append(f"Window ends took {self.ledger.seconds:.2f} s.")
        text = "\n".join(lines)
        return text if self.dry_run is None else f"{text}\n\n{self.dry_run}"

    def _lines(self, active: Ledger) -> list[str]:
        """Returns sentences about the savings after the warm-up, and remarks."""
        is_dry_run, rows, lines = self.settings.dry_run, active.rows, []
        did = "would have" if is_dry_run else "have"
        for policy in self.settings.policies:
            if policy.verb == "skipped":
                lines.append(_skipped(active, did, is_dry_run))
                if policy.correct and not is_dry_run:
                    lines.append(_OF_THE_KEPT + (_AS_OF_ALL if policy.weighs_examples else "."))
            elif policy.loses_gradients:
                share = f"{share_of(rows.masked, rows.offered):.1%}"
                lines.append(f"{rows.masked:,} gradient rows ({share}) {did} been masked.")
            elif policy.verb:
                saved = active.bytes_offered - active.bytes_sent
                share = f"{share_of(rows.sent, rows.offered):.1%}"
                lines.append(
                    f"{rows.sent:,} gradient rows ({share}) {did} been sent: {policy.told(rows)}. "
                    f"{saved / 2**20:,.1f} MiB saved."
                )
        if active.traffic:
            parts = [f"{kind} {n / 2**20:,.1f}" for kind, n in active.traffic.items() if n]
            lines.append(f"MiB between ranks: {', '.join(parts)}.")
        last, reports = active.reports[-1], self.ledger.reports
        lines += [f"max_auc_loss: {last.auc_loss_plan}"] * bool(last.auc_loss_plan)
        if anomalies := sum(report.anomalies for report in reports):
            lines.append(f"{anomalies:,} drifts were not finite; those keys count as varying.")
        if any(report.is_threshold_capped for report in reports):
            lines.append("max_threshold lowered T.")
        return lines

    def why_nothing(self) -> str:
        """Explains in a sentence why the policies saved neither examples nor gradients.

        The string is empty if something was saved after the warm-up, or if no policy saves anything
        and a window has ended.
        """
        settings, reports = self.settings, self.ledger.reports
        if not any(policy.verb for policy in settings.policies):
            return "" if reports else "No window has ended yet."
        active = [report for report in reports if not report.is_warming_up]
        if not active:
            return f"Nothing was saved: {self._why_no_window(reports)}"
        rows = Ledger(active).rows
        if (
            any(r.examples_skippable or r.examples_skipped for r in active)
            or rows.sent < rows.offered
        ):
            return ""
        return f"Nothing was saved: {_why_nothing_found(settings, active)}"

    def _why_no_window(self, reports: Sequence[WindowReport]) -> str:
        if self.warmup_steps is None:
            return (
                "the warm-up is a share of the planned steps, which are not known. Give "
                "Window(planned_steps=), Window(warmup=) in steps, or data of known length."
            )
        if self.steps < self.warmup_steps:
            return (
                f"the warm-up takes {self.warmup_steps:,} steps, and {self.steps:,} were trained."
            )
        return (
            f"no window has ended after the warm-up of {self.warmup_steps:,} steps ({len(reports)} "
            f"windows, {self.steps:,} steps). Take shorter windows (Window(steps=)), smaller "
            "batches, more examples or more epochs."
        )


def _skipped(active: Ledger, did: str, is_dry_run: bool) -> str:
    skipped = active.examples_skipped
    if is_dry_run:
        skipped = active.examples_skippable - active.examples_kept
    share = f"{share_of(skipped, active.examples_seen):.1%}"
    line = f"{skipped:,} examples ({share}) {did} been skipped"
    if active.examples_kept:
        line += f"; thinning kept {active.examples_kept:,} more, which stand for them"
    return line + "."


def _why_nothing_found(settings: EngineSettings, active: Sequence[WindowReport]) -> str:
    if settings.goes_by_keys and not any(report.saturated_keys for report in active):
        if not any(report.examples_seen for report in active):
            return (
                "no example went through Slipstream.apply, so that no T was found. Put it last in "
                "the training data's pipeline, or set Saturation(threshold=)."
            )
        if not any(report.hot_keys for report in active):
            return "no key was hot. Give HotSet more memory, or take longer windows."
        return "no key was saturated in any window."
    if active[-1].auc_loss_plan:
        return active[-1].auc_loss_plan
    return "no example was skippable, and no gradient could wait."
