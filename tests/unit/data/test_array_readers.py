"""Batches of arrays: no input lost, order by seed; data that no reader knows is named."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from slipstream_tf.data.readers import arrays, registry
from slipstream_tf.data.readers.arrays import ArrayReader
from slipstream_tf.data.spec import DataSpec


def collect(reader):
    keys, labels = [], []
    for features, label in reader.dataset():
        assert features["keys"].shape[0] == label.shape[0]
        keys.append(features["keys"].numpy())
        labels.append(label.numpy())
    return np.concatenate(keys), np.concatenate(labels)


def test_batches_of_arrays_lose_nothing():
    keys = np.arange(1003 * 2, dtype=np.int16).reshape(-1, 2)
    label = np.arange(1003) % 2
    dense = np.arange(1003, dtype=np.float32)[:, None]
    spec = DataSpec("x", ("a", "b"), 1, 1003)
    reader = ArrayReader(spec, keys, label, 10, dense=dense)
    read_keys, read_label = collect(reader)
    np.testing.assert_array_equal(read_keys, keys)
    np.testing.assert_array_equal(read_label, label)
    with pytest.raises(ValueError, match="do not fit"):
        ArrayReader(spec, keys[:5], label, 10, dense=dense)


def test_shuffling_is_another_order_each_pass_and_repeats_with_the_seed():
    keys = np.arange(500).reshape(-1, 1)
    spec = DataSpec("x", ("a",), 0, 500)

    def passes(seed):
        reader = ArrayReader(spec, keys, np.zeros(500), 64, shuffle_seed=seed)
        return [collect(reader)[0][:, 0].tolist() for _ in range(2)]

    first, second = passes(3)
    assert sorted(first) == sorted(second) == list(range(500))
    assert first != second
    assert passes(3) == [first, second]
    assert passes(4)[0] != first


def test_every_order_is_as_likely_though_parts_are_shuffled(monkeypatch):
    monkeypatch.setattr(arrays, "_ROWS_OF_A_PART", 2)
    random, drawn = np.random.default_rng(1), 24_000
    counts = Counter(tuple(arrays.random_order(4, random)) for _ in range(drawn))
    assert sorted(counts) == sorted(itertools.permutations(range(4)))
    # Chi-square of 23 degrees of freedom: above 49.7 in one of a thousand.
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 49.7


def test_an_order_of_many_parts_has_every_position_once():
    order = arrays.random_order(300_000, np.random.default_rng(2))
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(300_000))


def test_unknown_data_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.tsv.*Criteo"):
        registry.open_data(tmp_path / "nothing.tsv", "train", 4)
    odd = tmp_path / "data.xyz"
    odd.write_text("x")
    with pytest.raises(ValueError, match=r"data\.xyz.*Criteo"):
        registry.open_data(odd, "train", 4)


def test_large_arrays_are_cut_right_at_every_size():
    # More batches than are widened at once, with and without a last one that is not full.
    spec = DataSpec("x", ("a",), 1)
    keys = np.arange(1000, dtype=np.int32)[:, None]
    for size in (1, 3, 7, 10, 999, 1000, 1001):
        for seed in (None, 0):
            reader = ArrayReader(spec, keys, keys[:, 0], size, keys * 0.5, shuffle_seed=seed)
            parts = list(reader._batches())
            seen = np.concatenate([features["keys"][:, 0] for features, _ in parts])
            np.testing.assert_array_equal(np.sort(seen), keys[:, 0])
            for features, label in parts:
                np.testing.assert_array_equal(features["keys"][:, 0], label)
                np.testing.assert_array_equal(features["dense"][:, 0], label * 0.5)
            assert [len(y) for _, y in parts[:-1]] == [size] * (len(parts) - 1)


def test_last_batch():
    keys = np.zeros((70, 10), np.int32)
    reader = ArrayReader(DataSpec("x", tuple("abcdefghij"), 0, 70), keys, keys[:, 0], 16)
    assert [len(y) for _, y in reader.dataset()] == [16, 16, 16, 16, 6]
    assert reader.dataset().element_spec[0]["keys"].shape.as_list() == [None, 10]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": np.zeros((3, 1))}, "Keys of 'x' are of type float64"),
        ({"label": np.array([0, np.inf, 1])}, r"Label of 'x' has inf at \(1,\)"),
        ({"dense": np.array([[0.0], [1.0], [np.nan]])}, r"Dense of 'x' has nan at \(2, 0\)"),
        ({"label": np.zeros(())}, "do not fit"),
        ({"dense": None}, "do not fit"),
    ],
)
def test_unfit_arrays_in_memory_are_named(change, message):
    arrays = {"keys": np.zeros((3, 1), int), "label": np.zeros(3), "dense": np.zeros((3, 1))}
    with pytest.raises(ValueError, match=message):
        ArrayReader(DataSpec("x", ("a",), 1), batch_size=2, **{**arrays, **change})
