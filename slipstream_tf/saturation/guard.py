"""The guard: makes skipping back off when skippable examples get worse. Pure.

In: per window, the losses of the examples that could have been skipped but were kept by thinning.
Out: a factor on T, and words for the ledger. The kept examples are a random sample of the skippable
ones, so their loss tells how the model does on what it no longer trains on.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

BASELINE_INPUTS = 2000  # kept examples that the baseline is the mean of
MIN_INPUTS = 200  # kept examples below which nothing is decided: losses are skewed
# The guard looks once a window, over and over: at 3 standard errors it is wrong about once in 700
# looks. Finding that all is well is checked less strictly; it only starts the evidence anew.
WORSENED_DEVIATIONS = 3.0
FINE_DEVIATIONS = 1.64
SMALLEST_SCALE = 1 / 64  # halved once more, it is 0
FIRST_PATIENCE = 10  # windows; doubled whenever T is halved, the first time included
LONGEST_PATIENCE = 160  # windows
# Of the other inputs' loss; an excess over a baseline smaller than that is relative to that.
_SMALLEST_REFERENCE = 0.05
_ASSUMED_DEVIATION = 2.0  # of the mean loss; of one example's loss, where it was not measured

BASELINE, COLLECTING, FINE, UNDECIDED, WORSENED, STOPPED, RECOVERED = (
    "baseline",  # the baseline is being gathered
    "collecting",  # too few kept examples so far, or none in this window
    "fine",  # within the tolerance
    "undecided",  # the noise is too large to tell; evidence is gathered on
    "worsened",  # beyond the tolerance: T is halved
    "stopped",  # nothing is skipped
    "recovered",  # fine for long enough: T is doubled, or skipping starts again
)


@dataclasses.dataclass(frozen=True)
class LossSummary:
    """The mean of some inputs' losses.

    Attributes:
        count: inputs.
        mean: their mean; 0 for no inputs.
        std_error: standard error of the mean, or None if it was not measured.
    """

    count: int = 0
    mean: float = 0.0
    std_error: float | None = 0.0

    def plus(self, other: "LossSummary") -> "LossSummary":
        """The mean over the examples of both, each of which must have its standard error."""
        if not (self.count and other.count):
            return other if other.count else self
        assert self.std_error is not None and other.std_error is not None
        count = self.count + other.count
        own, others = self.count / count, other.count / count
        error = math.hypot(own * self.std_error, others * other.std_error)
        return LossSummary(count, own * self.mean + others * other.mean, error)


@dataclasses.dataclass(frozen=True)
class Losses:
    """Losses of one window's examples, or of several windows'. All are means without weights.

    Attributes:
        kept: skippable examples that thinning kept.
        others: the other trained inputs.
    """

    kept: LossSummary = LossSummary()
    others: LossSummary = LossSummary()

    def plus(self, other: "Losses") -> "Losses":
        """The losses of the examples of both."""
        return Losses(self.kept.plus(other.kept), self.others.plus(other.others))


@dataclasses.dataclass(frozen=True)
class GuardState:
    """What the guard carries from window to window.

    Attributes:
        scale: factor on T: 1, 1/2, 1/4, ...; 0 if nothing is skipped.
        baseline: losses when skipping began.
        evidence: losses since the last decision.
        windows: windows in the evidence.
        quiet_windows: windows found fine since T last changed; with scale 0, windows since then.
        patience: quiet windows that it takes to double T.
    """

    scale: float = 1.0
    baseline: Losses = Losses()
    evidence: Losses = Losses()
    windows: int = 0
    quiet_windows: int = 0
    patience: int = FIRST_PATIENCE

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "GuardState":
        """Returns the state that `dataclasses.asdict` made a dictionary of."""

        def losses(of: Mapping[str, Any]) -> Losses:
            # An older version had a third summary, of remembered losses.
            return Losses(**{name: LossSummary(**of[name]) for name in ("kept", "others")})

        carried = {name: losses(values[name]) for name in ("baseline", "evidence")}
        return cls(**{**values, **carried})


@dataclasses.dataclass(frozen=True)
class Excess:
    """By how much losses exceed the baseline, relative to it.

    Attributes:
        measure: "absolute" or "relative" (see `decide`).
        value: the excess.
        std_error: of the value.
    """

    measure: str
    value: float
    std_error: float

    @property
    def lowest(self) -> float:
        """The least that it may be: worsened if that is beyond the tolerance."""
        return self.value - WORSENED_DEVIATIONS * self.std_error

    @property
    def highest(self) -> float:
        """The most that it may be: fine if that is within the tolerance."""
        return self.value + FINE_DEVIATIONS * self.std_error


@dataclasses.dataclass(frozen=True)
class GuardVerdict:
    """What the guard found at a window's end; the factor on T from now on is in its state.

    Attributes:
        outcome: one of the names above `LossSummary`.
        explanation: the same in words.
        excess: what it was found by; or None.
    """

    outcome: str
    explanation: str
    excess: Excess | None = None


def decide(
    state: GuardState, observation: Losses, tolerance: float
) -> tuple[GuardState, GuardVerdict]:
    """Decides what a window tells: whether T is to fall, to rise or to stay.

    The first `BASELINE_INPUTS` kept examples are the baseline. They should be from when skipping
    began or just before it: in windows that skip nothing yet, all skippable examples count as kept.
    After that, windows are gathered until they have `MIN_INPUTS` kept examples and tell whether the
    excess over the baseline is within the tolerance; then the evidence starts anew.

    Worsened is what exceeds the tolerance, by `WORSENED_DEVIATIONS` standard errors, in each of
    - "absolute": mean loss of the kept examples, relative to its baseline, and
    - "relative": the same after both are divided by the mean loss of the other inputs.
    The second is for a stream that gets harder as a whole: that is not the skipping's doing. It is
    a ratio and not a difference because losses of easy and hard examples rise and fall in
    proportion rather than by the same amount: where the others go from 0.5 to 0.25, examples that
    had 0.1 are expected at 0.05, not at -0.15. The first is for the opposite: with several epochs
    the other inputs' loss falls as they are learned by heart, which does not make the skippable
    ones worse; what these might have gained is the quality budget's matter. To demand both needs no
    correction for testing twice. The price: damage hides behind a stream that gets easier.

    The skippable examples of a smaller T, or of later keys, may have another mean loss without
    anything having got worse or better. The baseline stays in spite of that: were it renewed when
    T changes, a slow loss would never add up to the tolerance.

    Standard errors treat examples as independent; where they are not measured, the standard
    deviation is taken to be twice the kept inputs' mean loss. A window with a loss that is not
    finite is left out.

    Once worsened, T is halved. It is doubled again after `patience` windows found fine; each
    halving doubles the patience, so that a T that does harm comes back ever more rarely. Below
    `SMALLEST_SCALE` nothing is skipped, so nothing can be observed either: after as many windows
    skipping starts again, at the smallest scale.

    Args:
        state: from the last window; `GuardState()` at the start.
        observation: the window's losses.
        tolerance: relative excess that is allowed, at least 0.

    Returns:
        The next state, and the verdict.
    """
    if state.scale == 0.0:
        return _wait_to_restart(state)
    if not _is_finite(observation):
        return state, GuardVerdict(COLLECTING, "A mean loss is not finite: window left out.")
    if not observation.kept.count:
        return state, GuardVerdict(COLLECTING, "No skippable example was kept in this window.")
    state = _absorb(state, _with_std_errors(observation))
    baseline, evidence = state.baseline.kept.count, state.evidence.kept.count
    if not state.windows:
        words = f"{baseline} of {BASELINE_INPUTS} kept examples gathered for the baseline."
        return state, GuardVerdict(BASELINE, words)
    if evidence < MIN_INPUTS:
        words = f"{evidence} kept examples so far; judged from {MIN_INPUTS} on."
        return state, GuardVerdict(COLLECTING, words)

    excesses = _excesses(state)
    least = min(excesses, key=lambda excess: excess.lowest)
    calmest = min(excesses, key=lambda excess: excess.highest)
    if least.lowest > tolerance:
        return _back_off(state, least, _describe(least, evidence, tolerance))
    if calmest.highest <= tolerance:
        return _find_fine(state, calmest, _describe(calmest, evidence, tolerance))
    words = _describe(least, evidence, tolerance) + "undecided."
    if evidence >= 4 * baseline:
        # More would not help: most of the error is the baseline's by now. Old evidence would only
        # hide what gets worse later.
        state = _start_anew(state)
    return state, GuardVerdict(UNDECIDED, words, least)


def _is_finite(observation: Losses) -> bool:
    return all(
        math.isfinite(summary.mean) and math.isfinite(summary.std_error or 0.0)
        for summary in (observation.kept, observation.others)
        if summary.count
    )


def _describe(excess: Excess, inputs: int, tolerance: float) -> str:
    return (
        f"Loss of {inputs} kept examples exceeds its baseline by {excess.value:.1%} +- "
        f"{excess.std_error:.1%} ({excess.measure}); tolerance {tolerance:.1%}: "
    )


def _with_std_errors(observation: Losses) -> Losses:
    """Fills in the standard errors that were not measured."""
    deviation = _ASSUMED_DEVIATION * observation.kept.mean

    def fill(summary: LossSummary) -> LossSummary:
        if summary.std_error is not None or not summary.count:
            return summary
        error = max(deviation, _ASSUMED_DEVIATION * summary.mean) / math.sqrt(summary.count)
        return dataclasses.replace(summary, std_error=error)

    return Losses(fill(observation.kept), fill(observation.others))


def _absorb(state: GuardState, observation: Losses) -> GuardState:
    """Adds a window to the baseline while that is short of examples, else to the evidence."""
    if state.baseline.kept.count < BASELINE_INPUTS:
        return dataclasses.replace(state, baseline=state.baseline.plus(observation))
    evidence = state.evidence.plus(observation)
    return dataclasses.replace(state, windows=state.windows + 1, evidence=evidence)


def _excesses(state: GuardState) -> list[Excess]:
    """The excesses that must all be beyond the tolerance for a verdict of worsened."""
    before, now = state.baseline, state.evidence
    floor = _SMALLEST_REFERENCE * before.others.mean
    excesses = [_excess("absolute", now.kept, before.kept.mean, _error(before.kept), floor)]
    if min(before.others.count, now.others.count) >= MIN_INPUTS and before.others.mean > 0.0:
        level = now.others.mean / before.others.mean
        level_error = math.hypot(_error(now.others), level * _error(before.others))
        level_error /= before.others.mean
        expected_error = math.hypot(level * _error(before.kept), before.kept.mean * level_error)
        expected = level * before.kept.mean
        excesses.append(_excess("relative", now.kept, expected, expected_error, level * floor))
    return excesses


def _excess(
    measure: str, now: LossSummary, expected: float, expected_error: float, floor: float
) -> Excess:
    reference = max(expected, floor)
    # The error of a ratio: that of its denominator counts as many times as the ratio is.
    ratio = max(now.mean / reference, 1.0) if reference > 0.0 else 1.0
    error = math.hypot(_error(now), ratio * expected_error)
    return _relative_to(measure, now.mean - expected, error, reference)


def _relative_to(measure: str, growth: float, error: float, reference: float) -> Excess:
    """An excess in units of `reference`; without any loss to refer to, growth is infinite."""
    if reference > 0.0:
        return Excess(measure, growth / reference, error / reference)
    return Excess(measure, math.inf if growth > 0.0 else 0.0, 0.0)


def _error(summary: LossSummary) -> float:
    return summary.std_error or 0.0


def _back_off(state: GuardState, excess: Excess, words: str) -> tuple[GuardState, GuardVerdict]:
    scale = state.scale / 2 if state.scale / 2 >= SMALLEST_SCALE else 0.0
    patience = min(2 * state.patience, LONGEST_PATIENCE)
    state = dataclasses.replace(_start_anew(state), scale=scale, patience=patience, quiet_windows=0)
    words += f"worsened, T is multiplied by {scale:g}" if scale else "worsened, skipping stops"
    words += f", for {patience} windows at least."
    return state, GuardVerdict(WORSENED, words, excess)


def _find_fine(state: GuardState, excess: Excess, words: str) -> tuple[GuardState, GuardVerdict]:
    quiet = state.quiet_windows + state.windows
    state = _start_anew(state)
    if state.scale == 1.0:
        return state, GuardVerdict(FINE, words + "fine.", excess)
    if quiet < state.patience:
        state = dataclasses.replace(state, quiet_windows=quiet)
        words += f"fine, {quiet} of {state.patience} windows before T is doubled."
        return state, GuardVerdict(FINE, words, excess)
    state = dataclasses.replace(state, scale=2 * state.scale, quiet_windows=0)
    words += f"fine for {quiet} windows, T is multiplied by {state.scale:g}."
    return state, GuardVerdict(RECOVERED, words, excess)


def _wait_to_restart(state: GuardState) -> tuple[GuardState, GuardVerdict]:
    quiet = state.quiet_windows + 1
    if quiet < state.patience:
        state = dataclasses.replace(state, quiet_windows=quiet)
        words = f"Nothing is skipped, {quiet} of {state.patience} windows."
        return state, GuardVerdict(STOPPED, words)
    state = dataclasses.replace(state, scale=SMALLEST_SCALE, quiet_windows=0)
    words = f"Nothing was skipped for {quiet} windows: T is multiplied by {state.scale:g} again."
    return state, GuardVerdict(RECOVERED, words)


def _start_anew(state: GuardState) -> GuardState:
    return dataclasses.replace(state, evidence=Losses(), windows=0)
