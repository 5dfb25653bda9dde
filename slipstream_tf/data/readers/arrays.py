"""Inputs that are in memory as NumPy arrays."""

from collections.abc import Iterator

import numpy as np

from slipstream_tf.data.readers.base import BatchReader, Rows
from slipstream_tf.data.spec import DataSpec

# Rows taken at a time: enough to cost nothing per batch, and to stay in the cache.
_ROWS_AT_ONCE = 1 << 16
# What is shuffled at a time, about: 256 KiB of positions.
_ROWS_OF_A_PART = 1 << 15


class ArrayReader(BatchReader):
    """Batches of arrays, shuffled in every pass."""

    def __init__(self, spec: DataSpec, rows: Rows, batch_size: int, shuffle_seed: int):
        """Keeps references to the arrays.

        Args:
            spec: what the batches hold.
            rows: all of them.
            batch_size: inputs of a batch.
            shuffle_seed: pass e (counted over the passes of this reader) has the order that
                (shuffle_seed, e) gives.
        """
        super().__init__(batch_size)
        self.spec, self._rows, self._shuffle_seed = spec, rows, shuffle_seed

    def _blocks(self, number: int) -> Iterator[Rows]:
        rows = self._rows
        size = self._batch_size * max(1, _ROWS_AT_ONCE // self._batch_size)
        order = random_order(len(rows), np.random.default_rng([self._shuffle_seed, number]))
        for begin in range(0, len(rows), size):
            part = order[begin : begin + size]
            # For rows of a few values several times as fast as indexing with positions.
            label, dense, keys = (
                array.take(part, axis=0) for array in (rows.label, rows.dense, rows.keys)
            )
            yield Rows(label, dense, keys)


def random_order(count: int, random: np.random.Generator) -> np.ndarray:
    """Returns 0 to count - 1, int64 [count], in any order with the same probability.

    As `random.permutation`, but in half its time where there are millions: each goes to a part
    at random, and the parts are shuffled one by one, in the cache.
    """
    parts = min(256, 1 + count // _ROWS_OF_A_PART)
    part = random.integers(parts, size=count, dtype=np.uint8)
    order = np.argsort(part, kind="stable")
    for own in np.split(order, np.cumsum(np.bincount(part, minlength=parts))[:-1]):
        random.shuffle(own)
    return order
