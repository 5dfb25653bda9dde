"""Tests of the statistics of prepared data against counts in plain Python."""

from __future__ import annotations

import collections
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_tf.data.readers.hashing import keys_of_ids
from slipstream_tf.data.readers.prepared import PreparedReader
from slipstream_tf.data.schema import parse_schema
from slipstream_tf.data.spec import MISSING_KEY
from slipstream_tf.data.statistics import hot_rows


@given(
    st.lists(st.tuples(st.integers(-2, 5), st.lists(st.integers(0, 4), max_size=3)), min_size=1),
    st.sets(st.integers(-2, 5)),
    st.sets(st.integers(0, 4)),
)
def test_hot_rows_have_hot_keys_only(rows, hot_keys, hot_tags):
    table = pa.table(
        {
            "key": pa.array([key for key, _ in rows], pa.int64()),
            "tags": pa.array([tags for _, tags in rows], pa.list_(pa.int64())),
        }
    )
    hot = {
        "key": np.sort(keys_of_ids(np.array([*hot_keys], np.int64))),
        "tags": np.array(sorted(hot_tags), np.int64),
    }
    expected = [key in hot_keys and hot_tags.issuperset(tags) for key, tags in rows]
    assert hot_rows(table, hot).tolist() == expected


def test_criteo_statistics_equal_reference(tmp_path, criteo_lines, run_prepare):
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(criteo_lines(2_000)))
    hot_rows_budget = 150
    statistics = run_prepare(
        path, tmp_path / "out", shard_rows=300, dim=8, hot_budget_bytes=hot_rows_budget * 8 * 4
    )
    assert statistics == json.loads((tmp_path / "out" / "statistics.json").read_text())
    features, clicks = [], 0.0
    for batch, label in PreparedReader(tmp_path / "out", 500, part="train").dataset():
        features += batch["keys"].numpy().tolist()
        clicks += float(label.numpy().sum())
    assert statistics["inputs"] == {"train": 1_800, "valid": 0, "test": 200}
    assert statistics["clicks"]["train"] == clicks
    counters = [collections.Counter(column) for column in zip(*features, strict=True)]
    table = pq.read_table(tmp_path / "out" / "counts.parquet").to_pylist()
    for number, (name, counter) in enumerate(zip(statistics["fields"], counters, strict=True)):
        assert name == f"C{number + 1}"
        ordered = sorted(counter.items(), key=lambda pair: (-pair[1], pair[0]))
        counted = [(r["key"], r["count"]) for r in table if r["field"] == name]
        assert counted == [(None if k == MISSING_KEY else k, count) for k, count in ordered]
        ordered = [(key, count) for key, count in ordered if key != MISSING_KEY]
        top = sum(count for _, count in ordered[: math.ceil(len(ordered) / 100)])
        assert statistics["fields"][name] == {
            "lookups": 1_800,
            "keys": len(ordered),
            "is_exact": True,
            "count_error": 0,
            "top_share": top / 1_800,
            "missing_share": counter[MISSING_KEY] / 1_800,
            "empty_share": None,
        }
    ranked = sorted(
        ((-count, field, key) for field, c in enumerate(counters) for key, count in c.items())
    )[:hot_rows_budget]
    hot = {(field, key) for _, field, key in ranked}
    is_hot = [all((field, key) in hot for field, key in enumerate(row)) for row in features]
    assert statistics["hot"]["keys"] == hot_rows_budget
    assert statistics["hot"]["inputs"] == sum(is_hot)
    assert statistics["hot"]["input_share"] == sum(is_hot) / 1_800
    lookups = -sum(count for count, _, _ in ranked)
    assert statistics["hot"]["lookup_share"] == lookups / (1_800 * 26)


def test_estimated_counts_are_marked(tmp_path, run_prepare):
    rows = 40_000
    table = {
        "y": [0, 1] * (rows // 2),
        "user": list(range(rows)),
        "day": [i % 7 for i in range(rows)],
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    schema = parse_schema({"label": "y", "keys": ["user", "day"]})
    options = {"schema": schema, "shard_rows": 10_000}
    exact = run_prepare(tmp_path / "a.parquet", tmp_path / "exact", **options)
    assert exact["fields"]["user"]["is_exact"]
    about = run_prepare(tmp_path / "a.parquet", tmp_path / "about", count_bytes=1 << 20, **options)
    user, day = about["fields"]["user"], about["fields"]["day"]
    assert not user["is_exact"] and user["count_error"] >= 1
    assert user["keys"] == pytest.approx(36_000, rel=0.03)
    assert day == exact["fields"]["day"]
