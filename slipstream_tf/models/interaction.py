"""How click models combine features: dots of pairs, attention (TBSM)."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import require_integer


@tf.custom_gradient
def pairwise_dots(vectors: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Dot products of all pairs of different vectors, each pair once.

    The strictly lower triangle of the [n, n] matrix of dots is folded into a rectangle: row i of
    the triangle has i entries and row n-i has n-i, so row i fills up with row n-i, reversed. A
    product, two slices and a select by a constant mask do it; a gather over [batch, n * n] and its
    scatter in the backward pass are far slower. So are the gradients of slices, of which TensorFlow
    copies one number at a time: the backward pass here has none, but unfolds the gradient of the
    dots into a matrix and multiplies once. `keras_rs.layers.DotInteraction`, which gathers, takes
    1.6 times as long for 27 vectors of 16, and 2.3 times for 27 of 64 (both passes, 2 cores).

    Args:
        vectors: [batch, n, dim], n >= 2 known statically.

    Returns:
        [batch, n * (n - 1) / 2]: dots (1,0), then for row i from 1 on its columns 0..i-1 followed
        by those of row n-i, columns n-i-1..0; see `pair_order`.
    """

    def gradient(of_dots: tf.Tensor) -> tf.Tensor:
        lower = _unfold(of_dots, vectors.shape[1])
        return tf.matmul(lower + tf.linalg.matrix_transpose(lower), vectors)

    return _fold(tf.matmul(vectors, vectors, transpose_b=True)), gradient


def _fold(square: tf.Tensor) -> tf.Tensor:
    """Returns the strictly lower triangles of [batch, n, n] as [batch, n * (n - 1) / 2]."""
    count = square.shape[1]
    pairs = count * (count - 1) // 2
    # Rows one after the other: the first row has no pair, and from behind come rows reversed.
    flat = tf.reshape(square, [-1, count * count])
    bottom = tf.reverse(flat[:, count * count - pairs :], axis=[1])
    is_of_top = np.tril(np.ones((count // 2, count), bool)).reshape(1, -1)[:, :pairs]
    return tf.where(is_of_top, flat[:, count : count + pairs], bottom)


def _unfold(pairs: tf.Tensor, count: int) -> tf.Tensor:
    """Returns what `_fold` folded as strictly lower triangles of [batch, n, n], zero elsewhere."""
    first_row = tf.zeros([tf.shape(pairs)[0], count], pairs.dtype)
    flat = tf.concat([first_row, pairs, tf.reverse(pairs, axis=[1])], axis=1)
    is_lower = np.tril(np.ones((count, count), bool), -1).reshape(1, -1)
    return tf.reshape(tf.where(is_lower, flat, tf.zeros([], pairs.dtype)), [-1, count, count])


def pair_order(count: int) -> list[tuple[int, int]]:
    """Returns the pairs (i, j), i > j, in the order in which `pairwise_dots` gives them."""
    pairs = []
    for row in range(1, count // 2 + 1):
        pairs += [(row, column) for column in range(row)]
        pairs += [(count - row, count - 1 - column) for column in range(row, count)]
    return pairs[: count * (count - 1) // 2]


def sum_of_dots(vectors: tf.Tensor) -> tf.Tensor:
    """Sums the dot products of all pairs of different vectors, each pair once.

    Half of the square of their sum less the sum of their squares (Rendle, "Factorization
    machines", ICDM 2010, lemma 3.1): no pair is formed.

    Args:
        vectors: [batch, n, dim].

    Returns:
        [batch, 1].
    """
    square = tf.square(tf.reduce_sum(vectors, axis=1))
    squares = tf.reduce_sum(tf.square(vectors), axis=1)
    return 0.5 * tf.reduce_sum(square - squares, axis=1, keepdims=True)


def padded_steps(vectors: Any) -> tf.Tensor:
    """Returns the vectors of sequences as [batch, steps, dim], with zeros for missing steps."""
    return vectors.to_tensor() if isinstance(vectors, tf.RaggedTensor) else vectors


@keras.saving.register_keras_serializable(package="slipstream_tf")
class TimeAttention(keras.layers.Layer):
    """TBSM's time series layer (Ishkhanov et al., arXiv:2008.11922, section 3).

    With a matrix A of its own each head weighs the steps of the history, z_t, by their inner
    product with the scored step, w, in the metric A^T A: a_t = z_t . A^T A w. Its context is the
    sum of a_t z_t. There is no softmax: a step may count against the scored one. The authors'
    program can also send the coefficients of a fixed number of steps through an MLP; here the
    number of steps is open, and the coefficients are used as they are.

    Args:
        heads: how many, 1 or more.
        **kwargs: of `keras.layers.Layer`.

    Raises:
        ValueError: `heads` is out of range.
    """

    def __init__(self, heads: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        require_integer("heads", heads, 1, None, "TimeAttention")
        self.heads = heads

    def build(self, scored_shape: Any, steps_shape: Any = None) -> None:
        """Creates the weights for a scored step [batch, width]."""
        width = scored_shape[-1]
        shape = (self.heads, width, width)
        normal = keras.initializers.RandomNormal(0.0, (2.0 / (2 * width)) ** 0.5)
        self.metric = self.add_weight(name="metric", shape=shape, initializer=normal)
        self.built = True

    def call(self, scored: Any, steps: Any, is_history: Any = None) -> Any:
        """Computes the contexts.

        Args:
            scored: [batch, width].
            steps: [batch, steps, width].
            is_history: bool [batch, steps]: which steps are weighed; None: all.

        Returns:
            [batch, heads * width]; zeros for an input without history.
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
        """Returns a JSON-serialisable dictionary for `from_config`."""
        return {**super().get_config(), "heads": self.heads}
