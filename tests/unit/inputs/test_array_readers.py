"""Frappe, the globo task and batches of arrays: against brute force, and no input lost."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

from slipstream_tf.inputs.readers import globo, registry
from slipstream_tf.inputs.readers.arrays import ArrayReader
from slipstream_tf.inputs.readers.frappe import FrappeReader
from slipstream_tf.inputs.readers.globo import FIELDS, GloboReader, build_rows
from slipstream_tf.inputs.spec import DataSpec

DATA = pathlib.Path(
    os.environ.get("SLIPSTREAM_DATA")
    or pathlib.Path(__file__).resolve().parents[4] / "shared" / "data"
)


def make_clicks(path, clicks=3000):
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 50, clicks).astype(np.int32) for name in FIELDS[:8]}
    columns["article"] = np.arange(clicks, dtype=np.int32)
    columns["click_ts"] = np.sort(rng.integers(1_506_000_000, 1_508_000_000, clicks)).astype("i4")
    columns["session_size"] = rng.integers(1, 60, clicks).astype(np.int16)
    np.savez(path, **columns)
    return columns


def collect(reader):
    keys, labels = [], []
    for features, label in reader.dataset():
        assert features["keys"].shape[0] == label.shape[0]
        keys.append(features["keys"].numpy())
        labels.append(label.numpy())
    return np.concatenate(keys), np.concatenate(labels)


def test_globo_rows_are_clicks_and_earlier_articles(tmp_path):
    columns = make_clicks(tmp_path / "clicks.npz")
    keys, label = build_rows(columns, seed=0)
    assert label.tolist() == [1, 0] * 3000
    farness = np.random.default_rng(0).integers(1, 20001, 3000)
    article = FIELDS.index("article")
    for i in range(3000):
        positive, negative = keys[2 * i], keys[2 * i + 1]
        for place, field in enumerate(FIELDS):
            if field == "hour":
                expected = columns["click_ts"][i] // 3600 % 24
            elif field == "session_size":
                expected = min(columns[field][i], 20)
            else:
                expected = columns[field][i]
            assert positive[place] == expected
            if place != article:
                assert negative[place] == expected
        assert negative[article] == columns["article"][max(i - farness[i], 0)]


def test_globo_splits_take_every_row_once(tmp_path, monkeypatch):
    path = tmp_path / "clicks.npz"
    columns = make_clicks(path)
    monkeypatch.setattr(globo, "RANDOM_SPLIT_CLICKS", 2000)
    for split, clicks in (("random", 2000), ("time", 3000)):
        all_keys, _ = build_rows({n: v[:clicks] for n, v in columns.items()}, 0)
        parts = {p: collect(GloboReader(path, 64, part=p, split=split)) for p in ("train", "test")}
        assert len(parts["train"][0]) == clicks * 2 * 9 // 10
        joined = np.concatenate([parts["train"][0], parts["test"][0]])
        np.testing.assert_array_equal(
            joined[np.lexsort(joined.T)], all_keys[np.lexsort(all_keys.T)].astype(np.int64)
        )
        if split == "time":
            np.testing.assert_array_equal(joined, all_keys)
    with pytest.raises(ValueError, match="`split`: 'day'"):
        GloboReader(path, 64, split="day")


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


def test_frappe_parts(tmp_path):
    path = tmp_path / "frappe.npz"
    arrays = {f"{p}_x": np.full((n, 10), n) for p, n in (("train", 7), ("valid", 3), ("test", 2))}
    labels = {f"{p}_y": np.ones(len(arrays[f"{p}_x"])) for p in ("train", "valid", "test")}
    np.savez(path, **arrays, **labels)
    assert collect(FrappeReader(path, 4, part="valid"))[0].shape == (3, 10)
    with pytest.raises(ValueError, match="`part`: 'dev'"):
        FrappeReader(path, 4, part="dev")
    np.savez(path, other=np.zeros(3))
    with pytest.raises(ValueError, match="no array"):
        registry.open_data(path, "train", 4)


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


def test_the_real_sets_have_their_sizes():
    sizes = {
        ("globo_clicks.npz", "random"): (2_700_000, 300_000),
        ("frappe_x1.npz", "random"): (202_027, 28_860),
    }
    for (name, split), counts in sizes.items():
        if not (DATA / name).is_file():
            pytest.skip(f"no {name} in SLIPSTREAM_DATA or ../shared/data")
        for part, count in zip(("train", "test"), counts, strict=True):
            reader = registry.open_data(DATA / name, part, 4096, split=split)
            keys, label = collect(reader)
            assert keys.shape == (count, 10) == (reader.spec.num_inputs, 10)
            assert set(np.unique(label)) == {0.0, 1.0}
