"""What a dry run would have saved, and what that is estimated to cost. Pure.

In: the settings and the windows' reports. Out: a frozen `DryRunEstimate`, in words and as JSON.

No run without its controls tells what skipping costs; until they are run, this is what one dry
run knows. Left out examples and masked rows: quality grows by b for each e-fold of trained
examples (`engine.steering`), so that training on S of N examples' worth less ends
b * ln(N / (N - S)) short. Deferred rows: an empirical rule (`policies.gradients`).
"""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from slipstream_tf.engine import steering
from slipstream_tf.engine.report import WindowReport, share_of
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.telemetry.exchange_estimate import ExchangeEstimate
from slipstream_tf.telemetry.ledger import Ledger

_WIDTH = 99
_Cost = tuple[float | None, float | None, str]  # As of `Saving`: least, most and basis.


@dataclasses.dataclass(frozen=True)
class Saving:
    """One way to save.

    Attributes:
        what: "examples" or "gradient rows".
        saved: of these, after the warm-up.
        offered: of these, after the warm-up.
        bytes_saved: of gradient rows and their keys, unpacked, where ranks exchange them.
        bytes_offered: the same of all.
        least_cost, most_cost: AUC missing at the end of training by the estimate, a range that does
            not bound it; None if the estimate has no basis.
        basis: of the estimate, or why there is none, in words.
    """

    what: str
    saved: int
    offered: int
    bytes_saved: int = 0
    bytes_offered: int = 0
    least_cost: float | None = None
    most_cost: float | None = None
    basis: str = ""

    @property
    def share(self) -> float:
        """Of what was offered, 0 to 1."""
        return self.saved / self.offered if self.offered else 0.0

    def __str__(self) -> str:
        text = f"{self.saved:,} of {self.offered:,} {self.what} ({self.share:.1%}"
        if self.bytes_offered:
            text += f"; {self.bytes_saved / 2**20:,.1f} of {self.bytes_offered / 2**20:,.1f} MiB"
        if self.least_cost is None or self.most_cost is None:
            return text + "), at a cost that is not estimated"
        return text + f") at an estimated cost of {self.least_cost:.4f} to {self.most_cost:.4f} AUC"


