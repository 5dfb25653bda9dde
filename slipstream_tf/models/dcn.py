"""DCN-v2: cross layers beside a deep MLP over the concatenated features."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.models.click_model import ClickModel, require_widths
from slipstream_tf.models.interaction import Cross


@keras.saving.register_keras_serializable(package="slipstream_tf")
class DCNv2(ClickModel):
    """Deep and cross network, version 2, parallel form (Wang et al., arXiv:2008.13535).

    Dense features and embeddings, concatenated, go through the cross layers and through the deep
    MLP; a linear layer over both gives the logit. Tables may have different dimensions where the
    keys come as a dictionary. Seed with `keras.utils.set_random_seed` before building it.

    Args:
        embeddings: the tables.
        dense_features: numeric features per input, 0 or more.
        cross_layers: number of cross layers, 1 or more.
        rank: of the cross layers' matrices, below the input's width; None for full matrices.
        deep: widths of the deep MLP; empty for none.
        dropout: share of units dropped after each layer of the deep MLP, 0 to below 1.
        returns_logits: whether the output is a logit instead of a probability.
        **kwargs: of `ClickModel` (`batch_norm`) and of `keras.Model`: name, dtype, trainable.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        dense_features: int,
        cross_layers: int = 3,
        rank: int | None = None,
        deep: Sequence[int] = (512, 256),
        dropout: float = 0.0,
        returns_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(embeddings, dense_features, dropout, returns_logits, **kwargs)
        require_widths("deep", deep, "DCNv2", may_be_empty=True)
        self.deep_widths = tuple(deep)
        width = dense_features + sum(self.dims.values())
        self.cross = Cross(cross_layers, rank, name="cross", dtype=self.dtype_policy)
        self.cross.build((None, width))
        self.deep = None
        if self.deep_widths:
            self.deep = self.mlp("deep", self.deep_widths, width, dropout=self.dropout)
        # In float32, as the last layer of `MLP`: bfloat16 logits tie.
        self.head = keras.layers.Dense(1, name="head", dtype="float32")
        self.head.build((None, width + (self.deep_widths[-1] if self.deep_widths else 0)))
        self.built = True

    def logits(self, dense: Any, vectors: list[Any] | Any, training: bool | None) -> Any:
        """Returns [batch, 1]; see `ClickModel.logits`."""
        if not isinstance(vectors, list):
            vectors = [tf.reshape(vectors, [-1, vectors.shape[1] * vectors.shape[2]])]
        parts = vectors if dense is None else [dense, *vectors]
        features = tf.concat(parts, axis=1)
        outputs = self.cross(features)
        if self.deep is not None:
            deep = self.deep(features, training=training)
            outputs = tf.concat([outputs, deep], axis=1)
        return self.head(outputs)

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`; no weights or rows in it."""
        return {
            **super().get_config(),
            "cross_layers": self.cross.depth,
            "rank": self.cross.rank,
            "deep": list(self.deep_widths),
        }
