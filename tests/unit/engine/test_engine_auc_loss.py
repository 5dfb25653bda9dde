"""Tests how `max_auc_loss` bounds the threshold of `engine.tracker` by the learning curve."""

from __future__ import annotations

import math

import numpy as np
from engine_on_rows import make, window


def test_max_auc_loss_without_planned_steps_skips_nothing_with_reason():
    store, tracker = make("skip_examples", skip_keep_rate=0.5, max_auc_loss=0.01)
    for _ in range(3):
        report, (skippable, *_) = window(store, tracker)
        assert not skippable.any() and report.threshold == report.target_fraction == 0.0
        assert "planned steps is unknown" in report.auc_loss_plan


def learn(max_auc_loss, windows=14):
    """Runs windows with an AUC that grows with the trained examples."""
    store, tracker = make(
        "skip_examples", skip_keep_rate=0.8, planned_steps=400, max_auc_loss=max_auc_loss
    )
    users, trained, reports = {key: 0.01 * key for key in range(40)}, 0, []
    for _ in range(windows):
        report, (skippable, _, weight) = window(store, tracker, users)
        reports.append(report)
        # Place a fraction `auc` of the positives above all negatives, and the rest below them.
        auc = 0.3 + 0.05 * math.log(trained + 20)
        losses = -np.log(np.array([0.5, 0.75, 0.25], np.float32))
        weights = 0.5 * weight.sum() * np.array([1.0, auc, 1.0 - auc], np.float32)
        tracker.classifier.record_losses(losses, [0, 1, 1], [skippable.any()] * 3, weights)
        trained += int((weight > 0).sum())
    return reports


def test_max_auc_loss_bounds_skip_fraction():
    tight, loose = learn(0.002), learn(10.0)
    assert "fewer than 5 windows" in tight[3].auc_loss_plan and tight[3].target_fraction == 0.0
    assert tight[3].predicted_cost is None
    assert 0.0 < tight[-1].target_fraction < 0.2 < loose[-1].target_fraction == 0.5
    assert 0.0 < tight[-1].predicted_cost <= 0.002 * 1.01
    assert "AUC rises by" in tight[-1].auc_loss_plan and "does not limit" in loose[-1].auc_loss_plan
    assert loose[-1].examples_skipped > 0 and loose[-1].auc is not None
