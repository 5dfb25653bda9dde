"""DCN-v2: cross layers beside a deep MLP over the concatenated features."""

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

    Dense features and embeddings, concatenated, go through the cross layers, which are
    `keras_rs.layers.FeatureCross`, and through the deep MLP, side by side or one after the other; a
    linear layer gives the logit. Tables may have different dimensions where the keys come as a
    dictionary. Seed with `keras.utils.set_random_seed` before building it.

    Args:
        embeddings: the tables.
        dense_features: numeric features per input, 0 or more.
        cross_layers: number of cross layers, 1 or more.
        rank: of the cross layers' matrices, below the input's width; None for full matrices.
        deep: widths of the deep MLP; empty for none.
        structure: "parallel": the linear layer sees what the cross layers and the MLP give;
            "stacked": the MLP goes on from the cross layers (figure 1 of the paper).
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
        width = dense_features + sum(self.dims.values())
        if rank is not None:
            require_integer("rank", rank, 1, None, "DCNv2")
            if rank >= width:
                allowed = f"an integer below the input's width {width}, or None for full matrices"
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
            # Weights that it would make at its first call.
            if rank is not None:
                layer.down_proj_dense.build((None, width))
            layer.dense.build((None, rank or width))
        self.deep = None
        if self.deep_widths:
            self.deep = self.mlp("deep", self.deep_widths, width, dropout=self.dropout)
        # In float32, as the last layer of `MLP`: bfloat16 logits tie.
        self.head = keras.layers.Dense(1, kernel_regularizer=penalty, name="head", dtype="float32")
        deep_width = self.deep_widths[-1] if self.deep_widths else 0
        self.head.build((None, deep_width if is_stacked else width + deep_width))
        self.end_with(self.head)

    def logits(self, dense: Any, vectors: list[Any] | Any, training: bool | None) -> Any:
        """Returns [batch, 1]; see `ClickModel.logits`."""
        features = side_by_side(dense, vectors)
        if features.shape[0] == 0:
            # Which `keras.ops.add`, called eagerly, takes for a bias, and refuses.
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
        """Returns a JSON-serialisable dictionary for `from_config`; no weights or rows in it."""
        return {
            **super().get_config(),
            "cross_layers": len(self.cross),
            "rank": self.rank,
            "deep": list(self.deep_widths),
            "structure": self.structure,
        }


def _keras_rs_layers() -> Any:
    """Imports keras-rs's layers; its import draws from the numbers that seed the weights."""
    state = random.getstate()
    try:
        return importlib.import_module("keras_rs.layers")
    finally:
        random.setstate(state)
