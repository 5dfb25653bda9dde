"""How rows of a bag become one vector, in TensorFlow's own ops.

The same as `cc_ops/core/lookup/pooling.h`.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from slipstream_tf.ops.features import PADDING_KEY, PackedFeatures


def pooled(
    packed: PackedFeatures,
    feature: int,
    combiner: str,
    gather: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Looks up and pools the rows of one feature.

    Args:
        packed: the keys of a batch.
        feature: index of the feature.
        combiner: "sum", "mean" or "sqrtn"; a bag whose divisor is 0 gives zeros.
        gather: int64 [n] -> float32 [n, dim].

    Returns:
        float32 [batch, dim].
    """
    keys = packed.keys[packed.attrs["feature_keys"][feature]]
    column = packed.attrs["feature_column"][feature]
    if column >= 0:
        return gather(keys[:, column])
    place = packed.attrs["feature_weights"][feature]
    weights = packed.weights[place] if place >= 0 else None
    splits = packed.attrs["feature_splits"][feature]
    if splits >= 0:
        return _pooled_ragged(keys, packed.row_splits[splits], weights, combiner, gather)
    if keys.shape.rank == 2:
        return _pooled_padded(keys, keys != PADDING_KEY, weights, combiner, gather)
    if weights is None:
        return gather(keys)
    # One key per input: -1 is a key like any other, as in a column.
    keys, weights = keys[:, tf.newaxis], weights[:, tf.newaxis]
    return _pooled_padded(keys, tf.ones_like(keys, tf.bool), weights, combiner, gather)


def _pooled_padded(
    keys: tf.Tensor,
    is_key: tf.Tensor,
    weights: tf.Tensor | None,
    combiner: str,
    gather: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Pools keys int64 [batch, width], of which bool [batch, width] are there."""
    shape = tf.shape(keys)
    rows = gather(tf.reshape(keys, [-1]))
    rows = tf.reshape(rows, [shape[0], shape[1], rows.shape[-1]])
    if weights is not None or combiner != "sum":
        used = tf.cast(is_key, tf.float32)
        if weights is not None:
            used = tf.where(is_key, weights, 0.0)
        divisor = tf.reduce_sum(_counted(used, combiner), axis=1)
        rows = rows * (used * _factor(divisor, combiner)[:, tf.newaxis])[..., tf.newaxis]
    return tf.reduce_sum(tf.where(is_key[..., tf.newaxis], rows, 0.0), axis=1)


def _pooled_ragged(
    keys: tf.Tensor,
    row_splits: tf.Tensor,
    weights: tf.Tensor | None,
    combiner: str,
    gather: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Pools keys int64 [total], those of input i from row_splits[i] to row_splits[i + 1]."""
    rows = gather(keys)
    batch = tf.size(row_splits) - 1
    inputs = tf.repeat(tf.range(batch), row_splits[1:] - row_splits[:-1])
    if weights is not None or combiner != "sum":
        used = tf.ones_like(keys, tf.float32) if weights is None else weights
        divisor = tf.math.unsorted_segment_sum(_counted(used, combiner), inputs, batch)
        rows = rows * (used * tf.gather(_factor(divisor, combiner), inputs))[:, tf.newaxis]
    return tf.math.unsorted_segment_sum(rows, inputs, batch)


def _counted(weights: tf.Tensor, combiner: str) -> tf.Tensor:
    return tf.square(weights) if combiner == "sqrtn" else weights


def _factor(divisor: tf.Tensor, combiner: str) -> tf.Tensor:
    if combiner == "sum":
        return tf.ones_like(divisor)
    return tf.math.divide_no_nan(1.0, tf.sqrt(divisor) if combiner == "sqrtn" else divisor)
