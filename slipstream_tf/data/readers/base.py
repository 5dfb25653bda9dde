"""What readers share. In: blocks of inputs, from a reader of a format. Out: batches of them.

The batches are data sets whose position TensorFlow can save. A `Dataset.from_generator` cannot be
saved: where it stands is known to Python alone. Here, the number of the pass and that of its next
batch are kept by the iterator, and are saved with it; what goes on from them reads the pass again
up to there.
"""

import collections
import copy
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from slipstream_tf._compat import tell_batch_size
from slipstream_tf._utils.errors import require_choice, require_integer
from slipstream_tf.data.spec import PARTS, BadLines, DataSpec

# Of ten consecutive runs of this many inputs, the last is for testing and the others for training,
# of which one is for validation where that is asked for.
PART_RUN = 100
PART_PERIOD = 10
# A pass that was begun and given up would keep its files open; the oldest are closed, and read
# again if they go on after all.
_MOST_OPEN = 4
# Rows, or a table of Arrow.
_Block = TypeVar("_Block")


@dataclasses.dataclass
class Rows:
    """Label float32 [n], dense float32 [n, num_dense], keys int64 [n, fields] (or by name)."""

    label: np.ndarray
    dense: np.ndarray
    keys: Any

    def __len__(self) -> int:
        return len(self.label)

    def take(self, index: Any) -> "Rows":
        """Returns the rows at `index` (a slice, a mask or positions)."""
        return Rows(self.label[index], self.dense[index], self.keys[index])

    def slice(self, first: int, count: int) -> "Rows":
        """Returns `count` rows from row `first` on, or fewer where they end."""
        return self.take(slice(first, first + count))

    @classmethod
    def join(cls, blocks: "Sequence[Rows]") -> "Rows":
        """Joins rows in order."""
        return cls(
            np.concatenate([b.label for b in blocks]),
            np.concatenate([b.dense for b in blocks]),
            np.concatenate([b.keys for b in blocks]),
        )

    def element(self) -> Any:
        """Returns (features, label), an element of a data set."""
        features = {"keys": self.keys}
        if self.dense.shape[1]:
            features["dense"] = self.dense
        return features, self.label


