"""slipstream_tf.ops.classifier against a NumPy reference."""

from __future__ import annotations

import gc
import math
import weakref
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.ops import _loader
from slipstream_tf.ops.classifier import ClassifierCounts, InputClassifier
from slipstream_tf.ops.features import FeatureSpec

INF = np.float32(np.inf)
TWO_TABLES = [FeatureSpec("user", "user"), FeatureSpec("item", "item")]


def reference_score(alpha: str, drifts: dict, lookups: list) -> np.float32:
    """The definition, with exact arithmetic: alpha is a decimal in text."""
    if not lookups:
        return INF
    ordered = sorted(drifts.get(lookup, INF) for lookup in lookups)
    return ordered[math.ceil(Fraction(alpha) * len(lookups)) - 1]


def make(alpha: float = 1.0, drifts: dict | None = None, **settings_) -> InputClassifier:
    classifier = InputClassifier(["user", "item"], alpha, **settings_)
    set_drifts(classifier, drifts or {})
    return classifier


def set_drifts(classifier: InputClassifier, drifts: dict) -> None:
    classifier.set_drift(*as_arrays(drifts))


def scores_of_sample(classifier: InputClassifier, drifts: dict | None = None) -> np.ndarray:
    return classifier.reservoir_scores(*as_arrays(drifts or {}))


def as_arrays(drifts: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([table for table, _ in drifts], np.int32),
        np.array([key for _, key in drifts], np.int64),
        np.array(list(drifts.values()), np.float32),
    )


key_lists = st.lists(st.integers(0, 8), max_size=6)
drift_maps = st.dictionaries(
    st.tuples(st.integers(0, 1), st.integers(0, 8)),
    st.floats(0, 10, width=32, allow_subnormal=False),
    max_size=18,
)


@settings(deadline=None, max_examples=100)
@given(
    batch=st.lists(st.tuples(key_lists, key_lists), max_size=8),
    drifts=drift_maps,
    percent=st.integers(1, 100),
    # TensorFlow computes with subnormal numbers as with 0.
    threshold=st.floats(0, 12, width=32, allow_subnormal=False),
    is_padded=st.booleans(),
)
def test_scores_equal_the_reference(batch, drifts, percent, threshold, is_padded):
    classifier = make(percent / 100, drifts)
    classifier.configure("drift", threshold)
    users = tf.ragged.constant([user for user, _ in batch], tf.int64, ragged_rank=1)
    items = tf.ragged.constant([item for _, item in batch], tf.int64, ragged_rank=1)
    if is_padded:
        items = items.to_tensor(-1)
    skippable, score, _ = classifier.classify({"user": users, "item": items}, TWO_TABLES)
    expected = [
        reference_score(f"{percent}/100", drifts, [(0, k) for k in user] + [(1, k) for k in item])
        for user, item in batch
    ]
    np.testing.assert_array_equal(score, np.array(expected, np.float32))
    np.testing.assert_array_equal(skippable, np.array(expected, np.float32) < threshold)
    np.testing.assert_array_equal(np.sort(scores_of_sample(classifier, drifts)), np.sort(expected))
    hot = int(np.isfinite(expected).sum())
    skipped = int(np.sum(np.array(expected, np.float32) < threshold))
    assert classifier.end_window() == ClassifierCounts(len(batch), skipped, hot, skipped)


@pytest.mark.parametrize("alpha, m, rank", [(0.9, 10, 9), (0.6, 10, 6), (0.55, 100, 55)])
def test_products_that_float32_or_float64_would_round_up(alpha, m, rank):
    specs = [FeatureSpec("keys", "user")]
    classifier = make(alpha, {(0, key): float(key) for key in range(m)})
    _, score, _ = classifier.classify({"keys": np.arange(m)[None]}, specs)
    assert score.numpy() == [rank - 1]


def test_matrix_vector_and_int32_keys():
    classifier = make(drifts={(0, 1): 0.25, (1, 1): 0.5})
    matrix = np.array([[1, 1], [1, 2]])
    _, from_matrix, _ = classifier.classify(matrix, TWO_TABLES)
    _, from_columns, _ = classifier.classify(
        {"user": matrix[:, 0].astype(np.int32), "item": matrix[:, 1]}, TWO_TABLES
    )
    np.testing.assert_array_equal(from_matrix, [0.5, INF])
    np.testing.assert_array_equal(from_columns, [0.5, INF])


