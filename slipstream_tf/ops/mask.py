"""Masking of sparse gradients: rows of the keys in a set are compacted away, not set to zero.

In: a `KeySet` (the saturated keys of a table, replaced once a window) and a `tf.IndexedSlices`.
Out: the slices that stay, and how many rows were left out. CPU and GPU; graph or eager.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from slipstream_tf.ops import _loader


class KeySet:
    """A set of int64 keys that steps read at run time: replacing it retraces nothing.

    The C++ resource lives as long as this object or a `tf.function` that uses it.

    Attributes:
        handle: scalar resource handle, for the ops.
    """

    def __init__(self, device: str | None = None):
        """Makes an empty set.

        Args:
            device: where the gradients will be masked, e.g. a variable's `device`. None: where
                TensorFlow would place an op.
        """
        with tf.init_scope(), tf.device(device):
            self.handle = _loader.library().slipstream_key_set()

    def assign(self, keys: Any) -> tf.Operation | None:
        """Replaces the content.

        Args:
            keys: int64 [n]; any value is a legal key, and one given twice counts once.

        Raises:
            ValueError: the keys are not integers, or no vector.
            tf.errors.ResourceExhaustedError: there is no memory for the set.
        """
        with tf.device("CPU:0"):
            keys = tf.convert_to_tensor(keys, tf.int64)
        return _loader.library().slipstream_key_set_assign(handle=self.handle, keys=keys)


class MaskedGradients(NamedTuple):
    """What `mask_gradients` returns.

    Attributes:
        slices: the rows that stay, with the `dense_shape` of the input.
        masked: int64 scalar, rows left out.
        offered: int64 scalar, rows before masking; with deduplication, different keys.
    """

    slices: tf.IndexedSlices
    masked: tf.Tensor
    offered: tf.Tensor


def mask_gradients(
    gradients: tf.IndexedSlices, masked_keys: KeySet, deduplicate: bool = True
) -> MaskedGradients:
    """Leaves out the rows of the keys in a set.

    Rows that are left out are not looked at, and values that are not finite are passed on in the
    others. The result depends on the inputs only, bit for bit. The op has no gradient.

    Args:
        gradients: indices int32 or int64 [n], values float32 [n, ...].
        masked_keys: the keys to leave out.
        deduplicate: whether rows of one key are summed first, in the order of the input; kept
            indices then ascend, each once. Otherwise every row is its own and the order is kept.

    Returns:
        The slices that stay and the counts of rows.

    Raises:
        TypeError: `gradients` is something else, or of another dtype.
        ValueError: the shapes are known to differ.
        tf.errors.InvalidArgumentError: the shapes differ, seen at run time.
    """
    if not isinstance(gradients, tf.IndexedSlices):
        raise TypeError(
            f"Invalid `gradients`: {type(gradients).__name__}. Use a tf.IndexedSlices, e.g. the "
            "gradient of tf.gather or of an embedding layer."
        )
    if gradients.values.dtype != tf.float32 or gradients.indices.dtype not in (tf.int32, tf.int64):
        raise TypeError(
            f"Invalid `gradients`: values of {gradients.values.dtype.name}, indices of "
            f"{gradients.indices.dtype.name}. Use float32 values and int32 or int64 indices."
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
            f"Invalid `gradients`: indices of shape {indices} with values of shape {values}. "
            "Use indices [n] and values [n, ...]."
        )


tf.no_gradient("SlipstreamMaskGradients")
