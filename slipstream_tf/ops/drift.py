"""Row drift: the distance of embedding rows from their snapshot."""

import tensorflow as tf

from slipstream_tf._utils.errors import require_choice
from slipstream_tf.config import DRIFT_METRICS
from slipstream_tf.ops import _loader


def row_drift(current: tf.Tensor, snapshot: tf.Tensor, metric: str = "linf") -> tf.Tensor:
    """Returns the distance of each row from its snapshot.

    If a row contains a NaN or an infinity in either input, its drift is not finite, so that it is
    never below a threshold. The op has no gradient. Source: Slipstream, arXiv 2404.04270, snapshot
    block.

    Args:
        current: float32 [rows, dim], the current rows.
        snapshot: float32 [rows, dim], the same rows at the start of the window.
        metric: "linf" is max_j |current_j - snapshot_j|, as in the paper. "l2" is ||current -
            snapshot||.

    Returns:
        float32 [rows], in the unit of the rows.

    Raises:
        ValueError: `metric` is unknown, or the static shapes differ.
        TypeError: An input is not float32.
        tf.errors.InvalidArgumentError: The shapes differ at run time.
    """
    require_choice("metric", metric, DRIFT_METRICS, "row_drift")
    current = _float_matrix(current, "current")
    snapshot = _float_matrix(snapshot, "snapshot")
    if not current.shape.is_compatible_with(snapshot.shape):
        raise ValueError(
            f"Invalid `snapshot`: shape {snapshot.shape} for row_drift. Expected the shape of "
            f"`current`, {current.shape}."
        )
    return _loader.library().slipstream_row_drift(current=current, snapshot=snapshot, metric=metric)


def _float_matrix(value: tf.Tensor, name: str) -> tf.Tensor:
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype != tf.float32:
        raise TypeError(
            f"Invalid `{name}`: dtype {tensor.dtype.name} for row_drift. Expected float32."
        )
    if tensor.shape.rank not in (None, 2):
        raise ValueError(
            f"Invalid `{name}`: shape {tensor.shape} for row_drift. Expected a shape [rows, dim]."
        )
    return tensor


tf.no_gradient("SlipstreamRowDrift")