def test_empty_batches_and_inputs_without_lookups():
    classifier = make(drifts={(0, 1): 0.25})
    classifier.configure("drift", np.inf)
    for inputs in (
        np.empty((0, 2), np.int64),
        {"user": np.empty(0, np.int64), "item": tf.ragged.constant([], tf.int64, ragged_rank=1)},
    ):
        skippable, score, _ = classifier.classify(inputs, TWO_TABLES)
        assert skippable.shape == score.shape == (0,)
    nothing = {"user": np.full((2, 3), -1), "item": np.empty((2, 0), np.int64)}
    skippable, score, _ = classifier.classify(nothing, TWO_TABLES)
    assert not skippable.numpy().any()
    np.testing.assert_array_equal(score, [INF, INF])
    assert classifier.end_window() == ClassifierCounts(2, 0, 0)
    assert classifier.end_window() == ClassifierCounts(0, 0, 0)
    assert scores_of_sample(classifier, {(0, 1): 1.0}).shape == (0,)


def test_drift_that_is_not_finite_is_never_below_the_threshold():
    classifier = make(drifts={(0, 1): np.nan, (0, 2): np.inf, (0, 3): -np.inf, (0, 4): 3e38})
    classifier.configure("drift", np.inf)
    keys = {"user": np.array([1, 2, 3, 4])}
    skippable = classifier.classify(keys, TWO_TABLES[:1]).skippable
    np.testing.assert_array_equal(skippable, [False, False, False, True])


def test_in_shadow_mode_a_share_of_the_batches_counts_for_all():
    classifier = make(drifts={(0, 1): 0.25}, reservoir_size=8)
    classifier.configure("drift", 0.5, shadow=True)
    keys = {"user": np.repeat([1, 2], 8)}
    classified = [
        classifier.classify(keys, TWO_TABLES[:1], window_batches=32).skippable.numpy().sum()
        for _ in range(32)
    ]
    # Of 512 inputs, 32 give four for each of the sample's: one batch in 16.
    assert sorted(classified) == [0] * 30 + [8] * 2
    counts = classifier.end_window()
    assert counts == ClassifierCounts(512, 0, 256, 256, 0)
    with pytest.raises(ValueError, match="window_batches"):
        classifier.classify(keys, TWO_TABLES[:1], window_batches=-1)


def test_set_drift_replaces_everything():
    classifier = make(drifts={(0, 1): 1.0})
    set_drifts(classifier, {(0, 2): 2.0})
    _, score, _ = classifier.classify({"user": np.array([1, 2])}, TWO_TABLES[:1])
    np.testing.assert_array_equal(score, [INF, 2.0])


def test_unobserved_inputs_leave_no_trace():
    classifier = make(drifts={(0, 1): 1.0})
    classifier.classify({"user": np.array([1, 2])}, TWO_TABLES[:1], observe=False)
    assert scores_of_sample(classifier).size == 0
    assert classifier.end_window() == ClassifierCounts(0, 0, 0)


def test_reservoir_is_a_uniform_sample_of_the_window():
    inputs, capacity, windows = 400, 20, 500
    drifts = {(0, k): float(k) for k in range(inputs)}
    classifier = make(reservoir_size=capacity)
    chosen = np.zeros(inputs)
    for _ in range(windows):
        classifier.classify({"user": np.arange(inputs)}, TWO_TABLES[:1])
        sample = scores_of_sample(classifier, drifts)
        assert sample.shape == (capacity,) and np.unique(sample).size == capacity
        chosen[sample.astype(int)] += 1
        classifier.end_window()
    expected = windows * capacity / inputs
    # 399 degrees of freedom, a little less for draws without replacement: mean 380, deviation 28.
    assert ((chosen - expected) ** 2 / expected).sum() < 380 + 5 * 28


def test_same_seed_same_sample_and_same_random_skips():
    results = []
    for seed in (1, 1, 2):
        drifts = {(0, k): k for k in range(100)}
        classifier = make(reservoir_size=10, seed=seed)
        classifier.configure("random", random_share=0.5)
        skips = [
            classifier.classify({"user": np.arange(100)}, TWO_TABLES[:1])[0].numpy()
            for _ in range(2)
        ]
        assert (skips[0] != skips[1]).any(), "a later input has its own random number"
        results.append((np.concatenate(skips), scores_of_sample(classifier, drifts)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])
    assert (results[0][0] != results[2][0]).any()
    assert (results[0][1] != results[2][1]).any()


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9, 1.0])
def test_random_share(share):
    classifier = make()
    classifier.configure("random", random_share=share)
    skippable = classifier.classify({"user": np.arange(20000)}, TWO_TABLES[:1]).skippable
    # Five standard deviations; none at the ends.
    assert abs(skippable.numpy().mean() - share) <= 5 * math.sqrt(share * (1 - share) / 20000)


