"""Tests that weights and marks stay with their examples in `skip_inputs`."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.ops.classifier import Classified, InputClassifier
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.sampling.classifier import skip_inputs

SPECS = [FeatureSpec("key", "table")]
KEEP_WEIGHT = 4.0


class FakeClassifier:
    """Classifies keys by k % 3: 1 is dropped, 2 is kept.

    Both are skippable.
    """

    def classify(self, inputs, specs, observe=True, window_batches=0):
        assert observe and not window_batches
        keys = inputs["key"] if isinstance(inputs, dict) else inputs
        pack(inputs, specs)
        if isinstance(keys, tf.RaggedTensor):
            keys = tf.gather(keys.flat_values, keys.row_starts())
        kind = keys[:, 0] % 3 if keys.shape.rank == 2 else keys % 3
        weight = tf.gather(tf.constant([1.0, 0.0, KEEP_WEIGHT]), kind)
        return Classified(kind > 0, tf.zeros_like(weight), weight)


def expected_weights(keys):
    return np.array([1.0, 0.0, KEEP_WEIGHT])[np.asarray(keys) % 3]


def ragged_batches(sizes, keys, with_weight):
    """Makes batches with a bag of repeated keys and the position."""
    keys = np.asarray(keys, np.int64)

    def batches():
        start = 0
        for size in sizes:
            part = keys[start : start + size]
            place = np.arange(start, start + size)
            start += size
            lengths = place % 3 + 1
            bag = tf.RaggedTensor.from_row_lengths(np.repeat(part, lengths), lengths)
            features = {"keys": {"key": bag}, "place": place, "dense": place[:, None] * 0.5}
            element = (features, place.astype(np.float32))
            yield (*element, place * 2.0) if with_weight else element

    features_spec = {
        "keys": {"key": tf.RaggedTensorSpec([None, None], tf.int64)},
        "place": tf.TensorSpec([None], tf.int64),
        "dense": tf.TensorSpec([None, 1], tf.float32),
    }
    vectors = [tf.TensorSpec([None], tf.float32)] * (2 if with_weight else 1)
    return tf.data.Dataset.from_generator(batches, output_signature=(features_spec, *vectors))


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 7), max_size=8),
    batch_size=st.integers(1, 9),
    with_weight=st.booleans(),
    weighted=st.booleans(),
    adds_skippable=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_weights_and_flags_stay_with_their_examples(
    sizes, batch_size, with_weight, weighted, adds_skippable, seed
):
    keys = np.random.default_rng(seed).integers(0, 9, sum(sizes))
    dataset = skip_inputs(
        ragged_batches(sizes, keys, with_weight),
        FakeClassifier(),
        SPECS,
        batch_size,
        weighted=weighted,
        adds_skippable=adds_skippable,
    )
    expected = expected_weights(keys)
    order = []
    for features, label, *weight in dataset:
        place = features["place"].numpy()
        order.extend(place)
        np.testing.assert_array_equal(label, place)
        np.testing.assert_array_equal(features["dense"][:, 0], place * 0.5)
        assert features["keys"]["key"].to_list() == [[int(keys[i])] * (i % 3 + 1) for i in place]
        assert ("skippable" in features) == adds_skippable
        if adds_skippable:
            assert features["skippable"].dtype == tf.bool
            np.testing.assert_array_equal(features["skippable"], keys[place] % 3 == 2)
        assert len(weight) == (with_weight or weighted)
        if weight:
            own = place * 2.0 if with_weight else 1.0
            by_classifier = expected[place] if weighted else 1.0
            np.testing.assert_array_equal(weight[0], own * by_classifier)
    assert order == np.flatnonzero(expected > 0).tolist(), "nothing is lost, doubled or moved"


def pairs(count=9):
    keys = np.arange(count, dtype=np.int64)[:, None]
    return tf.data.Dataset.from_tensor_slices(({"keys": keys}, keys[:, 0]))


def test_elements_are_unchanged_without_weights_or_flags():
    dataset = pairs().batch(3, drop_remainder=True)
    kept = skip_inputs(dataset, FakeClassifier(), SPECS, drop_remainder=True)
    assert kept.element_spec == dataset.element_spec


def test_multidimensional_and_integer_weights_are_multiplied():
    dataset = pairs().batch(9).map(lambda f, y: (f, y, tf.stack([y, 2 * y], axis=1)))
    (_, label, weight), *_ = skip_inputs(dataset, FakeClassifier(), SPECS, 9, weighted=True)
    one = label.numpy() * expected_weights(label.numpy())
    np.testing.assert_array_equal(weight, np.stack([one, 2 * one], axis=1))
    assert weight.dtype == tf.float32


def test_features_without_tuple_can_be_flagged():
    dataset = pairs().batch(9).map(lambda f, y: f)
    (features,) = skip_inputs(dataset, FakeClassifier(), SPECS, 9, adds_skippable=True)
    np.testing.assert_array_equal(features["keys"][:, 0] % 3 == 2, features["skippable"])


def test_flags_are_not_keys():
    def renamed(features, label):
        key = features["keys"][:, 0]
        return {"key": key, "skippable": tf.zeros_like(key, tf.bool)}, label

    ((_, label),) = skip_inputs(pairs().batch(9).map(renamed), FakeClassifier(), SPECS, 9)
    assert label.numpy().tolist() == [0, 2, 3, 5, 6, 8]


def test_elements_without_place_for_weights_or_flags_raise():
    bare = tf.data.Dataset.from_tensor_slices(np.zeros((4, 1), np.int64)).batch(2)
    classifier = FakeClassifier()
    with pytest.raises(ValueError, match=r"\(features, label, sample_weight\)"):
        skip_inputs(bare, classifier, SPECS, 2, weighted=True)
    noted = pairs().batch(3).map(lambda f, y: ({**f, "skippable": y > 0}, y))
    with pytest.raises(ValueError, match="features without 'skippable'"):
        skip_inputs(noted, classifier, SPECS, 3, adds_skippable=True)


@pytest.mark.parametrize("keep_rate", [0.0, 0.25])
def test_subsampling_weights_compensate_dropped_examples(keep_rate):
    classifier = InputClassifier(["table"], seed=2)
    classifier.set_drift([0], [1], [0.0])
    classifier.configure("drift", 0.5, keep_rate=keep_rate)
    keys = np.random.default_rng(0).integers(0, 2, 4000)
    features = {"keys": keys[:, None], "place": np.arange(len(keys))}
    dataset = tf.data.Dataset.from_tensor_slices((features, keys)).batch(64)
    kept = skip_inputs(dataset, classifier, SPECS, 64, weighted=True, adds_skippable=True)
    seen, total = [], 0.0
    for features, label, weight in kept:
        place = features["place"].numpy()
        seen.extend(place)
        np.testing.assert_array_equal(label, keys[place])
        np.testing.assert_array_equal(features["skippable"], keys[place] == 1)
        np.testing.assert_array_equal(weight, np.where(keys[place] == 1, 4.0, 1.0))
        total += float(tf.reduce_sum(weight))
    assert seen == sorted(set(seen)) and set(np.flatnonzero(keys == 0)) <= set(seen)
    if keep_rate:
        assert abs(total - len(keys)) < 0.1 * len(keys)
    else:
        assert total == np.sum(keys == 0)