@dataclasses.dataclass(frozen=True)
class DryRunEstimate:
    """What a dry run would have saved, each way as if it were the only one.

    Attributes:
        savings: by way; empty before the warm-up's end.
        exchange: of several ranks, what a step's exchange of rows takes.
    """

    savings: tuple[Saving, ...]
    exchange: ExchangeEstimate | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns {"savings": [...], "exchange": ...} as JSON-serialisable values."""
        return {
            "savings": [{**dataclasses.asdict(part), "share": part.share} for part in self.savings],
            "exchange": None if self.exchange is None else self.exchange.to_dict(),
        }

    def __str__(self) -> str:
        if not self.savings:
            return (
                "Dry run: no window ended after the warm-up; there is nothing to tell. Take\n"
                "shorter windows (Window(steps=)), smaller batches, more examples or more epochs."
            )
        lines = ["You would have saved, after the warm-up,"]
        ends = [" or"] * (len(self.savings) - 1) + ["."]
        lines += [f"- {part}{end}" for part, end in zip(self.savings, ends, strict=True)]
        notes = [f"Basis, {part.what}: {part.basis}" for part in self.savings]
        notes.append(
            "Only the same training with the policy switched on tells the cost; this run trained "
            "as plain training does, and is what to compare it with."
        )
        text = "\n".join(lines + [textwrap.fill(note, _WIDTH) for note in notes])
        return text if self.exchange is None else f"{text}\n\n{self.exchange}"


def estimate_dry_run(
    settings: EngineSettings,
    reports: Sequence[WindowReport],
    auc_loss_of_deferring: tuple[float, float] | None = None,
    exchange: ExchangeEstimate | None = None,
) -> DryRunEstimate:
    """Adds up what would have been saved, and estimates what AUC that would have cost.

    Args:
        settings: of the engine.
        reports: of its windows, from the first on.
        auc_loss_of_deferring: (least, most) of deferring by movement, of the tracker.
        exchange: of several ranks, from `estimate_exchange`.
    """
    active = Ledger([report for report in reports if not report.is_warming_up])
    if not active.reports:
        return DryRunEstimate(())
    savings = []
    for policy in settings.policies:
        if not policy.steered_by and not policy.correct:
            continue
        if policy.acts_on == "examples":
            left_out = [r.examples_skippable - r.examples_kept for r in reports]
            cost = _by_curve(reports, left_out, is_corrected=bool(policy.correct))
            savings.append(Saving("examples", sum(left_out), active.examples_seen, 0, 0, *cost))
            continue
        if policy.loses_gradients:
            # A masked row is taken to cost what its share of an example does.
            masked = [r.examples_seen * share_of(r.rows_masked, r.rows_offered) for r in reports]
            cost = _by_curve(reports, masked)
        else:
            cost = _by_movement(auc_loss_of_deferring)
        offered, num_bytes = active.rows.offered, active.bytes_offered
        saved = offered - active.rows.sent, offered, num_bytes - active.bytes_sent, num_bytes
        savings.append(Saving("gradient rows", *saved, *cost))
    return DryRunEstimate(tuple(savings), exchange)


def _by_curve(
    reports: Sequence[WindowReport], missing: Sequence[float], is_corrected: bool = False
) -> _Cost:
    """The cost of training on less.

    Args:
        reports: of the windows.
        missing: examples by window.
        is_corrected: whether what is left stands for them, so that they are worth what the
            gradients vary more, and no more.
    """
    curve, total = [], 0
    for report in reports:
        if report.auc is not None and report.examples_seen:
            curve.append(steering.CurvePoint(total, report.examples_seen, report.auc))
        total += report.examples_seen
    fit = steering.fit_learning_curve(curve)
    if fit is None:
        if not curve:
            words = "none: no losses came in, which dry_run=DryRun(estimates_cost=True) asks for."
            return None, None, words
        points = f"{steering.MIN_POINTS} windows in its later three quarters"
        return None, None, f"none: a learning curve needs {points}."
    all_missing = float(sum(missing))
    effective = sum(m * r.skippable_value for m, r in zip(missing, reports, strict=True))
    least = steering.cost_of_missing(max(abs(fit.slope) - fit.std_error, 0.0), total, effective)
    at_most = effective if is_corrected else max(all_missing, effective)
    most = steering.cost_of_missing(steering.MODEL_MARGIN * fit.bound, total, at_most)
    value = effective / all_missing if all_missing else 1.0
    return least, most, _words_of(fit, value, is_corrected)


def _words_of(fit: steering.LearningCurve, value: float, is_corrected: bool) -> str:
    rose = (
        f"this run's AUC rose by {fit.slope:.3g} +- {fit.std_error:.2g} per e-fold of examples "
        f"({fit.points} windows)."
    )
    if is_corrected:
        return (
            f"{rose} What is kept stands for what is skipped, so that a skipped example costs "
            f"{value:.2f} of an average one: by so much gradients vary more, if the pilot foresees "
            "as well as the model. The least takes the slope less its error, the most "
            f"{steering.MODEL_MARGIN:g} times its 95% bound; what it costs may lie outside."
        )
    return (
        f"{rose} The least takes that less its error, and what would be skipped for worth "
        f"{value:.2f} of an average example, by the squares of label - prediction; the most takes "
        f"it for worth as much as any other, and {steering.MODEL_MARGIN:g} times the slope's 95% "
        "bound; what it costs may lie outside. In later epochs, or on a changing stream, the slope "
        "says little."
    )


def _by_movement(auc_loss: tuple[float, float] | None) -> _Cost:
    if auc_loss is None:
        words = "none: no rule was measured for deferring by interval, or rows of unknown rate."
        return None, None, words
    words = (
        "not of this data: what deferring by movement cost on one other data set with Adagrad, "
        "from the least measured to twice the most, in proportion to movement / learning rate."
    )
    return *auc_loss, words
