"""Tests of the statistics of dense columns against NumPy."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slipstream_tf.data import shards
from slipstream_tf.data.dense_statistics import DenseStatistics, suspected_kind
from slipstream_tf.data.readers.base import is_in_part
from slipstream_tf.data.readers.prepared import PreparedReader
from slipstream_tf.data.schema import parse_schema


def test_merged_parts_equal_numpy():
    random = np.random.default_rng(0)
    values = (1e9 + 1e3 * random.normal(size=500)).astype(np.float32)
    values[random.random(500) < 0.2] = np.nan
    values[:40] = np.nan  # A part without numbers.
    found = DenseStatistics()
    for part in np.split(values, [40, 41, 300, 300]):
        found = found.merged(DenseStatistics.of(part))
    numbers = values[~np.isnan(values)].astype(np.float64)
    assert (found.count, found.missing) == (len(numbers), 500 - len(numbers))
    assert (found.min, found.max) == (numbers.min(), numbers.max())
    np.testing.assert_allclose([found.mean, found.std], [numbers.mean(), numbers.std()], 1e-9)
    assert DenseStatistics.of(values[:40]) == DenseStatistics(missing=40)


def test_statistics_describe_training_part(tmp_path, monkeypatch, run_prepare):
    monkeypatch.setattr(shards, "GROUP_ROWS", 97)
    price = [None if i % 3 == 0 else i * 0.5 - 100 for i in range(1_500)]
    lines = [
        f"{i % 2},k{i % 7},{'' if p is None else p},,7,{10**8 + i}" for i, p in enumerate(price)
    ]
    (tmp_path / "a.csv").write_text("\n".join(["y,k,price,none,seven,large", *lines]))
    dense = ["price", "none", "seven", "large"]
    schema = parse_schema({"label": "y", "keys": ["k"], "dense": dense})
    statistics = run_prepare(tmp_path / "a.csv", tmp_path / "out", schema, shard_rows=400)
    values = np.array(price, float)[is_in_part(0, 1_500, "train")]
    numbers = values[~np.isnan(values)]
    found = statistics["dense"]["price"]
    assert (found["count"], found["missing"]) == (len(numbers), len(values) - len(numbers))
    moments = [numbers.mean(), numbers.std(), numbers.min(), numbers.max()]
    np.testing.assert_allclose([found[m] for m in ("mean", "std", "min", "max")], moments, 1e-12)
    assert statistics["dense"]["none"]["missing"] == len(values)
    assert statistics["dense"]["none"]["mean"] is None
    assert statistics["dense"]["seven"]["std"] == 0.0
    # Shards have float32, which cannot represent these integers.
    assert (statistics["dense"]["large"]["min"], statistics["dense"]["large"]["max"]) == (
        100_000_000,
        100_001_499,
    )
    assert [found["suspected_kind"] for found in statistics["dense"].values()] == [None] * 4
    file = tmp_path / "out" / "statistics.json"
    assert json.loads(file.read_text())["dense"] == statistics["dense"]


@pytest.mark.parametrize("change", [{"count": -1.5}, {"mean": None}, {"median": 1.0}])
def test_damaged_statistics_in_manifest_are_named(tmp_path, run_prepare, change):
    (tmp_path / "a.csv").write_text("\n".join(["y,k,n"] + [f"{i % 2},a,{i}" for i in range(50)]))
    schema = parse_schema({"label": "y", "keys": ["k"], "dense": ["n"]})
    run_prepare(tmp_path / "a.csv", tmp_path / "out", schema)
    file = tmp_path / "out" / "prepared.json"
    manifest = json.loads(file.read_text())
    manifest["shards"][0]["dense"]["n"].update(change)
    file.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"damaged: `shards\[0\]`: `dense`: 'n'"):
        PreparedReader(tmp_path / "out", 8)


_COUNTING = np.arange(2_000.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (1.5e9 + 3_600 * _COUNTING, "timestamp"),
        (1.5e12 + 3.6e6 * _COUNTING, "timestamp"),
        (_COUNTING, "id"),
        (np.where(_COUNTING % 9 == 0, np.nan, _COUNTING * 1e12), "id"),
        (_COUNTING + 1e11, "id"),
        (_COUNTING * 1e5 + 0.25, None),
        (_COUNTING + 0.5, None),
        (_COUNTING % 99, None),
        (_COUNTING[:50], None),
        (1e9 * (1 + _COUNTING % 4), None),
        (_COUNTING * np.nan, None),
    ],
)
def test_timestamps_and_ids_are_suspected(values, expected):
    assert suspected_kind(DenseStatistics.of(values)) == expected
