"""Tests of key counts: exact within the bound, limited error beyond."""

from __future__ import annotations

import collections

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from slipstream_tf.data import statistics
from slipstream_tf.data.readers.hashing import keys_of_ids
from slipstream_tf.data.readers.parquet import to_keys
from slipstream_tf.data.statistics import FieldCounts, KeyCounts

KEYS = st.integers(-(2**63), 2**63 - 1)
SMALL_KEYS = st.one_of(st.integers(-3, 20), st.sampled_from([-(2**63), 2**63 - 1]))


# The id -1 has the key of the second id.
MOVED = [-1, int(keys_of_ids(np.array([-1]))[0])]
IDS = st.one_of(SMALL_KEYS, KEYS, st.none(), st.sampled_from(MOVED))


@given(st.lists(st.lists(IDS, max_size=30), max_size=12))
def test_counts_within_bound_are_exact(blocks):
    field = FieldCounts()
    expected = collections.Counter()
    for block in blocks:
        ids = pa.array(block, pa.int64())
        field.add(ids)
        expected.update(to_keys(ids).tolist())
    keys, counts = field.result()
    ordered = sorted(expected.items(), key=lambda pair: (-pair[1], pair[0]))
    assert list(zip(keys.tolist(), counts.tolist(), strict=True)) == ordered
    assert field.cardinality() == len(expected)
    assert (field.lookups, field.count_error) == (sum(expected.values()), 0)


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=40), max_size=20),
    st.integers(2, 40),
)
def test_counts_beyond_bound_err_by_at_most_reported_error(blocks, maximum):
    counted = KeyCounts(["a", "b"], maximum)
    expected = {"a": collections.Counter(), "b": collections.Counter()}
    for number, block in enumerate(blocks):
        name = "ab"[number % 2]
        counted.add(name, pa.array(block, pa.int64()))
        expected[name].update(block)
        assert sum(field.num_entries for field in counted.fields.values()) <= maximum
    for name, field in counted.fields.items():
        kept = dict(zip(*(values.tolist() for values in field.result()), strict=True))
        for key, count in expected[name].items():
            assert count - field.count_error <= kept.get(key, 0) <= count
        assert field.lookups == sum(expected[name].values())
        # There are fewer keys than stored hashes, therefore the cardinality is exact.
        assert field.cardinality() == len(expected[name])


def test_number_of_keys_is_estimated(monkeypatch):
    monkeypatch.setattr(statistics, "_SMALLEST", 1 << 12)
    counted = KeyCounts(["a"], 5_000)
    for begin in range(0, 200_000, 1_000):
        counted.add("a", pa.array(np.arange(begin, begin + 2_000)))
    field = counted.fields["a"]
    assert field.count_error > 0
    assert abs(field.cardinality() / 201_000 - 1) < 5 / (1 << 6)
