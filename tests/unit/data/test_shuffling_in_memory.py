"""Tests of readers that shuffle in memory: complete batches, seeded order, memory."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream_tf.data.readers import parquet, registry
from slipstream_tf.data.readers.parquet import ParquetReader


def collect(reader):
    keys, labels = [], []
    for features, label in reader.dataset():
        assert features["keys"].shape[0] == label.shape[0]
        keys.append(features["keys"].numpy())
        labels.append(label.numpy())
    return np.concatenate(keys), np.concatenate(labels)


@pytest.fixture
def make_reader(tmp_path):
    """Returns a function that returns a reader of numbered examples, shuffled in memory."""

    def make(count, batch_size, seed=0, fields=1):
        keys = np.arange(count * fields).reshape(-1, fields)
        table = {"y": keys[:, 0] / 8192, "x": keys[:, 0] * 0.5}
        names = [f"k{i}" for i in range(fields)]
        table |= dict(zip(names, keys.T, strict=True))
        pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=97)
        path = str(tmp_path / "a.parquet")
        return ParquetReader(path, batch_size, label="y", keys=names, dense=["x"]).in_memory(seed)

    return make


def test_batches_contain_every_example(make_reader):
    read_keys, read_label = collect(make_reader(1003, 10, fields=2))
    order = np.argsort(read_label)
    np.testing.assert_array_equal(read_keys[order], np.arange(2006).reshape(-1, 2))
    np.testing.assert_array_equal(read_label * 8192, read_keys[:, 0])


def test_shuffle_order_differs_per_pass_and_repeats_with_seed(make_reader):
    def passes(seed):
        reader = make_reader(500, 64, seed)
        return [collect(reader)[0][:, 0].tolist() for _ in range(2)]

    first, second = passes(3)
    assert sorted(first) == sorted(second) == list(range(500))
    assert first != second
    assert passes(3) == [first, second]
    assert passes(4)[0] != first


def test_every_order_is_equally_likely(monkeypatch):
    monkeypatch.setattr(parquet, "_ROWS_OF_A_PART", 2)
    random, drawn = np.random.default_rng(1), 24_000
    counts = Counter(tuple(parquet.random_order(4, random)) for _ in range(drawn))
    assert sorted(counts) == sorted(itertools.permutations(range(4)))
    # Chi-square with 23 degrees of freedom exceeds 49.7 with probability 0.001.
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 49.7


def test_order_of_many_parts_is_permutation():
    order = parquet.random_order(300_000, np.random.default_rng(2))
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(300_000))


def test_unknown_data_is_named_in_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.tsv.*Criteo"):
        registry.open_data(tmp_path / "nothing.tsv", "train", 4)
    odd = tmp_path / "data.xyz"
    odd.write_text("x")
    with pytest.raises(ValueError, match=r"data\.xyz.*Criteo"):
        registry.open_data(odd, "train", 4)


def test_shuffled_examples_are_batched_correctly_at_every_size(make_reader):
    # The sizes give more batches than are read at once, with and without a partial last batch.
    for size in (1, 3, 7, 10, 999, 1000, 1001):
        parts = list(make_reader(1000, size)._batches())
        seen = np.concatenate([features["keys"][:, 0] for features, _ in parts])
        np.testing.assert_array_equal(np.sort(seen), np.arange(1000))
        for features, label in parts:
            np.testing.assert_array_equal(features["keys"][:, 0], label * 8192)
            np.testing.assert_array_equal(features["dense"][:, 0], label * 4096)
        assert [len(y) for _, y in parts[:-1]] == [size] * (len(parts) - 1)


def test_last_batch_is_partial(make_reader):
    dataset = make_reader(70, 16, fields=10).dataset()
    assert [len(y) for _, y in dataset] == [16, 16, 16, 16, 6]
    assert dataset.element_spec[0]["keys"].shape.as_list() == [None, 10]


def test_lists_and_missing_values_are_shuffled_with_their_examples(tmp_path):
    count = 500
    tags = [None if i % 7 == 0 else [i] * (i % 3) for i in range(count)]
    user = [None if i % 11 == 0 else i for i in range(count)]
    x = [None if i % 13 == 0 else float(i) for i in range(count)]
    table = {"y": np.arange(count) / count, "user": user, "tags": tags, "x": x}
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=97)
    path = str(tmp_path / "a.parquet")
    reader = ParquetReader(path, 64, label="y", keys=["user", "tags"], dense=["x"])

    def examples(source):
        found = []
        for features, label in source.dataset():
            keys, dense = features["keys"], features["dense"].numpy()[:, 0].tolist()
            columns = keys["user"].numpy().tolist(), keys["tags"].to_list()
            found += map(repr, zip(label.numpy().tolist(), *columns, dense, strict=True))
        return found

    shuffled = reader.in_memory(3)
    first, second, in_order = examples(shuffled), examples(shuffled), examples(reader)
    assert sorted(first) == sorted(second) == sorted(in_order)
    assert len({str(first), str(second), str(in_order)}) == 3


def test_examples_are_in_memory_once(tmp_path):
    keys = np.random.default_rng(0).integers(0, 1 << 60, (8, 50_000))
    table = pa.table({"y": np.zeros(50_000), **{f"k{i}": k for i, k in enumerate(keys)}})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10_000, use_dictionary=False)
    names = [f"k{i}" for i in range(8)]
    reader = ParquetReader(str(tmp_path / "a.parquet"), 64, label="y", keys=names)
    before = pa.total_allocated_bytes()
    shuffled = reader.in_memory(0)
    assert table.nbytes <= pa.total_allocated_bytes() - before < 1.1 * table.nbytes
    assert next(iter(shuffled._batches()))[0]["keys"].shape == (64, 8)
