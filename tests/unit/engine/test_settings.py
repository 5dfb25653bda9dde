"""Tests of `engine.settings`: invalid combinations, and the requirements of the policies."""

from __future__ import annotations

import json

import pytest
from engine_settings import engine_settings

from slipstream_tf import (
    DeferGradients,
    DryRun,
    HotSet,
    Interval,
    MaskGradients,
    PredictedLoss,
    RowDrift,
    Saturation,
    SkipExamples,
    Window,
)
from slipstream_tf.baselines import SkipAtRandom
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.policies.base import WindowStart

BY_DRIFT, BY_LOSS = SkipExamples(RowDrift()), SkipExamples(PredictedLoss())
BY_INTERVAL = DeferGradients(Interval())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policies": "skip"}, "`policies`: 'skip' for Slipstream.*a sequence of policies"),
        ({"policies": [RowDrift()]}, "`policies`: RowDrift.*a sequence of policies"),
        ({"policies": [MaskGradients]}, "`policies`: <class.*a sequence of policies"),
        (
            {"policies": [BY_DRIFT, BY_LOSS]},
            r"`policies`: \['SkipExamples'\].*at most one policy of each class",
        ),
        (
            {"policies": [MaskGradients(), DeferGradients()]},
            r"`policies`: \['MaskGradients', 'DeferGradients'\].*one policy that acts on gradients",
        ),
        (
            {"policies": [BY_DRIFT, SkipAtRandom([0.5])]},
            r"`policies`: \['SkipExamples', 'SkipAtRandom'\].*one policy that acts on examples",
        ),
        ({"window": 5}, r"`window`: 5 for Slipstream.*Window\("),
        ({"hot_set": 1 << 20}, r"`hot_set`: 1048576 for Slipstream.*HotSet\("),
        ({"saturation": "l2"}, r"`saturation`: 'l2' for Slipstream.*Saturation\("),
        ({"max_auc_loss": 0.0}, "`max_auc_loss`: 0.0 for Slipstream.*> 0"),
        ({"max_auc_loss": -0.1}, "`max_auc_loss`: -0.1 for Slipstream.*> 0"),
        ({"max_auc_loss": "0.1"}, "`max_auc_loss`: '0.1' for Slipstream"),
        ({"dry_run": 1}, r"`dry_run`: 1 for Slipstream.*DryRun\("),
        ({"dry_run": True}, "`dry_run`: True for Slipstream without policies"),
        (
            {"policies": [SkipExamples(RowDrift(), fraction=0.5), MaskGradients(fraction=0.2)]},
            "`fraction`: {'SkipExamples': 0.5, 'MaskGradients': 0.2}.*one threshold T",
        ),
        ({"policies": [BY_LOSS, MaskGradients(fraction=0.2)]}, None),
        (
            {"policies": DeferGradients(), "saturation": Saturation("l2")},
            "`saturation`.*no policy uses the saturation of keys",
        ),
        (
            {"policies": SkipAtRandom([0.5]), "saturation": Saturation("l2")},
            "`saturation`.*no policy uses the saturation of keys",
        ),
        (
            {
                "policies": SkipExamples(RowDrift(), fraction=0.5),
                "saturation": Saturation(threshold=1),
            },
            "`threshold`: 1.* for Saturation with the `fraction` of SkipExamples",
        ),
        (
            {
                "policies": [SkipExamples(RowDrift(), fraction=0.5), MaskGradients(fraction=0.5)],
                "saturation": Saturation(threshold=0.1),
            },
            "`threshold`: 0.1 for Saturation with the `fraction` of SkipExamples and MaskGradients",
        ),
        (
            {"max_auc_loss": 0.1},
            "`max_auc_loss`: 0.1 for Slipstream.*no policy supports this bound",
        ),
        (
            {"policies": SkipAtRandom([0.1]), "max_auc_loss": 0.1},
            "`max_auc_loss`: 0.1 for Slipstream.*no policy supports this bound",
        ),
        (
            {
                "policies": BY_DRIFT,
                "saturation": Saturation(threshold=0.1),
                "max_auc_loss": 0.1,
            },
            "`max_auc_loss`: 0.1 for Slipstream with a threshold",
        ),
        (
            {
                "policies": MaskGradients(),
                "saturation": Saturation(threshold=0.1),
                "max_auc_loss": 0.1,
            },
            "`max_auc_loss`: 0.1 for Slipstream with a threshold",
        ),
        (
            {
                "policies": [BY_DRIFT, DeferGradients()],
                "saturation": Saturation(threshold=0.1),
                "max_auc_loss": 0.1,
            },
            None,
        ),
        ({"policies": BY_INTERVAL, "max_auc_loss": 0.1}, None),
    ],
)
def test_settings_without_effect_raise(settings, message):
    if message is None:
        EngineSettings(**settings)
        return
    with pytest.raises(ValueError, match=f"Invalid {message}"):
        EngineSettings(**settings)


