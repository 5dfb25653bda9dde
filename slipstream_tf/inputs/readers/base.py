"""What readers share. In: blocks of inputs, from a reader of a format. Out: batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from slipstream_tf.errors import require_choice, require_integer
from slipstream_tf.inputs.bad_lines import BadLines
from slipstream_tf.inputs.readers.passes import Passes
from slipstream_tf.inputs.readers.rows import Rows, in_batches
from slipstream_tf.inputs.spec import PARTS, DataSpec


class BatchReader:
    """A `Reader` of blocks that a subclass gives; the subclass sets `spec`."""

    spec: DataSpec

    def __init__(
        self,
        batch_size: int,
        *,
        part: str | None = None,
        strict: bool = False,
        drop_remainder: bool = False,
        max_inputs: int | None = None,
        ids: bool = False,
    ):
        """Checks what all readers are asked for.

        Args:
            batch_size: inputs of a batch.
            part: "train", "test" or None for all inputs.
            strict: make the first malformed line an error instead of leaving it out.
            drop_remainder: leave out a last batch that is not full.
            max_inputs: stop after so many inputs, or None.
            ids: add features["id"], int64 [batch].

        Raises:
            ValueError: an argument is out of its range.
        """
        place = type(self).__name__
        require_integer("batch_size", batch_size, 1, None, place)
        if part is not None:
            require_choice("part", part, PARTS, place)
        if max_inputs is not None:
            require_integer("max_inputs", max_inputs, 1, None, place)
        self.bad_lines = BadLines(strict)
        self._batch_size, self._drop_remainder = batch_size, drop_remainder
        self._part, self._max_inputs, self._ids = part, max_inputs, ids
        self._passes = Passes(self._batches)

    def dataset(self) -> tf.data.Dataset:
        """Returns the batches; each iteration is a pass of its own."""
        batch = self._batch_size if self._drop_remainder else None
        features = {"keys": self._key_spec(batch)}
        if self.spec.num_dense:
            features["dense"] = tf.TensorSpec([batch, self.spec.num_dense], tf.float32)
        if self._ids:
            features["id"] = tf.TensorSpec([batch], tf.int64)
        return self._passes.dataset((features, tf.TensorSpec([batch], tf.float32)))

    def _key_spec(self, batch: int | None) -> Any:
        return tf.TensorSpec([batch, len(self.spec.fields)], tf.int64)

    def _blocks(self, number: int) -> Iterator[Rows]:
        """Yields the inputs of a pass in order; passes are counted from 0."""
        raise NotImplementedError

    def _batches(self, number: int = 0) -> Iterator[Any]:
        for rows in in_batches(self._blocks(number), self._batch_size, self._drop_remainder):
            yield rows.element()
