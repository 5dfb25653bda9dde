"""DIN: attention over the history of a user."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.models.click_model import ClickModel, require_widths
from slipstream_tf.models.interaction import padded_steps


@keras.saving.register_keras_serializable(package="slipstream_tf")
class DIN(ClickModel):
    """Deep interest network (Zhou et al., arXiv:1706.06978).

    An MLP computes the attention weight of each step of the history. Its inputs are the step, the
    target, their difference and their product. The deep MLP receives the weighted sum of the steps,
    the vectors of the other features and the numeric features. As in the paper, the weights are not
    normalized, so that their sum reflects the strength of an interest. The activations are ReLU
    instead of PReLU and Dice.

    The inputs are `{"keys": {feature: int64}}`. The keys of a feature with a combiner are [batch],
    [batch, width] or ragged. A history has shape [batch, steps], padded with the padding key of the
    feature, or is a RaggedTensor [batch, None]. All histories have the same number of steps.
    With `dense_features`, the inputs also contain "dense", float [batch, dense_features]. Call
    `keras.utils.set_random_seed` before the constructor for reproducible weights.

    Example:

    >>> layer = slip.keras.EmbeddingCollection(
    ...     [slip.Table("user", 4), slip.Table("item", 4)],
    ...     features=[
    ...         slip.FeatureSpec("user", "user", "sum"),
    ...         slip.FeatureSpec("item", "item", "sum"),
    ...         slip.FeatureSpec("clicked", "item", None, padding_key=-1),
    ...     ],
    ... )
    >>> model = slip.models.DIN(layer, history={"clicked": "item"}, attention=[8], deep=[8])
    >>> keys = {"user": np.array([1]), "item": np.array([5]), "clicked": np.array([[7, 5, -1]])}
    >>> model({"keys": keys}).shape
    TensorShape([1, 1])

    Args:
        embeddings: The layer that looks up the keys. Its features without a combiner are histories.
        dense_features: Number of numeric features per example, at least 0.
        history: Dictionary from each history feature to the pooled feature with which its steps are
            compared. Both have the same dimension and usually the same table.
        attention: Widths of the hidden layers of the attention MLP.
        deep: Widths of the hidden layers of the deep MLP.
        dropout: Dropout rate after each hidden layer of the deep MLP, in [0, 1).
        returns_logits: Whether the model returns logits instead of probabilities.
        **kwargs: Arguments of `ClickModel` (`batch_norm`, `l2`, `standardization`) and of
            `keras.Model` (name, dtype, trainable).

    Raises:
        ValueError: An argument is out of range, or `history` does not map exactly the features
            without a combiner to pooled features of the same dimension.
    """

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        dense_features: int = 0,
        history: Mapping[str, str] | None = None,
        attention: Sequence[int] = (80, 40),
        deep: Sequence[int] = (200, 80),
        dropout: float = 0.0,
        returns_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        self.targets = dict(history or {})
        super().__init__(embeddings, dense_features, dropout, returns_logits, **kwargs)
        self.attention_widths = require_widths("attention", attention, "DIN")
        self.deep_widths = require_widths("deep", deep, "DIN")
        steps = sum(self.dims[name] for name in self.targets)
        self.attention = self.mlp(
            "attention", [*attention, 1], 4 * steps, last_is_linear=True, batch_norm=False
        )
        width = self.dense_width + steps
        width += sum(dim for name, dim in self.dims.items() if name not in self.targets)
        self.deep = self.mlp("deep", [*deep, 1], width, last_is_linear=True, dropout=self.dropout)
        self.end_with(self.deep.last)

    def _require_combiners(self, embeddings: EmbeddingCollection) -> None:
        specs = {spec.name: spec for spec in embeddings.specs}
        dims = {table.name: table.dim for table in embeddings.tables}
        unpooled = {name for name, spec in specs.items() if spec.combiner is None}
        pooled = set(specs) - unpooled
        allowed = (
            f"a dictionary from each feature without a combiner, {sorted(unpooled)}, to a feature "
            f"of the same dimension, one of {sorted(pooled)}"
        )
        if not self.targets or set(self.targets) != unpooled:
            raise invalid("history", self.targets, "DIN", allowed)
        for name, target in self.targets.items():
            if target not in pooled or dims[specs[name].table] != dims[specs[target].table]:
                raise invalid("history", {name: target}, "DIN", allowed)
        self._padding = {name: specs[name].padding_key for name in self.targets}

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Predicts clicks.

        Args:
            inputs: The inputs that the class describes.
            training: Whether to train the embeddings and to apply dropout.

        Returns:
            Probabilities or logits, float32 [batch, 1].
        """
        dense, keys = self._split(inputs)
        if not isinstance(keys, Mapping):
            allowed = "a dictionary {feature: keys}"
            raise invalid("keys", type(keys).__name__, f"model {self.name!r}", allowed)
        vectors = dict(zip(self.dims, self.look_up(keys, inputs, training), strict=True))
        steps = [vectors.pop(name) for name in self.targets]
        is_present = [self._is_there(name, keys[name], part)
                    for name, part in zip(self.targets, steps, strict=True)]  # fmt: skip
        of_steps = tf.concat([padded_steps(part) for part in steps], axis=2)
        target = tf.concat([vectors[name] for name in self.targets.values()], axis=1)
        interest = self._interest(of_steps, target, tf.reduce_any(is_present, axis=0), training)
        parts = [interest, *vectors.values()]
        if dense is not None:
            parts.insert(0, tf.cast(dense, self.compute_dtype))
        return self.prediction(self.deep(tf.concat(parts, axis=1), training=training))

    def _is_there(self, name: str, keys: Any, vectors: Any) -> tf.Tensor:
        """Returns whether each step of a history exists, bool [batch, steps].

        Args:
            name: Name of the history feature.
            keys: Its keys.
            vectors: Its embeddings, ragged or [batch, steps, dim].
        """
        if isinstance(vectors, tf.RaggedTensor):
            return tf.sequence_mask(vectors.row_lengths())
        padding = self._padding[name]
        keys = tf.convert_to_tensor(keys)
        return tf.ones(tf.shape(keys), tf.bool) if padding is None else keys != padding

    def _interest(self, steps: Any, target: Any, is_present: Any, training: bool | None) -> Any:
        """Returns the sum of the steps weighted by attention, [batch, width].

        Args:
            steps: Embeddings of the histories, [batch, steps, width].
            target: Embeddings of their targets, [batch, width].
            is_present: bool [batch, steps], False for padding, which gets weight 0.
            training: As in `call`.
        """
        target = tf.broadcast_to(target[:, tf.newaxis], tf.shape(steps))
        compared = tf.concat([steps, target, steps - target, steps * target], axis=2)
        compared = tf.reshape(compared, [-1, 4 * steps.shape[2]])
        weights = self.attention(compared, training=training)
        weights = tf.cast(tf.reshape(weights, tf.shape(is_present)), steps.dtype)
        weights = tf.where(is_present, weights, tf.zeros([], steps.dtype))
        return tf.einsum("bt,btd->bd", weights, steps)

    def _own_keys(self) -> dict[str, Any]:
        """Returns the specs of padded histories and of one key of each other feature."""
        keys = {name: tf.TensorSpec([None], tf.int64) for name in self.dims}
        return keys | {name: tf.TensorSpec([None, None], tf.int64) for name in self.targets}

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "history": dict(self.targets),
            "attention": list(self.attention_widths),
            "deep": list(self.deep_widths),
        }