@pytest.mark.parametrize("policies", [[BY_DRIFT], [BY_INTERVAL], [MaskGradients()]], ids=str)
def test_dry_run_accepts_same_settings(policies):
    for dry_run in (False, True):
        EngineSettings(policies, saturation=Saturation("l2"), dry_run=dry_run)


def test_single_policy_needs_no_list():
    assert EngineSettings(DeferGradients()) == EngineSettings([DeferGradients()])
    assert EngineSettings() == EngineSettings([], Window(), HotSet())


def test_max_auc_loss_is_divided_among_policy_kinds():
    def each(*policies):
        return EngineSettings(policies, max_auc_loss=0.002).max_auc_loss_each

    assert each(BY_DRIFT) == each(BY_DRIFT, MaskGradients()) == 0.002
    assert each(BY_DRIFT, DeferGradients()) == 0.001
    assert EngineSettings(BY_DRIFT).max_auc_loss_each is None


@pytest.mark.parametrize(
    ("policies", "settings", "windows"),
    [
        ([], {}, 100),
        ([BY_DRIFT], {}, 100),
        ([MaskGradients()], {}, 10),
        ([BY_INTERVAL], {}, 10),
        ([BY_DRIFT, MaskGradients()], {}, 10),
        ([BY_LOSS], {}, 100),
        ([MaskGradients()], {"revisit_every": 3}, 3),
        ([BY_DRIFT], {"revisit_every": 0}, 0),
    ],
)
def test_probes_follow_needs_of_policies(policies, settings, windows):
    saturation = Saturation(**settings) if settings else None
    assert EngineSettings(policies, saturation=saturation).revisit_every == windows


@pytest.mark.parametrize(
    ("policies", "go_by_keys"),
    [
        ([], True),
        ([BY_DRIFT], True),
        ([BY_LOSS], False),
        ([MaskGradients()], True),
        ([DeferGradients()], False),
        ([BY_INTERVAL], True),
        ([SkipAtRandom([0.5])], False),
        ([BY_DRIFT, DeferGradients()], True),
    ],
    ids=str,
)
def test_hot_keys_are_tracked_only_if_policies_need_them(policies, go_by_keys):
    settings = EngineSettings(policies)
    assert settings.goes_by_keys == go_by_keys and not settings.needs_losses


def test_max_auc_loss_and_estimates_require_losses():
    assert EngineSettings(BY_DRIFT, max_auc_loss=0.1).needs_losses
    assert EngineSettings([BY_DRIFT, DeferGradients()], max_auc_loss=0.1).needs_losses
    assert EngineSettings(BY_INTERVAL, max_auc_loss=0.1).needs_losses
    assert not EngineSettings(DeferGradients(), max_auc_loss=0.1).needs_losses
    estimating = EngineSettings(BY_DRIFT, dry_run=DryRun(estimates_cost=True))
    assert estimating.needs_losses and estimating.dry_run is True
    assert not EngineSettings(BY_DRIFT, dry_run=DryRun()).needs_losses


@pytest.mark.parametrize(
    ("settings", "start", "mode", "may_skip"),
    [
        (engine_settings(), WindowStart(0.5, 1), "none", False),
        (engine_settings("defer_gradients"), WindowStart(0.5, 1), "none", False),
        (engine_settings("skip_examples"), WindowStart(0.5, 0), "none", False),
        (engine_settings("skip_examples"), WindowStart(0.5, 1), "drift", True),
        (engine_settings("skip_examples"), WindowStart(0.0, 1), "drift", False),
        (engine_settings("skip_examples", dry_run=True), WindowStart(0.5, 1), "drift", False),
        (engine_settings("mask_gradients"), WindowStart(0.5, 1), "drift", False),
        (engine_settings("mask_gradients", "skip_examples"), WindowStart(0.5, 1), "drift", True),
        (engine_settings(random_fractions=(0.3,)), WindowStart(0.0, 1), "random", True),
        (EngineSettings(BY_LOSS), WindowStart(0.5, 1), "none", False),
    ],
)
def test_classifier_settings_follow_policies(settings, start, mode, may_skip):
    states = {type(policy).__name__: policy.initial_state() for policy in settings.policies}
    rule, found = settings.classifier_settings(states, start)
    assert (rule["mode"], found) == (mode, may_skip)


def test_all_settings_convert_to_json():
    settings = EngineSettings(
        [BY_LOSS, DeferGradients()], Window(7), HotSet("64MiB"), max_auc_loss=0.1
    )
    config = json.loads(json.dumps(settings.get_config()))
    assert [policy["class_name"] for policy in config["policies"]] == [
        "SkipExamples",
        "DeferGradients",
    ]
    assert config["window"]["config"]["steps"] == 7
    assert config["saturation"]["config"]["metric"] == "linf", "what holds, if nobody chose it"
    assert config["max_auc_loss"] == 0.1
