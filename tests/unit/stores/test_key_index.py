"""Two ways to find held sums agree with a dictionary, eager and traced."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.stores.key_index import HashedIndex, RangeIndex

KEYS = 30


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("kind", ["range", "hashed"])
def test_index_is_a_dictionary(kind: str, is_graph: bool) -> None:
    index = RangeIndex(KEYS, "CPU:0") if kind == "range" else HashedIndex("CPU:0")
    scale = 1 if kind == "range" else -(2**40)  # any keys, negative ones, too
    random, expected = np.random.default_rng(2), {}
    traced = tf.function if is_graph else lambda function, **_: function
    signature = [tf.TensorSpec([None], tf.int64)]
    find, drop = (traced(f, input_signature=signature) for f in (index.find, index.drop))
    put = traced(index.put, input_signature=signature * 2)
    index.replace(np.empty(0, np.int64), is_used=True)
    everything = np.arange(KEYS) * scale
    for step in range(20):
        keys = random.permutation(everything)[: random.integers(0, 9)]
        if step % 7 == 6:
            index.replace(keys, is_used=True)
            expected = {int(key): i for i, key in enumerate(keys)}
        elif step % 3 == 2:
            drop(tf.constant(keys))
            expected = {k: p for k, p in expected.items() if k not in keys}
        else:
            places = random.integers(0, 1000, keys.size)
            put(tf.constant(keys), tf.constant(places))
            expected.update(zip(keys.tolist(), places.tolist(), strict=True))
        found = find(tf.constant(everything)).numpy().tolist()
        assert found == [expected.get(int(key), -1) for key in everything]
    marks = everything[::4]
    index.mark(marks)
    np.testing.assert_array_equal(
        index.are_marked(tf.constant(everything)), np.isin(everything, marks)
    )
    index.mark(marks[:0])
    assert not index.are_marked(tf.constant(everything)).numpy().any()
    assert index.nbytes() > 0
