"""Tests of `sampling.classifier`: skippable examples are dropped and batches refilled.

Order and content of the kept examples stay the same.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.ops.classifier import InputClassifier
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.sampling.classifier import default_keys, skip_inputs

SPECS = [FeatureSpec("key", "table")]


def make_classifier(saturated=(), threshold=0.5):
    """Returns a classifier that skips examples with only saturated keys."""
    classifier = InputClassifier(["table"])
    set_saturated(classifier, saturated)
    classifier.configure("drift", threshold)
    return classifier


def set_saturated(classifier, keys):
    keys = sorted(keys)
    classifier.set_drift(np.zeros(len(keys), np.int32), keys, np.zeros(len(keys), np.float32))


def in_batches(sizes, keys):
    """Makes batches ({"keys": {"key": ragged}, "dense": matrix, "name": text}, label, weight)."""
    keys = np.asarray(keys, np.int64)

    def batches():
        start = 0
        for size in sizes:
            part = keys[start : start + size]
            position = np.arange(start, start + len(part))
            start += size
            lengths = position % 3 + 1  # The number of times that the key is repeated.
            ragged = tf.RaggedTensor.from_row_lengths(np.repeat(part, lengths), lengths)
            features = {
                "keys": {"key": ragged},
                "dense": np.stack([position, position], axis=1).astype(np.float32),
                "name": tf.strings.as_string(position),
            }
            yield features, position.astype(np.float32), -position.astype(np.float32)

    vector = tf.TensorSpec([None], tf.float32)
    features_spec = {
        "keys": {"key": tf.RaggedTensorSpec([None, None], tf.int64)},
        "dense": tf.TensorSpec([None, 2], tf.float32),
        "name": tf.TensorSpec([None], tf.string),
    }
    return tf.data.Dataset.from_generator(batches, output_signature=(features_spec, vector, vector))


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 7), max_size=8),
    batch_size=st.integers(1, 9),
    saturated=st.sets(st.integers(0, 5)),
    drop_remainder=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_stream_of_kept_examples_is_unchanged(sizes, batch_size, saturated, drop_remainder, seed):
    keys = np.random.default_rng(seed).integers(0, 6, sum(sizes))
    classifier = make_classifier(saturated)
    result = list(
        skip_inputs(
            in_batches(sizes, keys),
            classifier,
            SPECS,
            batch_size=batch_size,
            drop_remainder=drop_remainder,
        )
    )
    expected = [i for i, key in enumerate(keys) if key not in saturated]
    whole, rest = divmod(len(expected), batch_size)
    if drop_remainder:
        expected, rest = expected[: whole * batch_size], 0
    got_sizes = [int(label.shape[0]) for _, label, _ in result]
    assert got_sizes == [batch_size] * whole + [rest] * (rest > 0)
    got = [int(i) for _, label, _ in result for i in label]
    assert got == expected
    for features, label, weight in result:
        position = label.numpy().astype(int)
        np.testing.assert_array_equal(weight, -label.numpy())
        np.testing.assert_array_equal(features["dense"], np.stack([position] * 2, axis=1))
        assert [int(text) for text in features["name"].numpy()] == position.tolist()
        assert features["keys"]["key"].to_list() == [[int(keys[i])] * (i % 3 + 1) for i in position]
    counts = classifier.end_window()
    assert counts.examples_seen == len(keys)
    assert counts.examples_skipped == sum(key in saturated for key in keys)


def matrix_batches(keys, batch_size, labels=None):
    keys = np.asarray(keys, np.int64)
    labels = np.arange(len(keys), dtype=np.float32) if labels is None else labels
    pairs = tf.data.Dataset.from_tensor_slices(({"keys": keys[:, None]}, labels))
    return pairs.batch(batch_size, drop_remainder=True)


def labels_of(dataset):
    return [label.numpy().astype(int).tolist() for _, label in dataset]


def test_batch_size_defaults_to_element_spec():
    dataset = skip_inputs(matrix_batches([1, 2, 1, 3, 4, 5], 2), make_classifier([1]), SPECS)
    assert labels_of(dataset) == [[1, 3], [4, 5]]
    assert dataset.element_spec[1].shape.as_list() == [None]
    full = skip_inputs(matrix_batches([1, 2], 2), make_classifier(), SPECS, drop_remainder=True)
    assert full.element_spec[1].shape.as_list() == [2]


def test_classification_does_not_run_ahead_of_training():
    classifier = make_classifier()
    dataset = matrix_batches(np.arange(40) % 4, 4).prefetch(2)
    iterator = iter(skip_inputs(dataset, classifier, SPECS))
    for _ in range(3):
        next(iterator)
    assert classifier.end_window().examples_seen == 12, "nothing is classified ahead"
    # A window ends. From here on, half of the examples are dropped.
    set_saturated(classifier, [0, 1])
    _, label = next(iterator)
    np.testing.assert_array_equal(label, [14, 15, 18, 19])
    assert classifier.end_window().examples_seen == 8


def test_batches_without_skips_are_unchanged():
    classifier = make_classifier([1])
    sizes, keys = [3, 0, 1, 5], [1, 2, 1, 3, 1, 1, 4, 1, 1]
    stay = skip_inputs(in_batches(sizes, keys), classifier, SPECS, refill=False)
    assert [label.shape[0] for _, label, _ in stay] == sizes
    assert classifier.end_window().examples_seen == 9
    full = skip_inputs(matrix_batches([1, 2, 1, 3], 2), classifier, SPECS, 2, refill=False)
    assert labels_of(full) == [[0, 1], [2, 3]]
    assert full.element_spec[1].shape.as_list() == [2]
    other = skip_inputs(in_batches(sizes, keys), classifier, SPECS, 4, refill=False)
    assert [label.shape[0] for _, label, _ in other] == [4, 4, 1]
    with pytest.raises(ValueError, match="Invalid `batch_size`: None"):
        skip_inputs(in_batches(sizes, keys), classifier, SPECS, None, None, True, refill=False)


def test_same_seed_gives_same_stream_and_each_pass_differs():
    streams = []
    for _ in range(2):
        classifier = InputClassifier(["table"], seed=3)
        classifier.configure("random", random_fraction=0.5)
        dataset = skip_inputs(matrix_batches(np.zeros(200), 10), classifier, SPECS)
        streams.append([labels_of(dataset), labels_of(dataset)])
    assert streams[0] == streams[1]
    assert streams[0][0] != streams[0][1]


def test_many_fully_skipped_batches_do_not_overflow_stack():
    keys = np.zeros(20_000, np.int64)
    keys[-1] = 1
    dataset = skip_inputs(matrix_batches(keys, 1), make_classifier([0]), SPECS, batch_size=4)
    assert labels_of(dataset) == [[19_999]]


def test_fully_skipped_and_empty_datasets_yield_nothing():
    assert labels_of(skip_inputs(matrix_batches([0] * 8, 4), make_classifier([0]), SPECS)) == []
    assert labels_of(skip_inputs(matrix_batches([0], 4), make_classifier(), SPECS)) == []


def test_elements_without_tuple_and_get_keys_are_supported():
    keys = tf.constant([[[1], [2]], [[3], [1]]], tf.int64)
    bare = tf.data.Dataset.from_tensor_slices(keys)
    result = skip_inputs(bare, make_classifier([1]), SPECS)
    assert [batch.numpy().tolist() for batch in result] == [[[2], [3]]]

    mapping = tf.data.Dataset.from_tensor_slices({"key": keys[:, :, 0]})
    result = skip_inputs(mapping, make_classifier([1]), SPECS)
    assert [batch["key"].numpy().tolist() for batch in result] == [[2, 3]]

    one_tuple = tf.data.Dataset.from_tensor_slices((keys,))
    result = skip_inputs(one_tuple, make_classifier([1]), SPECS)
    assert [batch[0].numpy().tolist() for batch in result] == [[[2], [3]]]

    nested = tf.data.Dataset.from_tensor_slices(({"a": {"b": keys}}, keys))
    result = skip_inputs(nested, make_classifier([1]), SPECS, get_keys=lambda f, y: f["a"]["b"])
    assert [batch[1].numpy().tolist() for batch in result] == [[[2], [3]]]


def test_user_function_is_converted_by_autograph():
    def get_keys(features, label):
        if tf.reduce_sum(label) > 1:  # A condition on a tensor, which needs AutoGraph.
            return features["keys"]
        return features["keys"] * 0

    dataset = matrix_batches([1, 2, 1, 2], 2, labels=np.array([0, 0, 1, 2]))
    result = skip_inputs(dataset, make_classifier([1]), SPECS, get_keys=get_keys)
    assert np.concatenate(labels_of(result)).tolist() == [0, 0, 2]


def test_invalid_arguments_raise():
    classifier = make_classifier()
    unknown = tf.data.Dataset.from_tensor_slices(np.zeros((4, 1), np.int64)).batch(2)
    with pytest.raises(ValueError, match=r"Invalid `batch_size`: None.*\.batch\(n\)"):
        skip_inputs(unknown, classifier, SPECS)
    with pytest.raises(ValueError, match="Invalid `batch_size`: 0"):
        skip_inputs(unknown, classifier, SPECS, batch_size=0)
    with pytest.raises(ValueError, match="a batch dimension"):
        skip_inputs(tf.data.Dataset.range(3), classifier, SPECS, batch_size=2)
    nested = tf.data.Dataset.range(4).window(2)
    with pytest.raises(ValueError, match=r"'DatasetSpec'.*dense, ragged or sparse"):
        skip_inputs(nested, classifier, SPECS, batch_size=2)
    sparse = tf.data.Dataset.from_tensors(tf.sparse.eye(2))
    with pytest.raises(ValueError, match=r"`keys`: .float32"):
        skip_inputs(sparse, classifier, SPECS, batch_size=2)


def test_components_of_different_batch_sizes_raise():
    spec = ({"keys": tf.TensorSpec([None, 1], tf.int64)}, tf.TensorSpec([None], tf.float32))
    batches = [({"keys": np.zeros((2, 1), np.int64)}, np.zeros(3, np.float32))]
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers of examples"):
        list(skip_inputs(dataset, make_classifier(), SPECS, batch_size=2))


def test_invalid_row_splits_raise():
    def get_keys(features, label):
        splits = tf.constant([0, 2, 1], tf.int64)
        return {"key": tf.RaggedTensor.from_row_splits(label, splits, validate=False)}

    dataset = matrix_batches([1, 2], 2, labels=np.array([1, 2]))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"row_splits\[2\] .* is 1; expected at least 2"
    ):
        list(skip_inputs(dataset, make_classifier(), SPECS, get_keys=get_keys))


def test_feature_called_keys_is_distinguished_from_all_keys():
    specs = [FeatureSpec("keys", "table"), FeatureSpec("item", "table")]
    matrix, keys = tf.zeros([3, 2], tf.int64), tf.range(3)
    # A reader's matrix of all keys, and its dictionary if a feature is a bag.
    assert default_keys(specs, {"keys": matrix, "dense": matrix}) is matrix
    bags = {"keys": keys, "item": keys}
    assert default_keys(specs, {"keys": bags}) is bags
    assert default_keys(specs, {"keys": bags}, requires_all=False) is bags
    # A user's features by name.
    assert default_keys(specs, {"keys": keys, "item": keys, "dense": matrix}) == bags
    assert default_keys(specs, {"keys": keys}, requires_all=False) == {"keys": keys}
