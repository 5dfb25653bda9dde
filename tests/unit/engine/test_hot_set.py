"""Tests of `engine.hot_set`: the most accessed keys within a byte budget."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from slipstream_tf.engine.hot_set import Candidates, choose_hot_keys, max_candidates, sort_keys
from slipstream_tf.ops import _loader


def candidates(counts: dict, dim: int) -> Candidates:
    return Candidates(
        np.array(list(counts), np.int64), np.array(list(counts.values()), np.float32), dim
    )


def reference(tables: list[Candidates], budget: int) -> list[list[int]]:
    items = [
        (-count, index, key, table.dim * 4)
        for index, table in enumerate(tables)
        for key, count in zip(table.keys.tolist(), table.counts.tolist(), strict=True)
        if count > 0
    ]
    chosen: list[list[int]] = [[] for _ in tables]
    for _, index, key, size in sorted(items):
        if size <= budget:
            budget -= size
            chosen[index].append(key)
    return [sorted(keys) for keys in chosen]


def table_lists(dims: st.SearchStrategy) -> st.SearchStrategy:
    keys = st.dictionaries(st.integers(-20, 20), st.integers(0, 5).map(float), max_size=20)
    return st.lists(st.builds(candidates, keys, dims), max_size=4)


@given(
    tables=table_lists(st.sampled_from([1, 2, 8, 16])) | table_lists(st.just(4)),
    budget=st.integers(1, 2000),
)
def test_choice_equals_greedy_reference(tables, budget):
    chosen = choose_hot_keys(tables, budget)
    assert [keys.tolist() for keys in chosen] == reference(tables, budget)
    assert all(keys.dtype == np.int64 for keys in chosen)
    used = sum(keys.size * table.dim * 4 for keys, table in zip(chosen, tables, strict=True))
    assert used <= budget


def test_ties_prefer_earlier_table_then_smaller_key():
    tables = [candidates({5: 1.0, 3: 1.0}, 1), candidates({-9: 1.0, 4: 2.0}, 1)]
    assert [k.tolist() for k in choose_hot_keys(tables, 8)] == [[3], [4]]
    assert [k.tolist() for k in choose_hot_keys(tables, 12)] == [[3, 5], [4]]


def test_small_rows_fill_remaining_budget():
    tables = [candidates({1: 9.0, 2: 7.0}, 16), candidates({1: 5.0}, 2)]
    assert [k.tolist() for k in choose_hot_keys(tables, 72)] == [[1], [1]]
    assert [k.tolist() for k in choose_hot_keys(tables, 8)] == [[], [1]]
    assert [k.tolist() for k in choose_hot_keys(tables, 7)] == [[], []]


def test_no_candidates_give_empty_hot_set():
    assert choose_hot_keys([], 100) == []
    assert choose_hot_keys([candidates({}, 4)], 100)[0].shape == (0,)
    assert choose_hot_keys([candidates({1: 0.0, 2: float("nan")}, 4)], 100)[0].shape == (0,)


def test_max_candidates_follow_budget():
    assert max_candidates(16, 256 << 20) == 4 << 20
    assert max_candidates(16, 63) == 0


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="Invalid `budget_bytes`: 0"):
        choose_hot_keys([], 0)


RANGE = np.iinfo(np.int64)


def test_each_list_is_sorted_separately():
    rng = np.random.default_rng(0)
    lists = [
        rng.permutation(5000),
        rng.integers(RANGE.min, RANGE.max, 3000, endpoint=True),
        np.array([3, -1, 3, RANGE.min, RANGE.max, 0]),
        np.empty(0, np.int64),
    ]
    before = [keys.copy() for keys in lists]
    for keys, found in zip(lists, sort_keys(lists), strict=True):
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, np.sort(keys))
    for keys, was in zip(lists, before, strict=True):
        np.testing.assert_array_equal(keys, was)
    assert sort_keys([]) == []


def test_invalid_keys_raise():
    with pytest.raises(ValueError, match=r"`lists\[1\]`: 'int64 \(2, 1\)'"):
        sort_keys([np.arange(3), np.array([[1], [2]])])
    with pytest.raises(ValueError, match=r"`lists\[0\]`: 'float64 \(1,\)'"):
        sort_keys([np.array([0.5])])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"keys 0 has shape \[2,1\]"):
        _loader.library().slipstream_sort_keys(keys=[np.array([[1], [2]])])
