"""DIN: what a user did before, weighed by its likeness to what is scored."""

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

    Each step of a history goes, with the target, their difference and their product, through an
    MLP that gives its weight; the weighted sum of the steps, with the vectors of the other features
    and the numbers, goes through the deep MLP. As in the paper weights are not normalised: their
    sum tells how much of an interest there is. Its activations (PReLU, Dice) are ReLU here.

        slip.models.DIN(
            slip.keras.EmbeddingCollection(
                [slip.Table("user", 16), slip.Table("item", 16)],
                features=[
                    slip.FeatureSpec("user", "user", "sum"),
                    slip.FeatureSpec("item", "item", "sum"),
                    slip.FeatureSpec("clicked", "item", None, padding_key=-1),
                ],
            ),
            history={"clicked": "item"},
        )

    Inputs. {"keys": {feature: int64}}: [batch] of a pooled feature (or whatever is pooled), and of
    a history [batch, steps], padded with the feature's padding key, or a RaggedTensor [batch,
    None]. Histories of several features have the same steps. With `dense_features`, "dense" is
    float [batch, dense_features]. Seed with `keras.utils.set_random_seed` before building it.

    Args:
        embeddings: the tables. Histories are the features that are not pooled.
        dense_features: numeric features per input, 0 or more.
        history: of each feature that is not pooled, the pooled feature that its steps are compared
            with; of the same dimension, mostly of the same table.
        attention: widths of the hidden layers of the MLP that gives weights.
        deep: widths of the deep MLP's hidden layers.
        dropout: share of units dropped after each hidden layer of the deep MLP, 0 to below 1.
        returns_logits: whether the output is a logit instead of a probability.
        **kwargs: of `ClickModel` (`batch_norm`, `l2`) and of `keras.Model`: name, dtype, trainable.

    Raises:
        ValueError: an argument is out of range, or `history` does not name the features that are
            not pooled, each with a pooled one of its dimension.
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
        width = dense_features + steps
        width += sum(dim for name, dim in self.dims.items() if name not in self.targets)
        self.deep = self.mlp("deep", [*deep, 1], width, last_is_linear=True, dropout=self.dropout)
        self.end_with(self.deep.last)

    def _require_combiners(self, embeddings: EmbeddingCollection) -> None:
        specs = {spec.name: spec for spec in embeddings.specs}
        dims = {table.name: table.dim for table in embeddings.tables}
        unpooled = {name for name, spec in specs.items() if spec.combiner is None}
        pooled = set(specs) - unpooled
        allowed = (
            f"each feature without a combiner, {sorted(unpooled)}, with one of {sorted(pooled)} of "
            "the same dimension"
        )
        if not self.targets or set(self.targets) != unpooled:
            raise invalid("history", self.targets, "DIN", allowed)
        for name, target in self.targets.items():
            if target not in pooled or dims[specs[name].table] != dims[specs[target].table]:
                raise invalid("history", {name: target}, "DIN", allowed)
        self._padding = {name: specs[name].padding_key for name in self.targets}

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Predicts clicks; see `ClickModel.call` and the class for the inputs."""
        dense, keys = self._split(inputs)
        if not isinstance(keys, Mapping):
            allowed = "a dictionary {feature: keys}"
            raise invalid("keys", type(keys).__name__, f"model {self.name!r}", allowed)
        vectors = dict(zip(self.dims, self.look_up(keys, inputs, training), strict=True))
        steps = [vectors.pop(name) for name in self.targets]
        is_there = [self._is_there(name, keys[name], part)
                    for name, part in zip(self.targets, steps, strict=True)]  # fmt: skip
        of_steps = tf.concat([padded_steps(part) for part in steps], axis=2)
        target = tf.concat([vectors[name] for name in self.targets.values()], axis=1)
        interest = self._interest(of_steps, target, tf.reduce_any(is_there, axis=0), training)
        parts = [interest, *vectors.values()]
        if dense is not None:
            parts.insert(0, tf.cast(dense, self.compute_dtype))
        return self.prediction(self.deep(tf.concat(parts, axis=1), training=training))

    def _is_there(self, name: str, keys: Any, vectors: Any) -> tf.Tensor:
        """Returns bool [batch, steps]: which steps are no padding."""
        if isinstance(vectors, tf.RaggedTensor):
            return tf.sequence_mask(vectors.row_lengths())
        padding = self._padding[name]
        keys = tf.convert_to_tensor(keys)
        return tf.ones(tf.shape(keys), tf.bool) if padding is None else keys != padding

    def _interest(self, steps: Any, target: Any, is_there: Any, training: bool | None) -> Any:
        """Returns the weighted sum of the steps, [batch, width]."""
        target = tf.broadcast_to(target[:, tf.newaxis], tf.shape(steps))
        compared = tf.concat([steps, target, steps - target, steps * target], axis=2)
        compared = tf.reshape(compared, [-1, 4 * steps.shape[2]])
        weights = self.attention(compared, training=training)
        weights = tf.cast(tf.reshape(weights, tf.shape(is_there)), steps.dtype)
        weights = tf.where(is_there, weights, tf.zeros([], steps.dtype))
        return tf.einsum("bt,btd->bd", weights, steps)

    def input_signature(self) -> dict[str, Any]:
        """Returns the specs of the inputs of a prediction: padded histories of any length."""
        keys = {name: tf.TensorSpec([None], tf.int64) for name in self.dims}
        keys.update({name: tf.TensorSpec([None, None], tf.int64) for name in self.targets})
        return {**super().input_signature(), "keys": keys}

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`; no weights or rows in it."""
        return {
            **super().get_config(),
            "history": dict(self.targets),
            "attention": list(self.attention_widths),
            "deep": list(self.deep_widths),
        }
