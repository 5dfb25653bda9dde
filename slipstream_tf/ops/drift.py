"""Row drift: how far embedding rows have moved from their snapshot."""

import numpy as np
import tensorflow as tf

from slipstream_tf.ops import _loader

METRICS = ("linf", "l2", "relative")


def row_drift(
    current: tf.Tensor, snapshot: tf.Tensor, metric: str = "linf", epsilon: float = 1e-12
) -> tf.Tensor:
    """Distance of each row from its snapshot (Slipstream, arXiv 2404.04270, snapshot block).

    A row with a NaN or an infinity in either input has a non-finite drift, so that it never counts
    as below a threshold. The op has no gradient.

    Args:
      current: float32 [rows, dim], the rows as they are now.
      snapshot: float32 [rows, dim], the same rows at the start of the window.
      metric: "linf" is max_j |current_j - snapshot_j| (the paper's), "l2" is
        ||current - snapshot||, "relative" is ||current - snapshot|| / (||snapshot|| + epsilon).
      epsilon: positive; read by "relative" only.

    Returns:
      float32 [rows], in the rows' own unit ("relative": a ratio).

    Raises:
      ValueError: `metric` is unknown, `epsilon` is not positive and finite, or the shapes are known
        to differ.
      TypeError: an input is not float32.
      tf.errors.InvalidArgumentError: the shapes differ, seen at run time.
    """
    if metric not in METRICS:
        raise ValueError(f"Invalid `metric`: {metric!r}. Use one of {METRICS}.")
    if not 0 < epsilon < float("inf"):
        raise ValueError(f"Invalid `epsilon`: {epsilon!r}. Use a positive finite number.")
    current = _float_matrix(current, "current")
    snapshot = _float_matrix(snapshot, "snapshot")
    if not current.shape.is_compatible_with(snapshot.shape):
        raise ValueError(
            f"`current` has the shape {current.shape} but `snapshot` has {snapshot.shape}. "
            "Both must be the same [rows, dim]."
        )
    return _loader.library().slipstream_row_drift(
        current=current, snapshot=snapshot, metric=metric, epsilon=epsilon
    )


def signal(net: np.ndarray, squared_update_lengths: np.ndarray) -> np.ndarray:
    """Net squared drift over the sum of squared update lengths.

    The op of `ops.table.measure` computes the same, bit for bit.

    About 1 for a random walk and about n for n equal updates in one direction; a row that was not
    updated gives 0.

    Args:
        net: float32 [n], l2 distance from the snapshot.
        squared_update_lengths: float32 [n], sum of squared update lengths since then.

    Returns:
        float32 [n]; not finite where an argument is not.
    """
    net = np.asarray(net, np.float64)
    squares = np.asarray(squared_update_lengths, np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = net**2 / squares
        # A row that moved without an update was replaced by an import.
        ratio = np.where(net == 0.0, np.where(np.isfinite(squares), 0.0, np.nan), ratio)
        return ratio.astype(np.float32)


def _float_matrix(value: tf.Tensor, name: str) -> tf.Tensor:
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype != tf.float32:
        raise TypeError(f"Invalid `{name}`: dtype {tensor.dtype.name}. Use float32 [rows, dim].")
    if tensor.shape.rank not in (None, 2):
        raise ValueError(f"Invalid `{name}`: shape {tensor.shape}. Use float32 [rows, dim].")
    return tensor


tf.no_gradient("SlipstreamRowDrift")
