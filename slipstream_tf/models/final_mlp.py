"""FinalMLP: two MLPs over the same features, each with a gate, and a bilinear fusion."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.models.click_model import ClickModel, penalty_of, require_widths, side_by_side

_STREAMS = (0, 1)


@keras.saving.register_keras_serializable(package="slipstream_tf")
class FinalMLP(ClickModel):
    """Enhanced two-stream MLP (Mao et al., arXiv:2304.00902).

    Dense features and embeddings, concatenated, go through two MLPs. In front of each a gate
    multiplies every value by 0 to 2: twice the sigmoid of a hidden layer over a vector that is
    learned (the paper's gate without features of its own). The logit is linear in both outputs, and
    bilinear in pairs of them, head by head. Tables may have different dimensions where the keys
    come as a dictionary. Seed with `keras.utils.set_random_seed` before building it.

    Args:
        embeddings: the tables.
        dense_features: numeric features per input, 0 or more.
        first: widths of the first MLP.
        second: widths of the second MLP.
        heads: into which both outputs are split; the last widths are multiples of it.
        gate: width of the gates' hidden layers and of their learned vectors; 0: no gates.
        dropout: share of units dropped after each hidden layer, 0 to below 1.
        returns_logits: whether the output is a logit instead of a probability.
        **kwargs: of `ClickModel` (`batch_norm`, `l2`) and of `keras.Model`: name, dtype, trainable.

    Raises:
        ValueError: an argument is out of range, or a last width is no multiple of `heads`.
    """

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        dense_features: int,
        first: Sequence[int] = (400, 400, 400),
        second: Sequence[int] = (400, 400, 400),
        heads: int = 10,
        gate: int = 64,
        dropout: float = 0.0,
        returns_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(embeddings, dense_features, dropout, returns_logits, **kwargs)
        require_integer("heads", heads, 1, None, "FinalMLP")
        require_integer("gate", gate, 0, None, "FinalMLP")
        for name, widths in (("first", first), ("second", second)):
            require_widths(name, widths, "FinalMLP")
            if widths[-1] % heads:
                allowed = f"a list whose last width is a multiple of heads={heads}"
                raise invalid(name, list(widths), "FinalMLP", allowed)
        self.widths = (tuple(first), tuple(second))
        self.heads, self.gate = heads, gate
        width = dense_features + sum(self.dims.values())
        self.streams = [
            self.mlp(f"stream_{index}", self.widths[index], width, dropout=self.dropout)
            for index in _STREAMS
        ]
        # Lists without lists in them: of others older versions of Keras save nothing.
        self.gate_vectors = [
            self.add_weight(name=f"gate_{index}", shape=(1, gate), initializer="random_normal")
            for index in _STREAMS
            if gate
        ]
        self.gate_mlps = [
            self.mlp(f"gate_mlp_{i}", [gate, width], gate, last_is_linear=True, batch_norm=False)
            for i in _STREAMS
            if gate
        ]
        # In float32, as the last layer of `MLP`: bfloat16 logits tie.
        self.head = keras.layers.Dense(
            1, kernel_regularizer=penalty_of(self.l2), name="head", dtype="float32"
        )
        ends = [widths[-1] for widths in self.widths]
        self.head.build((None, sum(ends)))
        self.fusion = self.add_weight(
            name="fusion",
            shape=(heads, ends[0] // heads, ends[1] // heads),
            initializer="glorot_uniform",
            regularizer=penalty_of(self.l2),
            dtype="float32",
        )
        self.end_with(self.head)

    def logits(self, dense: Any, vectors: list[Any] | Any, training: bool | None) -> Any:
        """Returns [batch, 1]; see `ClickModel.logits`."""
        features = side_by_side(dense, vectors)
        outputs = []
        for index, stream in enumerate(self.streams):
            gated = features
            if self.gate:
                vector = tf.convert_to_tensor(self.gate_vectors[index])
                openness = self.gate_mlps[index](vector, training=training)
                gated = features * (2.0 * tf.sigmoid(tf.cast(openness, features.dtype)))
            outputs.append(tf.cast(stream(gated, training=training), tf.float32))
        first, second = (
            tf.reshape(part, [-1, self.heads, part.shape[1] // self.heads]) for part in outputs
        )
        pairs = tf.einsum("bhi,hij,bhj->b", first, tf.cast(self.fusion, tf.float32), second)
        return self.head(tf.concat(outputs, axis=1)) + pairs[:, tf.newaxis]

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`; no weights or rows in it."""
        return {
            **super().get_config(),
            "first": list(self.widths[0]),
            "second": list(self.widths[1]),
            "heads": self.heads,
            "gate": self.gate,
        }
