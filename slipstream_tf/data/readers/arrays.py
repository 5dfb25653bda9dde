"""Reads examples from NumPy arrays in memory."""

from collections.abc import Iterator

import numpy as np

from slipstream_tf.data.readers.base import BatchReader, Rows
from slipstream_tf.data.spec import DataSpec

# Rows per gather: enough to make the cost per batch negligible, and few enough for the cache.
_ROWS_AT_ONCE = 1 << 16
# Approximate number of positions that are shuffled at a time: 256 KiB.
_ROWS_OF_A_PART = 1 << 15


class ArrayReader(BatchReader):
    """Reads batches from arrays, with a new order in each pass."""

    def __init__(self, spec: DataSpec, rows: Rows, batch_size: int, shuffle_seed: int):
        """Creates a reader that references the arrays.

        Args:
            spec: Description of the features.
            rows: All examples.
            batch_size: Number of examples in a batch.
            shuffle_seed: Seed of the order. Pass e of this reader, from 0, has the order that
                `(shuffle_seed, e)` determines.
        """
        super().__init__(batch_size)
        self.spec, self._rows, self._shuffle_seed = spec, rows, shuffle_seed

    def _blocks(self, number: int) -> Iterator[Rows]:
        rows = self._rows
        size = self._batch_size * max(1, _ROWS_AT_ONCE // self._batch_size)
        order = random_order(len(rows), np.random.default_rng([self._shuffle_seed, number]))
        for begin in range(0, len(rows), size):
            part = order[begin : begin + size]
            # For short rows, `take` is much faster than indexing with positions.
            label, dense, keys = (
                array.take(part, axis=0) for array in (rows.label, rows.dense, rows.keys)
            )
            yield Rows(label, dense, keys)


def random_order(count: int, random: np.random.Generator) -> np.ndarray:
    """Returns a random permutation of 0 to count - 1, int64 [count].

    All permutations are equally likely.

    For millions of elements it takes half the time of `random.permutation`: each element is
    assigned to a random part, and the parts are shuffled one by one in the cache.
    """
    parts = min(256, 1 + count // _ROWS_OF_A_PART)
    part = random.integers(parts, size=count, dtype=np.uint8)
    order = np.argsort(part, kind="stable")
    for own in np.split(order, np.cumsum(np.bincount(part, minlength=parts))[:-1]):
        random.shuffle(own)
    return order
