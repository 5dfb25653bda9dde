"""DLRM: a bottom MLP, dots between all feature vectors, a top MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf.errors import invalid
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.models.click_model import ClickModel
from slipstream_tf.models.interaction import pairwise_dots
from slipstream_tf.models.mlp import MLP, require_dropout, require_widths


@keras.saving.register_keras_serializable(package="slipstream_tf")
class DLRM(ClickModel):
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
        **kwargs: of `keras.Model`: name, dtype, trainable.

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
        super().__init__(embeddings, dense_features, returns_logits, **kwargs)
        require_widths("bottom", bottom, "DLRM", may_be_empty=not dense_features)
        require_widths("top", top, "DLRM", may_be_empty=False)
        require_dropout(dropout, "DLRM")
        self.bottom_widths, self.top_widths = tuple(bottom), tuple(top)
        self.dropout = float(dropout)
        dim = self.one_dim("dots")
        if self.top_widths[-1] != 1:
            raise invalid("top", list(top), "DLRM", "a list that ends with 1, the logit")
        if dense_features and self.bottom_widths[-1] != dim:
            allowed = f"a list that ends with {dim}, the dim of the embedding tables"
            place = f"DLRM, whose bottom MLP ends with {self.bottom_widths[-1]}"
            raise invalid("bottom", list(bottom), place, allowed)
        vectors = len(embeddings.specs) + (1 if dense_features else 0)
        if vectors < 2:
            allowed = "two features or more, or dense_features >= 1 (there is no pair otherwise)"
            raise invalid("embeddings", f"{len(embeddings.specs)} feature", "DLRM", allowed)
        self.bottom = None
        if dense_features:
            self.bottom = MLP(self.bottom_widths, name="bottom", dtype=self.dtype_policy)
            self.bottom.build((None, dense_features))
        self.top = MLP(
            self.top_widths,
            last_is_linear=True,
            dropout=self.dropout,
            name="top",
            dtype=self.dtype_policy,
        )
        self.top.build((None, vectors * (vectors - 1) // 2 + (dim if dense_features else 0)))
        self.built = True

    def logits(self, dense: Any, vectors: list[Any] | Any, training: bool | None) -> Any:
        """Returns [batch, 1]; see `ClickModel.logits`."""
        stacked = tf.stack(vectors, axis=1) if isinstance(vectors, list) else vectors
        if self.bottom is None:
            return self.top(pairwise_dots(stacked), training=training)
        bottom = self.bottom(dense, training=training)
        dots = pairwise_dots(tf.concat([tf.expand_dims(bottom, 1), stacked], axis=1))
        return self.top(tf.concat([bottom, dots], axis=1), training=training)

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`; no weights or rows in it."""
        return {
            **super().get_config(),
            "bottom": list(self.bottom_widths),
            "top": list(self.top_widths),
            "dropout": self.dropout,
        }
