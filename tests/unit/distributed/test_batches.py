"""Tests of batches across ranks: even ends, next keys, remaining blocks."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.distributed import SingleProcess, pad_to_equal_steps, prefetch_keys, scale_loss
from slipstream_tf.distributed.elastic import BlocksLeft
from slipstream_tf.sampling.notes import note_fraction


class FakeRankWithPeers:
    """Simulates rank 0 of two ranks with different numbers of batches.

    Rank 1 has `batches_of_others` batches of `inputs` examples.
    """

    rank, size, local_rank = 0, 2, 0

    def __init__(self, batches_of_others: int, inputs: int = 0):
        self._left, self._inputs = batches_of_others, inputs

    def sum(self, tensor, kind, name):
        del kind, name

        def add(own):
            self._left -= 1
            return own + np.int64(self._left >= 0) * np.int64([1, self._inputs])

        total = tf.numpy_function(add, [tensor], tf.int64)
        return tf.ensure_shape(total, [2])


def features_and_labels(inputs: int, batch_size: int, drop_remainder: bool = False):
    features = {
        "keys": tf.reshape(tf.range(3 * inputs, dtype=tf.int64), [inputs, 3]),
        "bag": tf.RaggedTensor.from_row_lengths(
            tf.range(inputs, dtype=tf.int64), [1] * (inputs - 1) + [1]
        ),
        "name": tf.constant([f"n{i}" for i in range(inputs)]),
    }
    data = tf.data.Dataset.from_tensor_slices((features, tf.ones([inputs])))
    return data.ragged_batch(batch_size, drop_remainder)


def test_single_process_dataset_is_unchanged():
    data = tf.data.Dataset.range(6).batch(2)
    assert pad_to_equal_steps(data, SingleProcess()) is data


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_empty_batches_follow_until_all_ranks_end(drop_remainder):
    data = features_and_labels(4, 2, drop_remainder)
    got = list(pad_to_equal_steps(data, FakeRankWithPeers(5)))
    assert [int(labels.shape[0]) for _, labels in got] == [2, 2, 0, 0, 0]
    for (features, labels), (wanted, _) in zip(got, data, strict=False):
        for name in ("keys", "name"):
            np.testing.assert_array_equal(features[name], wanted[name])
        assert features["bag"].to_list() == wanted["bag"].to_list()
        np.testing.assert_array_equal(labels, np.ones(2))
    features, labels = got[-1]
    assert features["keys"].shape == (0, 3) and features["keys"].dtype == tf.int64
    assert features["name"].shape == (0,) and features["name"].dtype == tf.string
    assert isinstance(features["bag"], tf.RaggedTensor) and features["bag"].nrows() == 0
    assert labels.dtype == tf.float32


def test_fraction_of_each_batch_is_recorded():
    data = tf.data.Dataset.from_tensor_slices(({"keys": np.arange(5)}, np.ones(5))).batch(3)
    got = list(pad_to_equal_steps(data, FakeRankWithPeers(3, 1), note_fraction))
    shares = [features["fraction_of_step"].numpy().tolist() for features, _ in got]
    # The ranks have 3 + 1, 2 + 1 and 0 + 1 examples. This rank's counts are divided by the means 2,
    # 1.5 and 0.5.
    assert shares == [[1.5] * 3, [np.float32(4 / 3)] * 2, []]


def test_ranks_that_end_first_do_not_block_others():
    data = tf.data.Dataset.range(5).batch(2)
    got = [batch.numpy().tolist() for batch in pad_to_equal_steps(data, FakeRankWithPeers(1))]
    assert got == [[0, 1], [2, 3], [4]]


def test_rank_without_data_gets_empty_batches():
    data = features_and_labels(4, 2).take(0)
    assert [int(y.shape[0]) for _, y in pad_to_equal_steps(data, FakeRankWithPeers(3))] == [0, 0, 0]


def test_elements_keep_their_structure_and_lose_their_batch_size():
    data = tf.data.Dataset.from_tensor_slices({"a": tf.zeros([4, 2])}).batch(2, drop_remainder=True)
    spec = pad_to_equal_steps(data, FakeRankWithPeers(2)).element_spec
    assert spec == {"a": tf.TensorSpec([None, 2], tf.float32)}


def test_sparse_batches_end_with_empty_batch():
    keys = tf.sparse.from_dense(tf.constant([["a", ""], ["b", "c"]]))
    real, empty = pad_to_equal_steps(
        tf.data.Dataset.from_tensors({"keys": keys}), FakeRankWithPeers(2)
    )
    assert tf.sparse.to_dense(real["keys"]).numpy().tolist() == [[b"a", b""], [b"b", b"c"]]
    assert empty["keys"].dense_shape.numpy().tolist() == [0, 2]


@pytest.mark.parametrize(
    "data",
    [
        tf.data.Dataset.range(3),
        tf.data.Dataset.from_tensors(tf.ragged.constant([[[1], [2, 3]]])),
    ],
    ids=["no batch", "ragged twice"],
)
def test_unsupported_elements_raise_in_single_process(data):
    with pytest.raises(ValueError, match=r"Invalid `dataset`.*dense tensors, RaggedTensors"):
        pad_to_equal_steps(data, SingleProcess())


def test_single_process_loss_is_unscaled():
    loss = tf.constant(3.0)
    assert scale_loss(loss, 4, SingleProcess()) is loss


@pytest.mark.parametrize("sizes", [(3, 1), (2, 2), (5, 0), (0, 0)])
def test_averaged_gradients_equal_gradients_of_all_examples(run_as_ranks, sizes):
    inputs = [
        np.arange(1, size + 1, dtype=np.float32) * (rank + 1) for rank, size in enumerate(sizes)
    ]

    def program(comm):
        x = tf.constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean = tf.reduce_mean(x * tf.constant(inputs[comm.rank]))
            loss = scale_loss(mean, sizes[comm.rank], comm)
        return loss.numpy(), tape.gradient(loss, x).numpy()

    got = run_as_ranks(2, program)
    for (loss, _), own in zip(got, inputs, strict=True):
        np.testing.assert_allclose(loss, 2.0 * own.mean() if own.size else 0.0)
    union = np.concatenate(inputs)
    wanted = union.mean() if union.size else 0.0
    np.testing.assert_allclose(np.mean([gradient for _, gradient in got]), wanted)


@pytest.mark.parametrize(("transform", "ahead"), [("pad_to_equal_steps", 0), ("prefetch_keys", 1)])
def test_batches_are_not_read_before_request(transform, ahead):
    made = tf.Variable(0, dtype=tf.int64)

    def note(number):
        with tf.control_dependencies([made.assign_add(1)]):
            return {"keys": tf.identity(number)}

    options = tf.data.Options()
    # As in `Slipstream.apply`. Otherwise TensorFlow may add a prefetch.
    options.experimental_optimization.inject_prefetch = False
    data = tf.data.Dataset.range(50).batch(2).map(note).with_options(options)
    data = (
        pad_to_equal_steps(data, FakeRankWithPeers(99))
        if transform == "pad_to_equal_steps"
        else prefetch_keys(data)
    )
    batches = iter(data)
    for pulled in range(1, 9):
        next(batches)
        # Wait for any batch that would be made in the background.
        time.sleep(0.02)
        assert made.numpy() == pulled + ahead


def bags(values, lengths, splits):
    return tf.RaggedTensor.from_row_lengths(values, tf.cast(lengths, splits))


def test_each_batch_contains_next_keys_except_last():
    keys = np.arange(14, dtype=np.int64).reshape(7, 2)
    data = tf.data.Dataset.from_tensor_slices(({"keys": keys, "dense": keys + 0.5}, keys[:, 0]))
    got = list(prefetch_keys(data.batch(3)))
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
def test_next_keys_support_ragged_features_and_empty_batches(splits):
    lengths = [[2, 0], [], [1, 1, 3]]
    batches = []
    for i, n in enumerate(lengths):
        flat = np.arange(sum(n), dtype=np.int64) + 10 * i
        batches.append((flat, np.array(n, np.int64), np.arange(len(n), dtype=np.int64)))
    spec = (tf.TensorSpec([None], tf.int64),) * 3
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    data = data.map(lambda flat, n, one: {"keys": {"bag": bags(flat, n, splits), "one": one}})
    got = list(prefetch_keys(data))
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


def test_next_keys_support_smaller_last_batch():
    data = tf.data.Dataset.from_tensor_slices({"keys": np.arange(6, dtype=np.int64)})
    data = prefetch_keys(data.batch(2, drop_remainder=True))
    assert data.cardinality().numpy() == 3
    assert data.element_spec["keys"].shape.as_list() == [None]
    assert [x["next_keys"].numpy().tolist() for x in data] == [[2, 3], [4, 5], []]


def test_no_batch_is_read_twice():
    pulled = []

    def generate():
        for i in range(4):
            pulled.append(i)
            yield np.array([i], np.int64)

    signature = tf.TensorSpec([None], tf.int64)
    data = tf.data.Dataset.from_generator(generate, output_signature=signature)
    data = prefetch_keys(data.map(lambda keys: {"keys": keys}))
    assert [int(x["keys"][0]) for x in data] == pulled == [0, 1, 2, 3]
    assert list(prefetch_keys(data.take(0).map(lambda x: {"keys": x["keys"]}))) == []


@pytest.mark.parametrize(
    "element",
    [
        np.zeros([3, 2], np.int64),
        {"dense": np.zeros(3)},
        {"keys": np.zeros(3, np.int64), "next_keys": np.zeros(3, np.int64)},
    ],
    ids=["no dictionary", "no keys", "next keys already"],
)
def test_elements_without_place_for_next_keys_raise(element):
    data = tf.data.Dataset.from_tensor_slices(element).batch(2)
    with pytest.raises(ValueError, match=r"Invalid `dataset`.*a features dictionary with 'keys'"):
        prefetch_keys(data)


def test_unsupported_elements_raise():
    data = tf.data.Dataset.from_tensors({"keys": np.zeros(3, np.int64), "scalar": 1})
    with pytest.raises(ValueError, match=r"Invalid `dataset`.*batch dimension"):
        prefetch_keys(data)


BLOCKS = 60


def shares(left: BlocksLeft, ranks: int) -> list[list[int]]:
    """Returns the blocks in the data set of each rank."""
    blocks = left.of(tf.data.Dataset.range(BLOCKS))
    return [
        [int(b) for b in blocks.shard(ranks, rank).as_numpy_iterator()] for rank in range(ranks)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_every_block_is_assigned_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    left, taken = BlocksLeft(), []
    while len(taken) < BLOCKS:
        own = shares(left, ranks := int(random.integers(1, 5)))
        counts = [int(random.integers(0, min(12, len(blocks)) + 1)) for blocks in own]
        for blocks, count in zip(own, counts, strict=True):
            taken += blocks[:count]
        left = left.after(counts)
        assert len(counts) == ranks
    assert sorted(taken) == list(range(BLOCKS))
    assert shares(left, 2) == [[], []]


def test_equal_progress_has_no_gaps() -> None:
    assert BlocksLeft().after([5, 5, 5]) == BlocksLeft(15)
    assert BlocksLeft(15).after([2]) == BlocksLeft(17)


def test_a_gap_is_filled_first() -> None:
    left = BlocksLeft().after([3, 0])
    assert left == BlocksLeft(1, (2, 4))
    assert shares(left, 2)[0][:3] == [1, 5, 7]
    assert left.after([0, 0]) == left


def test_blocks_support_any_structure() -> None:
    blocks = tf.data.Dataset.from_tensor_slices(({"keys": np.arange(12)}, np.arange(12.0)))
    left = BlocksLeft(1, (2,)).of(blocks.batch(3))
    found = [features["keys"][0] for features, _ in left.as_numpy_iterator()]
    assert found == [3, 9]
    assert left.element_spec == blocks.batch(3).element_spec
