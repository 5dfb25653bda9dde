"""Batches of inputs that are in memory as NumPy arrays; shared by the .npz readers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.errors import require_integer
from slipstream_tf.inputs.bad_lines import BadLines
from slipstream_tf.inputs.readers.passes import Passes
from slipstream_tf.inputs.spec import DataSpec

# Rows widened to int64 at a time: large enough to cost nothing per batch.
_BATCHES_AT_ONCE = 64


class ArrayReader:
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
        drop_remainder: bool = False,
        ids: bool = False,
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
            drop_remainder: leave out a last batch that is not full.
            ids: add features["id"], int64 [batch]: an input's row in the arrays, from 0.

        Raises:
            ValueError: the arrays do not fit together, keys are no integers, a label or
                a dense number is not finite, or the batch size is below 1.
        """
        require_integer("batch_size", batch_size, 1)
        count = label.shape[0] if label.ndim == 1 else -1
        dense_shape = (count, 0) if dense is None else dense.shape
        if keys.shape != (count, len(spec.fields)) or dense_shape != (count, spec.num_dense):
            raise ValueError(
                f"Arrays of {spec.name!r} do not fit: keys {keys.shape}, label {label.shape}, "
                f"dense {None if dense is None else dense.shape}; allowed: "
                f"[n, {len(spec.fields)}], [n], [n, {spec.num_dense}]."
            )
        if keys.dtype.kind not in "iu":
            raise ValueError(f"Keys of {spec.name!r} are of type {keys.dtype}; allowed: integers.")
        require_all(f"Label of {spec.name!r}", label, np.isfinite(label), "finite numbers")
        if dense is not None:
            require_all(f"Dense of {spec.name!r}", dense, np.isfinite(dense), "finite numbers")
        self.spec = spec
        self.bad_lines = BadLines()
        self._keys, self._label, self._dense = keys, label, dense
        self._batch_size = batch_size
        self._shuffle_seed = shuffle_seed
        self._drop_remainder = drop_remainder
        self._ids = ids
        self._passes = Passes(self._batches)

    def dataset(self) -> tf.data.Dataset:
        """Returns the batches; each iteration is a pass of its own."""
        batch = self._batch_size if self._drop_remainder else None
        features = {"keys": tf.TensorSpec([batch, len(self.spec.fields)], tf.int64)}
        if self._dense is not None:
            features["dense"] = tf.TensorSpec([batch, self.spec.num_dense], tf.float32)
        if self._ids:
            features["id"] = tf.TensorSpec([batch], tf.int64)
        return self._passes.dataset((features, tf.TensorSpec([batch], tf.float32)))

    def _batches(self, number: int = 0) -> Iterator[Any]:
        count, size = len(self._label), self._batch_size
        if self._drop_remainder:
            count = count // size * size
        order = None
        if self._shuffle_seed is not None:
            order = np.random.default_rng([self._shuffle_seed, number]).permutation(
                len(self._label)
            )
        for begin in range(0, count, size * _BATCHES_AT_ONCE):
            rows: Any = slice(begin, min(begin + size * _BATCHES_AT_ONCE, count))
            if order is not None:
                rows = order[rows]
            keys = _take(self._keys, rows).astype(np.int64)
            label = _take(self._label, rows).astype(np.float32)
            dense = None if self._dense is None else _take(self._dense, rows).astype(np.float32)
            numbers = np.arange(rows.start, rows.stop) if order is None else rows
            for i in range(0, len(label), size):
                features: dict[str, Any] = {"keys": keys[i : i + size]}
                if dense is not None:
                    features["dense"] = dense[i : i + size]
                if self._ids:
                    features["id"] = numbers[i : i + size]
                yield features, label[i : i + size]


def _take(array: np.ndarray, rows: Any) -> np.ndarray:
    # For rows of a few values, `take` is several times as fast as indexing with positions.
    return array[rows] if isinstance(rows, slice) else array.take(rows, axis=0)


def require_all(what: str, values: np.ndarray, is_good: np.ndarray, allowed: str) -> None:
    """Raises ValueError with the first value of [n, ...] where `is_good` is not set, if any."""
    if not is_good.all():
        place = tuple(int(i) for i in np.argwhere(~is_good)[0])
        raise ValueError(f"{what} has {values[place]} at {place}; allowed: {allowed}.")
