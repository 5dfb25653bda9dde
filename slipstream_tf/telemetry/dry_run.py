"""Estimates the savings of a dry run, and their cost in AUC.

`estimate_dry_run` is a pure function of the engine's settings and the window reports. The result
prints as text and converts to JSON.

The exact cost of a policy requires a comparison of runs with and without it. These estimates are
the best that a single dry run can provide:

- Dropped examples and masked rows: AUC grows by b when the number of trained examples grows by a
  factor of e (`engine.steering`). If the dropped part is worth S of N examples, training therefore
  loses b * ln(N / (N - S)) of AUC.
- Deferred rows: an empirical rule (`policies.gradients`).
"""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from slipstream_tf.engine import steering
from slipstream_tf.engine.report import Totals, WindowReport, fraction_of
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.telemetry.exchange_estimate import ExchangeEstimate

_WIDTH = 99
_Cost = tuple[float | None, float | None, str]  # Minimum, maximum and basis, as in `Saving`.


@dataclasses.dataclass(frozen=True)
class Saving:
    """The savings of one policy.

    Attributes:
        what: The saved unit: "examples" or "gradient rows".
        saved: Number of saved units, after the warm-up.
        offered: Number of all units, after the warm-up.
        bytes_saved: Bytes of the saved gradient rows, with int64 keys and float32 values. 0 for
            examples.
        bytes_offered: Bytes of all gradient rows, as above.
        min_cost, max_cost: Estimated range of the AUC loss at the end of training. It is not a
            bound. None if there is no estimate.
        basis: Explains the estimate, or why there is none.
    """

    what: str
    saved: int
    offered: int
    bytes_saved: int = 0
    bytes_offered: int = 0
    min_cost: float | None = None
    max_cost: float | None = None
    basis: str = ""

    @property
    def fraction(self) -> float:
        """The saved fraction, 0 to 1."""
        return self.saved / self.offered if self.offered else 0.0

    def __str__(self) -> str:
        text = f"{self.saved:,} of {self.offered:,} {self.what} ({self.fraction:.1%}"
        if self.bytes_offered:
            text += f"; {self.bytes_saved / 2**20:,.1f} of {self.bytes_offered / 2**20:,.1f} MiB"
        if self.min_cost is None or self.max_cost is None:
            return text + "), without an estimate of the cost"
        return text + f") at an estimated cost of {self.min_cost:.4f} to {self.max_cost:.4f} AUC"


@dataclasses.dataclass(frozen=True)
class DryRunEstimate:
    """The savings of a dry run.

    Each policy is estimated as if it were the only policy.

    Attributes:
        savings: One entry per policy that skips examples or saves gradient rows. Empty if no window
            has ended after the warm-up.
        exchange: With multiple ranks, the estimated time to exchange the rows of a step.
        refusal: Why there are no savings although windows have ended. Empty otherwise.
    """

    savings: tuple[Saving, ...]
    exchange: ExchangeEstimate | None = None
    refusal: str = ""

    def refused(self, reason: str) -> "DryRunEstimate":
        """Returns the estimate without savings, because the model has not learned.

        The easy examples and the settled rows of such a model are not those of a model that works,
        and its learning curve does not show what an example is worth.

        Args:
            reason: A sentence from `ClickMetrics.no_learning_reason`. If it is empty, the estimate
                is returned unchanged.
        """
        return dataclasses.replace(self, savings=(), refusal=reason) if reason else self

    def to_dict(self) -> dict[str, Any]:
        """Returns {"savings": [...], ...} as JSON-serializable values."""
        return {
            "savings": [
                {**dataclasses.asdict(part), "fraction": part.fraction} for part in self.savings
            ],
            "exchange": None if self.exchange is None else self.exchange.to_dict(),
            "refusal": self.refusal,
        }

    def __str__(self) -> str:
        if self.refusal:
            text = f"Dry run: savings are not estimated. {self.refusal}"
            return textwrap.fill(text, _WIDTH)
        if not self.savings:
            return (
                "Dry run: no window ended after the warm-up, so there is no estimate. Use shorter\n"
                "windows (Window(steps=...)), smaller batches, more examples or more epochs."
            )
        lines = ["After the warm-up, applying a policy would have saved"]
        ends = [" or"] * (len(self.savings) - 1) + ["."]
        lines += [f"- {part}{end}" for part, end in zip(self.savings, ends, strict=True)]
        notes = [f"Basis for {part.what}: {part.basis}" for part in self.savings]
        notes.append(
            "Only a run with the policy applied shows the real cost. This dry run trained without "
            "the policy, so it is the baseline for that run."
        )
        text = "\n".join(lines + [textwrap.fill(note, _WIDTH) for note in notes])
        return text if self.exchange is None else f"{text}\n\n{self.exchange}"


