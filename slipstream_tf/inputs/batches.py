"""Batches of any structure: their size, and what a component may be."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from slipstream_tf.errors import invalid


def static_batch_size(element_spec: Any) -> int | None:
    """Returns the batch size that a component's shape tells, or None.

    Args:
        element_spec: of a dataset whose elements are batches.

    Raises:
        ValueError: a component has no batch dimension or is neither dense nor ragged.
    """
    size = None
    for component in tf.nest.flatten(element_spec):
        if not isinstance(component, (tf.TensorSpec, tf.RaggedTensorSpec)):
            kind = type(component).__name__
            raise invalid("dataset", kind, "a component", "dense tensors and RaggedTensors")
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


def num_rows(component: Any) -> tf.Tensor:
    """Returns the rows of a dense tensor or RaggedTensor, int64 []."""
    if isinstance(component, tf.RaggedTensor):
        return component.nrows(out_type=tf.int64)
    return tf.shape(component, out_type=tf.int64)[0]