def test_thinning_keeps_an_unbiased_sample_with_its_weight():
    inputs, rate = 40_000, 0.25
    classifier = make(drifts={(0, 1): 0.5, (0, 2): 2.0}, seed=3)
    classifier.configure("drift", 1.0, keep_rate=rate)
    users = np.where(np.arange(inputs) % 4 == 0, 2, 1)
    skippable, _, weight = (
        part.numpy() for part in classifier.classify({"user": users}, TWO_TABLES[:1])
    )
    np.testing.assert_array_equal(skippable, users == 1)
    np.testing.assert_array_equal(weight[~skippable], 1.0)
    assert set(weight[skippable]) == {0.0, 1 / rate}
    # Weights stand for the skipped: any sum over inputs keeps its expectation. Five deviations.
    deviation = math.sqrt((1 / rate - 1) / skippable.sum())
    assert abs(weight[skippable].mean() - 1.0) < 5 * deviation
    values = np.sin(np.arange(inputs))
    spread = 5 * math.sqrt((1 / rate - 1) * (values[skippable] ** 2).sum())
    assert abs((weight * values).sum() - values.sum()) < spread
    kept = int((weight[skippable] > 0).sum())
    expected = ClassifierCounts(inputs, 30_000 - kept, inputs, 30_000, kept)
    assert classifier.end_window() == expected


def test_thinning_repeats_with_the_seed():
    weights = []
    for seed in (1, 1, 2):
        classifier = make(drifts={(0, 1): 0.5}, seed=seed)
        classifier.configure("drift", 1.0, keep_rate=0.5)
        batch = {"user": np.ones(100, np.int64)}
        weights.append([classifier.classify(batch, TWO_TABLES[:1]).weight for _ in range(2)])
    np.testing.assert_array_equal(weights[0], weights[1])
    assert (weights[0][0] != weights[0][1]).numpy().any(), "a later input has its own draw"
    assert (weights[0][0] != weights[2][0]).numpy().any()


@pytest.mark.parametrize("mode, values", [("drift", {"threshold": 1.0}), ("random", {})])
def test_shadow_marks_and_keeps_everything(mode, values):
    all_flags, kept = [], 0
    for shadow in (False, True):
        classifier = make(drifts={(0, 1): 0.5, (0, 2): 2.0})
        rate = {"random_share": 0.5} if mode == "random" else {"keep_rate": 0.5}
        classifier.configure(mode, shadow=shadow, **values, **rate)
        users = {"user": np.arange(100) % 3}
        skippable, _, weight = classifier.classify(users, TWO_TABLES[:1])
        all_flags.append(skippable.numpy())
        counts = classifier.end_window()
        assert counts.examples_skippable == skippable.numpy().sum() > 0
        if shadow:
            np.testing.assert_array_equal(weight, np.ones(100))
            assert counts.examples_skipped == 0 and counts.examples_kept == kept, "as if it skipped"
        else:
            assert counts.examples_skipped == (weight.numpy() == 0).sum() > 0
            kept = counts.examples_kept
    np.testing.assert_array_equal(all_flags[0], all_flags[1])


def test_ignored_tables_count_neither_as_saturated_nor_as_moving():
    classifier = InputClassifier(["user"], 1.0, ignored_tables=["item"])
    classifier.set_drift([0], [1], [0.25])
    matrix = np.array([[1, 9], [2, 1]])
    np.testing.assert_array_equal(classifier.classify(matrix, TWO_TABLES).score, [0.25, INF])
    np.testing.assert_array_equal(
        np.sort(scores_of_sample(classifier, {(0, 1): 0.25})), [0.25, INF]
    )
    only_ignored = classifier.classify({"item": np.array([1])}, TWO_TABLES[1:])
    np.testing.assert_array_equal(only_ignored.score, [INF])


def test_graph_mode_and_shapes():
    classifier = make(drifts={(0, 1): 1.0})

    @tf.function(input_signature=[tf.RaggedTensorSpec([4, None], tf.int64)])
    def classify(keys):
        skippable, score, _ = classifier.classify({"user": keys}, TWO_TABLES[:1])
        assert skippable.shape == score.shape == (4,)
        return score

    keys = tf.ragged.constant([[1], [], [1, 1], [2]], tf.int64)
    np.testing.assert_array_equal(classify(keys), [1.0, INF, 1.0, INF])


