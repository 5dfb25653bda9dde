"""Tests of `engine.steering`: learning curve, value of examples, planned fraction."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_tf.engine import steering
from slipstream_tf.engine.steering import (
    CurvePoint,
    cost_of_weight,
    fit_learning_curve,
    plan_fraction,
    relative_value,
)

WINDOW = 25_000


def line(slope: float, windows: int = 40, noise: float = 0.0, seed: int = 0, memory: float = 0.0):
    """Returns the curve 0.3 + slope * ln(n) plus noise.

    The noise has the standard deviation `noise` and the correlation `memory` between windows.
    """
    rng, error, points = np.random.default_rng(seed), 0.0, []
    for i in range(windows):
        error = memory * error + math.sqrt(1 - memory**2) * noise * rng.standard_normal()
        middle = (i + 0.5) * WINDOW
        points.append(CurvePoint(i * WINDOW, WINDOW, 0.3 + slope * math.log(middle) + error))
    return points


def plan(curve, **changes):
    trained = curve[-1].trained + curve[-1].inputs if curve else 0
    arguments = {
        "planned_inputs": 4 * max(trained, WINDOW),
        "trained": trained,
        "skipped": 0,
        "skipped_effective": 0.0,
        "value": 1.0,
        "max_auc_loss": 0.001,
    }
    return plan_fraction(curve, **{**arguments, **changes})


@pytest.mark.parametrize("slope", [0.03, -0.02, 0.0])
def test_fit_recovers_exact_line(slope):
    fit = fit_learning_curve(line(slope))
    assert fit.slope == pytest.approx(slope, abs=1e-12)
    assert fit.bound == pytest.approx(abs(slope), abs=1e-8)
    assert fit.points == 30  # The fit starts at a quarter of the length.


def test_fit_equals_weighted_least_squares():
    rng = np.random.default_rng(3)
    sizes = rng.integers(1000, 50_000, 30)
    before = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    curve = [
        CurvePoint(int(t), int(n), 0.5 + 0.02 * math.log(t + n / 2) + rng.normal(0, 0.3 / n**0.5))
        for t, n in zip(before, sizes, strict=True)
    ]
    later = [p for p in curve if p.trained >= sizes.sum() / 4]
    design = np.array([[1.0, math.log(p.trained + p.inputs / 2)] for p in later])
    weight = np.array([p.inputs for p in later], float)
    normal = design.T @ (weight[:, None] * design)
    quality = np.array([p.auc for p in later])
    expected = np.linalg.solve(normal, design.T @ (weight * quality))
    rest = quality - design @ expected
    variance = (weight @ rest**2) / (len(later) - 2) * np.linalg.inv(normal)[1, 1]
    fit = fit_learning_curve(curve)
    assert fit.slope == pytest.approx(expected[1])
    assert fit.points == len(later)
    # Correlation can only widen the error.
    assert fit.std_error >= math.sqrt(variance) * (1 - 1e-9)
    assert fit.std_error <= math.sqrt(variance) * 2


@pytest.mark.parametrize(
    ("windows", "memory", "covered"), [(7, 0.0, 0.94), (27, 0.0, 0.94), (60, 0.6, 0.92)]
)
def test_confidence_bound_covers_true_slope(windows, memory, covered):
    fits = [fit_learning_curve(line(0.03, windows, 0.002, seed, memory)) for seed in range(1000)]
    assert np.mean([fit.bound >= 0.03 for fit in fits]) >= covered
    assert np.mean([fit.slope for fit in fits]) == pytest.approx(0.03, rel=0.05)
    # The bound must also be tight enough to be useful.
    assert np.median([fit.bound for fit in fits]) < 0.03 * (1.5 if windows > 7 else 2.5)


def test_student_t_quantiles_equal_reference():
    table = {3: 2.353, 4: 2.132, 5: 2.015, 10: 1.812, 30: 1.697, 1000: 1.646}
    for freedom, value in table.items():
        assert steering._student_t(freedom) == pytest.approx(value, rel=0.005)


@pytest.mark.parametrize("windows", range(7))
def test_too_few_windows_skip_nothing(windows):
    curve = line(0.03, windows)
    result = plan(curve)
    few = sum(p.trained >= windows * WINDOW / 4 for p in curve) < steering.MIN_POINTS
    assert few == (windows < 7)
    assert (result.fraction, result.predicted_cost) == (0.0, None)
    assert "fewer than 5 windows" in result.plan


def test_windows_without_auc_are_ignored():
    curve = line(0.03)
    gaps = [CurvePoint(p.trained, p.inputs, math.nan) if i % 3 else p for i, p in enumerate(curve)]
    assert fit_learning_curve(gaps).slope == pytest.approx(0.03)
    assert fit_learning_curve(gaps[1:3] * 10) is None
    # A single position has no slope.
    assert fit_learning_curve([CurvePoint(100, 10, 0.5)] * 9) is None


def test_order_of_points_does_not_matter():
    curve = line(0.03, noise=0.01)
    assert fit_learning_curve(curve[::-1]) == fit_learning_curve(curve)


def test_constant_quality_costs_nothing():
    curve = [CurvePoint(i * WINDOW, WINDOW, 0.5) for i in range(20)]
    result = plan(curve)
    assert result.fraction == 1.0
    assert result.predicted_cost == pytest.approx(0.0, abs=1e-12)
    zero = [CurvePoint(p.trained, p.inputs, 0.0) for p in curve]
    assert plan(zero, skipped=10, skipped_effective=1e9).predicted_cost == 0.0
    maximum = plan(zero, value=2.0)  # Even with a slope of exactly 0, some examples are trained.
    assert maximum.fraction == pytest.approx(0.9 / (0.75 * 2.0))


def test_plan_for_globo_matches_measured_loss(monkeypatch):
    """Measured: skipping 21.7% of 2.7M examples at random costs 0.0074 AUC.

    Therefore about 3% may be skipped for a loss of 0.001.
    """
    slope, planned = (0.7318 - 0.7244) / -math.log(1 - 0.217), 2_700_000
    assert slope == pytest.approx(0.030, abs=0.0005)
    curve = line(slope, 27)  # 675,000 examples, a quarter of the plan.
    careful = plan(curve, planned_inputs=planned)
    assert f"assumes {steering.MODEL_MARGIN * slope:.3g}" in careful.plan
    assert careful.fraction * 0.75 == pytest.approx(
        0.022, abs=0.001
    )  # As a fraction of all examples.
    assert careful.predicted_cost == pytest.approx(0.001)
    # With noise as measured in windows of this size, fewer examples may be skipped.
    shares = [plan(line(slope, 27, 0.002, s), planned_inputs=planned).fraction for s in range(50)]
    assert 0.016 < np.median(shares) * 0.75 < 0.022

    monkeypatch.setattr(steering, "MODEL_MARGIN", 1.0)  # The model without a margin.
    assert plan(curve, planned_inputs=planned).fraction * 0.75 == pytest.approx(0.0325, abs=0.001)
    whole = plan(curve, planned_inputs=planned, max_auc_loss=0.0074)
    assert whole.fraction * 0.75 == pytest.approx(0.217, abs=0.001)


@pytest.mark.parametrize("weight, cost", [(1.0, 0.0), (2.0, 0.693), (10.0, 2.303)])
def test_weights_of_kept_examples_have_cost(weight, cost):
    assert cost_of_weight(weight) == pytest.approx(cost, abs=0.001)


def test_worsening_curve_counts_like_improving_curve():
    rising, falling = plan(line(0.03)), plan(line(-0.03))
    assert rising.fraction == pytest.approx(falling.fraction)
    assert 0.0 < rising.fraction < 0.06


def test_examples_of_lower_value_allow_more_skipping():
    curve = line(0.03)
    assert plan(curve, value=0.2).fraction == pytest.approx(5 * plan(curve).fraction)
    assert plan(curve, value=0.2).predicted_cost == pytest.approx(0.001)
    assert plan(curve, value=1e-3).fraction == 1.0
    assert "does not limit the fraction of the policy" in plan(curve, value=1e-3).plan


def test_plan_at_or_beyond_end_skips_nothing():
    curve = line(0.03)
    end = 40 * WINDOW
    for planned in (end, end // 2):  # The plan is shorter than the training so far.
        result = plan(curve, planned_inputs=planned, skipped=1000, skipped_effective=1000)
        assert result.fraction == 0.0 and "No planned examples remain" in result.plan
        assert result.predicted_cost == pytest.approx(
            steering.MODEL_MARGIN * 0.03 * math.log((end + 1000) / end)
        )


def test_used_up_loss_skips_nothing():
    result = plan(line(0.03), skipped=500_000, skipped_effective=500_000)
    assert result.fraction == 0.0 and "used up" in result.plan
    assert result.predicted_cost > 0.001
    everything = plan(line(0.03), skipped=10, skipped_effective=1e9)
    assert everything.predicted_cost == math.inf


@given(
    slope=st.floats(0.0, 0.1),
    noise=st.floats(0.0, 0.02),
    skipped=st.integers(1, 2_000_000),
    value=st.floats(0.05, 3.0),
    allowed=st.floats(1e-5, 0.05),
)
def test_planned_skipping_stays_within_allowed_loss(slope, noise, skipped, value, allowed):
    curve = line(slope, 20, noise)
    spent = 0.01 * skipped
    result = plan(
        curve, skipped=skipped, skipped_effective=spent, value=value, max_auc_loss=allowed,
    )  # fmt: skip
    assert 0.0 <= result.fraction <= 1.0
    if result.fraction > 0.0:
        assert result.predicted_cost <= allowed * (1 + 1e-9)
    assert (
        plan(curve, value=value, max_auc_loss=2 * allowed).fraction
        >= plan(curve, value=value, max_auc_loss=allowed).fraction
    )


def test_following_plan_stays_within_allowed_loss():
    """Simulates a run in which the AUC follows the effective examples.

    The fraction is planned again in each window.
    """
    costs = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        slope, value, windows = 0.03, 0.5, 108
        curve, trained, skipped, effective, fraction = [], 0, 0, 0.0, 0.0
        for window in range(windows):
            now = int(WINDOW * fraction)
            seen = trained + skipped - effective  # The amount of learning, in average examples.
            quality = slope * math.log(max(seen, 1) + WINDOW / 2) + rng.normal(0, 0.002)
            curve.append(CurvePoint(trained, WINDOW - now, quality))
            trained, skipped, effective = (
                trained + WINDOW - now,
                skipped + now,
                effective + now * value,
            )
            if window >= windows // 4:
                fraction = plan_fraction(
                    curve, windows * WINDOW, trained, skipped, effective, value, 0.002
                ).fraction
        total = windows * WINDOW
        costs.append(slope * math.log(total / (total - effective)))
    assert np.mean(np.array(costs) <= 0.002) >= 0.95
    assert np.median(costs) > 0.001  # Most of the allowed loss is used.


@pytest.mark.parametrize(
    ("kept_mean", "kept_inputs", "all_mean", "value"),
    [
        (0.02, 1000, 0.1, 0.2),
        (0.0001, 1000, 0.1, steering.MIN_VALUE),
        (0.2, 1000, 0.1, 2.0),
        (0.02, 199, 0.1, 1.0),
        (0.2, 10, 0.1, 2.0),
        (math.nan, 0, 0.1, 1.0),
        (math.nan, 1000, 0.1, 1.0),
        (0.0, 1000, 0.0, 1.0),
    ],
)
def test_relative_value_of_skipped_examples(kept_mean, kept_inputs, all_mean, value):
    assert relative_value(kept_mean, kept_inputs, all_mean) == pytest.approx(value)
