"""DeepFM: a factorisation machine beside a deep MLP, both on the same rows."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.models.click_model import ClickModel, penalty_of, require_widths
from slipstream_tf.models.interaction import sum_of_dots


@keras.saving.register_keras_serializable(package="slipstream_tf")
class DeepFM(ClickModel):
    """DeepFM (Guo et al., arXiv:1703.04247).

    The logit is the sum of three parts: linear weights of keys and numbers; the dots of all pairs
    of factors; a deep MLP over factors and numbers. Key and number alike have a linear weight and a
    factor. A row holds both of its key: its first value is the weight, the others are the factor,
    so that one lookup and one sparse optimizer serve both. A number's factor is multiplied by it.
    Seed with `keras.utils.set_random_seed` before building it.

    Args:
        embeddings: tables of one dimension, 2 or more: factors of `dim - 1` values.
        dense_features: numeric features per input, 0 or more.
        deep: widths of the deep MLP's hidden layers; empty for a linear layer.
        dropout: share of units dropped after each hidden layer, 0 to below 1.
        returns_logits: whether the output is a logit instead of a probability.
        **kwargs: of `ClickModel` (`batch_norm`) and of `keras.Model`: name, dtype, trainable.

    Raises:
        ValueError: an argument is out of range, or tables have several dimensions or dimension 1.
    """

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        dense_features: int,
        deep: Sequence[int] = (512, 256),
        dropout: float = 0.0,
        returns_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(embeddings, dense_features, dropout, returns_logits, **kwargs)
        self.deep_widths = require_widths("deep", deep, "DeepFM", may_be_empty=True)
        dim = self.one_dim("dots")
        if dim < 2:
            allowed = "2 or more: a linear weight and a factor"
            raise invalid("dim", dim, "DeepFM", allowed)
        self.linear = self.factors = None
        if dense_features:
            # In float32, as the sums they go into: bfloat16 logits tie.
            penalty = penalty_of(self.l2)
            self.linear = keras.layers.Dense(
                1, use_bias=False, kernel_regularizer=penalty, name="linear", dtype="float32"
            )
            self.linear.build((None, dense_features))
            uniform, shape = (
                keras.initializers.RandomUniform(-0.05, 0.05),
                (dense_features, dim - 1),
            )
            self.factors = self.add_weight(
                name="factors", shape=shape, initializer=uniform, regularizer=penalty
            )
        inputs = len(embeddings.specs) * (dim - 1) + dense_features
        self.deep = self.mlp(
            "deep", [*self.deep_widths, 1], inputs, last_is_linear=True, dropout=dropout
        )
        self.end_with(self.deep.last)

    def logits(self, dense: Any, vectors: list[Any] | Any, training: bool | None) -> Any:
        """Returns [batch, 1]; see `ClickModel.logits`."""
        rows = tf.stack(vectors, axis=1) if isinstance(vectors, list) else vectors
        # Not slices: see `pairwise_dots` on their gradients.
        weights, factors = tf.split(rows, [1, rows.shape[2] - 1], axis=2)
        deep = tf.reshape(factors, [-1, factors.shape[1] * factors.shape[2]])
        linear = tf.reduce_sum(tf.cast(weights, tf.float32), axis=1)
        if self.linear is not None:
            linear += self.linear(dense)
            dense = tf.cast(dense, factors.dtype)
            own = dense[:, :, tf.newaxis] * tf.cast(self.factors, factors.dtype)
            factors = tf.concat([factors, own], axis=1)
            deep = tf.concat([deep, dense], axis=1)
        dots = sum_of_dots(tf.cast(factors, tf.float32))
        return linear + dots + self.deep(deep, training=training)

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`; no weights or rows in it."""
        return {**super().get_config(), "deep": list(self.deep_widths)}
