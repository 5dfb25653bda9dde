"""Inputs that are in memory as NumPy arrays."""

from collections.abc import Iterator

import numpy as np

from slipstream_tf.data.readers.base import BatchReader, Rows
from slipstream_tf.data.spec import DataSpec

# Rows widened to int64 at a time: enough to cost nothing per batch, and to stay in the cache.
_ROWS_AT_ONCE = 1 << 16
# What is shuffled at a time, about: 256 KiB of positions.
_ROWS_OF_A_PART = 1 << 15


class ArrayReader(BatchReader):
    """Batches of arrays, in their order or shuffled anew in every pass.

    The arrays may be of any integer type; batches are int64.
    """

    def __init__(
        self,
        spec: DataSpec,
        keys: np.ndarray,
        label: np.ndarray,
        batch_size: int,
        dense: np.ndarray | None = None,
        shuffle_seed: int | None = None,
    ):
        """Keeps references to the arrays.

        Args:
            spec: what the batches hold.
            keys: [n, fields].
            label: [n].
            batch_size: inputs of a batch.
            dense: [n, num_dense], or None.
            shuffle_seed: None keeps the order; with a seed, pass e (counted over the passes of
                this reader) has the order that (seed, e) gives.

        Raises:
            ValueError: the arrays do not fit together, keys are no integers, a label or
                a dense number is not finite, or the batch size is below 1.
        """
        super().__init__(batch_size)
        count = label.shape[0] if label.ndim == 1 else -1
        dense = np.empty((max(count, 0), 0), np.float32) if dense is None else dense
        if keys.shape != (count, len(spec.fields)) or dense.shape != (count, spec.num_dense):
            raise ValueError(
                f"Arrays of {spec.name!r} do not fit: keys {keys.shape}, label {label.shape}, "
                f"dense {dense.shape}; allowed: "
                f"[n, {len(spec.fields)}], [n], [n, {spec.num_dense}]."
            )
        if keys.dtype.kind not in "iu":
            raise ValueError(f"Keys of {spec.name!r} are of type {keys.dtype}; allowed: integers.")
        _require_all(f"Label of {spec.name!r}", label, np.isfinite(label), "finite numbers")
        if dense.size:
            _require_all(f"Dense of {spec.name!r}", dense, np.isfinite(dense), "finite numbers")
        self.spec = spec
        self._keys, self._label, self._dense = keys, label, dense
        self._shuffle_seed = shuffle_seed

    def _blocks(self, number: int) -> Iterator[Rows]:
        count = len(self._label)
        size = self._batch_size * max(1, _ROWS_AT_ONCE // self._batch_size)
        order = None
        if self._shuffle_seed is not None:
            order = random_order(count, np.random.default_rng([self._shuffle_seed, number]))
        for begin in range(0, count, size):
            part = slice(begin, min(begin + size, count))
            arrays = (self._label, self._dense, self._keys)
            if order is None:
                label, dense, keys = (array[part] for array in arrays)
            else:
                # For rows of a few values several times as fast as indexing with positions.
                label, dense, keys = (array.take(order[part], axis=0) for array in arrays)
            label, dense = label.astype(np.float32), dense.astype(np.float32)
            yield Rows(label, dense, keys.astype(np.int64))


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


def _require_all(what: str, values: np.ndarray, is_good: np.ndarray, allowed: str) -> None:
    """Raises ValueError with the first value of [n, ...] where `is_good` is not set, if any."""
    if not is_good.all():
        index = tuple(int(i) for i in np.argwhere(~is_good)[0])
        raise ValueError(f"{what} has {values[index]} at {index}; allowed: {allowed}.")
