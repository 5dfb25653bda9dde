"""Tests that generated data is reproducible, Zipf-distributed and learnable."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream_tf.data.readers import generator
from slipstream_tf.data.readers.generator import (
    GeneratedReader,
    default_cardinalities,
    parse_name,
    zipf_ranks,
)
from slipstream_tf.data.readers.registry import open_data
from slipstream_tf.data.spec import PARTS
from slipstream_tf.telemetry.metrics import click_metrics


def joined(reader):
    """Returns the keys, dense values and labels of all batches."""
    parts = list(reader._batches())
    return (
        np.concatenate([features["keys"] for features, _ in parts]),
        np.concatenate([features["dense"] for features, _ in parts]),
        np.concatenate([label for _, label in parts]),
    )


def area_under_curve(scores, label):
    ranks = np.argsort(np.argsort(scores)) + 1
    positive = label.sum()
    return (ranks[label == 1].sum() - positive * (positive + 1) / 2) / (
        positive * (len(label) - positive)
    )


def test_dataset_yields_generated_batches():
    reader = GeneratedReader(1000, "train", 128)
    features, label = reader.dataset().element_spec
    assert features["keys"].shape.as_list() == [None, 26]
    assert features["dense"].shape.as_list() == [None, 13]
    assert label.shape.as_list() == [None]
    assert reader.spec.num_examples == 1000 and reader.spec.num_dense == 13
    expected = joined(reader)
    for _ in range(2):
        batches = list(reader.dataset())
        assert [len(label) for _, label in batches] == [128] * 7 + [104]
        keys = np.concatenate([features["keys"].numpy() for features, _ in batches])
        np.testing.assert_array_equal(keys, expected[0])


def test_stream_is_independent_of_batch_size_and_length():
    expected = joined(GeneratedReader(20_000, "train", 20_000))
    for size, count in ((1, 300), (7, 9000), (8192, 20_000), (9000, 20_000), (50_000, 20_000)):
        got = joined(GeneratedReader(count, "train", size))
        for values, all_values in zip(got, expected, strict=True):
            np.testing.assert_array_equal(values, all_values[:count])


def test_seed_and_part_change_examples_but_not_distribution():
    train, test = (GeneratedReader(2000, part, 500) for part in ("train", "test"))
    other = GeneratedReader(2000, "train", 500, seed=1)
    keys, dense, _ = joined(train)
    assert not (joined(test)[1] == dense).any(axis=1).any()
    assert not (joined(other)[1] == dense).any(axis=1).any()
    logits = train.click_logits(keys, dense)
    np.testing.assert_array_equal(test.click_logits(keys, dense), logits)
    assert abs(other.click_logits(keys, dense) - logits).max() > 1


def test_examples_have_expected_shape():
    reader = GeneratedReader(30_000, "train", 30_000)
    keys, dense, label = joined(reader)
    assert (keys.dtype, dense.dtype, label.dtype) == (np.int64, np.float32, np.float32)
    sizes = np.array(reader.cardinalities)
    assert sizes.min() == 10 and sizes.max() == 100_000
    assert (keys >= 0).all() and (keys < sizes).all()
    assert (np.median(keys, axis=0) < sizes / 4).all()
    assert dense.min() > 0 and np.isfinite(dense).all()
    # Skewed: without the logarithm, the mean is well above the median.
    counts = np.expm1(dense)
    assert (counts.mean(axis=0) > 1.3 * np.median(counts, axis=0)).all()
    assert 0.23 < label.mean() < 0.27


@pytest.mark.parametrize("cardinality", [1, 10, 1000])
def test_key_frequencies_follow_zipf(cardinality):
    uniform = np.random.default_rng(0).random((200_000, 1))
    ranks = zipf_ranks(uniform, np.array([float(cardinality)]))
    assert ranks.dtype == np.int64 and ranks.min() == 0 and ranks.max() < cardinality
    # Integrate x**-s over [r + 1, r + 2) numerically with 100 steps.
    steps = 1 + (np.arange(cardinality * 100) + 0.5) / 100
    mass = (steps**-generator.ZIPF).reshape(cardinality, 100).sum(axis=1)
    mass /= mass.sum()
    fraction = np.bincount(ranks[:, 0], minlength=cardinality) / len(ranks)
    assert abs(fraction - mass).max() < 0.006
    ends = zipf_ranks(np.array([[0.0], [1 - 2**-53]]), np.array([float(cardinality)]))
    assert ends[:, 0].tolist() == [0, cardinality - 1]


@pytest.mark.parametrize("seed", [0, 1])
def test_labels_can_be_learned(seed):
    train, test = (
        GeneratedReader(count, part, 8192, seed=seed)
        for part, count in (("train", 100_000), ("test", 20_000))
    )
    keys, dense, label = joined(test)
    best = area_under_curve(test.click_logits(keys, dense), label)
    assert 0.8 < best < 0.92
    # Sum the smoothed click rates of single keys. A network can learn far more than this.
    train_keys, _, train_label = joined(train)
    scores = np.zeros(len(label))
    for field in range(26):
        seen = np.bincount(train_keys[:, field], minlength=100_000)
        clicks = np.bincount(train_keys[:, field], train_label, minlength=100_000)
        rate = (clicks + 20 * generator.CLICK_RATE) / (seen + 20)
        scores += np.log(rate / (1 - rate))[keys[:, field]]
    learned = area_under_curve(scores, label)
    assert 0.68 < learned < best


def test_sizes_can_be_set():
    reader = GeneratedReader(100, "train", 50, fields=2, dense=0, cardinalities=[3, 5], seed=9)
    features, _ = next(iter(reader.dataset()))
    assert set(features) == {"keys"} and features["keys"].shape == (50, 2)
    assert len(set(default_cardinalities(26))) == 26
    assert default_cardinalities(1) == (10,)


def test_errors_name_invalid_value():
    for argument, value in (
        *(("num_examples", 0), ("batch_size", 0), ("seed", -1), ("fields", 0), ("dense", -1)),
        *(("cardinalities", [3]), ("cardinalities", [0] * 26)),
    ):
        options = {"num_examples": 10, "part": "train", "batch_size": 5, argument: value}
        with pytest.raises(ValueError, match=f"Invalid `{argument}`"):
            GeneratedReader(**options)
    with pytest.raises(ValueError, match=r"`part`: 'dev'.*'train', 'valid', 'test'"):
        GeneratedReader(10, "dev", 5)


@pytest.mark.parametrize(
    "name, parsed",
    [
        ("generated", (400_000, 100_000, 0.25)),
        ("generated:7", (7, 100_000, 0.25)),
        ("generated:500:1000", (500, 1000, 0.25)),
        ("generated:500:1000000000:0.02", (500, 1_000_000_000, 0.02)),
        ("generated:500:1000:.5", (500, 1000, 0.5)),
        ("generatedx", None),
        ("a.npz", None),
    ],
)
def test_valid_names_are_parsed(name, parsed):
    assert parse_name(name) == parsed


@pytest.mark.parametrize(
    "name",
    [
        *("generated:", "generated:0", "generated:-1", "generated:1:2:3", "generated:5:9"),
        *("generated:5:10:0", "generated:5:10:0.0", "generated:5:10:1.5", "generated:5:10:.1:.1"),
        "generated:5:2000000000",
    ],
)
def test_invalid_names_raise(name):
    with pytest.raises(ValueError, match=f"Invalid `data`: '{name}' for generated data. Expected "):
        parse_name(name)


@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_any_click_rate_is_met(rate):
    reader = open_data(f"generated:40000:1000:{rate}", "train", 8192)
    labels = np.concatenate([label for _, label in reader.dataset().as_numpy_iterator()])
    assert abs(labels.mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / labels.size) + 0.05 * rate


def test_keys_reach_one_billion():
    reader = open_data("generated:20000:1000000000", "train", 20000)
    (features, _), *_ = reader.dataset().as_numpy_iterator()
    assert 10**8 < features["keys"].max() < 10**9


def test_parts_are_independent_streams_and_true_logits_rank_best(monkeypatch):
    readers = {part: open_data("generated:30000:500", part, 30000) for part in PARTS}
    keys = {}
    for part, reader in readers.items():
        ((features, label),) = reader.dataset().as_numpy_iterator()
        keys[part] = features["keys"].tobytes()
        labels, logits = reader.best_predictions()
        np.testing.assert_array_equal(labels, label)
        expected = reader.click_logits(features["keys"], features["dense"])
        np.testing.assert_allclose(logits, expected, rtol=1e-5)
        assert 0.8 < click_metrics(labels, logits).auc < 0.92
        monkeypatch.setattr(generator, "_MAX_PREDICTED", 100)
        few, _ = reader.best_predictions()
        monkeypatch.undo()
        np.testing.assert_array_equal(few, label[:100])
    assert len(set(keys.values())) == 3


def test_largest_field_can_be_set_by_name():
    reader = open_data("generated:300:50", "train", 100)
    assert max(reader.cardinalities) == 50 and min(reader.cardinalities) == 10
    assert reader.spec.num_examples == 300
