"""slipstream_tf.ops.drift_classifier against an InputClassifier and a NumPy reference."""

from __future__ import annotations

import dataclasses
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
from slipstream_tf.ops.classifier import InputClassifier
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
SPECS = [FeatureSpec("user", "user"), FeatureSpec("seen", "item"), FeatureSpec("item", "item")]
DRIFTS = {(0, 1): 0.1, (0, 2): 0.9, (1, 1): 0.2, (1, 2): 0.3, (1, -1): 0.4}


def set_drifts(classifier, drifts: dict) -> None:
    classifier.set_drift(
        np.array([table for table, _ in drifts], np.int32),
        np.array([key for _, key in drifts], np.int64),
        np.array(list(drifts.values()), np.float32),
    )


def make(device: str = "CPU:0", drifts: dict | None = None, **options) -> DriftClassifier:
    classifier = DriftClassifier(TABLES, device=device, **options)
    set_drifts(classifier, DRIFTS if drifts is None else drifts)
    classifier.configure("drift", 0.5)
    return classifier


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


drift_maps = st.dictionaries(
    st.tuples(st.integers(0, 1), st.integers(0, 8)), st.floats(0, 10, width=32), max_size=18
)
keys = st.integers(0, 9)
batches = st.lists(st.tuples(keys, st.lists(keys, max_size=40), keys), max_size=8)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=100)
@given(
    parts=st.lists(batches, min_size=1, max_size=3),
    drifts=drift_maps,
    alpha=st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    mode=st.sampled_from(["none", "drift", "random"]),
    threshold=st.floats(0, 12, width=32),
    keep_rate=st.sampled_from([0.0, 0.4]),
    shadow=st.booleans(),
    is_padded=st.booleans(),
    is_column=st.booleans(),
)
def test_results_equal_the_input_classifier(
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


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=50)
@given(
    batch=st.lists(st.lists(st.tuples(st.integers(-1, 1), keys), max_size=70), max_size=6),
    drifts=drift_maps,
    percent=st.integers(1, 100),
)
def test_scores_equal_the_definition(device, batch, drifts, percent):
    classifier = make(device, drifts, alpha=percent / 100)
    expected = []
    for lookups in batch:
        found = sorted(drifts.get(lookup, INF) for lookup in lookups if lookup[0] >= 0)
        expected.append(found[math.ceil(Fraction(percent, 100) * len(found)) - 1] if found else INF)
    flat = [lookup for lookups in batch for lookup in lookups]
    result = _loader.library().slipstream_classify_by_drift(
        handle=classifier._handle,
        keys=np.array([key for _, key in flat], np.int64),
        tables=np.array([table for table, _ in flat], np.int32),
        row_splits=np.cumsum([0, *map(len, batch)]).astype(np.int64),
    )
    assert result.score.numpy().tolist() == expected
    skippable = [score < np.float32(0.5) for score in expected]
    assert result.skippable.numpy().tolist() == skippable
    assert result.weight.numpy().tolist() == [0.0 if skip else 1.0 for skip in skippable]


@pytest.mark.parametrize("device", DEVICES)
def test_a_key_matrix(device):
    keys = tf.constant([[1, 1, 2], [2, 1, 1], [1, -1, 1], [1, 1, 7]], tf.int64)
    found = make(device).classify(keys, SPECS)
    # In a column of a matrix, too, -1 stands for no key, where it is padding.
    assert found.score.numpy().tolist() == np.float32([0.3, 0.9, 0.2, np.inf]).tolist()
    specs = [dataclasses.replace(spec, padding_key=None) for spec in SPECS]
    found = make(device).classify(keys, specs)
    assert found.score.numpy().tolist() == np.float32([0.3, 0.9, 0.4, np.inf]).tolist()
    assert found.skippable.numpy().tolist() == [True, False, True, False]


def test_ignored_tables_are_passed_over():
    classifier = make(ignored_tables=["other"])
    specs = [SPECS[0], FeatureSpec("other", "other")]
    inputs = {"user": tf.constant([1, 3], tf.int64), "other": tf.constant([1, 1], tf.int64)}
    assert classifier.classify(inputs, specs).skippable.numpy().tolist() == [True, False]
    with pytest.raises(ValueError, match=r"`table`.*user, item"):
        make().classify(inputs, specs)


@pytest.mark.parametrize("is_ragged", [True, False])
def test_replacing_drifts_and_settings_retraces_nothing(is_ragged):
    classifier, traces = make(), []

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


def test_a_copy_has_what_comes_after_it():
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


