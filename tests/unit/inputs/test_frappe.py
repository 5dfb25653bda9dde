"""Frappe reader: parts, order, shuffling and last batches, against the file's arrays."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.inputs import DataSpec
from slipstream_tf.inputs.readers.arrays import ArrayReader
from slipstream_tf.inputs.readers.frappe import FIELDS, FrappeReader

DATA = pathlib.Path(
    os.environ.get("SLIPSTREAM_DATA")
    or pathlib.Path(__file__).resolve().parents[4] / "shared" / "data"
)
SIZES = {"train": 70, "valid": 20, "test": 10}


@pytest.fixture
def arrays(tmp_path):
    generator = np.random.default_rng(0)
    arrays = {}
    for part, size in SIZES.items():
        arrays[f"{part}_x"] = generator.integers(0, 5000, (size, len(FIELDS))).astype(np.int32)
        arrays[f"{part}_y"] = generator.integers(0, 2, size).astype(np.int8)
    path = tmp_path / "frappe.npz"
    np.savez(path, **arrays)
    return path, arrays


def batches(reader_or_dataset):
    dataset = reader_or_dataset
    if not isinstance(dataset, tf.data.Dataset):
        dataset = dataset.dataset()
    return [(f["keys"].numpy(), y.numpy()) for f, y in dataset]


def joined(reader_or_dataset):
    parts = batches(reader_or_dataset)
    return np.concatenate([k for k, _ in parts]), np.concatenate([y for _, y in parts])


@pytest.mark.parametrize("part", SIZES)
def test_parts_arrive_whole_and_in_order(arrays, part):
    path, expected = arrays
    reader = FrappeReader(path, 16, part=part)
    assert reader.spec == DataSpec("frappe", FIELDS, 0, SIZES[part])
    for _ in range(2):
        keys, label = joined(reader)
        assert (keys.dtype, label.dtype) == (np.int64, np.float32)
        np.testing.assert_array_equal(keys, expected[f"{part}_x"])
        np.testing.assert_array_equal(label, expected[f"{part}_y"])
    assert reader.bad_lines.count == 0


def test_last_batch(arrays):
    path, _ = arrays
    reader = FrappeReader(path, 16)
    assert [len(y) for _, y in batches(reader)] == [16, 16, 16, 16, 6]
    assert reader.dataset().element_spec[0]["keys"].shape.as_list() == [None, 10]
    full = FrappeReader(path, 16, drop_remainder=True)
    assert [len(y) for _, y in batches(full)] == [16] * 4
    assert full.dataset().element_spec[0]["keys"].shape.as_list() == [16, 10]
    assert full.dataset().element_spec[1].shape.as_list() == [16]


def test_shuffling_differs_between_passes_and_repeats_between_readers(arrays):
    path, expected = arrays
    dataset = FrappeReader(path, 16, shuffle_seed=3).dataset()
    passes = [joined(dataset) for _ in range(3)]
    inputs = sorted(np.column_stack([expected["train_x"], expected["train_y"]]).tolist())
    for keys, label in passes:
        assert sorted(np.column_stack([keys, label]).tolist()) == inputs
    assert not (passes[0][0] == passes[1][0]).all()
    assert not (passes[0][0] == expected["train_x"]).all()
    again = FrappeReader(path, 16, shuffle_seed=3).dataset()
    for keys, _ in passes:
        np.testing.assert_array_equal(joined(again)[0], keys)
    other = FrappeReader(path, 16, shuffle_seed=4)
    assert not (joined(other)[0] == passes[0][0]).all()


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


def test_errors_name_what_is_wrong(arrays, tmp_path):
    path, expected = arrays
    with pytest.raises(ValueError, match=r"`part`: 'tset'.*'train', 'valid', 'test'"):
        FrappeReader(path, 16, part="tset")
    with pytest.raises(ValueError, match="`batch_size`: 0"):
        FrappeReader(path, 0)
    np.savez(tmp_path / "other.npz", train_x=expected["train_x"])
    with pytest.raises(ValueError, match=r"train_y.*found \['train_x'\]"):
        FrappeReader(tmp_path / "other.npz", 16)
    with pytest.raises(ValueError, match=r"do not fit: keys \(3, 2\)"):
        ArrayReader(DataSpec("x", ("a",)), np.zeros((3, 2)), np.zeros(3), 1)


def test_real_file():
    path = DATA / "frappe_x1.npz"
    if not path.exists():
        pytest.skip(f"no {path}")
    sizes = {"train": 202_027, "valid": 57_722, "test": 28_860}
    ids = set()
    for part, size in sizes.items():
        keys, label = joined(FrappeReader(path, 4096, part=part))
        assert keys.shape == (size, 10)
        assert 0.3 < label.mean() < 0.37
        ids.update(np.unique(keys).tolist())
    assert len(ids) <= 5382
