"""The drifts of sampled keys among those of all hot keys."""

import numpy as np

from slipstream_tf.engine.window_end import sampled_drifts
from slipstream_tf.ops import features
from slipstream_tf.ops.classifier import InputClassifier


def test_sampled_drifts_are_those_of_sampled_keys_that_are_hot() -> None:
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


def test_samples_score_by_their_keys_as_by_all() -> None:
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