def estimate_dry_run(
    settings: EngineSettings,
    reports: Sequence[WindowReport],
    auc_loss_of_deferring: tuple[float, float] | None = None,
    exchange: ExchangeEstimate | None = None,
) -> DryRunEstimate:
    """Sums the savings and estimates their cost in AUC.

    Args:
        settings: The engine's settings.
        reports: The reports of all windows, in order.
        auc_loss_of_deferring: (minimum, maximum) AUC loss of deferring by movement, from the
            tracker.
        exchange: With multiple ranks, the result of `estimate_exchange`.
    """
    active = Totals([report for report in reports if not report.is_warming_up])
    if not active.reports:
        return DryRunEstimate(())
    savings = []
    for policy in settings.policies:
        if not policy.steered_by and not policy.correction:
            continue
        if policy.acts_on == "examples":
            left_out = [r.examples_skippable - r.examples_kept for r in reports]
            cost = _by_curve(reports, left_out, is_corrected=bool(policy.correction))
            savings.append(Saving("examples", sum(left_out), active.examples_seen, 0, 0, *cost))
            continue
        if policy.loses_gradients:
            # Assume that a masked row costs as much as its fraction of an example.
            masked = [r.examples_seen * fraction_of(r.rows_masked, r.rows_offered) for r in reports]
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
    """Returns the cost of training on fewer examples, from the learning curve.

    Args:
        reports: The window reports.
        missing: Number of missing examples per window.
        is_corrected: Whether the kept examples are reweighted to represent the dropped examples. If
            so, a dropped example costs only the increased variance of the gradients.

    Returns:
        (minimum, maximum, basis), as in `Saving`.
    """
    curve, total = [], 0
    for report in reports:
        if report.auc is not None and report.examples_seen:
            curve.append(steering.CurvePoint(total, report.examples_seen, report.auc))
        total += report.examples_seen
    fit = steering.fit_learning_curve(curve)
    if fit is None:
        if not curve and any(report.log_loss is not None for report in reports):
            return None, None, "none, because all labels of a window are equal, in every window."
        if not curve:
            words = "none, because no losses were recorded. Pass DryRun(estimates_cost=True)."
            return None, None, words
        points = f"{steering.MIN_POINTS} windows in the last three quarters of training"
        return None, None, f"none, because a learning curve needs {points}."
    all_missing = float(sum(missing))
    effective = sum(m * r.skippable_value for m, r in zip(missing, reports, strict=True))
    minimum = steering.cost_of_missing(max(abs(fit.slope) - fit.std_error, 0.0), total, effective)
    at_most = effective if is_corrected else max(all_missing, effective)
    maximum = steering.cost_of_missing(steering.MODEL_MARGIN * fit.bound, total, at_most)
    value = effective / all_missing if all_missing else 1.0
    return minimum, maximum, _words_of(fit, value, is_corrected)


def _words_of(fit: steering.LearningCurve, value: float, is_corrected: bool) -> str:
    rose = (
        f"the AUC of this run rose by {fit.slope:.3g} +- {fit.std_error:.2g} per e-fold of "
        f"examples ({fit.points} windows)."
    )
    if is_corrected:
        return (
            f"{rose} The kept examples have larger weights to represent the skipped examples. A "
            f"skipped example therefore costs {value:.2f} of an average example, which is the "
            "additional variance of the gradients, if the pilot predicts losses as well as the "
            "model. The minimum uses the slope minus its standard error. The maximum uses "
            f"{steering.MODEL_MARGIN:g} times the 95% bound of the slope. The real cost may be "
            "outside this range."
        )
    return (
        f"{rose} The minimum uses this slope minus its standard error, and values a skipped "
        f"example at {value:.2f} of an average example, from the squares of label - prediction. "
        f"The maximum uses {steering.MODEL_MARGIN:g} times the 95% bound of the slope, and values "
        "a skipped example like an average example. The real cost may be outside this range. The "
        "slope is less reliable in later epochs and on a changing stream."
    )


def _by_movement(auc_loss: tuple[float, float] | None) -> _Cost:
    if auc_loss is None:
        words = (
            "none, because deferring was measured only by movement and with a known learning rate "
            "of the rows."
        )
        return None, None, words
    words = (
        "measurements of deferring by movement on one other data set with Adagrad, not on this "
        "data. The range is from the smallest measured cost to twice the largest, in proportion to "
        "movement / learning rate."
    )
    return *auc_loss, words
