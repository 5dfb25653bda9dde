"""checkpoint.tree: nested values as JSON and arrays, and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_tf.checkpoint.store_state import flatten, unflatten

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
)
trees = st.recursive(
    leaves,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=4), parts),
    max_leaves=10,
)


@given(trees, st.integers(0, 5))
def test_any_tree_comes_back_exactly(tree: object, rows: int) -> None:
    array = np.arange(rows, dtype=np.float32)
    skeleton, arrays = flatten({"tree": tree, "arrays": [array, {"deep": array[:1]}]})
    back = unflatten(json.loads(json.dumps(skeleton)), arrays)
    assert back["tree"] == tree
    np.testing.assert_array_equal(back["arrays"][0], array)
    np.testing.assert_array_equal(back["arrays"][1]["deep"], array[:1])


def test_numbers_of_numpy_become_plain_ones_and_infinities_stay() -> None:
    skeleton, _ = flatten({"a": np.float32(0.1), "b": float("inf"), "c": (np.int64(3),)})
    assert json.loads(json.dumps(skeleton)) == {"a": float(np.float32(0.1)), "b": np.inf, "c": [3]}


def test_a_missing_array_is_an_error() -> None:
    skeleton, _ = flatten({"a": np.zeros(3)})
    with pytest.raises(KeyError):
        unflatten(skeleton, {})
