"""scores: what the one by drift refuses, needs, and gives for a rule."""

from __future__ import annotations

import json

import pytest

from slipstream_tf._utils.serialization import deserialize, serialize
from slipstream_tf.baselines import RowDrift
from slipstream_tf.policies.base import Begins


@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        (0, "`alpha`: 0 for RowDrift.*> 0 <= 1"),
        (2, "`alpha`: 2 for RowDrift"),
        ("all", "`alpha`: 'all' for RowDrift"),
    ],
)
def test_bad_settings_are_refused(alpha, message):
    with pytest.raises(ValueError, match=f"Invalid {message}"):
        RowDrift(alpha)


def test_a_score_comes_back_from_json():
    described = json.loads(json.dumps(serialize(RowDrift(0.5))))
    assert deserialize("by", described, (RowDrift,), "scores") == RowDrift(0.5)


def test_the_rule_of_drift_is_the_threshold_of_keys():
    drift = RowDrift()
    assert drift.initial_state() == {}
    assert drift.rule({}, Begins(0.5, 1)) == {"mode": "drift", "threshold": 0.5}
