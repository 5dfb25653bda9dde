"""Which blocks of a stream of examples no rank has taken yet, however many ranks there have been.

In: a data set of blocks, the same on all ranks and in the same order, and how many of them each
rank has taken. Out: the blocks that are left, shared out to the ranks that there are now.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class BlocksLeft:
    """The blocks that are left: all from `first` on, but `taken`.

    Block i of those that are left goes to rank i % ranks.

    Attributes:
        first: number of the first one.
        taken: numbers of later ones that are not left, ascending.
    """

    first: int = 0
    taken: tuple[int, ...] = ()

    def of(self, blocks: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the blocks of a data set that are left; the others are read all the same."""
        left = blocks.skip(self.first) if self.first else blocks
        if not self.taken:
            return left
        gone = tf.constant(self.taken, tf.int64)

        @tf.autograph.experimental.do_not_convert
        def is_left(number: tf.Tensor, _: Any) -> tf.Tensor:
            return tf.reduce_all(tf.not_equal(gone, number))

        @tf.autograph.experimental.do_not_convert
        def block(_: tf.Tensor, element: Any) -> Any:
            return element

        return left.enumerate(self.first).filter(is_left).map(block)

    def after(self, counts: Sequence[int]) -> BlocksLeft:
        """Returns what is left when ranks have taken blocks.

        Args:
            counts: how many of its blocks each rank has taken, rank 0 first.
        """
        ranks = len(counts)
        left = self._first_left(max(counts) * ranks + 1)
        place = np.arange(left.size)
        has_gone = place // ranks < np.asarray(counts)[place % ranks]
        first = int(left[~has_gone][0])
        gone = np.concatenate([np.asarray(self.taken, np.int64), left[has_gone]])
        return BlocksLeft(first, tuple(np.sort(gone[gone > first]).tolist()))

    def _first_left(self, count: int) -> np.ndarray:
        """Returns the numbers of the first so many blocks that are left, int64."""
        numbers = np.arange(self.first, self.first + count + len(self.taken))
        return numbers[~np.isin(numbers, self.taken)][:count]
