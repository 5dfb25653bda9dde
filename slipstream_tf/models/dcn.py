"""DCN-v2: cross layers and a deep MLP over the concatenated features."""

import importlib
import random
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf._utils.errors import invalid, require_choice, require_integer
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.models.click_model import ClickModel, penalty_of, require_widths, side_by_side

STRUCTURES = ("parallel", "stacked")


@keras.saving.register_keras_serializable(package="slipstream_tf")
class DCNv2(ClickModel):
    """Deep and cross network, version 2 (Wang et al., arXiv:2008.13535).

    Dense features and embeddings are concatenated. They pass through cross layers
    (`keras_rs.layers.FeatureCross`) and a deep MLP, in parallel or in sequence. A linear layer
    returns the logit. Tables may have different dimensions if the keys are a dictionary. Call
    `keras.utils.set_random_seed` before the constructor for reproducible weights.

    Example:

    >>> layer = slip.keras.EmbeddingCollection([slip.Table("user", 4), slip.Table("item", 4)])
    >>> model = slip.models.DCNv2(layer, dense_features=3, cross_layers=2, deep=[8])
    >>> inputs = {"dense": np.zeros((2, 3), "float32"), "keys": np.array([[1, 5], [2, 7]])}
    >>> model(inputs).shape
    TensorShape([2, 1])

    Args:
        embeddings: The layer that looks up the keys.
        dense_features: Number of numeric features per example, at least 0.
        cross_layers: Number of cross layers, at least 1.
        rank: Rank of the cross layer matrices, below the input width. None uses full matrices.
        deep: Widths of the deep MLP. An empty list omits it.
        structure: `"parallel"`: the linear layer receives the outputs of the cross layers and the
            MLP. `"stacked"`: the MLP receives the output of the cross layers (figure 1 of the
            paper).
        dropout: Dropout rate after each layer of the deep MLP, in [0, 1).
        returns_logits: Whether the model returns logits instead of probabilities.
        **kwargs: Arguments of `ClickModel` (`batch_norm`, `l2`, `standardization`) and of
            `keras.Model` (name, dtype, trainable).

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        dense_features: int,
        cross_layers: int = 3,
        rank: int | None = None,
        deep: Sequence[int] = (512, 256),
        structure: str = "parallel",
        dropout: float = 0.0,
        returns_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(embeddings, dense_features, dropout, returns_logits, **kwargs)
        require_choice("structure", structure, STRUCTURES, "DCNv2")
        is_stacked = structure == "stacked"
        self.deep_widths = require_widths("deep", deep, "DCNv2", may_be_empty=not is_stacked)
        require_integer("cross_layers", cross_layers, 1, None, "DCNv2")
        self.structure = structure
        width = self.dense_width + sum(self.dims.values())
        if rank is not None:
            require_integer("rank", rank, 1, None, "DCNv2")
            if rank >= width:
                allowed = f"an integer < {width}, the width of the input, or None for full matrices"
                raise invalid("rank", rank, "DCNv2", allowed)
        self.rank = rank
        penalty = penalty_of(self.l2)
        layers = _keras_rs_layers()
        self.cross = [
            layers.FeatureCross(
                rank, kernel_regularizer=penalty, name=f"cross_{i}", dtype=self.dtype_policy
            )
            for i in range(cross_layers)
        ]
        for layer in self.cross:
            layer.build((None, width))
            # The sublayers would otherwise create their weights at the first call.
            if rank is not None:
                layer.down_proj_dense.build((None, width))
            layer.dense.build((None, rank or width))
        self.deep = None
        if self.deep_widths:
            self.deep = self.mlp("deep", self.deep_widths, width, dropout=self.dropout)
        # Computed in float32 like the last layer of `MLP`, because bfloat16 logits cause ties.
        self.head = keras.layers.Dense(1, kernel_regularizer=penalty, name="head", dtype="float32")
        deep_width = self.deep_widths[-1] if self.deep_widths else 0
        self.head.build((None, deep_width if is_stacked else width + deep_width))
        self.end_with(self.head)

    def logits(self, dense: Any, vectors: list[Any] | Any, training: bool | None) -> Any:
        features = side_by_side(dense, vectors)
        if features.shape[0] == 0:
            # In eager mode `keras.ops.add` mistakes an empty batch for a bias and raises an error.
            return tf.zeros([0, 1])
        outputs = features
        for layer in self.cross:
            outputs = layer(features, outputs)
        if self.deep is not None and self.structure == "stacked":
            outputs = self.deep(outputs, training=training)
        elif self.deep is not None:
            deep = self.deep(features, training=training)
            outputs = tf.concat([outputs, deep], axis=1)
        return self.head(outputs)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "cross_layers": len(self.cross),
            "rank": self.rank,
            "deep": list(self.deep_widths),
            "structure": self.structure,
        }


def _keras_rs_layers() -> Any:
    """Imports the layers of keras-rs without a side effect on `random`.

    The import draws numbers from `random`, from which Keras derives the seeds of weights. Restoring
    its state keeps seeded weights reproducible.
    """
    state = random.getstate()
    try:
        return importlib.import_module("keras_rs.layers")
    finally:
        random.setstate(state)
