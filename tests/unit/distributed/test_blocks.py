"""Blocks are each taken once, however many ranks there are from one commit to the next."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.distributed.elastic import BlocksLeft

BLOCKS = 60


def shares(left: BlocksLeft, ranks: int) -> list[list[int]]:
    """Returns the blocks of each rank, as its data set has them."""
    blocks = left.of(tf.data.Dataset.range(BLOCKS))
    return [
        [int(b) for b in blocks.shard(ranks, rank).as_numpy_iterator()] for rank in range(ranks)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_every_block_is_taken_once(seed: int) -> None:
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


def test_even_ranks_leave_no_gaps() -> None:
    assert BlocksLeft().after([5, 5, 5]) == BlocksLeft(15)
    assert BlocksLeft(15).after([2]) == BlocksLeft(17)


def test_a_gap_is_filled_first() -> None:
    left = BlocksLeft().after([3, 0])
    assert left == BlocksLeft(1, (2, 4))
    assert shares(left, 2)[0][:3] == [1, 5, 7]
    assert left.after([0, 0]) == left


def test_blocks_may_have_any_structure() -> None:
    blocks = tf.data.Dataset.from_tensor_slices(({"keys": np.arange(12)}, np.arange(12.0)))
    left = BlocksLeft(1, (2,)).of(blocks.batch(3))
    found = [features["keys"][0] for features, _ in left.as_numpy_iterator()]
    assert found == [3, 9]
    assert left.element_spec == blocks.batch(3).element_spec
