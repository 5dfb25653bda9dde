"""Batches of any structure: their size, and what a component may be."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf._compat import is_sized_by_reader, told_batch_size
from slipstream_tf._utils.errors import invalid
from slipstream_tf.ops.features import num_rows


def static_batch_size(element_spec: Any) -> int | None:
    """Returns the batch size that a component's shape tells, or None.

    Args:
        element_spec: of a dataset whose elements are batches.

    Raises:
        ValueError: a component has no batch dimension, or is no tensor, dense, ragged or sparse.
    """
    size = None
    for component in tf.nest.flatten(element_spec):
        if not isinstance(component, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            kind = type(component).__name__
            raise invalid("dataset", kind, "a component", "dense, ragged and sparse tensors")
        if component.shape.rank == 0:
            raise invalid("dataset", component, "a component", "batches: a first dimension")
        if component.shape.rank is not None and component.shape[0] is not None:
            size = int(component.shape[0])
    return size


@dataclasses.dataclass(frozen=True)
class Sized:
    """A data set of batches and what is known of their sizes, without reading any.

    Attributes:
        dataset: the data set. Where `most` rests on what was given to `.batch(n)`, it raises an
            error at a batch that is larger.
        size: inputs of a batch that is made of them; None: not known.
        batches: of `size` in one pass, if nothing is left out; None: not known. Where the batches
            do not tell their size, they are taken to have this one.
        most: the same, but never too few.
        given: inputs of a batch of `dataset`, as it tells or was told; None: not known.
    """

    dataset: tf.data.Dataset
    size: int | None
    batches: int | None
    most: int | None
    given: int | None


def sized(dataset: tf.data.Dataset, batch_size: int | None, is_refilled: bool = True) -> Sized:
    """Finds out how many batches there are, and of how many inputs; no element is made.

    Args:
        dataset: its elements are batches.
        batch_size: inputs of a batch that is made of them; None: that of `dataset`, as its
            element_spec tells it or as it was given to `.batch(n)`, `.rebatch(n)` or a reader.
        is_refilled: whether batches are refilled; else they stay as they are where `batch_size` is
            None.

    Raises:
        ValueError: it is no data set, or its elements are no batches.
    """
    if not isinstance(dataset, tf.data.Dataset):
        example = "tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(y)).batch(128)"
        allowed = f"a tf.data.Dataset of batches; of arrays: {example}"
        raise invalid("dataset", type(dataset).__name__, "Slipstream.apply", allowed)
    static = static_batch_size(dataset.element_spec)
    told = told_batch_size(dataset) if static is None else None
    size = static if batch_size is None else batch_size
    if size is None and is_refilled:
        size = told
    is_told = told is not None and told == size
    before = static if not is_told else told
    cardinality = int(dataset.cardinality().numpy())
    batches = most = None
    if cardinality >= 0:
        known = before or told
        batches = cardinality if not (known and size) else math.ceil(cardinality * known / size)
        most = math.ceil(cardinality * before / size) if before and size else None
    if told is not None and is_told and not is_sized_by_reader(dataset):
        dataset = dataset.map(functools.partial(_require_at_most, told))
    return Sized(dataset, size, batches, most, static or told)


@tf.autograph.experimental.do_not_convert
def _require_at_most(size: int, *element: Any) -> Any:
    rows = num_rows(tf.nest.flatten(element)[0])
    message = (
        f"A batch has more inputs than the {size} that were told, as by .batch({size}): give "
        "Slipstream.apply the batch_size that the batches have after .map."
    )
    with tf.control_dependencies([tf.debugging.assert_less_equal(rows, np.int64(size), message)]):
        same = tf.nest.map_structure(tf.identity, element, expand_composites=True)
    return same if len(element) > 1 else same[0]


def call_at(dataset: tf.data.Dataset, batch: int, function: Callable[[], None]) -> tf.data.Dataset:
    """Returns the data set, which calls a function in Python when it gives one of its batches.

    Args:
        dataset: of any elements.
        batch: number of the batch, from 0; of no other is Python entered.
        function: called once per iteration.
    """

    def call() -> np.int64:
        function()
        return np.int64(0)

    @tf.autograph.experimental.do_not_convert
    def check(index: tf.Tensor, element: Any) -> Any:
        tf.cond(
            tf.equal(index, batch),
            lambda: tf.numpy_function(call, [], tf.int64),
            lambda: tf.constant(0, tf.int64),
        )
        return element

    return dataset.enumerate().map(check)


def chosen_rows(element: Any, is_chosen: tf.Tensor) -> Any:
    """Returns the rows of each component of a batch that a bool [batch] chooses."""
    return rows_of(element, tf.where(is_chosen)[:, 0])


def rows_of(element: Any, rows: tf.Tensor) -> Any:
    """Returns rows of each component of a batch; rows: int64 [rows], ascending."""

    def choose(component: Any) -> Any:
        if not isinstance(component, tf.SparseTensor):
            return tf.gather(component, rows)
        # Of a row that is not chosen the number is -1.
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
