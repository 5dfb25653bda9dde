"""Exact and estimated access counts agree on all layouts of keys, where there is room."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables.replicas import EstimatedCounts, ExactCounts

COUNTED = 1 << 12


def pair():
    return ExactCounts(["a", "b"], COUNTED), EstimatedCounts({"a": "CPU:0", "b": "CPU:0"}, COUNTED)


def assert_equal(exact, estimated):
    for table in ("a", "b"):
        for k in (3, 1000):
            for one, other in zip(
                exact.hot_keys(table, k), estimated.hot_keys(table, k), strict=True
            ):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("is_graph", [False, True])
def test_they_agree(is_graph):
    rng = np.random.default_rng(1)
    specs = [FeatureSpec("x", "a"), FeatureSpec("bag", "b"), FeatureSpec("ragged", "a")]
    counters = pair()
    for _ in range(6):  # So often that no decay is rounded.
        lengths = rng.integers(0, 4, 20)
        inputs = {
            "x": tf.constant(rng.zipf(1.5, 20) % 50),
            "bag": tf.constant(rng.integers(-1, 9, (20, 3))),
            "ragged": tf.RaggedTensor.from_row_lengths(rng.integers(0, 60, lengths.sum()), lengths),
        }
        for counter in counters:

            def step(counter=counter, inputs=inputs):
                counter.count(pack(inputs, specs), specs)

            (tf.function(step) if is_graph else step)()
        assert_equal(*counters)
        for counter in counters:
            counter.decay_counts(0.5)
    assert -1 not in counters[1].hot_keys("b", 100)[0]


def test_columns_of_a_matrix():
    specs = [FeatureSpec("x", "a"), FeatureSpec("y", "b"), FeatureSpec("z", "a")]
    counters = pair()
    matrix = tf.constant([[1, 2, 3], [1, 5, -1], [4, 5, 3]], tf.int64)
    for counter in counters:
        counter.count(pack(matrix, specs), specs)
    assert_equal(*counters)
    keys, counts = counters[1].hot_keys("a", 5)
    assert keys.tolist() == [1, 3, 4] and counts.tolist() == [2.0, 2.0, 1.0]