def is_in_part(first: int, count: int, part: str | None, hold_out: bool = False) -> np.ndarray:
    """Tells which inputs belong to a part, by their position in a file alone.

    Args:
        first: position of the first input, from 0.
        count: how many consecutive inputs.
        part: "train", "valid", "test" or None for all.
        hold_out: whether "valid" is left out of "train".

    Returns:
        bool [count].
    """
    if part is None:
        return np.ones(count, bool)
    run = (np.arange(first, first + count) // PART_RUN) % PART_PERIOD
    of_part = {"test": run == PART_PERIOD - 1, "valid": run == PART_PERIOD - 2}
    if part in of_part:
        return of_part[part]
    return ~(of_part["test"] | of_part["valid"]) if hold_out else ~of_part["test"]


def in_batches(blocks: Iterable[Rows], batch_size: int) -> Iterator[Rows]:
    """Cuts blocks of any sizes into batches, in order; the last one may be smaller."""
    waiting: list[Rows] = []
    count = 0
    for block in blocks:
        waiting.append(block)
        count += len(block)
        if count < batch_size:
            continue
        joined = Rows.join(waiting) if len(waiting) > 1 else block
        full = count // batch_size * batch_size
        for begin in range(0, full, batch_size):
            yield joined.slice(begin, batch_size)
        count -= full
        waiting = [joined.slice(full, count)] if count else []
    if count:
        yield Rows.join(waiting)


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
                shape_of = [[size or 0 for size in spec.shape] for spec in specs]
                empty = map(np.zeros, shape_of, (spec.dtype.as_numpy_dtype for spec in specs))
                return [np.zeros((), bool), *empty]
            parts = zip(tf.nest.flatten(batch), specs, strict=True)
            converted = [np.asarray(part, spec.dtype.as_numpy_dtype) for part, spec in parts]
            return [np.ones((), bool), *converted]

        @tf.autograph.experimental.do_not_convert
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

        @tf.autograph.experimental.do_not_convert
        def begin(_: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(self._next_pass, [], tf.int64), [])

        @tf.autograph.experimental.do_not_convert
        def batch_of(state: tf.Tensor, element: Any) -> Any:
            return state, element[1]

        options = tf.data.Options()
        # Functions in Python have a state, which is found again by the numbers.
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        read = tf.data.Dataset.from_tensors(0).map(begin).flat_map(batches)
        # TensorFlow makes a `map` without a state parallel, and that reads ahead.
        return read.scan(0, batch_of).with_options(options)

    def _next_pass(self) -> np.int64:
        with self._lock:
            self._begun += 1
            return np.int64(self._begun - 1)

    def _batch(self, number: int, index: int) -> Any | None:
        """Returns a batch of a pass, or None after the last one."""
        with self._lock:
            batches, position = self._open.pop(number, (None, 0))
            # An iterator that was restored stands where this process has never been.
            self._begun = max(self._begun, number + 1)
        if batches is None or position > index:
            batches, position = self._begin(number), 0
        batch = None
        for _ in range(position, index + 1):
            batch = next(batches, None)
        if batch is not None:
            with self._lock:
                self._open[number] = batches, index + 1
                if len(self._open) > _MOST_OPEN:
                    self._open.popitem(last=False)
        return batch


class BatchReader:
    """A `Reader` of blocks that a subclass gives; the subclass sets `spec`."""

    spec: DataSpec

    def __init__(
        self,
        batch_size: int,
        *,
        part: str | None = None,
        hold_out: bool = False,
        strict: bool = False,
    ):
        """Checks the arguments that all readers have.

        Args:
            batch_size: inputs of a batch.
            part: "train", "valid", "test" or None for all inputs.
            hold_out: whether "valid" is left out of "train".
            strict: make the first malformed line an error instead of leaving it out.

        Raises:
            ValueError: an argument is out of its range.
        """
        place = type(self).__name__
        require_integer("batch_size", batch_size, 1, None, place)
        if part is not None:
            require_choice("part", part, PARTS, place)
        self.bad_lines = BadLines(strict)
        self._batch_size, self._part, self._hold_out = batch_size, part, hold_out
        self._passes = Passes(self._batches)

    def dataset(self) -> tf.data.Dataset:
        """Returns the batches; each iteration is a pass of its own."""
        features = {"keys": self._key_spec()}
        if self.spec.num_dense:
            features["dense"] = tf.TensorSpec([None, self.spec.num_dense], tf.float32)
        dataset = self._passes.dataset((features, tf.TensorSpec([None], tf.float32)))
        dataset = tell_batch_size(dataset, self._batch_size)
        if self.spec.num_examples is None:
            return dataset
        batches = -(-self.spec.num_examples // self._batch_size)
        return dataset.apply(tf.data.experimental.assert_cardinality(batches))

    def in_batches_of(self, batch_size: int) -> "BatchReader":
        """Returns a reader of the same inputs in batches of another size."""
        other = copy.copy(self)
        other._batch_size = require_integer("batch_size", batch_size, 1, None, type(self).__name__)
        other._passes = Passes(other._batches)
        return other

    def _key_spec(self) -> Any:
        return tf.TensorSpec([None, len(self.spec.fields)], tf.int64)

    def _blocks(self, number: int) -> Iterator[Rows]:
        """Yields the inputs of a pass in order; passes are counted from 0."""
        raise NotImplementedError

    def _is_wanted(self, first: int, count: int) -> np.ndarray:
        """Tells which of consecutive inputs are of this part; see `is_in_part`."""
        return is_in_part(first, count, self._part, self._hold_out)

    def _with_bad_lines(self, blocks: Iterable[_Block]) -> Iterator[_Block]:
        """Yields the blocks of a pass, whose bad lines are counted and reported."""
        self.bad_lines.reset()
        try:
            yield from blocks
        finally:
            # Also where the reading stops early, by choice or at damaged data.
            self.bad_lines.report()

    def _batches(self, number: int = 0) -> Iterator[Any]:
        for rows in in_batches(self._blocks(number), self._batch_size):
            yield rows.element()
