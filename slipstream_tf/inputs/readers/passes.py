"""Passes of a reader written in Python, as data sets whose place TensorFlow can save.

In: a function that begins a pass. Out: a data set. A `Dataset.from_generator` cannot be saved:
where it stands is known to Python alone. Here, the number of the pass and that of its next batch
are kept by the iterator, and are saved with it; what goes on from them reads the pass again up to
there.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

# A pass that was begun and given up would keep its files open; the oldest are closed, and read
# again if they go on after all.
_MOST_OPEN = 4


class Passes:
    """The passes of a reader, counted from 0, each in batches.

    Args:
        begin: called with the number of a pass; gives its batches, always the same ones: nested
            structures of arrays.
    """

    def __init__(self, begin: Callable[[int], Iterator[Any]]) -> None:
        self._begin = begin
        self._begun = 0
        # Number of a pass -> (its batches, number of the next one), latest used last.
        self._open: collections.OrderedDict[int, tuple[Iterator[Any], int]] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def dataset(self, output_signature: Any) -> tf.data.Dataset:
        """Returns the batches; each iteration is a pass of its own.

        A saved iterator goes on in the pass and at the batch where it was, in another process, too.
        What TensorFlow reads ahead by itself (`inject_prefetch` and `map_parallelization` of
        `tf.data.Options.experimental_optimization`) is saved, too; but passes that were read ahead
        to their end are not counted, so that shuffled ones may come again.

        Args:
            output_signature: nested structure of `tf.TensorSpec`, as the batches have it.
        """
        specs = tf.nest.flatten(output_signature)

        def next_batch(number: np.int64, index: np.int64) -> list[np.ndarray]:
            batch = self._batch(int(number), int(index))
            if batch is None:
                shapes = ([size or 0 for size in spec.shape] for spec in specs)
                empty = [
                    np.zeros(shape, spec.dtype.as_numpy_dtype)
                    for shape, spec in zip(shapes, specs, strict=True)
                ]
                return [np.zeros((), bool), *empty]
            parts = zip(tf.nest.flatten(batch), specs, strict=True)
            converted = [np.asarray(part, spec.dtype.as_numpy_dtype) for part, spec in parts]
            return [np.ones((), bool), *converted]

        def batches(number: tf.Tensor) -> tf.data.Dataset:
            def read(index: tf.Tensor) -> Any:
                kinds = [tf.bool, *(spec.dtype for spec in specs)]
                is_there, *parts = tf.numpy_function(next_batch, [number, index], kinds)
                is_there.set_shape([])
                for part, spec in zip(parts, specs, strict=True):
                    part.set_shape(spec.shape)
                return is_there, tf.nest.pack_sequence_as(output_signature, parts)

            indices = tf.data.Dataset.counter()
            return indices.map(read).take_while(lambda is_there, _: is_there)

        number = tf.data.Dataset.from_tensors(0).map(
            lambda _: tf.ensure_shape(tf.numpy_function(self._next_pass, [], tf.int64), [])
        )
        options = tf.data.Options()
        # Functions in Python have a state, which is found again by the numbers.
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        read = number.flat_map(batches)
        # TensorFlow makes a `map` without a state parallel, and that reads ahead.
        alone = read.scan(0, lambda state, element: (state, element[1]))
        return alone.with_options(options)

    def _next_pass(self) -> np.int64:
        with self._lock:
            self._begun += 1
            return np.int64(self._begun - 1)

    def _batch(self, number: int, index: int) -> Any | None:
        """Returns a batch of a pass, or None after the last one."""
        with self._lock:
            batches, place = self._open.pop(number, (None, 0))
            # An iterator that was restored stands where this process has never been.
            self._begun = max(self._begun, number + 1)
        if batches is None or place > index:
            batches, place = self._begin(number), 0
        batch = None
        for _ in range(place, index + 1):
            batch = next(batches, None)
        if batch is not None:
            with self._lock:
                self._open[number] = batches, index + 1
                if len(self._open) > _MOST_OPEN:
                    self._open.popitem(last=False)
        return batch
