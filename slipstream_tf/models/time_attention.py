"""Attention over time, as TBSM uses it. In: vectors of steps. Out: contexts of the scored step."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf.errors import require_integer

_compat.require_keras()


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
        del steps_shape
        width = scored_shape[-1]
        deviation = (2.0 / (2 * width)) ** 0.5
        self.metric = self.add_weight(
            name="metric",
            shape=(self.heads, width, width),
            initializer=keras.initializers.RandomNormal(0.0, deviation),
        )
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
        del steps_shape
        return (scored_shape[0], self.heads * scored_shape[-1])

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`."""
        return {**super().get_config(), "heads": self.heads}
