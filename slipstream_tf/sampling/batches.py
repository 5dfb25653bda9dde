"""Handles batches of any structure: finds batch sizes and selects rows."""

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf._compat import is_sized_by_reader, recorded_batch_size
from slipstream_tf._utils.errors import invalid
from slipstream_tf.ops.features import num_rows


def static_batch_size(element_spec: Any) -> int | None:
    """Returns the static batch size of a dataset, or None.

    Args:
        element_spec: The `element_spec` of a dataset of batches.

    Raises:
        ValueError: If a component is not a dense, ragged or sparse tensor, or is a scalar.
    """
    size = None
    for component in tf.nest.flatten(element_spec):
        if not isinstance(component, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            kind = type(component).__name__
            allowed = "a dense, ragged or sparse tensor"
            raise invalid("dataset", kind, "a component of its elements", allowed)
        if component.shape.rank == 0:
            allowed = "a tensor with a batch dimension. Call .batch(n) on the dataset first"
            raise invalid("dataset", component, "a component of its elements", allowed)
        if component.shape.rank is not None and component.shape[0] is not None:
            size = int(component.shape[0])
    return size


@dataclasses.dataclass(frozen=True)
class Sized:
    """Holds a dataset of batches and its known sizes.

    The sizes are determined without reading the dataset.

    Attributes:
        dataset: The dataset. If its batch size was derived from `.batch(n)` and not from its
            shapes, iteration raises an error at a batch with more than n examples.
        size: Number of examples in an output batch, or None if unknown.
        batches: Number of output batches in one pass if no example is dropped, or None if unknown.
            An estimate if the sizes of the input batches are unknown: it assumes input batches of
            `size` examples.
        maximum: Upper bound of `batches`, or None if unknown.
        given: Number of examples in an input batch, or None if unknown.
    """

    dataset: tf.data.Dataset
    size: int | None
    batches: int | None
    maximum: int | None
    given: int | None


def sized(dataset: tf.data.Dataset, batch_size: int | None, is_refilled: bool = True) -> Sized:
    """Determines batch size and number of batches without reading an element.

    Args:
        dataset: Dataset of batches.
        batch_size: Number of examples in an output batch. None takes the batch size of `dataset`:
            from its `element_spec`, or from the `.batch(n)`, `.rebatch(n)` or reader that made it.
        is_refilled: Whether batches are refilled after examples were dropped. If False and
            `batch_size` is None, batches keep their sizes.

    Returns:
        The dataset with its sizes.

    Raises:
        ValueError: If `dataset` is not a `tf.data.Dataset` or its elements are not batches.
    """
    if not isinstance(dataset, tf.data.Dataset):
        example = "tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(y)).batch(128)"
        allowed = f"a tf.data.Dataset of batches. For arrays, pass {example}"
        raise invalid("dataset", type(dataset).__name__, "Slipstream.apply", allowed)
    static = static_batch_size(dataset.element_spec)
    recorded = recorded_batch_size(dataset) if static is None else None
    size = static if batch_size is None else batch_size
    if size is None and is_refilled:
        size = recorded
    keeps_recorded = recorded is not None and recorded == size
    before = static if not keeps_recorded else recorded
    cardinality = int(dataset.cardinality().numpy())
    batches = maximum = None
    if cardinality >= 0:
        known = before or recorded
        batches = cardinality if not (known and size) else math.ceil(cardinality * known / size)
        maximum = math.ceil(cardinality * before / size) if before and size else None
    if recorded is not None and keeps_recorded and not is_sized_by_reader(dataset):
        dataset = dataset.map(functools.partial(_require_at_most, recorded))
    return Sized(dataset, size, batches, maximum, static or recorded)


@tf.autograph.experimental.do_not_convert
def _require_at_most(size: int, *element: Any) -> Any:
    rows = num_rows(tf.nest.flatten(element)[0])
    message = (
        f"A batch has more than {size} examples, although .batch({size}) or the reader set this "
        "size. Pass the size of the batches after .map to Slipstream.apply(..., batch_size=...)."
    )
    with tf.control_dependencies([tf.debugging.assert_less_equal(rows, np.int64(size), message)]):
        same = tf.nest.map_structure(tf.identity, element, expand_composites=True)
    return same if len(element) > 1 else same[0]


def call_at(dataset: tf.data.Dataset, batch: int, function: Callable[[], None]) -> tf.data.Dataset:
    """Calls a Python function when the dataset produces one specific batch.

    Args:
        dataset: Dataset with elements of any structure.
        batch: Index of the batch, from 0. The other batches do not call into Python.
        function: Function without arguments. It is called once per iteration over the dataset.

    Returns:
        The same elements.
    """

    # TensorFlow keeps the function of a `tf.numpy_function` until the process ends. It must not
    # keep a model and its tables.
    reference = weakref.ref(function)

    def call() -> np.int64:
        if (referenced := reference()) is not None:
            referenced()
        return np.int64(0)

    @tf.autograph.experimental.do_not_convert
    def check(index: tf.Tensor, element: Any) -> Any:
        tf.cond(
            tf.equal(index, batch),
            lambda: tf.numpy_function(call, [], tf.int64),
            lambda: tf.constant(0, tf.int64),
        )
        return element

    checked = dataset.enumerate().map(check)
    checked._slipstream_calls = function
    return checked


def chosen_rows(element: Any, is_chosen: tf.Tensor) -> Any:
    """Returns a batch with the examples that the mask bool [batch] selects."""
    return rows_of(element, tf.where(is_chosen)[:, 0])


def rows_of(element: Any, rows: tf.Tensor) -> Any:
    """Returns a batch with selected examples.

    Args:
        element: Nested structure of dense, ragged and sparse tensors.
        rows: int64 [n], ascending positions of the examples in the batch.
    """

    def choose(component: Any) -> Any:
        if not isinstance(component, tf.SparseTensor):
            return tf.gather(component, rows)
        # Maps each old row number to its new number, or to -1 if the row is dropped.
        numbers = tf.tensor_scatter_nd_update(
            tf.fill(component.dense_shape[:1], tf.constant(-1, tf.int64)),
            rows[:, None],
            tf.range(tf.size(rows, tf.int64)),
        )
        row = tf.gather(numbers, component.indices[:, :1])
        kept = tf.sparse.retain(component, row[:, 0] >= 0)
        row = tf.boolean_mask(row, row[:, 0] >= 0)
        shape = tf.concat([[tf.size(rows, tf.int64)], kept.dense_shape[1:]], 0)
        return tf.SparseTensor(tf.concat([row, kept.indices[:, 1:]], 1), kept.values, shape)

    return tf.nest.map_structure(choose, element)
