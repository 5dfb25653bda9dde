"""FinalMLP: two gated MLPs over the same features with a bilinear fusion."""

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

    Dense features and embeddings are concatenated and pass through two MLPs. A gate before each MLP
    multiplies every value by a factor between 0 and 2: twice the sigmoid of an MLP with one hidden
    layer over a learned vector (in the paper, the gate that uses no features). The outputs of the
    MLPs are divided into heads of equal size. The logit is a linear function of both outputs plus,
    for each head, a bilinear form of its parts of the two outputs. Tables may have different
    dimensions if the keys are a dictionary. Call `keras.utils.set_random_seed` before the
    constructor for reproducible weights.

    Example:

    >>> layer = slip.keras.EmbeddingCollection([slip.Table("user", 4), slip.Table("item", 4)])
    >>> model = slip.models.FinalMLP(layer, 0, first=[8, 4], second=[8, 4], heads=2, gate=4)
    >>> model({"keys": np.array([[1, 5], [2, 7]])}).shape
    TensorShape([2, 1])

    Args:
        embeddings: The layer that looks up the keys.
        dense_features: Number of numeric features per example, at least 0.
        first: Widths of the first MLP.
        second: Widths of the second MLP.
        heads: Number of heads of the fusion. The last width of each MLP is a multiple of it.
        gate: Width of the hidden layer and of the learned vector of each gate. 0 disables the
            gates.
        dropout: Dropout rate after each hidden layer of the MLPs, in [0, 1).
        returns_logits: Whether the model returns logits instead of probabilities.
        **kwargs: Arguments of `ClickModel` (`batch_norm`, `l2`, `standardization`) and of
            `keras.Model` (name, dtype, trainable).

    Raises:
        ValueError: An argument is out of range, or a last width is not a multiple of `heads`.
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
                allowed = f"a list that ends with a multiple of heads={heads}"
                raise invalid(name, list(widths), "FinalMLP", allowed)
        self.widths = (tuple(first), tuple(second))
        self.heads, self.gate = heads, gate
        width = self.dense_width + sum(self.dims.values())
        self.streams = [
            self.mlp(f"stream_{index}", self.widths[index], width, dropout=self.dropout)
            for index in _STREAMS
        ]
        # Flat lists, because older versions of Keras do not save the layers in nested lists.
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
        # Computed in float32 like the last layer of `MLP`, because bfloat16 logits cause ties.
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
        return {
            **super().get_config(),
            "first": list(self.widths[0]),
            "second": list(self.widths[1]),
            "heads": self.heads,
            "gate": self.gate,
        }
