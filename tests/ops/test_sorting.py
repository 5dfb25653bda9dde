"""slipstream_tf.engine.hot_set against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.engine.hot_set import sort_keys
from slipstream_tf.ops import _loader

RANGE = np.iinfo(np.int64)


def test_sorts_each_list_for_itself():
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


def test_bad_keys():
    with pytest.raises(ValueError, match=r"int64 \(2, 1\).*list 1"):
        sort_keys([np.arange(3), np.array([[1], [2]])])
    with pytest.raises(ValueError, match=r"float64 \(1,\).*list 0"):
        sort_keys([np.array([0.5])])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"keys 0 has shape \[2,1\]"):
        _loader.library().slipstream_sort_keys(keys=[np.array([[1], [2]])])
