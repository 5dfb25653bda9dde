"""Tests of `engine.window_end`: the decisions and the report, computed from plain values."""

from __future__ import annotations

import numpy as np
import pytest
from engine_settings import engine_settings
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import slipstream_tf as slip
from slipstream_tf.engine.hot_set import Candidates
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.engine.states import KeyState, KeyStates
from slipstream_tf.engine.steering import Steering
from slipstream_tf.engine.tracked_table import Measured
from slipstream_tf.engine.window_end import Findings, decide, describe, sampled_drifts
from slipstream_tf.ops import features
from slipstream_tf.ops.classifier import ClassifierCounts, InputClassifier
from slipstream_tf.ops.loss_statistics import LossStatistics
from slipstream_tf.ops.update_policy import UpdateCounts

NO_LOSSES = LossStatistics.from_sums(np.zeros(6), np.zeros((2, 4)))
DIM = 4


def measured(keys, drift, evicted=0):
    drift = np.array(drift, np.float32)
    return Measured(np.array(keys, np.int64), drift, drift, evicted)


def warming(keys):
    """Returns the states of keys that became hot one window ago."""
    count = len(keys)
    return KeyStates(
        np.array(keys, np.int64),
        np.full(count, KeyState.WARMING, np.uint8),
        np.full(count, np.nan, np.float32),
    )


def candidates(counts):
    keys = np.array(list(counts), np.int64)
    return Candidates(keys, np.array(list(counts.values()), np.float32), DIM)


def findings(**changes):
    """Returns the measurements of two tables at the end of a window.

    Keys 1 to 4 of the first table have drifts of 0.1 to 0.4. Key 9 of the second was evicted.
    """
    values = {
        "window": 5,
        "states": [warming([1, 2, 3, 4]), warming([9])],
        "measured": [measured([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4]), measured([], [], evicted=1)],
        "scores": np.array([0.1, 0.2, 0.3, 0.4, np.inf], np.float32),
        "predicted_losses": None,
        "policies": {"SkipExamples": {}},
        "losses": NO_LOSSES,
        "inputs": ClassifierCounts(100, 20, 80, 30, 10),
        "rows": [UpdateCounts(offered=7, masked=2), UpdateCounts(offered=5)],
        "candidates": [candidates({1: 5, 2: 4, 3: 3, 7: 2}), candidates({9: 1})],
    }
    return Findings(**{**values, **changes})


def settings(*policies, **changes):
    chosen = {"revisit_every": 0, "hot_set_memory": 4096, **changes}
    return engine_settings(*(policies or ("skip_examples",)), **chosen)


def by_state(states):
    return {
        key: KeyState(s).name.lower() for key, s in zip(states.keys, states.states, strict=True)
    }


def test_keys_below_score_quantile_are_saturated():
    decision = decide(settings(), findings(), Steering(0.5))
    assert decision.found.threshold == np.float32(0.3)
    assert decision.policies == {"SkipExamples": {}}
    user, item = decision.states
    assert by_state(user) == {1: "saturated", 2: "saturated", 3: "varying", 7: "warming"}
    assert by_state(item) == {9: "warming"}, "an evicted key starts again"


def test_budget_selects_most_accessed_keys_of_all_tables():
    decision = decide(settings(hot_set_memory=3 * 4 * DIM), findings(), Steering(0.5))
    assert [states.keys.tolist() for states in decision.states] == [[1, 2, 3], []]


def test_hot_set_is_empty_without_candidates():
    found = findings(candidates=None, policies={"DeferGradients": {}})
    decision = decide(engine_settings("defer_gradients"), found, Steering(0.5))
    assert decision.states is None and decision.found.threshold == 0.0


def test_predicted_loss_has_separate_fraction():
    chosen = EngineSettings(
        [
            slip.SkipExamples(slip.PredictedLoss("label", min_keep_probability=0.1)),
            slip.MaskGradients(fraction=0.5),
        ],
        hot_set=slip.HotSet(4096),
    )
    states = {
        "SkipExamples": {"predicted_loss_threshold": None, "min_keep_probability": None},
        "MaskGradients": {},
    }
    predicted_losses = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    decision = decide(
        chosen, findings(policies=states, predicted_losses=predicted_losses), Steering(0.75)
    )
    assert decision.found.threshold == np.float32(0.3), "by the fraction of the gradients' policy"
    found = decision.policies["SkipExamples"]
    assert np.clip(
        predicted_losses / found["predicted_loss_threshold"], 0.1, 1
    ).mean() == pytest.approx(0.25)


