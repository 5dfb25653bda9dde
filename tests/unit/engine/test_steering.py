"""Tests of `engine.steering`: the fraction under `max_auc_loss`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from engine_settings import engine_settings

from slipstream_tf.engine.steering import Steerer, Steering, WindowWork
from slipstream_tf.ops.classifier import ClassifierCounts
from slipstream_tf.ops.loss_statistics import LossStatistics
from slipstream_tf.ops.update_policy import UpdateCounts

NOTHING = LossStatistics.from_sums(np.zeros(6), np.zeros((2, 4)))


def sums(losses):
    """Returns count, sum and sum of squared residuals of losses."""
    losses = np.asarray(losses, np.float64)
    return np.array([losses.size, losses.sum(), (np.expm1(-losses) ** 2).sum()])


def statistics(others, skippable=(), stands_for=1.0, auc=None):
    """Returns loss statistics in which each skippable example has the weight `stands_for`."""
    kept = sums(skippable)
    histogram = np.zeros((2, 4))
    # All negatives are in the middle bucket, and a fraction `auc` of the positives is above it.
    if auc is not None:
        histogram[0, 1], histogram[1, 0], histogram[1, 2] = 1.0, 1.0 - auc, auc
    weighted = sums(others) + stands_for * kept
    return LossStatistics.from_sums(np.array([kept[0], kept[2], *weighted, 0]), histogram)


def work(losses=NOTHING, seen=1000, skipped=0, hot=1000, offered=0, masked=0):
    rows = [UpdateCounts(offered=offered, masked=masked)]
    return WindowWork(ClassifierCounts(seen, skipped, hot), rows, losses)


def auc_in(window, inputs=1000):
    return 0.3 + 0.05 * math.log(inputs * (window + 0.5))


def curve_losses(window, inputs=1000, kept=0):
    auc = auc_in(window, inputs)
    return statistics(np.full(inputs - kept, 0.5), np.full(kept, 0.5), auc=auc)


def run(windows, planned=30_000, kept=0, **settings):
    """Runs windows with a rising AUC and returns the steering of each."""
    steerer = Steerer(engine_settings("skip_examples", skip_keep_rate=0.5, **settings))
    return [
        steerer.next(work(curve_losses(window, kept=kept)), planned) for window in range(windows)
    ]


def test_without_max_auc_loss_target_is_unchanged():
    steerer = Steerer(engine_settings("skip_examples", fraction=0.4))
    for losses in (NOTHING, statistics([0.1, 0.2])):
        assert steerer.next(work(losses), None) == Steering(0.4)


def test_max_auc_loss_requires_planned_examples():
    steerer = Steerer(engine_settings("skip_examples", max_auc_loss=0.1))
    steering = steerer.next(work(statistics([0.1])), None)
    assert steering.fraction == 0.0 and "planned_steps" in steering.plan


def test_max_auc_loss_bounds_fraction_once_curve_is_known():
    found = run(12, max_auc_loss=0.004)
    assert [steering.fraction for steering in found[:5]] == [0.0] * 5
    assert "fewer than 5 windows" in found[3].plan
    last = found[-1]
    # The allowed number is N (1 - exp(-max_auc_loss / b)), spread over the remaining examples. Here
    # b is the fitted slope 0.05 times the margin. A skipped example costs its own contribution and
    # the variance of the weight 2 that a kept example carries instead.
    maximum = 30_000 * -math.expm1(-0.004 / 0.075) / 18_000 / (1 + math.log(2))
    assert last.fraction == pytest.approx(maximum, rel=0.02)
    assert last.predicted_cost == pytest.approx(0.004, rel=0.02)


def test_larger_loss_allows_more_up_to_target():
    shares = [run(12, max_auc_loss=b, fraction=0.6)[-1].fraction for b in (0.001, 0.01, 1.0)]
    assert 0.0 < shares[0] < shares[1] < shares[2] == 0.6


def test_windows_with_single_label_are_not_curve_points():
    steerer = Steerer(engine_settings("skip_examples", max_auc_loss=0.5, skip_keep_rate=0.5))
    for _ in range(12):
        steering = steerer.next(work(statistics(np.full(1000, 0.5))), 30_000)
    assert steering.fraction == 0.0 and "fewer than 5 windows" in steering.plan


def test_skip_fraction_refers_to_hot_examples():
    # The plan counts all examples. If half of them are hot, the fraction of hot examples doubles.
    settings = engine_settings("skip_examples", max_auc_loss=0.002)
    steerers = [Steerer(settings) for _ in range(2)]
    for window in range(12):
        all_hot, half_hot = (
            steerer.next(work(curve_losses(window), hot=hot), 30_000).fraction
            for steerer, hot in zip(steerers, (1000, 500), strict=True)
        )
    assert half_hot == pytest.approx(2 * all_hot) and all_hot > 0.0
    assert steerers[0].next(work(curve_losses(12), hot=0), 30_000).fraction == 0.0


def test_skipped_examples_use_up_allowed_loss():
    settings = engine_settings("skip_examples", max_auc_loss=0.004, skip_keep_rate=0.5)
    idle, spending = Steerer(settings), Steerer(settings)
    for window in range(12):
        losses = curve_losses(window, kept=100)
        saved = idle.next(work(losses), 30_000)
        spent = spending.next(work(losses, skipped=100 * (window > 7)), 30_000)
    assert 0.0 < spent.fraction < saved.fraction


def test_skipped_examples_of_low_value_cost_little():
    shares = []
    for kept_loss in (0.5, 0.05):
        steerer = Steerer(engine_settings("skip_examples", max_auc_loss=0.002, skip_keep_rate=0.5))
        for window in range(12):
            losses = statistics(np.full(700, 0.5), np.full(300, kept_loss), auc=auc_in(window))
            fraction = steerer.next(work(losses), 30_000).fraction
        shares.append(fraction)
    assert 0.0 < shares[0] < shares[1]


def test_windows_without_kept_skippable_examples_are_not_curve_points():
    steerer = Steerer(engine_settings("skip_examples", max_auc_loss=0.004))
    for window in range(12):
        steering = steerer.next(work(curve_losses(window), skipped=100), 30_000)
    assert "fewer than 5 windows" in steering.plan


def test_masked_rows_count_as_fraction_of_examples():
    steerer = Steerer(engine_settings("mask_gradients", max_auc_loss=0.004))
    for window in range(7):
        steering = steerer.next(work(curve_losses(window), offered=100), 30_000)
    first = steering.fraction
    assert 0.0 < first <= 0.3
    # Twice as many rows are masked as planned, therefore the fraction is about halved.
    plain = Steerer(engine_settings("skip_examples", max_auc_loss=0.004))
    for window in range(8):
        planned = plain.next(work(curve_losses(window)), 30_000).fraction
    masked = round(200 * planned)
    steering = steerer.next(work(curve_losses(7), offered=100, masked=masked), 30_000)
    assert steering.fraction == pytest.approx(first / 2, rel=0.2)