@pytest.mark.parametrize("make_keys", [ragged, padded])
def test_empty(make_keys):
    found = make().classify({"seen": make_keys([])}, SPECS[1:2])
    assert [part.shape for part in found] == [(0,)] * 3
    found = make().classify({"seen": make_keys([[], []])}, SPECS[1:2])
    assert found.score.numpy().tolist() == [np.inf] * 2 and not found.skippable.numpy().any()
    assert not make(drifts={}).classify({"seen": make_keys([[1]])}, SPECS[1:2]).skippable.numpy()


@pytest.mark.parametrize(
    ("keys", "tables", "row_splits"),
    [
        ([[1]], [0], [0, 1]),
        ([1], [0, 1], [0, 1]),
        ([1], [0], []),
        ([1], [0], [[0, 1]]),
        ([1], [0], [1, 1]),
        ([1, 2], [0, 0], [0, 2, 1, 2]),
        ([1, 2], [0, 0], [0, 1]),
        ([1, 2], [0, 0], [0, 3]),
        ([1, 2], [0, 0], [-1, 2]),
    ],
)
def test_bad_lookups(keys, tables, row_splits):
    with pytest.raises(BAD, match=r"allowed|rank|Dimension"):
        _loader.library().slipstream_classify_by_drift(
            handle=make()._handle,
            keys=tf.constant(keys, tf.int64),
            tables=tf.constant(tables, tf.int32),
            row_splits=tf.constant(row_splits, tf.int64),
        )


def test_batches_of_different_sizes():
    for seen in (ragged([[1], [2]]), padded([[1], [2]])):
        with pytest.raises(BAD):
            make().classify({"user": tf.constant([1], tf.int64), "seen": seen}, SPECS[:2])


@pytest.mark.parametrize(
    ("tables", "keys", "drift"),
    [
        ([2], [1], [0.1]),
        ([-1], [1], [0.1]),
        ([0], [1], [-0.1]),
        ([0, 0], [1, 1], [0.1, 0.1]),
        ([0], [1, 2], [0.1]),
        ([[0]], [[1]], [[0.1]]),
    ],
)
def test_bad_drifts_leave_the_others(tables, keys, drift):
    classifier = make()
    with pytest.raises(BAD, match=r"allowed|rank|Dimension|twice"):
        classifier.set_drift(tables, keys, drift)
    inputs = {"user": tf.constant([1], tf.int64)}
    assert classifier.classify(inputs, SPECS[:1]).skippable.numpy()


def test_bad_settings():
    classifier = make()
    for values in ((-1.0, 0.0, 0.0), (np.nan, 0.0, 0.0), (0.0, 1.5, 0.0), (0.0, 0.0, 1.0)):
        with pytest.raises(BAD, match="allowed"):
            classifier.configure("drift", *values)
    with pytest.raises(ValueError, match="`mode`"):
        classifier.configure("foreseen_loss")
    for options in ({"alpha": 0.0}, {"alpha": 1.1}, {"seed": -1}):
        with pytest.raises(ValueError, match="Invalid"):
            make(**options)
    with pytest.raises(ValueError, match="`tables`"):
        DriftClassifier([])
    for alpha in (0.0, 2.0, [1.0]):
        with pytest.raises(BAD, match=r"alpha.*allowed|rank"):
            _loader.library().slipstream_drift_classifier(
                alpha=tf.constant(alpha, tf.float64), num_tables=1
            )


def test_handle_of_something_else():
    classifier = make()
    classifier._handle = tf.Variable(1.0).handle
    for call in (
        lambda: classifier.classify({"user": tf.constant([1], tf.int64)}, SPECS[:1]),
        lambda: classifier.configure("none"),
        lambda: set_drifts(classifier, DRIFTS),
    ):
        with pytest.raises(tf.errors.OpError):
            call()


def test_resource_dies_with_its_last_handle():
    handle = weakref.ref(make()._handle)
    gc.collect()
    assert handle() is None


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("drift_classifier", ("alpha", "num_tables", "seed")),
        ("drift_classifier_set_drift", ("handle", "tables", "keys", "drift")),
        (
            "drift_classifier_configure",
            ("handle", "threshold", "random_share", "keep_rate", "mode", "is_shadow"),
        ),
        ("classify_by_drift", ("handle", "keys", "tables", "row_splits")),
    ],
)
def test_every_argument_is_documented(op, arguments):
    doc = getattr(_loader.library(), "slipstream_" + op).__doc__
    for argument in arguments:
        assert f"{argument}: " in doc, argument