@pytest.mark.parametrize(("deciding", "state"), [(0.9, "varying"), (0.1, "saturated")])
def test_key_is_classified_by_deciding_drift(deciding, state):
    of_key = Measured(np.array([1]), np.zeros(1, np.float32), np.array([deciding], np.float32), 0)
    found = findings(
        states=[warming([1])],
        measured=[of_key],
        candidates=[candidates({1: 1})],
        rows=[UpdateCounts()],
        policies={"MaskGradients": {}},
    )
    (states,) = decide(settings("mask_gradients", threshold=0.5), found, Steering(0.5)).states
    assert by_state(states) == {1: state}


@given(
    drift=hnp.arrays(np.float32, 20, elements=st.floats(0, 10, width=32) | st.just(np.nan)),
    fraction=st.integers(0, 100),
    threads=st.sampled_from([1, 2]),
)
def test_window_end_equals_reference_and_is_pure(drift, fraction, threads):
    keys = np.arange(20)
    found = findings(
        states=[warming(keys)],
        measured=[measured(keys, drift)],
        scores=drift,
        candidates=[candidates(dict.fromkeys(keys.tolist(), 1))],
    )
    before = drift.copy()
    decision = decide(settings(), found, Steering(fraction / 100), threads=threads)
    finite = np.sort(drift[np.isfinite(drift)])
    rank = fraction * finite.size // 100
    limit = np.append(finite, np.nextafter(finite[-1:], np.float32(np.inf)))[rank] if rank else 0.0
    assert decision.found.threshold == limit
    is_saturated = decision.states[0].states == KeyState.SATURATED
    np.testing.assert_array_equal(is_saturated, drift < limit)
    np.testing.assert_array_equal(drift, before)


def test_report_contains_findings_and_decisions():
    found, steering = findings(), Steering(0.5, "planned", 0.01, 0.3)
    decision = decide(settings(), found, steering)
    report = describe(
        settings(),
        found,
        steering,
        decision,
        **{"step": 60, "is_warming_up": False, "snapshot_bytes": 80, "is_skipping": True},
        **{"saturated_keys": 1, "next_hot_keys": 5, "hot_set_overlap": 0.8, "seconds": 0.1},
    )
    assert (report.window, report.hot_keys, report.evicted, report.anomalies) == (5, 5, 1, 0)
    assert report.drift_quantiles[1.0] == pytest.approx(0.4)
    assert sum(count for _, _, count in report.drift_histogram) == 4
    assert report.threshold == decision.found.threshold == np.float32(0.3)
    assert (report.examples_seen, report.examples_skipped, report.examples_kept) == (100, 20, 10)
    assert (report.hot_examples, report.examples_skippable) == (80, 30)
    assert (report.target_fraction, report.auc_loss_plan) == (0.5, "planned")
    assert (report.predicted_cost, report.skippable_value) == (0.01, 0.3)
    assert (found.rows_offered, found.rows_masked) == (12, 2)


def test_sampled_drifts_belong_to_hot_sampled_keys() -> None:
    window = {
        "tables": np.array([0, 1, 0, 0, 1, 2, 0], np.int32),
        "keys": np.array([8, 9, 1, 8, 7, 5, 99]),
    }
    keys = [np.array([1, 5, 8]), np.array([7, 8]), np.array([], np.int64), np.array([1])]
    drifts = [np.array(d, np.float32) for d in ([0.1, 0.5, np.nan], [0.7, 0.8], [], [0.9])]
    tables, found, drift = sampled_drifts(window, keys, drifts)
    assert tables.dtype == np.int32 and found.dtype == np.int64 and drift.dtype == np.float32
    np.testing.assert_array_equal(tables, [0, 0, 1])
    np.testing.assert_array_equal(found, [1, 8, 7])
    np.testing.assert_array_equal(drift, np.array([0.1, np.nan, 0.7], np.float32))


def test_sample_scores_need_drifts_of_sampled_keys_only() -> None:
    classifier = InputClassifier(["a", "b"], alpha=0.75, seed=3)
    rng = np.random.default_rng(0)
    specs = [features.FeatureSpec("a", "a"), features.FeatureSpec("b", "b")]
    classifier.classify(rng.integers(0, 3000, (500, 2)), specs)
    hot = [np.unique(rng.integers(0, 3000, 2000)) for _ in range(2)]
    drift = [rng.random(keys.size, np.float32) for keys in hot]
    tables = np.repeat(np.arange(2, dtype=np.int32), [keys.size for keys in hot])
    by_all = classifier.reservoir_scores(tables, np.concatenate(hot), np.concatenate(drift))
    by_own = sampled_drifts(classifier.export_window(), hot, drift)
    assert by_own[1].size < tables.size
    np.testing.assert_array_equal(classifier.reservoir_scores(*by_own), by_all)
    assert np.isfinite(by_all).any() and not np.isfinite(by_all).all()
