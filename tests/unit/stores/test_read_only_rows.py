"""Copies in front of a lookup: right rows, keys that never reach it, and gradients around them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.stores.replicas import ReadOnlyRows

DIM = 3


def rows_of(keys: np.ndarray) -> np.ndarray:
    return (keys[:, None] % 97 + np.arange(DIM)).astype(np.float32)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=8),
    st.lists(st.integers(-5, 5), max_size=8),
    st.data(),
)
def test_read_only_keys_never_reach_the_lookup(read_only: list, others: list, data) -> None:
    read_only = list(dict.fromkeys(read_only + others[::2]))
    few = st.lists(st.sampled_from([*read_only, *others, 0]), max_size=12)
    keys = np.array(data.draw(few), np.int64)
    copies = ReadOnlyRows(DIM, "CPU:0")
    copies.assign(np.array(read_only, np.int64), -rows_of(np.array(read_only, np.int64)))
    requested = []

    def lookup(missing: tf.Tensor) -> tf.Tensor:
        requested.extend(missing.numpy().tolist())
        return tf.constant(rows_of(missing.numpy()))

    rows = copies.look_up(tf.constant(keys), lookup)
    is_read_only = np.isin(keys, read_only)
    assert requested == keys[~is_read_only].tolist() and copies.size == len(read_only)
    np.testing.assert_array_equal(rows, np.where(is_read_only[:, None], -1, 1) * rows_of(keys))


@pytest.mark.parametrize("is_graph", [False, True])
def test_no_gradient_flows_to_copies(is_graph: bool) -> None:
    copies, table = ReadOnlyRows(DIM, "CPU:0"), tf.Variable(np.zeros((6, DIM)), dtype=tf.float32)

    def step(keys: tf.Tensor) -> tf.IndexedSlices:
        with tf.GradientTape() as tape:
            rows = copies.look_up(keys, lambda missing: tf.gather(table, missing))
            loss = tf.reduce_sum(rows * tf.cast(keys, tf.float32)[:, None])
        return tf.convert_to_tensor(tape.gradient(loss, table))

    traced = tf.function(step, input_signature=[tf.TensorSpec([None], tf.int64)])
    run = traced if is_graph else step
    keys = tf.constant([5, 1, 4, 1, 2], tf.int64)
    np.testing.assert_array_equal(run(keys)[:, 0], [0, 2, 2, 0, 4, 5])
    copies.assign(np.array([4, 1]), np.ones((2, DIM), np.float32))
    np.testing.assert_array_equal(run(keys)[:, 0], [0, 0, 2, 0, 0, 5])
    assert run(tf.constant([1, 4], tf.int64)).shape == (6, DIM)
