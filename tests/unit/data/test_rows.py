"""Tests that rows are cut into complete, ordered batches and parts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream_tf.data.readers.base import Rows, in_batches, is_in_part


def blocks_of(sizes):
    begin = 0
    for size in sizes:
        ids = np.arange(begin, begin + size)
        yield Rows(ids.astype(np.float32), np.zeros((size, 0), np.float32), ids[:, None])
        begin += size


@given(
    sizes=st.lists(st.integers(0, 30), max_size=12),
    batch_size=st.integers(1, 40),
)
def test_batches_contain_every_example_once_in_order(sizes, batch_size):
    batches = list(in_batches(blocks_of(sizes), batch_size))
    ids = [int(key) for batch in batches for key in batch.keys[:, 0]]
    assert ids == list(range(sum(sizes)))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert all(0 < len(batch) <= batch_size for batch in batches)


@given(cuts=st.lists(st.integers(1, 700), max_size=8))
def test_parts_are_independent_of_block_boundaries(cuts):
    total = sum(cuts)
    begins = np.cumsum([0, *cuts])
    pieces = [is_in_part(int(b), n, "test") for b, n in zip(begins, cuts, strict=False)]
    is_test = np.concatenate([np.zeros(0, bool), *pieces])
    np.testing.assert_array_equal(is_test, [i % 1000 >= 900 for i in range(total)])
    np.testing.assert_array_equal(~is_test, is_in_part(0, total, "train"))
    assert is_in_part(0, total, None).all()
    is_valid = is_in_part(0, total, "valid")
    np.testing.assert_array_equal(is_valid, [800 <= i % 1000 < 900 for i in range(total)])
    rest = is_in_part(0, total, "train", hold_out=True)
    np.testing.assert_array_equal(rest, ~is_test & ~is_valid)
