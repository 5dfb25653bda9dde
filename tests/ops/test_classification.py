"""Classification by drift matches the definition on all paths.

Tests with the parameter `make` run on an `InputClassifier`, and on a `DriftClassifier` on a CPU and
on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import weakref
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from definitions import assert_same_bits, classify, skip_score
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.ops import _loader
from slipstream_tf.ops.classifier import ClassifierCounts, InputClassifier
from slipstream_tf.ops.drift_classifier import DriftClassifier
from slipstream_tf.ops.features import FeatureSpec

needs_gpu = pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU") or not _loader.build_info().cuda,
    reason="needs a GPU and a library built with CUDA",
)
DEVICES = ["CPU:0", pytest.param("GPU:0", marks=needs_gpu)]
BAD = (ValueError, tf.errors.InvalidArgumentError)
INF = np.float32(np.inf)
TABLES = ("user", "item")
TWO_TABLES = [FeatureSpec("user", "user"), FeatureSpec("item", "item")]
SPECS = [FeatureSpec("user", "user"), FeatureSpec("seen", "item"), FeatureSpec("item", "item")]
DRIFTS = {(0, 1): 0.1, (0, 2): 0.9, (1, 1): 0.2, (1, 2): 0.3, (1, -1): 0.4}


def make_input(
    alpha: float = 1.0, drifts: dict | None = None, tables=TABLES, **options
) -> InputClassifier:
    classifier = InputClassifier(tables, alpha, **options)
    set_drifts(classifier, drifts or {})
    return classifier


def make_drift(
    alpha: float = 1.0,
    drifts: dict | None = None,
    device: str = "CPU:0",
    tables=TABLES,
    **options,
) -> DriftClassifier:
    classifier = DriftClassifier(tables, alpha, device=device, **options)
    set_drifts(classifier, drifts or {})
    return classifier


on_classifiers = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make_input, id="input"),
        pytest.param(make_drift, id="drift-CPU:0"),
        pytest.param(
            functools.partial(make_drift, device="GPU:0"), marks=needs_gpu, id="drift-GPU:0"
        ),
    ],
)


def set_drifts(classifier, drifts: dict) -> None:
    classifier.set_drift(*as_arrays(drifts))


def scores_of_sample(classifier: InputClassifier, drifts: dict | None = None) -> np.ndarray:
    return classifier.reservoir_scores(*as_arrays(drifts or {}))


def as_arrays(drifts: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([table for table, _ in drifts], np.int32),
        np.array([key for _, key in drifts], np.int64),
        np.array(list(drifts.values()), np.float32),
    )


def ragged(lists) -> tf.RaggedTensor:
    splits = np.cumsum([0, *(len(keys) for keys in lists)])
    flat = np.array([key for keys in lists for key in keys], np.int64)
    return tf.RaggedTensor.from_row_splits(tf.constant(flat), tf.constant(splits, tf.int64))


def padded(lists) -> tf.Tensor:
    width = max((len(keys) for keys in lists), default=0) + 1
    rows = [[*keys, *[-1] * (width - len(keys))] for keys in lists]
    return tf.constant(np.array(rows, np.int64).reshape(len(lists), width))


def same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.numpy().tobytes() == other.numpy().tobytes()


keys = st.integers(0, 9)
short_lists, key_lists = (st.lists(keys, max_size=size) for size in (9, 40))
tracked_keys = st.tuples(st.integers(0, 1), st.integers(0, 8))
# TensorFlow treats subnormal numbers as 0.
drift_maps = st.dictionaries(
    tracked_keys, st.floats(0, 10, width=32, allow_subnormal=False), max_size=18
)
batches = st.lists(st.tuples(keys, key_lists, keys), max_size=8)


@on_classifiers
@settings(max_examples=60)
@given(
    batch=st.lists(st.tuples(short_lists, short_lists), max_size=8),
    drifts=drift_maps,
    percent=st.integers(1, 100),
    threshold=st.floats(0, 12, width=32, allow_subnormal=False),
    is_padded=st.booleans(),
)
def test_results_equal_definition(make, batch, drifts, percent, threshold, is_padded):
    classifier = make(percent / 100, drifts)
    classifier.configure("drift", threshold)
    users = ragged([user for user, _ in batch])
    items = (padded if is_padded else ragged)([item for _, item in batch])
    found = classifier.classify({"user": users, "item": items}, TWO_TABLES)
    score = [
        skip_score(Fraction(percent, 100), drifts, [(0, k) for k in user] + [(1, k) for k in item])
        for user, item in batch
    ]
    score = np.array(score, np.float32)
    skippable, weight = classify(score, threshold)
    assert_same_bits(found.score, score)
    assert_same_bits(found.skippable, skippable)
    assert_same_bits(found.weight, weight)
    if isinstance(classifier, InputClassifier):
        assert_same_bits(np.sort(scores_of_sample(classifier, drifts)), np.sort(score))
        hot, skipped = int(np.isfinite(score).sum()), int(skippable.sum())
        counts = ClassifierCounts(len(batch), skipped, hot, skipped)
        assert classifier.end_window() == counts


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=50)
@given(
    batch=st.lists(st.lists(st.tuples(st.integers(-1, 1), keys), max_size=70), max_size=6),
    drifts=drift_maps,
    percent=st.integers(1, 100),
)
def test_lookups_without_table_are_ignored(device, batch, drifts, percent):
    classifier = make_drift(percent / 100, drifts, device)
    classifier.configure("drift", 0.5)
    alpha = Fraction(percent, 100)
    score = [
        skip_score(alpha, drifts, [lookup for lookup in lookups if lookup[0] >= 0])
        for lookups in batch
    ]
    skippable, weight = classify(score, 0.5)
    flat = [lookup for lookups in batch for lookup in lookups]
    result = _loader.library().slipstream_classify_by_drift(
        handle=classifier._handle,
        keys=np.array([key for _, key in flat], np.int64),
        tables=np.array([table for table, _ in flat], np.int32),
        row_splits=np.cumsum([0, *map(len, batch)]).astype(np.int64),
    )
    assert_same_bits(result.score, np.array(score, np.float32))
    assert_same_bits(result.skippable, skippable)
    assert_same_bits(result.weight, weight)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=100)
@given(
    parts=st.lists(batches, min_size=1, max_size=3),
    drifts=drift_maps,
    alpha=st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    mode=st.sampled_from(["none", "drift", "random"]),
    threshold=st.floats(0, 12, width=32, allow_subnormal=False),
    keep_rate=st.sampled_from([0.0, 0.4]),
    shadow=st.booleans(),
    is_padded=st.booleans(),
    is_column=st.booleans(),
)
def test_results_equal_input_classifier(
    device, parts, drifts, alpha, mode, threshold, keep_rate, shadow, is_padded, is_column
):
    classifier = InputClassifier(TABLES, alpha, seed=5)
    copy = classifier.copy_on(device)
    set_drifts(classifier, drifts)
    classifier.configure(mode, threshold, 0.5, keep_rate, shadow)
    for batch in parts:
        users = np.array([user for user, _, _ in batch], np.int64)
        inputs = {
            "user": tf.constant(users[:, None] if is_column else users),
            "seen": (padded if is_padded else ragged)([seen for _, seen, _ in batch]),
            "item": tf.constant(np.array([item for _, _, item in batch], np.int64)),
        }
        same(copy.classify(inputs, SPECS), classifier.classify(inputs, SPECS))


@on_classifiers
@pytest.mark.parametrize("alpha, m, rank", [(0.9, 10, 9), (0.6, 10, 6), (0.55, 100, 55)])
def test_required_lookups_do_not_round_up(make, alpha, m, rank):
    specs = [FeatureSpec("keys", "user")]
    classifier = make(alpha, {(0, key): float(key) for key in range(m)})
    _, score, _ = classifier.classify({"keys": np.arange(m)[None]}, specs)
    assert score.numpy() == [rank - 1]


@on_classifiers
def test_matrix_vector_and_int32_keys_are_accepted(make):
    classifier = make(drifts={(0, 1): 0.25, (1, 1): 0.5})
    matrix = np.array([[1, 1], [1, 2]])
    _, from_matrix, _ = classifier.classify(matrix, TWO_TABLES)
    _, from_columns, _ = classifier.classify(
        {"user": matrix[:, 0].astype(np.int32), "item": matrix[:, 1]}, TWO_TABLES
    )
    np.testing.assert_array_equal(from_matrix, [0.5, INF])
    np.testing.assert_array_equal(from_columns, [0.5, INF])


@on_classifiers
def test_key_matrix_is_classified(make):
    classifier = make(drifts=DRIFTS)
    classifier.configure("drift", 0.5)
    keys = tf.constant([[1, 1, 2], [2, 1, 1], [1, -1, 1], [1, 1, 7]], tf.int64)
    found = classifier.classify(keys, SPECS)
    # In a column of a matrix, -1 is the padding key as well.
    assert found.score.numpy().tolist() == np.float32([0.3, 0.9, 0.2, np.inf]).tolist()
    specs = [dataclasses.replace(spec, padding_key=None) for spec in SPECS]
    found = classifier.classify(keys, specs)
    assert found.score.numpy().tolist() == np.float32([0.3, 0.9, 0.4, np.inf]).tolist()
    assert found.skippable.numpy().tolist() == [True, False, True, False]


@on_classifiers
def test_empty_batches_and_examples_without_lookups_are_not_skippable(make):
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
    if isinstance(classifier, InputClassifier):
        assert classifier.end_window() == ClassifierCounts(2, 0, 0)
        assert classifier.end_window() == ClassifierCounts(0, 0, 0)
        assert scores_of_sample(classifier, {(0, 1): 1.0}).shape == (0,)


@on_classifiers
@pytest.mark.parametrize("make_keys", [ragged, padded])
def test_empty_batch_returns_empty_results(make, make_keys):
    classifier = make(drifts=DRIFTS)
    classifier.configure("drift", 0.5)
    found = classifier.classify({"seen": make_keys([])}, SPECS[1:2])
    assert [part.shape for part in found] == [(0,)] * 3
    found = classifier.classify({"seen": make_keys([[], []])}, SPECS[1:2])
    assert found.score.numpy().tolist() == [np.inf] * 2 and not found.skippable.numpy().any()
    without_drifts = make()
    without_drifts.configure("drift", 0.5)
    found = without_drifts.classify({"seen": make_keys([[1]])}, SPECS[1:2])
    assert not found.skippable.numpy()


@on_classifiers
def test_nonfinite_drift_is_never_below_threshold(make):
    classifier = make(drifts={(0, 1): np.nan, (0, 2): np.inf, (0, 3): -np.inf, (0, 4): 3e38})
    classifier.configure("drift", np.inf)
    keys = {"user": np.array([1, 2, 3, 4])}
    skippable = classifier.classify(keys, TWO_TABLES[:1]).skippable
    np.testing.assert_array_equal(skippable, [False, False, False, True])


def test_shadow_mode_counts_fraction_of_batches_for_all():
    classifier = make_input(drifts={(0, 1): 0.25}, reservoir_size=8)
    classifier.configure("drift", 0.5, shadow=True)
    keys = {"user": np.repeat([1, 2], 8)}
    classified = [
        classifier.classify(keys, TWO_TABLES[:1], window_batches=32).skippable.numpy().sum()
        for _ in range(32)
    ]
    # 32 of the 512 examples are classified, four per place of the reservoir. This is one batch in
    # 16.
    assert sorted(classified) == [0] * 30 + [8] * 2
    counts = classifier.end_window()
    assert counts == ClassifierCounts(512, 0, 256, 256, 0)
    with pytest.raises(ValueError, match="window_batches"):
        classifier.classify(keys, TWO_TABLES[:1], window_batches=-1)


@on_classifiers
def test_set_drift_replaces_all_drifts(make):
    classifier = make(drifts={(0, 1): 1.0})
    set_drifts(classifier, {(0, 2): 2.0})
    _, score, _ = classifier.classify({"user": np.array([1, 2])}, TWO_TABLES[:1])
    np.testing.assert_array_equal(score, [INF, 2.0])


def test_unobserved_examples_are_not_counted():
    classifier = make_input(drifts={(0, 1): 1.0})
    classifier.classify({"user": np.array([1, 2])}, TWO_TABLES[:1], observe=False)
    assert scores_of_sample(classifier).size == 0
    assert classifier.end_window() == ClassifierCounts(0, 0, 0)


def test_reservoir_samples_window_uniformly():
    inputs, capacity, windows = 400, 20, 500
    drifts = {(0, k): float(k) for k in range(inputs)}
    classifier = make_input(reservoir_size=capacity)
    chosen = np.zeros(inputs)
    for _ in range(windows):
        classifier.classify({"user": np.arange(inputs)}, TWO_TABLES[:1])
        sample = scores_of_sample(classifier, drifts)
        assert sample.shape == (capacity,) and np.unique(sample).size == capacity
        chosen[sample.astype(int)] += 1
        classifier.end_window()
    expected = windows * capacity / inputs
    # 399 degrees of freedom, slightly fewer for draws without replacement: mean 380, deviation 28.
    assert ((chosen - expected) ** 2 / expected).sum() < 380 + 5 * 28


def test_same_seed_gives_same_sample():
    samples = []
    for seed in (1, 1, 2):
        classifier = make_input(reservoir_size=10, seed=seed)
        classifier.configure("random", random_fraction=0.5)
        for _ in range(2):
            classifier.classify({"user": np.arange(100)}, TWO_TABLES[:1])
        samples.append(scores_of_sample(classifier, {(0, k): k for k in range(100)}))
    np.testing.assert_array_equal(samples[0], samples[1])
    assert (samples[0] != samples[2]).any()


@on_classifiers
def test_same_seed_gives_same_random_skips(make):
    results = []
    for seed in (1, 1, 2):
        classifier = make(seed=seed)
        classifier.configure("random", random_fraction=0.5)
        skips = [
            classifier.classify({"user": np.arange(100)}, TWO_TABLES[:1])[0].numpy()
            for _ in range(2)
        ]
        assert (skips[0] != skips[1]).any(), "a later input has its own random number"
        results.append(np.concatenate(skips))
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[0] != results[2]).any()


@on_classifiers
@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.9, 1.0])
def test_random_mode_skips_given_fraction(make, fraction):
    classifier = make()
    classifier.configure("random", random_fraction=fraction)
    skippable = classifier.classify({"user": np.arange(20000)}, TWO_TABLES[:1]).skippable
    # Five standard deviations. The result is exact for shares 0 and 1.
    assert abs(skippable.numpy().mean() - fraction) <= 5 * math.sqrt(
        fraction * (1 - fraction) / 20000
    )


@on_classifiers
def test_subsampling_keeps_unbiased_weighted_sample(make):
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
    # Weights replace the skipped examples, so that any sum over examples keeps its expectation. The
    # bound is five standard deviations.
    deviation = math.sqrt((1 / rate - 1) / skippable.sum())
    assert abs(weight[skippable].mean() - 1.0) < 5 * deviation
    values = np.sin(np.arange(inputs))
    spread = 5 * math.sqrt((1 / rate - 1) * (values[skippable] ** 2).sum())
    assert abs((weight * values).sum() - values.sum()) < spread
    if isinstance(classifier, InputClassifier):
        kept = int((weight[skippable] > 0).sum())
        expected = ClassifierCounts(inputs, 30_000 - kept, inputs, 30_000, kept)
        assert classifier.end_window() == expected


@on_classifiers
def test_same_seed_gives_same_subsample(make):
    weights = []
    for seed in (1, 1, 2):
        classifier = make(drifts={(0, 1): 0.5}, seed=seed)
        classifier.configure("drift", 1.0, keep_rate=0.5)
        batch = {"user": np.ones(100, np.int64)}
        weights.append([classifier.classify(batch, TWO_TABLES[:1]).weight for _ in range(2)])
    np.testing.assert_array_equal(weights[0], weights[1])
    assert (weights[0][0] != weights[0][1]).numpy().any(), "a later input has its own draw"
    assert (weights[0][0] != weights[2][0]).numpy().any()


@on_classifiers
@pytest.mark.parametrize("mode, values", [("drift", {"threshold": 1.0}), ("random", {})])
def test_shadow_mode_marks_and_keeps_all_examples(make, mode, values):
    all_flags, kept = [], 0
    for shadow in (False, True):
        classifier = make(drifts={(0, 1): 0.5, (0, 2): 2.0})
        rate = {"random_fraction": 0.5} if mode == "random" else {"keep_rate": 0.5}
        classifier.configure(mode, shadow=shadow, **values, **rate)
        users = {"user": np.arange(100) % 3}
        skippable, _, weight = classifier.classify(users, TWO_TABLES[:1])
        all_flags.append(skippable.numpy())
        num_skipped = (weight.numpy() == 0).sum()
        if shadow:
            np.testing.assert_array_equal(weight, np.ones(100))
        else:
            assert num_skipped > 0
        if not isinstance(classifier, InputClassifier):
            continue
        counts = classifier.end_window()
        assert counts.examples_skippable == skippable.numpy().sum() > 0
        assert counts.examples_skipped == num_skipped
        if shadow:
            assert counts.examples_kept == kept, "as if it skipped"
        kept = counts.examples_kept
    np.testing.assert_array_equal(all_flags[0], all_flags[1])


@on_classifiers
def test_ignored_tables_do_not_affect_classification(make):
    classifier = make(drifts={(0, 1): 0.25}, tables=["user"], ignored_tables=["item"])
    matrix = np.array([[1, 9], [2, 1]])
    np.testing.assert_array_equal(classifier.classify(matrix, TWO_TABLES).score, [0.25, INF])
    if isinstance(classifier, InputClassifier):
        np.testing.assert_array_equal(
            np.sort(scores_of_sample(classifier, {(0, 1): 0.25})), [0.25, INF]
        )
    only_ignored = classifier.classify({"item": np.array([1])}, TWO_TABLES[1:])
    np.testing.assert_array_equal(only_ignored.score, [INF])


@on_classifiers
def test_ignored_tables_are_skipped_and_unknown_tables_raise(make):
    classifier = make(drifts=DRIFTS, ignored_tables=["other"])
    classifier.configure("drift", 0.5)
    specs = [SPECS[0], FeatureSpec("other", "other")]
    inputs = {"user": tf.constant([1, 3], tf.int64), "other": tf.constant([1, 1], tf.int64)}
    assert classifier.classify(inputs, specs).skippable.numpy().tolist() == [True, False]
    with pytest.raises(ValueError, match=r"`table`.*user, item"):
        make().classify(inputs, specs)


@on_classifiers
def test_graph_mode_has_static_shapes(make):
    classifier = make(drifts={(0, 1): 1.0})

    @tf.function(input_signature=[tf.RaggedTensorSpec([4, None], tf.int64)])
    def run(keys):
        skippable, score, _ = classifier.classify({"user": keys}, TWO_TABLES[:1])
        assert skippable.shape == score.shape and score.shape.rank == 1
        if isinstance(classifier, InputClassifier):
            assert score.shape == (4,)
        return score

    keys = tf.ragged.constant([[1], [], [1, 1], [2]], tf.int64)
    np.testing.assert_array_equal(run(keys), [1.0, INF, 1.0, INF])


@on_classifiers
@pytest.mark.parametrize("is_ragged", [True, False])
def test_replacing_drifts_and_settings_does_not_retrace(make, is_ragged):
    classifier, traces = make(drifts=DRIFTS), []
    classifier.configure("drift", 0.5)

    @tf.function(reduce_retracing=True)
    def step(seen):
        traces.append(1)
        found = classifier.classify({"seen": seen}, SPECS[1:2])
        assert found.score.shape.rank == 1
        return found.skippable

    signature = (tf.RaggedTensorSpec if is_ragged else tf.TensorSpec)([None, None], tf.int64)
    step = step.get_concrete_function(signature)
    batch = (ragged if is_ragged else padded)([[1], [1, 2], [], [5]])
    assert step(batch).numpy().tolist() == [True, True, False, False]
    classifier.configure("drift", 0.25)
    assert step(batch).numpy().tolist() == [True, False, False, False]
    set_drifts(classifier, {(1, 5): 0.0})
    assert step(batch).numpy().tolist() == [False, False, False, True]
    classifier.configure("none")
    assert not step(batch).numpy().any() and len(traces) == 1


def test_copy_receives_later_settings():
    classifier = InputClassifier(TABLES)
    set_drifts(classifier, DRIFTS)
    classifier.configure("drift", 0.5)
    copy, inputs = classifier.copy_on("CPU:0"), {"user": tf.constant([1], tf.int64)}
    assert not copy.classify(inputs, SPECS[:1]).skippable.numpy()
    set_drifts(classifier, DRIFTS)
    classifier.configure("drift", 0.5)
    assert copy.classify(inputs, SPECS[:1]).skippable.numpy()
    with pytest.raises(ValueError, match="`pilot`"):
        InputClassifier(TABLES, pilot="label").copy_on("CPU:0")


@on_classifiers
def test_resource_is_freed_with_last_handle(make):
    handle = weakref.ref(make()._handle)
    gc.collect()
    assert handle() is None


@on_classifiers
@pytest.mark.parametrize("alpha", [0, 2, -0.5, 1.1, math.nan, "1"])
def test_invalid_alpha_raises(make, alpha):
    with pytest.raises(ValueError, match=r"Invalid `alpha`.*> 0 and <= 1"):
        make(alpha)


@pytest.mark.parametrize("op", ["classifier", "drift_classifier"])
@pytest.mark.parametrize("alpha", [0.0, 2.0, math.nan])
def test_op_rejects_invalid_alpha(op, alpha):
    make_resource = getattr(_loader.library(), f"slipstream_{op}")
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"alpha is .*expected a number above 0"
    ):
        make_resource(alpha=tf.constant(alpha, tf.float64), num_tables=1)


def test_op_rejects_nonscalar_alpha():
    with pytest.raises(BAD, match=r"alpha.*expected|rank"):
        _loader.library().slipstream_drift_classifier(
            alpha=tf.constant([1.0], tf.float64), num_tables=1
        )


@on_classifiers
@pytest.mark.parametrize(
    "settings_, name",
    [
        ({"tables": []}, "tables"),
        ({"tables": ["a", "a"]}, "tables"),
        ({"tables": ["a"], "seed": -1}, "seed"),
    ],
)
def test_invalid_settings_raise(make, settings_, name):
    with pytest.raises(ValueError, match=f"Invalid `{name}`"):
        make(**settings_)


def test_invalid_reservoir_size_raises():
    with pytest.raises(ValueError, match="Invalid `reservoir_size`"):
        InputClassifier(["a"], reservoir_size=0)


@on_classifiers
@pytest.mark.parametrize(
    "mode, values, name",
    [
        ("other", {}, "mode"),
        ("drift", {"threshold": -1.0}, "threshold"),
        ("drift", {"threshold": math.nan}, "threshold"),
        ("random", {"random_fraction": 1.5}, "random_fraction"),
        ("drift", {"random_fraction": 1.5}, "random_fraction"),
        ("drift", {"keep_rate": 1.0}, "keep_rate"),
        ("drift", {"keep_rate": -0.1}, "keep_rate"),
    ],
)
def test_invalid_configuration_raises(make, mode, values, name):
    classifier = make()
    if isinstance(classifier, InputClassifier) or name == "mode":
        error, message = ValueError, f"Invalid `{name}`"
    else:
        error, message = BAD, f"{name}.*expected"
    with pytest.raises(error, match=message):
        classifier.configure(mode, **values)


def test_predicted_losses_require_input_classifier():
    with pytest.raises(ValueError, match="`mode`"):
        make_drift().configure("predicted_loss")


@on_classifiers
@pytest.mark.parametrize(
    "tables, keys, drift, message",
    [
        ([2], [1], [0.0], r"tables\[0\] is 2; expected an integer from 0 to "),
        ([-1], [1], [0.0], r"tables\[0\] is -1"),
        ([0, 0], [1, 1], [0.0, 1.0], "key 1 of table 0 occurs twice"),
        ([0], [1], [-0.5], r"drifts\[0\] is -0\.5"),
        ([0, 0], [1], [0.5], "shape|Dimension"),
        ([0], [1, 2], [0.1], "shape|Dimension"),
        ([[0]], [[1]], [[0.5]], "rank 1|shape"),
    ],
)
def test_invalid_drift_raises(make, tables, keys, drift, message):
    classifier = make(drifts={(0, 7): 1.0})
    with pytest.raises(BAD, match=message):
        classifier.set_drift(tables, keys, drift)
    _, score, _ = classifier.classify({"user": np.array([7])}, TWO_TABLES[:1])
    assert score.numpy() == [1.0], "a rejected call changes nothing"


def with_splits(splits):
    return tf.RaggedTensor.from_row_splits(
        tf.constant([1, 2, 3], tf.int64), tf.constant(splits, tf.int64), validate=False
    )


@pytest.mark.parametrize(
    "inputs, message",
    [
        (
            {"user": with_splits([0, 2, 1, 3])},
            r"row_splits\[2\] of feature 'user' is 1; expected at least 2",
        ),
        ({"user": with_splits([-1, 1, 3])}, r"row_splits\[0\] of feature 'user' is -1; expected 0"),
        (
            {"user": with_splits([0, 1, 9])},
            r"row_splits\[2\] of feature 'user' is 9; expected 3, the number of keys",
        ),
        ({"user": np.array([1.0, 2.0])}, "float64"),
        ({"user": np.zeros((2, 2, 2), np.int64)}, "user"),
        ({"other": np.array([1])}, "other"),
        (np.zeros((2, 5), np.int64), r"\[batch, 1\]"),
    ],
)
def test_invalid_inputs_raise(inputs, message):
    classifier = make_input()
    with pytest.raises(BAD, match=message):
        classifier.classify(inputs, TWO_TABLES[:1])
    assert classifier.end_window().examples_seen == 0


@pytest.mark.parametrize(
    ("keys", "tables", "row_splits"),
    [
        ([[1]], [0], [0, 1]),
        ([1], [0, 1], [0, 1]),
        ([1], [0], []),
        ([1], [0], [[0, 1]]),
        *(
            pytest.param([1, 2], [0, 0], row_splits, marks=pytest.mark.cpu_kernel)
            for row_splits in ([1, 2], [0, 2, 1, 2], [0, 1], [0, 3], [-1, 2])
        ),
    ],
)
def test_invalid_lookups_raise(keys, tables, row_splits):
    with pytest.raises(BAD, match=r"expected|rank|Dimension"):
        _loader.library().slipstream_classify_by_drift(
            handle=make_drift(drifts=DRIFTS)._handle,
            keys=tf.constant(keys, tf.int64),
            tables=tf.constant(tables, tf.int32),
            row_splits=tf.constant(row_splits, tf.int64),
        )


@on_classifiers
def test_different_batch_sizes_and_unknown_tables_raise(make):
    is_input = isinstance(make(), InputClassifier)
    message = (
        "feature 'item' has 3 examples; expected 2, as in feature 'user'" if is_input else None
    )
    with pytest.raises(BAD, match=message):
        make().classify({"user": np.arange(2), "item": np.arange(3)}, TWO_TABLES)
    for seen in (ragged([[1], [2]]), padded([[1], [2]])):
        with pytest.raises(BAD):
            make().classify({"user": tf.constant([1], tf.int64), "seen": seen}, SPECS[:2])
    with pytest.raises(ValueError, match=r"Invalid `table`: 'shop' for feature 'x'.*user, item"):
        make().classify({"x": np.arange(2)}, [FeatureSpec("x", "shop")])


@on_classifiers
def test_handle_of_other_resource_raises(make):
    classifier, is_input = make(), isinstance(make(), InputClassifier)
    variable = tf.Variable(1.0)
    classifier._handle = variable.handle
    calls = [
        lambda: classifier.classify({"user": tf.constant([1], tf.int64)}, SPECS[:1]),
        lambda: classifier.configure("none"),
        lambda: set_drifts(classifier, DRIFTS),
    ]
    for call in [*calls, *[lambda: scores_of_sample(classifier)] * is_input]:
        with pytest.raises(tf.errors.OpError):
            call()


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("drift_classifier", ("alpha", "num_tables", "seed")),
        ("drift_classifier_set_drift", ("handle", "tables", "keys", "drift")),
        (
            "drift_classifier_configure",
            ("handle", "threshold", "random_fraction", "keep_rate", "mode", "is_shadow"),
        ),
        ("classify_by_drift", ("handle", "keys", "tables", "row_splits")),
    ],
)
def test_every_argument_is_documented(op, arguments):
    doc = getattr(_loader.library(), "slipstream_" + op).__doc__
    for argument in arguments:
        assert f"{argument}: " in doc, argument