def test_resource_dies_with_its_last_handle():
    handle = weakref.ref(make()._handle)
    gc.collect()
    assert handle() is None


@pytest.mark.parametrize("alpha", [0, 2, -0.5, math.nan, "1"])
def test_bad_alpha(alpha):
    with pytest.raises(ValueError, match=r"Invalid `alpha`.*> 0 <= 1"):
        InputClassifier(["user"], alpha)


@pytest.mark.parametrize("alpha", [0.0, 2.0, math.nan])
def test_op_itself_rejects_bad_alpha(alpha):
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"alpha is .*allowed: above 0"):
        _loader.library().slipstream_classifier(alpha=tf.constant(alpha, tf.float64), num_tables=1)


@pytest.mark.parametrize(
    "settings_, name",
    [
        ({"tables": []}, "tables"),
        ({"tables": ["a", "a"]}, "tables"),
        ({"tables": ["a"], "reservoir_size": 0}, "reservoir_size"),
        ({"tables": ["a"], "seed": -1}, "seed"),
    ],
)
def test_bad_settings(settings_, name):
    with pytest.raises(ValueError, match=f"Invalid `{name}`"):
        InputClassifier(**settings_)


@pytest.mark.parametrize(
    "mode, values, name",
    [
        ("other", {}, "mode"),
        ("drift", {"threshold": -1.0}, "threshold"),
        ("drift", {"threshold": math.nan}, "threshold"),
        ("random", {"random_share": 1.5}, "random_share"),
        ("drift", {"keep_rate": 1.0}, "keep_rate"),
        ("drift", {"keep_rate": -0.1}, "keep_rate"),
    ],
)
def test_bad_configuration(mode, values, name):
    with pytest.raises(ValueError, match=f"Invalid `{name}`"):
        make().configure(mode, **values)


@pytest.mark.parametrize(
    "tables, keys, drift, message",
    [
        ([2], [1], [0.0], "tables is 2 at position 0"),
        ([-1], [1], [0.0], "tables is -1"),
        ([0, 0], [1, 1], [0.0, 1.0], "key 1 of table 0 is given twice"),
        ([0], [1], [-0.5], "drift is -0.5"),
        ([0, 0], [1], [0.5], "shape"),
        ([[0]], [[1]], [[0.5]], "rank 1|shape"),
    ],
)
def test_bad_drift(tables, keys, drift, message):
    classifier = make(drifts={(0, 7): 1.0})
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
        classifier.set_drift(tables, keys, drift)
    _, score, _ = classifier.classify({"user": np.array([7])}, TWO_TABLES[:1])
    assert score.numpy() == [1.0], "a rejected call changes nothing"


def ragged(splits):
    return tf.RaggedTensor.from_row_splits(
        tf.constant([1, 2, 3], tf.int64), tf.constant(splits, tf.int64), validate=False
    )


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"user": ragged([0, 2, 1, 3])}, "decrease from 2 to 1"),
        ({"user": ragged([-1, 1, 3])}, "start at -1"),
        ({"user": ragged([0, 1, 9])}, "end at 9"),
        ({"user": np.array([1.0, 2.0])}, "float64"),
        ({"user": np.zeros((2, 2, 2), np.int64)}, "user"),
        ({"other": np.array([1])}, "other"),
        (np.zeros((2, 5), np.int64), r"\[batch, 1\]"),
    ],
)
def test_bad_inputs(inputs, message):
    classifier = make()
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
        classifier.classify(inputs, TWO_TABLES[:1])
    assert classifier.end_window().examples_seen == 0


def test_batch_sizes_that_differ_and_unknown_tables():
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature 'item' has 3 examples"):
        make().classify({"user": np.arange(2), "item": np.arange(3)}, TWO_TABLES)
    with pytest.raises(ValueError, match=r"Invalid `table`: 'shop' for feature 'x'.*user, item"):
        make().classify({"x": np.arange(2)}, [FeatureSpec("x", "shop")])


def test_handle_of_something_else():
    classifier = make()
    variable = tf.Variable(1.0)
    classifier._handle = variable.handle
    with pytest.raises(tf.errors.OpError):
        scores_of_sample(classifier)
