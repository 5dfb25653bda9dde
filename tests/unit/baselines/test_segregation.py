"""Tests of `segregate` and `profile_hot_keys` on made-up data and on a reader."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.baselines.segregation import profile_hot_keys, segregate
from slipstream_tf.data.readers.generator import GeneratedReader

HOT = ([0, 3, 1], [2, 0])


def data_of(keys, batch_size):
    keys = np.reshape(keys, (-1, 2)).astype(np.int64)
    count = len(keys)
    features = {
        "keys": keys,
        "dense": np.arange(3 * count, dtype=np.float32).reshape(count, 3),
        "id": np.arange(count, dtype=np.int64),
    }
    labels = np.arange(count, dtype=np.float32) % 2
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(batch_size)


def is_hot(row, hot=HOT):
    return all(key == -1 or key in column for key, column in zip(row, hot, strict=True))


def reference(keys, source_batch, batch_size):
    """Computes the example ids of each batch in plain Python."""
    waiting, out = {True: [], False: []}, []
    rows = np.reshape(keys, (-1, 2)).tolist()
    for start in range(0, len(rows), source_batch):
        for index in range(start, min(start + source_batch, len(rows))):
            waiting[is_hot(rows[index])].append(index)
        for kind in (True, False):
            while len(waiting[kind]) >= batch_size:
                out.append(waiting[kind][:batch_size])
                waiting[kind] = waiting[kind][batch_size:]
    for kind in (True, False):
        ids = waiting[kind]
        out += [ids[i : i + batch_size] for i in range(0, len(ids), batch_size)]
    return out


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(0, 60),
    source_batch=st.integers(1, 9),
    batch_size=st.integers(1, 6),
)
def test_batches_equal_python_reference(seed, count, source_batch, batch_size):
    keys = np.random.default_rng(seed).integers(-1, 5, (count, 2))
    dataset = data_of(keys, source_batch)
    batches = list(segregate(dataset, HOT, batch_size))
    ids = [features["id"].numpy().tolist() for features, _ in batches]
    assert ids == reference(keys, source_batch, batch_size)
    for features, label in batches:
        rows = features["id"].numpy()
        np.testing.assert_array_equal(features["keys"], keys[rows])
        np.testing.assert_array_equal(features["dense"][:, 0], 3 * rows)
        np.testing.assert_array_equal(label, rows % 2)
        assert len({is_hot(row) for row in features["keys"].numpy().tolist()}) == 1


def test_no_or_all_hot_keys_keep_order_and_batches():
    keys = np.arange(22).reshape(11, 2)
    dataset = data_of(keys, 4)
    for hot in (([], []), (keys[:, 0], keys[:, 1])):
        ids = [features["id"].numpy().tolist() for features, _ in segregate(dataset, hot, 4)]
        assert ids == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_profile_selects_most_accessed_keys_within_budget():
    keys = [[1, 7]] * 3 + [[2, 7]] * 2 + [[5, -1]]
    dataset = data_of(np.array(keys), 4)
    hot = profile_hot_keys(dataset, budget_bytes=3 * 8, row_bytes=8)
    assert [column.tolist() for column in hot] == [[1, 2], [7]]
    assert [c.tolist() for c in profile_hot_keys(dataset, 1 << 20, 8)] == [[1, 2, 5], [7]]


def test_profile_counts_across_merges(monkeypatch):
    monkeypatch.setattr("slipstream_tf.baselines.segregation._MERGED_AT_ONCE", 2)
    keys = np.random.default_rng(0).zipf(1.5, (200, 2)) % 50
    hot = profile_hot_keys(data_of(keys, 3), budget_bytes=4 * 12, row_bytes=4)
    counts = Counter({(c, k): n for c in (0, 1) for k, n in Counter(keys[:, c]).items()})
    order = sorted(counts, key=lambda ck: (-counts[ck], ck))[:12]
    expected = [sorted(k for c, k in order if c == column) for column in (0, 1)]
    assert [column.tolist() for column in hot] == expected


def test_segregated_dataset_contains_every_example_once():
    reader = GeneratedReader(1000, "train", 64)
    hot = profile_hot_keys(reader.dataset(), 4 * 4 * 3000, 16)
    dataset = segregate(reader.dataset().repeat(2).rebatch(64), hot, 64)

    def dense(batches):
        return np.sort(np.concatenate([features["dense"][:, 0].numpy() for features, _ in batches]))

    np.testing.assert_array_equal(dense(dataset), np.repeat(dense(reader.dataset()), 2))
    assert dataset.element_spec[0]["keys"].shape.as_list() == [None, 26]


def test_unsupported_dataset_raises():
    dataset = data_of(np.zeros((4, 2)), 2)
    with pytest.raises(ValueError, match=r"1 lists.*one list of keys per field, 2 in total"):
        segregate(dataset, [[1]], 2)
    with pytest.raises(ValueError, match="`batch_size`: 0"):
        segregate(dataset, HOT, 0)
    ragged = dataset.map(lambda f, y: ({"keys": tf.RaggedTensor.from_tensor(f["keys"])}, y))
    for other in (ragged, dataset.map(lambda f, y: f), dataset.map(lambda f, y: (f["keys"], y))):
        with pytest.raises(ValueError, match=r"`dataset`.*\[batch, fields\]"):
            segregate(other, HOT, 2)
        with pytest.raises(ValueError, match=r"`dataset`.*\[batch, fields\]"):
            profile_hot_keys(other, 100, 4)
    with pytest.raises(ValueError, match=r"`row_bytes`: 6.*a multiple of 4"):
        profile_hot_keys(dataset, 100, 6)
