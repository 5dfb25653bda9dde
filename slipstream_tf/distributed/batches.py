"""Batches of no inputs, and data sets whose batches may be empty. In: an element of a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from slipstream_tf.errors import invalid


def element_of(spec: Any, parts: tuple[Any, ...]) -> Any:
    """Returns the element that `map` called a function with.

    Args:
        spec: `element_spec` of the data set.
        parts: the function's arguments: `map` unpacks tuples and nothing else.
    """
    return parts if isinstance(spec, tuple) else parts[0]


def map_in_step(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """`dataset.map(function)` whose elements are made when they are pulled, and no sooner.

    tf.data makes those of a map without side effects some elements ahead, by itself, and with them
    what is upstream: inputs would be classified before a window ends, and ranks would ask each
    other for batches that nobody has pulled.
    """

    def apply(*parts: Any) -> Any:
        # The time is of no use, but reading it counts as a side effect.
        with tf.control_dependencies([tf.timestamp()]):
            return tf.nest.map_structure(tf.identity, function(*parts), expand_composites=True)

    return dataset.map(apply)


def no_inputs(spec: Any, place: str) -> Any:
    """Returns the component of a batch of no inputs.

    Args:
        spec: of the component.
        place: who asks, for errors.

    Raises:
        ValueError: it is neither dense nor ragged, or has no batch dimension.
    """
    allowed = "a dense tensor or a RaggedTensor with a batch dimension"
    if isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 1:
        flat = tf.zeros([0, *_known(spec.shape[2:])], spec.dtype)
        return tf.RaggedTensor.from_row_splits(flat, tf.zeros([1], spec.row_splits_dtype))
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        raise invalid("dataset", spec, place, allowed)
    if spec.dtype == tf.string:
        return tf.fill([0, *_known(spec.shape[1:])], "")
    return tf.zeros([0, *_known(spec.shape[1:])], spec.dtype)


def loosen(element: Any) -> Any:
    """Forgets the static sizes of batches and of ragged widths, which differ in an empty batch."""

    def loosen_part(part: Any) -> Any:
        if isinstance(part, tf.RaggedTensor):
            flat = loosen_part(part.flat_values)
            return part.with_flat_values(flat).with_row_splits_dtype(tf.int64)
        shape = [None, *part.shape[1:]]
        return tf.compat.v1.placeholder_with_default(part, shape)

    return tf.nest.map_structure(loosen_part, element)


def _known(shape: tf.TensorShape) -> list[int]:
    return [0 if size is None else size for size in shape]
