"""Models with pairwise dot products: DLRM, and TBSM for sequences."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.models.click_model import ClickModel, require_widths
from slipstream_tf.models.interaction import TimeAttention, padded_steps, pairwise_dots
from slipstream_tf.ops.features import PADDING_KEY


class DotsModel(ClickModel):
    """Base class of models with pairwise dots between two MLPs.

    Args:
        embeddings: The layer that looks up the keys. Its tables share one dimension.
        dense_features: Number of numeric features per example. With 0 there is no bottom MLP.
        bottom: Widths of the bottom MLP. The last width equals the dimension of the tables.
        top: Widths of the top MLP. The last width is 1, the logit.
        dropout: Dropout rate after each hidden layer of the top MLP, in [0, 1).
        returns_logits: Whether the model returns logits instead of probabilities.
        **kwargs: Arguments of `ClickModel` and `keras.Model`.

    Attributes:
        dim: Dimension of the tables.
        num_vectors: Number of vectors per example: the features and the output of the bottom MLP.

    Raises:
        ValueError: The widths do not match, or the tables have different dimensions.
    """

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        dense_features: int,
        bottom: Sequence[int],
        top: Sequence[int],
        dropout: float,
        returns_logits: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(embeddings, dense_features, dropout, returns_logits, **kwargs)
        place = type(self).__name__
        self.bottom_widths = require_widths("bottom", bottom, place, not dense_features)
        self.top_widths = require_widths("top", top, place)
        self.dim = self.shared_dim("dot products")
        if self.top_widths[-1] != 1:
            raise invalid(
                "top", list(top), place, "a list that ends with 1, the width of the logit"
            )
        if dense_features and self.bottom_widths[-1] != self.dim:
            allowed = f"a list that ends with {self.dim}, the dimension of the tables"
            raise invalid("bottom", list(bottom), place, allowed)
        self.num_vectors = len(embeddings.specs) + (1 if dense_features else 0)
        self.bottom = None
        if dense_features:
            self.bottom = self.mlp("bottom", self.bottom_widths, self.dense_width)

    def end_with_top(self, inputs: int) -> None:
        """Creates the top MLP and makes its last layer the output layer.

        Args:
            inputs: Number of input values per example.
        """
        self.top = self.mlp(
            "top", self.top_widths, inputs, last_is_linear=True, dropout=self.dropout
        )
        self.end_with(self.top.last)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "bottom": list(self.bottom_widths),
            "top": list(self.top_widths),
        }


@keras.saving.register_keras_serializable(package="slipstream_tf")
class DLRM(DotsModel):
    """Deep learning recommendation model (Naumov et al., arXiv:1906.00091).

    The model takes the dot products of all pairs among the embeddings and the output of the bottom
    MLP, each pair once. The top MLP receives these dot products and the output of the bottom MLP.
    Without numeric features, a trainable vector replaces the output of the bottom MLP in the dot
    products. Its dot product with an embedding is a first-order term, the effect of a single key.
    Products of two embeddings alone start near 0, and so do their gradients. Such a model learns
    slowly or not at all. Call `keras.utils.set_random_seed` before the constructor for
    reproducible weights.

    Example:

    >>> layer = slip.keras.EmbeddingCollection([slip.Table("user", 4), slip.Table("item", 4)])
    >>> model = slip.models.DLRM(layer, dense_features=3, bottom=[8, 4], top=[8, 1])
    >>> inputs = {"dense": np.zeros((2, 3), "float32"), "keys": np.array([[1, 5], [2, 7]])}
    >>> model(inputs).shape
    TensorShape([2, 1])

    Args:
        embeddings: The layer that looks up the keys. Its tables share one dimension.
        dense_features: Number of numeric features per example. With 0 there is no bottom MLP,
            `bottom` is ignored, and the top MLP receives only the dot products.
        bottom: Widths of the bottom MLP. The last width equals the dimension of the tables.
        top: Widths of the top MLP. The last width is 1, the logit.
        dropout: Dropout rate after each hidden layer of the top MLP, in [0, 1).
        returns_logits: Whether the model returns logits instead of probabilities.
        first_order: Whether a model without numeric features has the trainable vector. False
            gives only the dot products of embeddings.
        **kwargs: Arguments of `ClickModel` (`batch_norm`, `l2`, `standardization`) and of
            `keras.Model` (name, dtype, trainable).

    Raises:
        ValueError: The widths do not match, the tables have different dimensions, or there is a
            single vector and therefore no pair.
    """

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        dense_features: int,
        bottom: Sequence[int] = (512, 256, 64, 16),
        top: Sequence[int] = (512, 256, 1),
        dropout: float = 0.0,
        returns_logits: bool = False,
        first_order: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(embeddings, dense_features, bottom, top, dropout, returns_logits, **kwargs)
        if not isinstance(first_order, bool):
            raise invalid("first_order", first_order, "DLRM", "True or False")
        self.first_order = first_order
        self.vector = None
        if self.first_order and not dense_features:
            # Values of about 1, as in the output of a bottom MLP. With smaller values, the rows
            # learn too slowly in a single pass.
            normal = keras.initializers.RandomNormal(0.0, 1.0)
            self.vector = self.add_weight(name="vector", shape=(self.dim,), initializer=normal)
            self.num_vectors += 1
        if self.num_vectors < 2:
            allowed = "at least two features, dense_features >= 1, or first_order=True"
            raise invalid("embeddings", [embeddings.specs[0].name], "DLRM", allowed)
        pairs = self.num_vectors * (self.num_vectors - 1) // 2
        self.end_with_top(pairs + (self.dim if dense_features else 0))

    def logits(self, dense: Any, vectors: list[Any] | Any, training: bool | None) -> Any:
        stacked = tf.stack(vectors, axis=1) if isinstance(vectors, list) else vectors
        if self.bottom is not None:
            bottom = self.bottom(dense, training=training)
            dots = pairwise_dots(tf.concat([tf.expand_dims(bottom, 1), stacked], axis=1))
            return self.top(tf.concat([bottom, dots], axis=1), training=training)
        if self.vector is not None:
            vector = tf.cast(self.vector, stacked.dtype)
            vector = tf.broadcast_to(vector, [tf.shape(stacked)[0], 1, self.dim])
            stacked = tf.concat([vector, stacked], axis=1)
        return self.top(pairwise_dots(stacked), training=training)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "first_order": self.first_order}


@keras.saving.register_keras_serializable(package="slipstream_tf")
class TBSM(DotsModel):
    """Time-based sequence model (Ishkhanov et al., arXiv:2008.11922).

    An example is a sequence of steps, for example the items that a user viewed. The model predicts
    the click on the last step. The earlier steps are the history. As in DLRM, each step passes
    through the tables and the bottom MLP. The step MLP receives the vectors and their pairwise dot
    products, and its output is normalized to length 1. `TimeAttention` weights the history by its
    similarity to the last step. The top MLP receives the last step and the contexts.

    The inputs are `{"keys": {feature: int64 [batch, steps]}}`, with one key per feature and step
    and the same number of steps for all features. Shorter sequences are padded with the key -1 in
    all features, at either end. Alternatively, each feature is a RaggedTensor [batch, None]. The
    last step that is not padding is the scored step. Repeat features that do not change over time,
    such as the user, at each step. With `dense_features`, the inputs also contain "dense", float
    [batch, steps, dense_features]. The saturation engine treats a sequence as a bag, so that the
    keys of all steps are keys of the example. Call `keras.utils.set_random_seed` before the
    constructor for reproducible weights.

    Example:

    >>> tables = [slip.Table(name, 4, combiner=None) for name in ("user", "item")]
    >>> layer = slip.keras.EmbeddingCollection(tables)
    >>> model = slip.models.TBSM(layer, step=[8, 4], top=[8, 1])
    >>> keys = {"user": np.array([[1, 1, 1]]), "item": np.array([[5, 7, 6]])}
    >>> model({"keys": keys}).shape
    TensorShape([1, 1])

    Args:
        embeddings: The layer that looks up the keys. Its tables share one dimension, and no feature
            is pooled: `Table(..., combiner=None)`.
        dense_features: Number of numeric features per step, at least 0.
        bottom: Widths of the bottom MLP. The last width equals the dimension of the tables. Ignored
            without numeric features.
        step: Widths of the step MLP. The last width is the size of the vector of a step.
        heads: Number of attention heads, at least 1.
        top: Widths of the top MLP. The last width is 1, the logit.
        dropout: Dropout rate after each hidden layer of the top MLP, in [0, 1).
        returns_logits: Whether the model returns logits instead of probabilities.
        **kwargs: Arguments of `ClickModel` (`batch_norm`, `l2`, `standardization`) and of
            `keras.Model` (name, dtype, trainable).

    Raises:
        ValueError: The widths do not match, the tables have different dimensions, or a feature has
            a combiner or a padding key other than -1.
    """

    dense_axes = ("batch", "steps")
    takes_sequences = True

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        dense_features: int = 0,
        bottom: Sequence[int] = (16,),
        step: Sequence[int] = (64, 16),
        heads: int = 1,
        top: Sequence[int] = (60, 1),
        dropout: float = 0.0,
        returns_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(embeddings, dense_features, bottom, top, dropout, returns_logits, **kwargs)
        paddings = {spec.name: spec.padding_key for spec in embeddings.specs}
        if set(paddings.values()) != {PADDING_KEY}:
            allowed = f"{PADDING_KEY} for every feature, because it marks missing steps"
            raise invalid("padding_key", paddings, "TBSM", allowed)
        self.step_widths = require_widths("step", step, "TBSM")
        vectors, width = self.num_vectors, self.step_widths[-1]
        inputs = vectors * self.dim + vectors * (vectors - 1) // 2
        self.step = self.mlp("step", self.step_widths, inputs, last_is_linear=True)
        self.attention = TimeAttention(heads, name="attention", dtype=self.dtype_policy)
        self.attention.build((None, width))
        self.end_with_top((1 + heads) * width)

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Predicts clicks on the last steps.

        Args:
            inputs: The inputs that the class describes. "skippable" and "next_keys" are handled as
                in other click models.
            training: Whether to train the embeddings and to apply dropout.

        Returns:
            Probabilities or logits, float32 [batch, 1] for every dtype policy.

        Raises:
            ValueError: An input is missing, unknown or has the wrong shape.
        """
        dense, keys = self._split(inputs)
        padded = _padded_keys(keys, self.name)
        is_present = tf.reduce_any([part != PADDING_KEY for part in padded.values()], axis=0)
        rows = [padded_steps(part) for part in self.look_up(keys, inputs, training)]
        vectors = tf.reshape(tf.stack(rows, axis=2), [-1, len(rows), self.dim])
        steps = tf.shape(is_present)
        vectors = self._step_vectors(dense, vectors, training)
        vectors = tf.reshape(vectors, [steps[0], steps[1], self.step_widths[-1]])
        # The index of the last step without padding; the last step if all steps are padding.
        last = steps[1] - 1 - tf.argmax(is_present[:, ::-1], axis=1, output_type=tf.int32)
        scored = tf.gather(vectors, last, batch_dims=1)
        is_history = is_present & (tf.range(steps[1]) < last[:, tf.newaxis])
        contexts = self.attention(scored, vectors, is_history)
        logits = self.top(tf.concat([scored, contexts], axis=1), training=training)
        return self.prediction(logits)

    def _step_vectors(self, dense: Any, vectors: Any, training: bool | None) -> Any:
        """Returns step vectors of length 1, [batch * steps, width].

        Args:
            dense: Numeric features, [batch, steps, dense_features], or None.
            vectors: Embeddings, [batch * steps, features, dim].
            training: As in `call`.
        """
        if self.bottom is not None:
            numbers = tf.reshape(dense, [-1, self.dense_width])
            bottom = self.bottom(numbers, training=training)
            vectors = tf.concat([tf.expand_dims(bottom, 1), vectors], axis=1)
        parts = [tf.reshape(vectors, [-1, vectors.shape[1] * vectors.shape[2]])]
        if vectors.shape[1] > 1:
            parts.append(pairwise_dots(vectors))
        outputs = self.step(tf.concat(parts, axis=1), training=training)
        return tf.math.l2_normalize(tf.cast(outputs, self.compute_dtype), axis=1)

    def _own_keys(self) -> dict[str, Any]:
        """Returns the specs of padded sequences."""
        return {s.name: tf.TensorSpec([None, None], tf.int64) for s in self.embeddings.specs}

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "step": list(self.step_widths),
            "heads": self.attention.heads,
        }


def _padded_keys(keys: Any, model: str) -> dict[str, tf.Tensor]:
    """Returns the keys of sequences, int64 [batch, steps], padded with -1."""
    place = f"model {model!r}"
    if not isinstance(keys, Mapping):
        raise invalid(
            "keys", type(keys).__name__, place, "a dictionary {feature: keys [batch, steps]}"
        )
    padded = {}
    for name, part in keys.items():
        if isinstance(part, tf.RaggedTensor):
            part = part.to_tensor(PADDING_KEY)
        if len(part.shape) != 2:
            allowed = "shape [batch, steps] with one key per step, or a RaggedTensor [batch, None]"
            raise invalid("keys", tuple(part.shape), f"feature {name!r} of {place}", allowed)
        padded[name] = part
    return padded
