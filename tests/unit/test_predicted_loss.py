"""Tests of `PredictedLoss`: valid arguments, thresholds and values of dropped examples."""

import numpy as np
import pytest

import slipstream_tf as slip
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.policies.threshold import find_subsampling_threshold, value_of_dropped


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"pilot": "tree"}, "`pilot`: 'tree'"),
        ({"correction": "none"}, "`correction`: 'none'"),
        ({"min_keep_probability": 0.0}, "`min_keep_probability`: 0.0"),
        ({"min_keep_probability": 1.0}, "`min_keep_probability`: 1.0"),
        ({"factors": 9}, "`factors`: 9"),
        ({"memory": "1KB"}, "`memory`: '1KB' for PredictedLoss.*bytes >= 1024"),
    ],
)
def test_settings_out_of_range_raise(arguments, said):
    with pytest.raises(ValueError, match=said):
        slip.PredictedLoss(**arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"fraction": 1.0}, "`fraction`: 1.0 for SkipExamples by PredictedLoss"),
        ({"keep_rate": 0.1}, "`keep_rate`: 0.1 for SkipExamples by PredictedLoss"),
    ],
)
def test_skip_examples_refuses_settings_of_drift_score(arguments, said):
    with pytest.raises(ValueError, match=said):
        slip.SkipExamples(slip.PredictedLoss(), **arguments)


def test_min_keep_probability_is_at_most_kept_fraction():
    slip.SkipExamples(slip.PredictedLoss(min_keep_probability=0.2), fraction=0.8)
    with pytest.raises(ValueError, match=r"`min_keep_probability`: 0\.3.* at most 0\.2"):
        slip.SkipExamples(slip.PredictedLoss(min_keep_probability=0.3), fraction=0.8)


def test_max_auc_loss_with_predicted_loss_only_raises():
    with pytest.raises(ValueError, match=r"`max_auc_loss`: 0.001.*no policy supports this bound"):
        EngineSettings(slip.SkipExamples(slip.PredictedLoss()), max_auc_loss=0.001)


def test_max_auc_loss_of_masking_with_predicted_loss_raises():
    policies = [slip.MaskGradients(), slip.SkipExamples(slip.PredictedLoss())]
    with pytest.raises(ValueError, match=r"`max_auc_loss`.*PredictedLoss"):
        EngineSettings(policies, max_auc_loss=0.001)
    defers = [slip.DeferGradients(), slip.SkipExamples(slip.PredictedLoss())]
    EngineSettings(defers, max_auc_loss=0.001)


def test_pilot_is_part_of_hot_set_memory():
    skip = slip.SkipExamples(slip.PredictedLoss(memory="32MiB"))
    assert EngineSettings(skip).snapshot_bytes == (256 - 32) << 20
    with pytest.raises(ValueError, match="`memory`: 33554432 for PredictedLoss"):
        EngineSettings(skip, hot_set=slip.HotSet(memory="1MiB"))
    # The pilot "label" stores no keys.
    label = slip.SkipExamples(slip.PredictedLoss("label"))
    assert EngineSettings(label, hot_set=slip.HotSet(memory="1MiB")).snapshot_bytes == 1 << 20


def test_predicted_loss_tracks_no_keys():
    assert not EngineSettings(slip.SkipExamples(slip.PredictedLoss())).goes_by_keys


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.2, 0.05])
@pytest.mark.parametrize("floor", [0.001, 0.02])
def test_threshold_keeps_target_fraction(kept, floor):
    random = np.random.default_rng(0)
    scores = np.where(random.random(8192) < 0.02, 0.95, random.beta(1, 40, 8192))
    scores = scores.astype(np.float32)
    threshold = find_subsampling_threshold(scores, kept, floor)
    assert np.clip(scores / threshold, floor, 1.0).mean() == pytest.approx(kept, rel=1e-4)


def test_value_of_dropped_examples_matches_gradient_variance():
    random = np.random.default_rng(1)
    scores = random.random(100_000)
    labels = random.standard_normal(scores.size)
    threshold, floor = 1.5, 0.1
    kept = np.clip(scores / threshold, floor, 1.0)
    value = value_of_dropped(scores, threshold, floor)
    # The subsampled mean of s * z varies like a mean over the fraction `effective` of the examples.
    weighed = np.where(random.random(scores.size) < kept, scores * labels / kept, 0.0)
    effective = np.square(scores * labels).sum() / np.square(weighed).sum()
    assert value == pytest.approx((1.0 - effective) / (1.0 - kept.mean()), rel=0.05)
    assert value_of_dropped(scores, 0.0, floor) is None
    assert value_of_dropped([], 1.0, floor) is None
    # With uniform scores, each dropped example has the value of one example.
    assert value_of_dropped([0.1] * 10, 0.5, 0.01) == pytest.approx(1.0)


@pytest.mark.parametrize("scores", [[], [0.0, 0.0]])
def test_all_examples_are_kept_without_scores(scores):
    assert find_subsampling_threshold(scores, 0.5, 0.05) == 0.0
    assert find_subsampling_threshold([0.1, 0.2], 1.0, 0.05) == 0.0


def test_window_end_computes_threshold_for_next_window():
    score = slip.PredictedLoss()
    skip = slip.SkipExamples(score, fraction=0.8)
    state = skip.initial_state()
    assert skip.classifier_settings(state, None) == {"mode": "none", "keep_rate": 0.0}
    scores = np.linspace(0, 1, 1000, dtype=np.float32)
    state = skip.next_state(state, scores, 0.8)
    rule = skip.classifier_settings(state, None)
    assert rule["mode"] == "predicted_loss" and rule["keep_rate"] == pytest.approx(0.08)
    kept = np.clip(scores / rule["threshold"], rule["keep_rate"], 1.0)
    assert kept.mean() == pytest.approx(0.2, rel=1e-3)
