"""saturation.guard: it trips on what got worse, and on nothing else."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from slipstream_tf.saturation import guard
from slipstream_tf.saturation.guard import GuardState, GuardVerdict, Losses, LossSummary, decide

NAN = float("nan")


def summary(mean: float, count: int = 100_000, std_error: float | None = 1e-4) -> LossSummary:
    return LossSummary(count, mean, std_error)


def summary_of(losses) -> LossSummary:
    values = np.asarray(losses, np.float64)
    error = values.std(ddof=1) / math.sqrt(values.size) if values.size > 1 else None
    return LossSummary(values.size, float(values.mean()), error)


def window(kept: float, others: float, **of_kept) -> Losses:
    return Losses(summary(kept, **of_kept), summary(others))


@dataclasses.dataclass(frozen=True)
class Seen(GuardVerdict):
    """A verdict, and the factor on T that it left."""

    scale: float = 1.0

    @property
    def measure(self):
        return self.excess and self.excess.measure


def run(*windows: Losses, tolerance: float = 0.1, state: GuardState | None = None):
    state, verdicts = state or GuardState(), []
    for observation in windows:
        state, verdict = decide(state, observation, tolerance)
        verdicts.append(Seen(verdict.outcome, verdict.explanation, verdict.excess, state.scale))
    return state, verdicts


def sampled(rng, kept: float, others: float, count: int, number_of_others: int = 3000) -> Losses:
    """Losses of inputs whose spread is about that of log losses: exponential."""
    return Losses(
        summary_of(rng.exponential(kept, count)),
        summary_of(rng.exponential(others, number_of_others)),
    )


# name, first window (the baseline), second window, tolerance 0.1 -> outcome, measure
CASES = [
    ("nothing changed", (0.2, 0.4), (0.2, 0.4), "fine", "absolute"),
    ("within the tolerance", (0.2, 0.4), (0.218, 0.4), "fine", "absolute"),
    ("worse", (0.2, 0.4), (0.23, 0.4), "worsened", "relative"),
    ("the stream got harder as a whole", (0.2, 0.4), (0.3, 0.6), "fine", "relative"),
    ("harder, and worse still", (0.2, 0.4), (0.4, 0.6), "worsened", "relative"),
    ("only the others got better", (0.2, 0.4), (0.2, 0.2), "fine", "absolute"),
    ("they got better, these got worse", (0.2, 0.4), (0.25, 0.2), "worsened", "absolute"),
    ("the stream got easier", (0.2, 0.4), (0.1, 0.2), "fine", "absolute"),
    ("a tiny loss got a little less tiny", (1e-4, 0.4), (1e-3, 0.4), "fine", "absolute"),
    ("a tiny loss got large", (1e-4, 0.4), (0.021, 0.4), "worsened", "relative"),
]


@pytest.mark.parametrize(
    ("before", "now", "outcome", "measure"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_verdict(before, now, outcome, measure):
    state, (first, second) = run(window(*before), window(*now))
    assert (first.outcome, first.scale) == ("baseline", 1.0)
    assert (second.outcome, second.measure) == (outcome, measure)
    assert second.scale == (0.5 if outcome == "worsened" else 1.0)
    assert state.windows == 0  # each verdict starts the evidence anew


def test_without_other_inputs_the_loss_itself_is_judged():
    before, now = (Losses(summary(mean), LossSummary()) for mean in (0.2, 0.3))
    _, verdicts = run(before, now)
    assert (verdicts[-1].outcome, verdicts[-1].measure) == ("worsened", "absolute")
    assert verdicts[-1].excess.value == pytest.approx(0.5)


def test_the_mean_of_no_inputs_does_not_matter():
    nothing = LossSummary(0, NAN, None)
    _, verdicts = run(*[Losses(summary(0.2), nothing)] * 2)
    assert verdicts[-1].outcome == "fine"


def test_excess_and_its_error_follow_the_delta_method():
    rng = np.random.default_rng(0)
    estimates, errors = [], []
    for _ in range(2000):
        state, _ = decide(GuardState(), sampled(rng, 0.2, 0.4, 2000), 0.2)
        _, verdict = decide(state, sampled(rng, 0.3, 0.5, 500, 500), 0.2)
        assert verdict.excess.measure == "relative"
        estimates.append(verdict.excess.value)
        errors.append(verdict.excess.std_error)
    assert np.mean(estimates) == pytest.approx(0.2, abs=0.02)  # (0.3 / 0.2) / (0.5 / 0.4) - 1
    assert np.std(estimates) == pytest.approx(np.mean(errors), rel=0.1)


def test_noise_of_few_inputs_does_not_trip_it():
    """300 windows a run, 60 runs: 18,000 looks at inputs that are as they were."""
    tripped = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        state, _ = run(sampled(rng, 0.2, 0.4, 2000))
        for _ in range(300):
            state, verdict = decide(state, sampled(rng, 0.2, 0.4, 50), 0.05)
            tripped += verdict.outcome == "worsened"
    assert tripped <= 3


def test_it_trips_on_a_real_loss_soon():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        state, _ = run(sampled(rng, 0.2, 0.4, 2000))
        _, verdicts = run(*(sampled(rng, 0.3, 0.4, 100) for _ in range(12)), state=state)
        assert any(verdict.outcome == "worsened" for verdict in verdicts)


def test_small_windows_add_up():
    start, _ = run(window(0.2, 0.4))
    _, verdicts = run(*[window(0.3, 0.4, count=60, std_error=0.02)] * 4, state=start, tolerance=0.1)
    assert [v.outcome for v in verdicts] == ["collecting"] * 3 + ["worsened"]
    assert verdicts[-1].excess.std_error == pytest.approx(0.05, rel=0.01)  # 0.02 / sqrt(4) / 0.2
    baseline, verdicts = run(*[window(0.2, 0.4, count=900)] * 3)
    assert [v.outcome for v in verdicts] == ["baseline"] * 3
    assert baseline.baseline.kept.count == 2700


def test_evidence_that_cannot_decide_is_dropped_in_the_end():
    state, _ = run(window(0.2, 0.4, count=2000, std_error=0.01))
    near = window(0.22, 0.4, count=2000, std_error=0.01)
    state, verdicts = run(*[near] * 4, state=state)
    assert [v.outcome for v in verdicts] == ["undecided"] * 4
    assert state.windows == 0


def test_halving_to_nothing_and_back():
    bad, good = window(0.3, 0.4), window(0.2, 0.4)
    state, _ = run(good)
    state, verdicts = run(*[bad] * 7, state=state)
    assert [v.scale for v in verdicts] == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 0.0]
    assert state.patience == guard.LONGEST_PATIENCE
    assert "skipping stops" in verdicts[-1].explanation

    state, verdicts = run(*[Losses()] * guard.LONGEST_PATIENCE, state=state)
    assert {v.outcome for v in verdicts[:-1]} == {"stopped"}
    assert (verdicts[-1].outcome, verdicts[-1].scale) == ("recovered", guard.SMALLEST_SCALE)

    state, verdicts = run(*[good] * (6 * guard.LONGEST_PATIENCE), state=state)
    scales = [v.scale for v in verdicts if v.outcome == "recovered"]
    assert scales == [1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0] and state.scale == 1.0


def test_each_halving_doubles_the_wait_for_recovery():
    bad, good = window(0.3, 0.4), window(0.2, 0.4)
    state, _ = run(good)
    for waited in (20, 40, 80, 160, 160):
        state, _ = run(bad, state=state)
        state, verdicts = run(*[good] * waited, state=state)
        assert [v.outcome for v in verdicts] == ["fine"] * (waited - 1) + ["recovered"]
        assert state.scale == 1.0


def test_windows_without_kept_inputs_neither_trip_nor_count_as_quiet():
    state, _ = run(window(0.2, 0.4), window(0.3, 0.4))
    after, verdicts = run(*[Losses(others=summary(0.4))] * 50, state=state)
    assert after == state and {v.outcome for v in verdicts} == {"collecting"}


@pytest.mark.parametrize(
    "broken",
    [
        window(NAN, 0.4),
        window(0.2, math.inf),
        window(0.2, 0.4, std_error=NAN),
    ],
)
def test_losses_that_are_not_finite_are_left_out(broken):
    state, _ = run(window(0.2, 0.4))
    after, (verdict,) = run(broken, state=state)
    assert after == state and "not finite" in verdict.explanation


def test_unmeasured_errors_are_assumed():
    losses = Losses(summary(0.2, 400, None), summary(0.4, 400, None))
    state, _ = run(losses)
    assert state.baseline.kept.std_error == pytest.approx(0.4 / 20)
    assert state.baseline.others.std_error == pytest.approx(0.8 / 20)


def test_without_any_loss():
    zero = Losses(summary(0.0, std_error=0.0), summary(0.0, std_error=0.0))
    state, verdicts = run(zero, zero)
    assert verdicts[-1].outcome == "fine"
    _, verdicts = run(window(0.1, 0.4), state=state)
    assert (verdicts[-1].outcome, verdicts[-1].excess.value) == ("worsened", math.inf)


def test_explanation_and_json():
    state, verdicts = run(window(0.2, 0.4), window(0.26, 0.4))
    assert verdicts[-1].explanation == (
        "Loss of 100000 kept examples exceeds its baseline by 30.0% +- 0.1% (relative); tolerance "
        "10.0%: worsened, T is multiplied by 0.5, for 20 windows at least."
    )
    for record in (state, *verdicts):
        json.dumps(dataclasses.asdict(record), allow_nan=False)


def test_a_state_comes_back_of_an_older_version_too():
    state, _ = run(window(0.2, 0.4), window(0.3, 0.4, count=60))
    values = dataclasses.asdict(state)
    assert GuardState.from_dict(values) == state
    for name in ("baseline", "evidence"):
        values[name]["paired"] = dataclasses.asdict(LossSummary())
    assert GuardState.from_dict(values) == state


def test_summaries_pool_to_that_of_all_inputs():
    rng = np.random.default_rng(1)
    first, second = rng.exponential(1.0, 500), rng.exponential(1.0, 300)
    pooled = summary_of(first).plus(summary_of(second))
    whole = summary_of(np.concatenate([first, second]))
    assert pooled.count == 800 and pooled.mean == pytest.approx(whole.mean)
    assert pooled.std_error == pytest.approx(whole.std_error, rel=0.02)
    assert LossSummary().plus(whole) == whole == whole.plus(LossSummary())
