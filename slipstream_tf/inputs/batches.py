"""Batches of any structure: their size, and what a component may be."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.errors import invalid


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


def batches_after(dataset: tf.data.Dataset, batch_size: int | None) -> int | None:
    """Batches of `batch_size` that a data set makes; None if it does not know its length.

    Where its batches do not tell their size, they are taken to have this one.
    """
    batches = int(dataset.cardinality().numpy())
    if batches < 0:
        return None
    before = static_batch_size(dataset.element_spec)
    if before is None or batch_size is None:
        return batches
    return math.ceil(batches * before / batch_size)


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
    rows = tf.where(is_chosen)[:, 0]

    def choose(component: Any) -> Any:
        if not isinstance(component, tf.SparseTensor):
            return tf.gather(component, rows)
        kept = tf.sparse.retain(component, tf.gather(is_chosen, component.indices[:, 0]))
        numbers = tf.cumsum(tf.cast(is_chosen, tf.int64), exclusive=True)
        row = tf.gather(numbers, kept.indices[:, :1])
        shape = tf.concat([[tf.size(rows, tf.int64)], kept.dense_shape[1:]], 0)
        return tf.SparseTensor(tf.concat([row, kept.indices[:, 1:]], 1), kept.values, shape)

    return tf.nest.map_structure(choose, element)


def num_rows(component: Any) -> tf.Tensor:
    """Returns the rows of a dense tensor, RaggedTensor or SparseTensor, int64 []."""
    if isinstance(component, tf.SparseTensor):
        return component.dense_shape[0]
    if isinstance(component, tf.RaggedTensor):
        return component.nrows(out_type=tf.int64)
    return tf.shape(component, out_type=tf.int64)[0]
