"""Tests of policies: refused arguments, and restoring from a serialized configuration."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from slipstream_tf import baselines, policies
from slipstream_tf._utils.serialization import deserialize, serialize
from slipstream_tf.baselines import RowDrift, SkipAtRandom
from slipstream_tf.policies import (
    DeferGradients,
    Interval,
    MaskGradients,
    Movement,
    PredictedLoss,
    SkipExamples,
)
from slipstream_tf.policies.base import Policy, WindowStart

CLASSES = tuple(
    value
    for module in (policies, baselines)
    for value in vars(module).values()
    if dataclasses.is_dataclass(value)
)
POLICIES = [
    SkipExamples(RowDrift(0.5)),
    SkipExamples(RowDrift(), fraction=0.75, keep_rate=0.1),
    SkipExamples(PredictedLoss("linear", min_keep_probability=0.1, memory="1MiB"), fraction=0.75),
    MaskGradients(0.25, decay_moments=True),
    DeferGradients(),
    DeferGradients(Interval(7, fraction=0.5), memory="64MB"),
    DeferGradients(Movement(0.25, max_age=9), memory=12_345),
    SkipAtRandom([0.5, 0.25]),
]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SkipExamples("drift"), r"`score`: 'drift' for SkipExamples.*RowDrift\("),
        (lambda: SkipExamples(RowDrift), r"`score`: <class.*PredictedLoss\("),
        (
            lambda: SkipExamples(RowDrift(), fraction=1.5),
            "`fraction`: 1.5 for SkipExamples.*> 0 and <= 1",
        ),
        (lambda: SkipExamples(RowDrift(), fraction="half"), "`fraction`: 'half' for SkipExamples"),
        (lambda: SkipExamples(RowDrift(), keep_rate=-0.1), "`keep_rate`: -0.1 for SkipExamples"),
        (
            lambda: SkipExamples(RowDrift(), keep_rate=1),
            "`keep_rate`: 1.0 for SkipExamples.*dry_run",
        ),
        (lambda: SkipExamples(RowDrift(), keep_rate=None), "`keep_rate`: None for SkipExamples"),
        (lambda: MaskGradients(fraction=-0.1), "`fraction`: -0.1 for MaskGradients"),
        (lambda: MaskGradients(fraction=float("nan")), "`fraction`: nan for MaskGradients"),
        (lambda: MaskGradients(fraction=0), "`fraction`: 0 for MaskGradients.*> 0"),
        (lambda: SkipExamples(RowDrift(), fraction=0.0), "`fraction`: 0.0 for SkipExamples.*> 0"),
        (lambda: MaskGradients(decay_moments=1), "`decay_moments`: 1 for MaskGradients"),
        (lambda: DeferGradients(0.005), r"`until`: 0.005 for DeferGradients.*Movement\("),
        (lambda: DeferGradients("interval"), r"`until`: 'interval'.*Interval\("),
        (lambda: DeferGradients(memory=0), "`memory`: 0 for DeferGradients"),
        (lambda: DeferGradients(memory="much"), "`memory`: 'much' for DeferGradients"),
        (lambda: Movement(0.0), "`distance`: 0.0 for Movement.*> 0"),
        (lambda: Movement(max_age=0), "`max_age`: 0 for Movement"),
        (lambda: Interval(0), "`steps`: 0 for Interval"),
        (lambda: Interval(2.5), "`steps`: 2.5 for Interval"),
        (lambda: Interval(fraction=2), "`fraction`: 2.* for Interval"),
        (lambda: SkipAtRandom([]), r"`fractions`: \[\] for SkipAtRandom"),
        (lambda: SkipAtRandom(0.5), "`fractions`: 0.5 for SkipAtRandom.*a non-empty sequence"),
        (lambda: SkipAtRandom([1.5]), "`fractions`: 1.5 for SkipAtRandom"),
    ],
)
def test_invalid_settings_raise(build, message):
    with pytest.raises(ValueError, match=f"Invalid {message}"):
        build()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_policy_json_round_trip(policy):
    described = json.loads(json.dumps(serialize(policy)))
    again = deserialize("policy", described, CLASSES, "policies")
    assert again == policy and hash(again) == hash(policy)


def test_objects_that_are_not_policies_raise():
    with pytest.raises(ValueError, match=r"Invalid `policy`: {'class_name': 'Skip'.*policies\."):
        deserialize("policy", {"class_name": "Skip", "config": {}}, CLASSES, "policies")


def test_cases_cover_every_policy():
    kinds = {cls for cls in CLASSES if issubclass(cls, Policy)}
    assert kinds == {type(policy) for policy in POLICIES}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_policy_is_frozen_and_has_settings_only(policy):
    name = dataclasses.fields(policy)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, name, None)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        type(policy)(acts_on="gradients")


def test_acts_on_is_correct_for_every_policy():
    assert {type(policy).__name__: policy.acts_on for policy in POLICIES} == {
        **{"SkipExamples": "examples", "SkipAtRandom": "examples"},
        **{"MaskGradients": "gradients", "DeferGradients": "gradients"},
    }


def test_fractions_follow_policies():
    assert SkipExamples(RowDrift(), fraction=0.5).key_fraction == 0.5
    assert SkipExamples(RowDrift()).key_fraction == 0.3
    by_loss = SkipExamples(PredictedLoss(), fraction=0.25)
    assert (by_loss.key_fraction, by_loss.target_fraction) == (None, 0.25)
    assert SkipExamples(PredictedLoss()).target_fraction == 0.5
    assert MaskGradients().key_fraction == DeferGradients(Interval()).key_fraction == 0.3
    assert DeferGradients().key_fraction is None


def test_skip_examples_stores_threshold_of_score():
    policy = SkipExamples(PredictedLoss(min_keep_probability=0.1), fraction=0.5)
    state = policy.initial_state()
    assert policy.classifier_settings(state, WindowStart(0.5, 1))["mode"] == "none", (
        "nothing is known"
    )
    losses = np.array([0.4, 0.1, 0.2, 0.3], np.float32)
    state = policy.next_state(state, losses, fraction=0.5)
    rule = policy.classifier_settings(state, WindowStart(0.5, 2))
    assert (rule["mode"], rule["keep_rate"]) == ("predicted_loss", 0.1)
    assert rule["threshold"] == state["predicted_loss_threshold"] > 0.0
    assert SkipExamples(RowDrift()).next_state({}, None, 0.5) == {}


def test_random_skip_fractions_start_after_warmup():
    policy = SkipAtRandom((0.5, 0.25))
    found = [
        policy.classifier_settings({}, WindowStart(0.0, window))["random_fraction"]
        for window in (1, 2, 9)
    ]
    assert found == [0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        (0, "`alpha`: 0 for RowDrift.*> 0 and <= 1"),
        (2, "`alpha`: 2 for RowDrift"),
        ("all", "`alpha`: 'all' for RowDrift"),
    ],
)
def test_invalid_score_settings_raise(alpha, message):
    with pytest.raises(ValueError, match=f"Invalid {message}"):
        RowDrift(alpha)


def test_score_json_round_trip():
    described = json.loads(json.dumps(serialize(RowDrift(0.5))))
    assert deserialize("score", described, (RowDrift,), "scores") == RowDrift(0.5)


def test_row_drift_uses_threshold_of_keys():
    drift = RowDrift()
    assert drift.initial_state() == {}
    assert drift.classifier_settings({}, WindowStart(0.5, 1)) == {"mode": "drift", "threshold": 0.5}
