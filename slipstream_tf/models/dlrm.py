"""DLRM: a bottom MLP, dots between all feature vectors, a top MLP."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf.errors import invalid
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.models.click_model import DotsModel
from slipstream_tf.models.interaction import pairwise_dots


@keras.saving.register_keras_serializable(package="slipstream_tf")
class DLRM(DotsModel):
    """Deep learning recommendation model (Naumov et al., arXiv:1906.00091).

    The dots of all pairs among the embeddings and the bottom MLP's output, each pair once, go with
    that output through the top MLP. Seed with `keras.utils.set_random_seed` before building it.

    Args:
        embeddings: tables of one dimension.
        dense_features: numeric features per input; with 0 there is no bottom MLP (`bottom` is not
            used) and the dots alone go on.
        bottom: widths of the bottom MLP; the last one equals the tables' dimension.
        top: widths of the top MLP; the last one is 1, the logit.
        dropout: share of units dropped after each hidden layer of the top MLP, 0 to below 1.
        returns_logits: whether the output is a logit instead of a probability.
        **kwargs: of `ClickModel` (`batch_norm`) and of `keras.Model`: name, dtype, trainable.

    Raises:
        ValueError: widths that do not fit, tables of several dimensions, or a single vector (no
            pair).
    """

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        dense_features: int,
        bottom: Sequence[int] = (512, 256, 64, 16),
        top: Sequence[int] = (512, 256, 1),
        dropout: float = 0.0,
        returns_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(embeddings, dense_features, bottom, top, dropout, returns_logits, **kwargs)
        if self.num_vectors < 2:
            allowed = "two features or more, or dense_features >= 1 (there is no pair otherwise)"
            raise invalid("embeddings", f"{len(embeddings.specs)} feature", "DLRM", allowed)
        pairs = self.num_vectors * (self.num_vectors - 1) // 2
        self.end_with_top(pairs + (self.dim if dense_features else 0))

    def logits(self, dense: Any, vectors: list[Any] | Any, training: bool | None) -> Any:
        """Returns [batch, 1]; see `ClickModel.logits`."""
        stacked = tf.stack(vectors, axis=1) if isinstance(vectors, list) else vectors
        if self.bottom is None:
            return self.top(pairwise_dots(stacked), training=training)
        bottom = self.bottom(dense, training=training)
        dots = pairwise_dots(tf.concat([tf.expand_dims(bottom, 1), stacked], axis=1))
        return self.top(tf.concat([bottom, dots], axis=1), training=training)
