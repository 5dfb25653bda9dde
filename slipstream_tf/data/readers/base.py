"""Base classes of readers, with datasets that save their position.

TensorFlow cannot save the position of a `Dataset.from_generator`, because only Python knows it.
Here, the iterator holds the number of the pass and the index of its next batch, therefore both are
saved with it. A restored iterator reads the pass again up to this batch.
"""

import collections
import copy
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from slipstream_tf._compat import record_batch_size
from slipstream_tf._utils.errors import require_choice, require_integer
from slipstream_tf.data.spec import PARTS, BadLines, DataSpec

# A file is divided into runs of `PART_RUN` examples. In every `PART_PERIOD` consecutive runs, the
# last one is for testing and the others are for training. The run before the last one is also for
# validation, and can be held out from training.
PART_RUN = 100
PART_PERIOD = 10
# Maximum number of open passes. An abandoned pass would keep its files open, therefore the least
# recently used pass is closed. If it continues later, it is read again.
_MAX_OPEN = 4
# `Rows`, or an Arrow table.
_Block = TypeVar("_Block", bound=Sized)


@dataclasses.dataclass
class Rows:
    """Holds labels, dense values and keys of examples.

    `label` is float32 [n], `dense` is float32 [n, num_dense], and `keys` is int64 [n, fields] or a
    dictionary by field name.
    """

    label: np.ndarray
    dense: np.ndarray
    keys: Any

    def __len__(self) -> int:
        return len(self.label)

    def take(self, index: Any) -> "Rows":
        """Returns the rows at `index` (a slice, a mask or positions)."""
        return Rows(self.label[index], self.dense[index], self.keys[index])

    def slice(self, first: int, count: int) -> "Rows":
        """Returns at most `count` rows, starting at row `first`."""
        return self.take(slice(first, first + count))

    @classmethod
    def join(cls, blocks: "Sequence[Rows]") -> "Rows":
        """Concatenates rows."""
        return cls(
            np.concatenate([b.label for b in blocks]),
            np.concatenate([b.dense for b in blocks]),
            np.concatenate([b.keys for b in blocks]),
        )

    def element(self) -> Any:
        """Returns (features, label), one element of a dataset."""
        features = {"keys": self.keys}
        if self.dense.shape[1]:
            features["dense"] = self.dense
        return features, self.label


