"""Feature interactions of click models: pairwise dots and time attention."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.errors import require_integer


def pairwise_dots(vectors: tf.Tensor) -> tf.Tensor:
    """Computes the dot products of all pairs of different vectors, each once.

    The results are the entries below the diagonal of the [n, n] matrix of all dot products. Row i
    of that triangle has i entries and row n-i has n-i entries, so that row i followed by the
    reversed row n-i has n entries. The triangle is thus folded into a rectangle with rows of n
    entries, which takes one matrix product, one split and a select with a constant mask. A gather
    over [batch, n * n] with its scatter in the backward pass is far slower. TensorFlow's gradient
    of a product with itself takes two products. Therefore the backward pass of a
    `tf.GradientTape` unfolds the gradient into a matrix and multiplies once.

    `keras_rs.layers.DotInteraction` gathers. It takes 1.6 times as long for 27 vectors of 16
    values, and 2.3 times as long for 27 vectors of 64 values (forward and backward pass, 2 cores).

    Example:

    >>> vectors = tf.constant([[[1.0, 0.0], [2.0, 3.0]]])
    >>> slip.models.pairwise_dots(vectors).numpy()
    array([[2.]], dtype=float32)

    Args:
        vectors: Tensor of shape [batch, n, dim], with a static n of at least 2.

    Returns:
        Tensor of shape [batch, n * (n - 1) / 2], in the order of `pair_order`: for i = 1, 2, ...
        the pairs (i, 0) to (i, i-1), followed by the pairs (n-i, n-i-1) to (n-i, 0), until all
        pairs have occurred once.
    """
    vectors = tf.convert_to_tensor(vectors)

    def gradient(of_dots: tf.Tensor) -> tf.Tensor:
        lower = _unfold(of_dots, vectors.shape[1])
        return tf.matmul(lower + tf.linalg.matrix_transpose(lower), vectors)

    return _compat.call_with_gradient(_dots, vectors, gradient)


def _dots(vectors: tf.Tensor) -> tf.Tensor:
    """Multiplies [batch, n, dim] vectors and packs the strictly lower triangles into vectors."""
    count = vectors.shape[1]
    pairs = count * (count - 1) // 2
    square = tf.reshape(tf.matmul(vectors, vectors, transpose_b=True), [-1, count * count])
    # `top` starts with row 1, because row 0 has no pair. `bottom` is read backward from the last
    # row. In each row of the rectangle, the mask selects the entries of the triangle. A split,
    # because the gradients of slices are slow: TensorFlow copies one number at a time.
    _, top, bottom = tf.split(square, [count, pairs, pairs], axis=1)
    is_of_top = np.tril(np.ones((count // 2, count), bool)).reshape(1, -1)[:, :pairs]
    return tf.where(is_of_top, top, tf.reverse(bottom, axis=[1]))


def _unfold(pairs: tf.Tensor, count: int) -> tf.Tensor:
    """Unpacks the vectors that `_dots` packed.

    Returns:
        Strictly lower triangular matrices [batch, n, n].
    """
    first_row = tf.zeros([tf.shape(pairs)[0], count], pairs.dtype)
    flat = tf.concat([first_row, pairs, tf.reverse(pairs, axis=[1])], axis=1)
    is_lower = np.tril(np.ones((count, count), bool), -1).reshape(1, -1)
    return tf.reshape(tf.where(is_lower, flat, tf.zeros([], pairs.dtype)), [-1, count, count])


def pair_order(count: int) -> list[tuple[int, int]]:
    """Returns pairs (i, j), i > j, in the order of `pairwise_dots`.

    Args:
        count: Number of vectors n, at least 2.
    """
    pairs = []
    for row in range(1, count // 2 + 1):
        pairs += [(row, column) for column in range(row)]
        pairs += [(count - row, count - 1 - column) for column in range(row, count)]
    return pairs[: count * (count - 1) // 2]


def sum_of_dots(vectors: tf.Tensor) -> tf.Tensor:
    """Sums the dot products of all pairs of an example's vectors.

    The result equals (|v_1 + ... + v_n|^2 - (|v_1|^2 + ... + |v_n|^2)) / 2 (Rendle, "Factorization
    machines", ICDM 2010, lemma 3.1), which takes time linear in n.

    Args:
        vectors: Tensor of shape [batch, n, dim].

    Returns:
        Tensor of shape [batch, 1].
    """
    square = tf.square(tf.reduce_sum(vectors, axis=1))
    squares = tf.reduce_sum(tf.square(vectors), axis=1)
    return 0.5 * tf.reduce_sum(square - squares, axis=1, keepdims=True)


def padded_steps(vectors: Any) -> tf.Tensor:
    """Converts the vectors of sequences to a dense tensor [batch, steps, dim].

    Shorter sequences of a RaggedTensor are filled with zeros at the end. A tensor is returned
    unchanged.
    """
    return vectors.to_tensor() if isinstance(vectors, tf.RaggedTensor) else vectors


@keras.saving.register_keras_serializable(package="slipstream_tf")
class TimeAttention(keras.layers.Layer):
    """Time series attention of TBSM (Ishkhanov et al., arXiv:2008.11922, section 3).

    The layer sums up a sequence of vectors, the steps, as seen from one vector w, the scored step.
    Each head has a matrix A. It weights a step z_t by its inner product with w in the metric A^T A:
    a_t = z_t . A^T A w. The output of the head, its context, is the sum of a_t z_t. There is no
    softmax, so that a weight can be negative. The implementation of the authors can also pass the
    weights of a fixed number of steps through an MLP. This layer accepts any number of steps and
    uses the weights directly.

    Args:
        heads: Number of heads, at least 1.
        **kwargs: Arguments of `keras.layers.Layer`.

    Raises:
        ValueError: `heads` is out of range.
    """

    def __init__(self, heads: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        require_integer("heads", heads, 1, None, "TimeAttention")
        self.heads = heads

    def build(self, scored_shape: Any, steps_shape: Any = None) -> None:
        """Creates the heads' matrices for a scored step [batch, width]."""
        width = scored_shape[-1]
        shape = (self.heads, width, width)
        normal = keras.initializers.RandomNormal(0.0, (2.0 / (2 * width)) ** 0.5)
        self.metric = self.add_weight(name="metric", shape=shape, initializer=normal)
        self.built = True

    def call(self, scored: Any, steps: Any, is_history: Any = None) -> Any:
        """Computes the contexts.

        Args:
            scored: The scored step, [batch, width].
            steps: All steps, [batch, steps, width].
            is_history: Bool [batch, steps], True for the steps that contribute. None uses all
                steps.

        Returns:
            Tensor of shape [batch, heads * width]; zeros for an example without history.
        """
        metric = tf.cast(self.metric, scored.dtype)
        image = tf.einsum("kij,bj->bki", metric, scored)
        query = tf.einsum("kij,bki->bkj", metric, image)
        coefficients = tf.einsum("btj,bkj->bkt", steps, query)
        if is_history is not None:
            coefficients *= tf.cast(is_history, scored.dtype)[:, tf.newaxis]
        contexts = tf.einsum("bkt,btj->bkj", coefficients, steps)
        return tf.reshape(contexts, [-1, self.heads * scored.shape[-1]])

    def compute_output_shape(self, scored_shape: Any, steps_shape: Any = None) -> Any:
        """Returns (batch, heads * width)."""
        return (scored_shape[0], self.heads * scored_shape[-1])

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary for `from_config`."""
        return {**super().get_config(), "heads": self.heads}
