"""distributed.with_next: batches that carry the keys of the next one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.distributed import with_next


def bags(values, lengths, splits):
    return tf.RaggedTensor.from_row_lengths(values, tf.cast(lengths, splits))


def test_each_batch_has_the_keys_of_the_next_and_the_last_has_none():
    keys = np.arange(14, dtype=np.int64).reshape(7, 2)
    data = tf.data.Dataset.from_tensor_slices(({"keys": keys, "dense": keys + 0.5}, keys[:, 0]))
    got = list(with_next(data.batch(3)))
    wanted = list(data.batch(3))
    assert len(got) == 3
    for (features, label), (before, label_before) in zip(got, wanted, strict=True):
        assert sorted(features) == ["dense", "keys", "next_keys"]
        np.testing.assert_array_equal(features["keys"], before["keys"])
        np.testing.assert_array_equal(features["dense"], before["dense"])
        np.testing.assert_array_equal(label, label_before)
    for (features, _), (after, _) in zip(got, wanted[1:], strict=False):
        np.testing.assert_array_equal(features["next_keys"], after["keys"])
    assert got[-1][0]["next_keys"].shape == (0, 2)
    assert got[-1][0]["next_keys"].dtype == tf.int64


@pytest.mark.parametrize("splits", [tf.int32, tf.int64])
def test_ragged_keys_of_several_features_and_batches_of_no_inputs(splits):
    lengths = [[2, 0], [], [1, 1, 3]]
    batches = []
    for i, n in enumerate(lengths):
        flat = np.arange(sum(n), dtype=np.int64) + 10 * i
        batches.append((flat, np.array(n, np.int64), np.arange(len(n), dtype=np.int64)))
    spec = (tf.TensorSpec([None], tf.int64),) * 3
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    data = data.map(lambda flat, n, one: {"keys": {"bag": bags(flat, n, splits), "one": one}})
    got = list(with_next(data))
    assert len(got) == 3
    assert [x["keys"]["bag"].to_list() for x in got] == [
        [[0, 1], []],
        [],
        [[20], [21], [22, 23, 24]],
    ]
    for x, after in itertools.pairwise(got):
        assert x["next_keys"]["bag"].to_list() == after["keys"]["bag"].to_list()
        np.testing.assert_array_equal(x["next_keys"]["one"], after["keys"]["one"])
    assert isinstance(got[-1]["next_keys"]["bag"], tf.RaggedTensor)
    assert got[-1]["next_keys"]["bag"].nrows() == 0 and got[-1]["next_keys"]["one"].shape == (0,)


def test_batches_of_a_known_size_and_a_last_one_of_another():
    data = tf.data.Dataset.from_tensor_slices({"keys": np.arange(6, dtype=np.int64)})
    data = with_next(data.batch(2, drop_remainder=True))
    assert data.cardinality().numpy() == 3
    assert data.element_spec["keys"].shape.as_list() == [None]
    assert [x["next_keys"].numpy().tolist() for x in data] == [[2, 3], [4, 5], []]


def test_no_batch_is_pulled_twice():
    pulled = []

    def generate():
        for i in range(4):
            pulled.append(i)
            yield np.array([i], np.int64)

    signature = tf.TensorSpec([None], tf.int64)
    data = tf.data.Dataset.from_generator(generate, output_signature=signature)
    data = with_next(data.map(lambda keys: {"keys": keys}))
    assert [int(x["keys"][0]) for x in data] == pulled == [0, 1, 2, 3]
    assert list(with_next(data.take(0).map(lambda x: {"keys": x["keys"]}))) == []


@pytest.mark.parametrize(
    "element",
    [
        np.zeros([3, 2], np.int64),
        {"dense": np.zeros(3)},
        {"keys": np.zeros(3, np.int64), "next_keys": np.zeros(3, np.int64)},
    ],
    ids=["no dictionary", "no keys", "next keys already"],
)
def test_what_has_no_place_for_next_keys_is_refused(element):
    data = tf.data.Dataset.from_tensor_slices(element).batch(2)
    with pytest.raises(ValueError, match=r"Invalid `dataset`.*a dictionary with 'keys'"):
        with_next(data)


def test_what_has_no_empty_batch_is_refused():
    data = tf.data.Dataset.from_tensors({"keys": np.zeros(3, np.int64), "scalar": 1})
    with pytest.raises(ValueError, match=r"Invalid `dataset`.*batch dimension"):
        with_next(data)
