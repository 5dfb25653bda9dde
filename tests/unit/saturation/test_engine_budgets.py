"""saturation.tracker with a guard or a budget of quality: what losses do to the threshold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from engine_on_rows import make, state_of, window

from slipstream_tf.saturation.states import KeyState


def feed(tracker, loss, inputs=2500, skippable=True):
    generator = np.random.default_rng(0)
    losses = loss * generator.uniform(0.9, 1.1, inputs)
    tracker.classifier.record_losses(losses, np.arange(inputs) % 2, [skippable] * inputs)


@pytest.mark.parametrize("policy", ["skip_examples", "mask_gradients"])
def test_the_guard_halves_the_threshold_and_releases_keys(policy):
    drifts = {0: 0.1, 1: 0.28, 2: 0.3, 3: 0.4}
    settings = {"skip_keep": 0.5} if policy == "skip_examples" else {}
    store, tracker = make(policy, threshold=0.3, loss_guard=0.1, **settings)
    words = []
    for loss in (0.1, 0.1, 0.1, 0.1, 0.2):
        before = [state_of(tracker, "user", key) for key in (0, 1)] if words else None
        feed(tracker, loss)
        feed(tracker, 0.6, skippable=False)
        report, _ = window(store, tracker, drifts)
        words.append(report.guard)
    assert before == [KeyState.SATURATED, KeyState.SATURATED]
    assert "baseline" in words[0] and "fine" in words[2] and "worsened" in words[4]
    assert report.threshold == pytest.approx(0.15)
    assert state_of(tracker, "user", 0) == KeyState.SATURATED
    assert state_of(tracker, "user", 1) == KeyState.VARYING, "0.28 is above 1.5 * 0.15"
    assert report.log_loss == pytest.approx(0.4, rel=0.02)
    feed(tracker, 0.1)
    report, _ = window(store, tracker, drifts)
    assert report.threshold == pytest.approx(0.15), "and it stays halved for a while"


def test_the_guard_without_losses_changes_nothing():
    store, tracker = make("skip_examples", skip_keep=0.5, loss_guard=0.1)
    for _ in range(3):
        report, _ = window(store, tracker)
    assert report.threshold == pytest.approx(0.3) and "No skippable example" in report.guard


@pytest.mark.parametrize("budget", ["max_auc_loss", "max_log_loss_increase"])
def test_a_quality_budget_without_planned_steps_skips_nothing_and_says_why(budget):
    store, tracker = make("skip_examples", skip_keep=0.5, **{budget: 0.01})
    for _ in range(3):
        report, (skippable, *_) = window(store, tracker)
        assert not skippable.any() and report.threshold == report.target_share == 0.0
        assert "planned steps are not known" in report.budget


def learn(budget, windows=14):
    """Windows whose log loss falls with the logarithm of the inputs trained."""
    store, tracker = make(
        "skip_examples", skip_keep=0.8, planned_steps=400, max_log_loss_increase=budget
    )
    users, trained, reports = {key: 0.01 * key for key in range(40)}, 0, []
    for _ in range(windows):
        report, (skippable, _, weight) = window(store, tracker, users)
        reports.append(report)
        kept = weight > 0
        losses = np.full(kept.sum(), 0.9 - 0.05 * math.log(trained + 20), np.float32)
        labels = np.arange(kept.sum()) % 2
        tracker.classifier.record_losses(losses, labels, skippable[kept], weight[kept])
        trained += int(kept.sum())
    return reports


def test_a_quality_budget_bounds_the_share():
    tight, loose = learn(0.002), learn(10.0)
    assert "fewer than 5 windows" in tight[3].budget and tight[3].target_share == 0.0
    assert tight[3].predicted_cost is None
    assert 0.0 < tight[-1].target_share < 0.2 < loose[-1].target_share == 0.5
    assert 0.0 < tight[-1].predicted_cost <= 0.002 * 1.01
    assert "Slope" in tight[-1].budget and "allows more" in loose[-1].budget
    assert loose[-1].examples_skipped > 0 and loose[-1].log_loss is not None
