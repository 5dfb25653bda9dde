"""DeepFM: a factorization machine and a deep MLP that share their embeddings."""

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

    The logit is the sum of three terms: a linear term of keys and numeric features, the dot
    products of all pairs of factors, and a deep MLP over factors and numeric features. Each key and
    each numeric feature has a linear weight and a factor. The row of a key contains both: the first
    value is the linear weight, the other values are the factor. Therefore one lookup and one sparse
    optimizer serve both. The factor of a numeric feature is multiplied by the feature. Call
    `keras.utils.set_random_seed` before the constructor for reproducible weights.

    Example:

    >>> layer = slip.keras.EmbeddingCollection([slip.Table("user", 5), slip.Table("item", 5)])
    >>> model = slip.models.DeepFM(layer, dense_features=3, deep=[8])
    >>> inputs = {"dense": np.zeros((2, 3), "float32"), "keys": np.array([[1, 5], [2, 7]])}
    >>> model(inputs).shape
    TensorShape([2, 1])

    Args:
        embeddings: The layer that looks up the keys. Its tables share one dimension `dim`, at least
            2. Factors have `dim - 1` values.
        dense_features: Number of numeric features per example, at least 0.
        deep: Widths of the hidden layers of the deep MLP. An empty list makes it a linear layer.
        dropout: Dropout rate after each hidden layer, in [0, 1).
        returns_logits: Whether the model returns logits instead of probabilities.
        **kwargs: Arguments of `ClickModel` (`batch_norm`, `l2`, `standardization`) and of
            `keras.Model` (name, dtype, trainable).

    Raises:
        ValueError: An argument is out of range, or the tables have different dimensions or
            dimension 1.
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
        dim = self.shared_dim("dot products")
        if dim < 2:
            allowed = "an integer >= 2, because a row contains a linear weight and factors"
            raise invalid("dim", dim, "DeepFM", allowed)
        self.linear = self.factors = None
        if dense_features:
            # Computed in float32 like the logit, because bfloat16 logits cause ties.
            penalty = penalty_of(self.l2)
            self.linear = keras.layers.Dense(
                1, use_bias=False, kernel_regularizer=penalty, name="linear", dtype="float32"
            )
            self.linear.build((None, self.dense_width))
            uniform, shape = (
                keras.initializers.RandomUniform(-0.05, 0.05),
                (self.dense_width, dim - 1),
            )
            self.factors = self.add_weight(
                name="factors", shape=shape, initializer=uniform, regularizer=penalty
            )
        inputs = len(embeddings.specs) * (dim - 1) + self.dense_width
        self.deep = self.mlp(
            "deep", [*self.deep_widths, 1], inputs, last_is_linear=True, dropout=dropout
        )
        self.end_with(self.deep.last)

    def logits(self, dense: Any, vectors: list[Any] | Any, training: bool | None) -> Any:
        rows = tf.stack(vectors, axis=1) if isinstance(vectors, list) else vectors
        # A split, because the gradients of slices are slow (see `pairwise_dots`).
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
        return {**super().get_config(), "deep": list(self.deep_widths)}
