"""Models over the dots of feature vectors: DLRM, and TBSM with a vector per step of a sequence."""

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
    """Base of models with a bottom MLP over the numbers, dots of pairs, and a top MLP.

    Args:
        embeddings: tables of one dimension.
        dense_features: numeric features per input; without any there is no bottom MLP.
        bottom: widths of the bottom MLP; the last one equals the tables' dimension.
        top: widths of the top MLP; the last one is 1, the logit.
        dropout: share of units dropped after each hidden layer of the top MLP, 0 to below 1.
        returns_logits: whether the output is a logit instead of a probability.
        **kwargs: of `keras.Model`.

    Attributes:
        dim: of the tables.
        num_vectors: of which dots are taken: features, and the bottom MLP's output.

    Raises:
        ValueError: widths that do not fit, or tables of several dimensions.
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
        self.dim = self.one_dim("dots")
        if self.top_widths[-1] != 1:
            raise invalid("top", list(top), place, "a list that ends with 1, the logit")
        if dense_features and self.bottom_widths[-1] != self.dim:
            allowed = f"a list that ends with {self.dim}, the dim of the embedding tables"
            place += f", whose bottom MLP ends with {self.bottom_widths[-1]}"
            raise invalid("bottom", list(bottom), place, allowed)
        self.num_vectors = len(embeddings.specs) + (1 if dense_features else 0)
        self.bottom = None
        if dense_features:
            self.bottom = self.mlp("bottom", self.bottom_widths, dense_features)

    def end_with_top(self, inputs: int) -> None:
        """Makes the top MLP, the last of the model's layers, for `inputs` values per row."""
        self.top = self.mlp(
            "top", self.top_widths, inputs, last_is_linear=True, dropout=self.dropout
        )
        self.end_with(self.top.last)

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`; no weights or rows in it."""
        return {
            **super().get_config(),
            "bottom": list(self.bottom_widths),
            "top": list(self.top_widths),
        }


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


@keras.saving.register_keras_serializable(package="slipstream_tf")
class TBSM(DotsModel):
    """Time-based sequence model (Ishkhanov et al., arXiv:2008.11922).

    An input is a sequence of steps, such as the items that a user looked at; the last step is the
    item whose click is predicted, the ones before are its history. Every step goes, as in DLRM,
    through the tables and the bottom MLP; the vectors and the dots of their pairs go through the
    step MLP, and its output is scaled to length 1. `TimeAttention` weighs the history by its
    likeness to the last step; last step and contexts go through the top MLP.

    Inputs. {"keys": {feature: int64 [batch, steps]}}, one key per feature and step, the same number
    of steps for all features. Where sequences have several lengths, steps that are not there have
    the key -1 in all features, before or behind the others (or each feature is a RaggedTensor
    [batch, None]). The last step that is there is the one that is scored. What stays the same over
    time, such as the user, is repeated at each step. With `dense_features`, "dense" is float
    [batch, steps, dense_features]. To the saturation engine a sequence is a bag: its keys are the
    keys of the input.

    Seed with `keras.utils.set_random_seed` before building it.

    Args:
        embeddings: tables of one dimension. No feature is pooled: `Table(..., combiner=None)`.
        dense_features: numeric features per step, 0 or more.
        bottom: widths of the bottom MLP; the last one equals the tables' dimension. Not used
            without numbers.
        step: widths of the step MLP; the last one is the length of a step's vector.
        heads: of the attention, 1 or more.
        top: widths of the top MLP; the last one is 1, the logit.
        dropout: share of units dropped after each hidden layer of the top MLP, 0 to below 1.
        returns_logits: whether the output is a logit instead of a probability.
        **kwargs: of `ClickModel` (`batch_norm`) and of `keras.Model`: name, dtype, trainable.

    Raises:
        ValueError: widths that do not fit, tables of several dimensions, or a feature with a
            combiner or another padding key than -1.
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
            allowed = f"{PADDING_KEY} for all features, of steps that are not there"
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
            inputs: see the class; "skippable" and "next_keys" as for other click models.
            training: whether to train the embeddings and to drop units.

        Returns:
            Probabilities (or logits), float32 [batch, 1] whatever the dtype policy.

        Raises:
            ValueError: an input is missing, unknown or of another shape.
        """
        dense, keys = self._split(inputs)
        padded = _padded_keys(keys, self.name)
        is_there = tf.reduce_any([part != PADDING_KEY for part in padded.values()], axis=0)
        rows = [padded_steps(part) for part in self.look_up(keys, inputs, training)]
        vectors = tf.reshape(tf.stack(rows, axis=2), [-1, len(rows), self.dim])
        steps = tf.shape(is_there)
        vectors = self._step_vectors(dense, vectors, training)
        vectors = tf.reshape(vectors, [steps[0], steps[1], self.step_widths[-1]])
        # The last step that is there; of an input without any, one that is not.
        last = steps[1] - 1 - tf.argmax(is_there[:, ::-1], axis=1, output_type=tf.int32)
        scored = tf.gather(vectors, last, batch_dims=1)
        is_history = is_there & (tf.range(steps[1]) < last[:, tf.newaxis])
        contexts = self.attention(scored, vectors, is_history)
        logits = self.top(tf.concat([scored, contexts], axis=1), training=training)
        return self.prediction(logits)

    def _step_vectors(self, dense: Any, vectors: Any, training: bool | None) -> Any:
        """Returns vectors of length 1, [batch * steps, width]."""
        if self.bottom is not None:
            numbers = tf.reshape(dense, [-1, self.dense_features])
            bottom = self.bottom(numbers, training=training)
            vectors = tf.concat([tf.expand_dims(bottom, 1), vectors], axis=1)
        parts = [tf.reshape(vectors, [-1, vectors.shape[1] * vectors.shape[2]])]
        if vectors.shape[1] > 1:
            parts.append(pairwise_dots(vectors))
        outputs = self.step(tf.concat(parts, axis=1), training=training)
        return tf.math.l2_normalize(tf.cast(outputs, self.compute_dtype), axis=1)

    def input_signature(self) -> dict[str, Any]:
        """Returns the specs of the inputs of a prediction: padded sequences of any length."""
        keys = {s.name: tf.TensorSpec([None, None], tf.int64) for s in self.embeddings.specs}
        return {**super().input_signature(), "keys": keys}

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`; no weights or rows in it."""
        return {
            **super().get_config(),
            "step": list(self.step_widths),
            "heads": self.attention.heads,
        }


def _padded_keys(keys: Any, model: str) -> dict[str, tf.Tensor]:
    """Returns sequences int64 [batch, steps], padded with -1."""
    place = f"model {model!r}"
    if not isinstance(keys, Mapping):
        raise invalid("keys", type(keys).__name__, place, "a dictionary {feature: [batch, steps]}")
    padded = {}
    for name, part in keys.items():
        if isinstance(part, tf.RaggedTensor):
            part = part.to_tensor(PADDING_KEY)
        if len(part.shape) != 2:
            allowed = "[batch, steps], a key per step, or a RaggedTensor [batch, None]"
            raise invalid("keys", tuple(part.shape), f"feature {name!r} of {place}", allowed)
        padded[name] = part
    return padded
