"""scores: what each refuses, what it needs, and the rule that it gives."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slipstream_tf.policies.base import Begins, Ended
from slipstream_tf.scores import LastLoss, RowDrift
from slipstream_tf.serialization import deserialize, serialize


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RowDrift(0), "`alpha`: 0 for RowDrift.*> 0 <= 1"),
        (lambda: RowDrift(2), "`alpha`: 2 for RowDrift"),
        (lambda: RowDrift("all"), "`alpha`: 'all' for RowDrift"),
        (lambda: LastLoss(-1), "`max_skips`: -1 for LastLoss"),
        (lambda: LastLoss(128), "`max_skips`: 128 for LastLoss"),
        (lambda: LastLoss(2.5), "`max_skips`: 2.5 for LastLoss"),
        (lambda: LastLoss(weigh_returns="yes"), "`weigh_returns`: 'yes' for LastLoss"),
        (lambda: LastLoss(memory=0), "`memory`: 0 for LastLoss"),
        (lambda: LastLoss(memory="64 megs"), "`memory`: '64 megs' for LastLoss"),
        (lambda: LastLoss(saturated_share=1.1), "`saturated_share`: 1.1 for LastLoss"),
        (lambda: LastLoss(alpha=0.0), "`alpha`: 0.0 for LastLoss.*> 0 <= 1"),
    ],
)
def test_bad_settings_are_refused(build, message):
    with pytest.raises(ValueError, match=f"Invalid {message}"):
        build()


@pytest.mark.parametrize(
    "score", [RowDrift(0.5), LastLoss(), LastLoss(7, False, "1MiB", 0.5, 0.25)], ids=str
)
def test_a_score_comes_back_from_json(score):
    described = json.loads(json.dumps(serialize(score)))
    assert deserialize("by", described, (LastLoss, RowDrift), "scores") == score


def test_what_scores_need():
    drift, loss = RowDrift(), LastLoss()
    assert not (drift.needs_losses or drift.needs_ids or drift.weighs_examples)
    assert drift.loss_memory == {} and drift.initial_state() == {}
    assert loss.needs_losses and loss.needs_ids and loss.weighs_examples and loss.examples_return
    assert LastLoss(memory="1MiB", max_skips=5).loss_memory == {
        **{"loss_memory_bytes": 1 << 20, "max_skips": 5, "weigh_visits": True}
    }
    assert not LastLoss(weigh_returns=False).weighs_examples
    assert not LastLoss(max_skips=0).examples_return


def test_the_bound_of_a_loss_is_a_quantile_that_the_guard_scales():
    score, losses = LastLoss(), np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    state = score.initial_state()
    assert state == {"loss_threshold": None} and score.rule(state, None)["threshold"] == 0.0
    state = score.next_state(state, Ended(losses, share=0.5, scale=1.0))
    assert state == {"loss_threshold": 3.0}
    assert score.rule(state, None) == {"mode": "remembered_loss", "threshold": 3.0}
    assert score.next_state(state, Ended(losses, 0.5, 0.5)) == {"loss_threshold": 1.5}
    nothing = Ended(np.empty(0, np.float32), 0.5, 1.0)
    assert score.next_state(state, nothing) == {"loss_threshold": 0.0}


def test_the_rule_of_drift_is_the_threshold_of_keys():
    assert RowDrift().rule({}, Begins(0.5, 1)) == {"mode": "drift", "threshold": 0.5}
