"""Typed wrappers of the ops that connect the lookups of a training step with one update."""

from collections.abc import Sequence

import tensorflow as tf

from slipstream_tf.ops import _loader


def row_source(
    anchors: Sequence[tf.Tensor], store: int, apply: str, previous: Sequence[tf.Tensor] = ()
) -> tf.Tensor:
    """Returns the source of all rows of a store, from which the lookups of a step depend.

    TensorFlow sums the gradients of these lookups and then calls the gradient function of the op
    once.

    Args:
        anchors: Values of the trainable variables that receive the gradient, float32 [].
        store: Number of the store in this process.
        apply: `"backward"` or `"step"`.
        previous: An earlier source of the store, to which a tape that has recorded it passes the
            gradients on; or empty.

    Returns:
        A scalar variant.
    """
    op = _loader.library().slipstream_row_source
    return op(anchors=list(anchors), previous=list(previous), store=store, apply=apply)


def connect_rows(
    source: tf.Tensor,
    plan: tf.Tensor,
    anchors: Sequence[tf.Tensor],
    pooled: Sequence[tf.Tensor],
    ranks: int,
) -> list[tf.Tensor]:
    """Connects the gradients of a lookup with the source and returns the pooled vectors.

    Args:
        source: Result of `row_source`.
        plan: Plan of the lookup.
        anchors: Values of further variables of the layer, which receive the gradient 0.
        pooled: The pooled vectors of the lookup.
        ranks: Divisor of the gradients.
    """
    op = _loader.library().slipstream_connect_rows
    connected = op(
        source=source, plan=plan, anchors=list(anchors), pooled=list(pooled), ranks=ranks
    )
    return list(connected)


def row_gradients(plan: tf.Tensor, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """Packs the gradients of a lookup into a scalar variant.

    The sum of such tensors has the gradients of all lookups. It is passed as the plan of an update,
    without gradients.

    Args:
        plan: Plan of the lookup.
        gradients: float32 gradients of the pooled vectors.
    """
    op = _loader.library().slipstream_row_gradients
    return op(plan=plan, gradients=list(gradients))