def is_in_part(
    first: int, count: int, part: str | None, hold_out: bool = False, run: int = PART_RUN
) -> np.ndarray:
    """Returns a mask of the examples that belong to a part.

    The mask depends only on their positions in a file.

    Args:
        first: Position of the first example, from 0.
        count: Number of consecutive examples.
        part: `"train"`, `"valid"`, `"test"`, or None for all examples.
        hold_out: Whether to exclude the examples of `"valid"` from `"train"`.
        run: Number of consecutive examples in the same part.

    Returns:
        bool [count].
    """
    if part is None:
        return np.ones(count, bool)
    phase = (np.arange(first, first + count) // run) % PART_PERIOD
    of_part = {"test": phase == PART_PERIOD - 1, "valid": phase == PART_PERIOD - 2}
    if part in of_part:
        return of_part[part]
    return ~(of_part["test"] | of_part["valid"]) if hold_out else ~of_part["test"]


def in_batches(blocks: Iterable[Rows], batch_size: int) -> Iterator[Rows]:
    """Regroups blocks of any size into batches, in order.

    Args:
        blocks: Blocks with keys as arrays.
        batch_size: Number of examples in a batch. The last batch may be smaller.
    """
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
    """Numbers the passes of a reader from 0 and provides their batches.

    Args:
        begin: Called with the number of a pass. Returns an iterator over its batches, which are
            nested structures of arrays. The same number must give the same batches.
    """

    def __init__(self, begin: Callable[[int], Iterator[Any]]) -> None:
        self._begin = begin
        self._begun = 0
        # Number of a pass -> (its batches, index of the next batch), most recently used last.
        self._open: collections.OrderedDict[int, tuple[Iterator[Any], int]] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def dataset(self, output_signature: Any) -> tf.data.Dataset:
        """Returns a dataset of the batches.

        Each iteration over the dataset is another pass.

        A restored iterator continues in the same pass at the same batch, also in another process.

        Note: `inject_prefetch` and `map_parallelization` of
        `tf.data.Options.experimental_optimization` make TensorFlow read ahead. Batches that were
        read ahead are saved too. However, passes that were completely read ahead are not counted,
        so that a restored reader may repeat the order of a shuffled pass.

        Args:
            output_signature: Nested structure of `tf.TensorSpec` that describes a batch.
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
                is_present, *parts = tf.numpy_function(next_batch, [number, index], kinds)
                is_present.set_shape([])
                for part, spec in zip(parts, specs, strict=True):
                    part.set_shape(spec.shape)
                return is_present, tf.nest.pack_sequence_as(output_signature, parts)

            indices = tf.data.Dataset.counter()
            return indices.map(read).take_while(lambda is_present, _: is_present)

        @tf.autograph.experimental.do_not_convert
        def begin(_: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(self._next_pass, [], tf.int64), [])

        @tf.autograph.experimental.do_not_convert
        def batch_of(state: tf.Tensor, element: Any) -> Any:
            return state, element[1]

        options = tf.data.Options()
        # Python functions count as stateful. Their state is restored from the saved numbers.
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        read = tf.data.Dataset.from_tensors(0).map(begin).flat_map(batches)
        # `scan` instead of `map`, because tf.data runs a stateless map in parallel, which would
        # read ahead.
        return read.scan(0, batch_of).with_options(options)

    def _next_pass(self) -> np.int64:
        with self._lock:
            self._begun += 1
            return np.int64(self._begun - 1)

    def _batch(self, number: int, index: int) -> Any | None:
        """Returns a batch of a pass, or None after the last batch."""
        with self._lock:
            batches, position = self._open.pop(number, (None, 0))
            # A restored iterator may be in a pass that this process has not begun.
            self._begun = max(self._begun, number + 1)
        if batches is None or position > index:
            batches, position = self._begin(number), 0
        batch = None
        for _ in range(position, index + 1):
            batch = next(batches, None)
        if batch is not None:
            with self._lock:
                self._open[number] = batches, index + 1
                if len(self._open) > _MAX_OPEN:
                    self._open.popitem(last=False)
        return batch


class BatchReader:
    """Base class of readers: splits blocks of examples into batches.

    A subclass sets `spec` and implements `_blocks`.

    Attributes:
        spec: Description of the features.
        bad_lines: Counts of the malformed lines that the last pass skipped.
    """

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
            batch_size: Number of examples in a batch.
            part: `"train"`, `"valid"`, `"test"`, or None for all examples.
            hold_out: Whether to exclude the examples of `"valid"` from `"train"`.
            strict: Whether the first malformed line raises an error. By default, malformed lines
                are skipped and counted.

        Raises:
            ValueError: If an argument is out of range.
        """
        place = type(self).__name__
        require_integer("batch_size", batch_size, 1, None, place)
        if part is not None:
            require_choice("part", part, PARTS, place)
        self.bad_lines = BadLines(strict)
        self._batch_size, self._part, self._hold_out = batch_size, part, hold_out
        self._part_run = PART_RUN
        self._passes = Passes(self._batches)

    def dataset(self) -> tf.data.Dataset:
        """Returns a dataset of the batches.

        Each iteration over the dataset is another pass.
        """
        features = {"keys": self._key_spec()}
        if self.spec.num_dense:
            features["dense"] = tf.TensorSpec([None, self.spec.num_dense], tf.float32)
        dataset = self._passes.dataset((features, tf.TensorSpec([None], tf.float32)))
        dataset = record_batch_size(dataset, self._batch_size)
        if self.spec.num_examples is None:
            return dataset
        batches = -(-self.spec.num_examples // self._batch_size)
        return dataset.apply(tf.data.experimental.assert_cardinality(batches))

    def in_batches_of(self, batch_size: int) -> "BatchReader":
        """Returns a reader of the same examples with another batch size."""
        other = copy.copy(self)
        other._batch_size = require_integer("batch_size", batch_size, 1, None, type(self).__name__)
        other._passes = Passes(other._batches)
        return other

    def _key_spec(self) -> Any:
        return tf.TensorSpec([None, len(self.spec.fields)], tf.int64)

    def _blocks(self, number: int) -> Iterator[Rows]:
        """Yields the examples of a pass in order.

        Passes are counted from 0.
        """
        raise NotImplementedError

    def _is_wanted(self, first: int, count: int) -> np.ndarray:
        """Returns a mask of the examples in this reader's part; see `is_in_part`."""
        return is_in_part(first, count, self._part, self._hold_out, self._part_run)

    def _with_bad_lines(self, blocks: Iterable[_Block]) -> Iterator[_Block]:
        """Yields nonempty blocks of a pass; reports malformed lines at the end."""
        self.bad_lines.reset()
        try:
            yield from (block for block in blocks if len(block))
        finally:
            # Also reached if the consumer stops early or the data is damaged.
            self.bad_lines.report()

    def _batches(self, number: int = 0) -> Iterator[Any]:
        for rows in in_batches(self._blocks(number), self._batch_size):
            yield rows.element()
