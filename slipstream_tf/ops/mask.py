"""Removes the rows of some keys from sparse gradients.

A `KeySet` contains the keys to mask, for example the saturated keys of a table. `mask_gradients`
removes their rows from a `tf.IndexedSlices` instead of setting them to zero. The ops work on CPU
and GPU, in graph and eager mode.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from slipstream_tf.ops import _loader


class KeySet:
    """A set of int64 keys that ops read at run time.

    Replacing the keys causes no retracing. The C++ resource is released with the last object or
    `tf.function` that uses it.

    Attributes:
        handle: Scalar resource handle, for the ops.
    """

    def __init__(self, device: str | None = None):
        """Creates an empty set.

        Args:
            device: Device of the gradients to mask, for example the `device` of a variable. None
                means the default placement of TensorFlow.
        """
        with tf.init_scope(), tf.device(device):
            self.handle = _loader.library().slipstream_key_set()

    def assign(self, keys: Any) -> tf.Operation | None:
        """Replaces the keys of the set.

        Args:
            keys: int64 [n]. Any value is allowed, and duplicates are ignored.

        Raises:
            ValueError: The keys are not integers, or not a vector.
            tf.errors.ResourceExhaustedError: There is not enough memory.
        """
        with tf.device("CPU:0"):
            keys = tf.convert_to_tensor(keys, tf.int64)
        return _loader.library().slipstream_key_set_assign(handle=self.handle, keys=keys)


class MaskedGradients(NamedTuple):
    """Result of `mask_gradients`.

    Attributes:
        slices: The remaining rows, with the `dense_shape` of the input.
        masked: int64 scalar, number of removed rows.
        offered: int64 scalar, number of rows before masking, after deduplication.
    """

    slices: tf.IndexedSlices
    masked: tf.Tensor
    offered: tf.Tensor


def mask_gradients(
    gradients: tf.IndexedSlices, masked_keys: KeySet, deduplicate: bool = True
) -> MaskedGradients:
    """Removes the rows of the keys in a set.

    Removed rows are not read. Values of other rows that are not finite are passed through. The
    result is bitwise reproducible. GPUs compute the same bits as CPUs, except for the sign and
    payload of NaN, and for subnormal numbers, which TensorFlow's CPU threads replace by zero. The
    op has no gradient.

    Args:
        gradients: Indices int32 or int64 [n], values float32 [n, ...].
        masked_keys: The keys of the rows to remove.
        deduplicate: Whether to sum the rows of each key first, in the order of the input. More than
            256 rows of a key are summed in chunks of 256, and then the sums of the chunks in order.
            The remaining indices are then ascending and unique. If not, all rows are separate and
            their order is kept.

    Returns:
        The remaining slices and the numbers of rows.

    Raises:
        TypeError: `gradients` is not a `tf.IndexedSlices` or has another dtype.
        ValueError: The static shapes do not fit.
        tf.errors.InvalidArgumentError: The shapes do not fit at run time.
    """
    if not isinstance(gradients, tf.IndexedSlices):
        raise TypeError(
            f"Invalid `gradients`: {type(gradients).__name__} for mask_gradients. Expected a "
            "tf.IndexedSlices, for example the gradient of tf.gather or of an embedding layer."
        )
    if gradients.values.dtype != tf.float32 or gradients.indices.dtype not in (tf.int32, tf.int64):
        raise TypeError(
            f"Invalid `gradients`: values of {gradients.values.dtype.name}, indices of "
            f"{gradients.indices.dtype.name} for mask_gradients. Expected float32 values and int32 "
            "or int64 indices."
        )
    _require_shapes(gradients.indices.shape, gradients.values.shape)
    result = _loader.library().slipstream_mask_gradients(
        handle=masked_keys.handle,
        keys=gradients.indices,
        gradients=gradients.values,
        deduplicate=deduplicate,
    )
    slices = tf.IndexedSlices(result.kept_gradients, result.kept_keys, gradients.dense_shape)
    return MaskedGradients(slices, result.masked, result.offered)


def _require_shapes(indices: tf.TensorShape, values: tf.TensorShape) -> None:
    is_compatible = indices.rank in (None, 1) and values.rank != 0
    if is_compatible and indices.rank is not None and values.rank is not None:
        is_compatible = indices[:1].is_compatible_with(values[:1])
    if not is_compatible:
        raise ValueError(
            f"Invalid `gradients`: indices of shape {indices} with values of shape {values} for "
            "mask_gradients. Expected indices [n] and values [n, ...]."
        )


tf.no_gradient("SlipstreamMaskGradients")
