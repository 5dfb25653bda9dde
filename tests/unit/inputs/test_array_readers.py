"""Batches of arrays: no input lost, order by seed; data that no reader knows is named."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from slipstream_tf.inputs.readers import arrays, registry
from slipstream_tf.inputs.readers.arrays import ArrayReader
from slipstream_tf.inputs.spec import DataSpec


def collect(reader):
    keys, labels = [], []
    for features, label in reader.dataset():
        assert features["keys"].shape[0] == label.shape[0]
        keys.append(features["keys"].numpy())
        labels.append(label.numpy())
    return np.concatenate(keys), np.concatenate(labels)


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batches_of_arrays_lose_nothing(drop_remainder):
    keys = np.arange(1003 * 2, dtype=np.int16).reshape(-1, 2)
    label = np.arange(1003) % 2
    dense = np.arange(1003, dtype=np.float32)[:, None]
    spec = DataSpec("x", ("a", "b"), 1, 1003)
    reader = ArrayReader(spec, keys, label, 10, dense=dense, drop_remainder=drop_remainder)
    read_keys, read_label = collect(reader)
    expected = 1000 if drop_remainder else 1003
    np.testing.assert_array_equal(read_keys, keys[:expected])
    np.testing.assert_array_equal(read_label, label[:expected])
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
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(ValueError, match=r"broken\.npz.*no \.npz"):
        registry.open_data(broken, "train", 4)
