"""Tests of array readers: complete batches, seeded order, and unsupported data."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from slipstream_tf.data.readers import arrays, registry
from slipstream_tf.data.readers.arrays import ArrayReader
from slipstream_tf.data.readers.base import Rows
from slipstream_tf.data.spec import DataSpec


def collect(reader):
    keys, labels = [], []
    for features, label in reader.dataset():
        assert features["keys"].shape[0] == label.shape[0]
        keys.append(features["keys"].numpy())
        labels.append(label.numpy())
    return np.concatenate(keys), np.concatenate(labels)


def make_reader(count, batch_size, seed=0, fields=1):
    keys = np.arange(count * fields).reshape(-1, fields)
    label = keys[:, 0].astype(np.float32)
    spec = DataSpec("x", tuple(map(str, range(fields))), 1, count)
    return ArrayReader(spec, Rows(label, label[:, None] * 0.5, keys), batch_size, seed)


def test_array_batches_contain_every_example():
    read_keys, read_label = collect(make_reader(1003, 10, fields=2))
    order = np.argsort(read_label)
    np.testing.assert_array_equal(read_keys[order], np.arange(2006).reshape(-1, 2))
    np.testing.assert_array_equal(read_label, read_keys[:, 0])


def test_shuffle_order_differs_per_pass_and_repeats_with_seed():
    def passes(seed):
        reader = make_reader(500, 64, seed)
        return [collect(reader)[0][:, 0].tolist() for _ in range(2)]

    first, second = passes(3)
    assert sorted(first) == sorted(second) == list(range(500))
    assert first != second
    assert passes(3) == [first, second]
    assert passes(4)[0] != first


def test_every_order_is_equally_likely(monkeypatch):
    monkeypatch.setattr(arrays, "_ROWS_OF_A_PART", 2)
    random, drawn = np.random.default_rng(1), 24_000
    counts = Counter(tuple(arrays.random_order(4, random)) for _ in range(drawn))
    assert sorted(counts) == sorted(itertools.permutations(range(4)))
    # Chi-square with 23 degrees of freedom exceeds 49.7 with probability 0.001.
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 49.7


def test_order_of_many_parts_is_permutation():
    order = arrays.random_order(300_000, np.random.default_rng(2))
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(300_000))


def test_unknown_data_is_named_in_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.tsv.*Criteo"):
        registry.open_data(tmp_path / "nothing.tsv", "train", 4)
    odd = tmp_path / "data.xyz"
    odd.write_text("x")
    with pytest.raises(ValueError, match=r"data\.xyz.*Criteo"):
        registry.open_data(odd, "train", 4)


def test_large_arrays_are_batched_correctly_at_every_size():
    # The sizes give more batches than are read at once, with and without a partial last batch.
    for size in (1, 3, 7, 10, 999, 1000, 1001):
        parts = list(make_reader(1000, size)._batches())
        seen = np.concatenate([features["keys"][:, 0] for features, _ in parts])
        np.testing.assert_array_equal(np.sort(seen), np.arange(1000))
        for features, label in parts:
            np.testing.assert_array_equal(features["keys"][:, 0], label)
            np.testing.assert_array_equal(features["dense"][:, 0], label * 0.5)
        assert [len(y) for _, y in parts[:-1]] == [size] * (len(parts) - 1)


def test_last_batch_is_partial():
    dataset = make_reader(70, 16, fields=10).dataset()
    assert [len(y) for _, y in dataset] == [16, 16, 16, 16, 6]
    assert dataset.element_spec[0]["keys"].shape.as_list() == [None, 10]
