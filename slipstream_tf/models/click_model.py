"""What the click models share: inputs, embeddings, MLPs and output. A model adds `logits`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid, require_integer, require_number
from slipstream_tf.data.spec import NOTES
from slipstream_tf.distributed.batches import NEXT_KEYS
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.keras.loss_feedback import LossFeedback

# PyTorch's, by which published models were trained. By Keras's momentum of 0.99 the averages lag
# behind by more than an epoch of a small data set, and its epsilon of 1e-3 is more than the
# variance of what new rows give.
_NORM_MOMENTUM, _NORM_EPSILON = 0.9, 1e-5


def require_widths(
    argument: str, widths: Sequence[int], place: str, may_be_empty: bool = False
) -> tuple[int, ...]:
    """Returns `widths`; raises ValueError unless it is a list of integers >= 1."""
    allowed = "a list of integers >= 1" + ("" if may_be_empty else ", not empty")
    if not isinstance(widths, (list, tuple)) or not (widths or may_be_empty):
        raise invalid(argument, widths, place, allowed)
    for width in widths:
        require_integer(argument, width, 1, None, place)
    return tuple(widths)


def require_dropout(dropout: float, place: str) -> float:
    """Returns `dropout`; raises ValueError unless it is in [0, 1)."""
    require_number("dropout", dropout, minimum=0.0, maximum=1.0, place=place)
    if dropout == 1.0:
        raise invalid("dropout", dropout, place, "a number >= 0 and < 1")
    return float(dropout)


def side_by_side(dense: Any, vectors: Any) -> tf.Tensor:
    """Returns numbers and vectors, as `ClickModel.logits` has them, as one matrix."""
    if not isinstance(vectors, list):
        vectors = [tf.reshape(vectors, [-1, vectors.shape[1] * vectors.shape[2]])]
    return tf.concat(vectors if dense is None else [dense, *vectors], axis=1)


def penalty_of(l2: float) -> Any:
    """Returns the regularizer of a layer's weights, None without a penalty."""
    return keras.regularizers.L2(l2) if l2 else None


@keras.saving.register_keras_serializable(package="slipstream_tf")
class MLP(keras.layers.Layer):
    """Dense layers with ReLU and dropout between them, and batch normalisation in front of ReLU.

    Args:
        widths: units of each layer, one layer or more.
        last_is_linear: whether the last layer has neither ReLU nor dropout: it gives logits, and
            is computed in float32 whatever the dtype policy.
        dropout: share of units dropped after each ReLU in training, 0 to below 1.
        batch_norm: whether there is `keras.layers.BatchNormalization` in front of each ReLU, with
            a momentum of 0.9 and an epsilon of 1e-5.
        l2: factor on the layers' squared weights, biases apart, a penalty in the loss; 0: none.
        **kwargs: of `keras.layers.Layer`.

    Raises:
        ValueError: a width, the dropout or `l2` is out of range.
    """

    def __init__(
        self,
        widths: Sequence[int],
        last_is_linear: bool = False,
        dropout: float = 0.0,
        batch_norm: bool = False,
        l2: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.widths = require_widths("widths", widths, "MLP")
        self.dropout = require_dropout(dropout, "MLP")
        self.l2 = float(require_number("l2", l2, minimum=0.0, place="MLP"))
        self.last_is_linear = bool(last_is_linear)
        self.batch_norm = bool(batch_norm)
        self._stack = []
        for index, width in enumerate(self.widths):
            is_linear = self.last_is_linear and index == len(self.widths) - 1
            # Logits in bfloat16 have 8 bits: ties in the ranking and a coarse calibration.
            policy = "float32" if is_linear else self.dtype_policy
            normalises = self.batch_norm and not is_linear
            activation = None if is_linear or normalises else "relu"
            penalty = penalty_of(self.l2)
            self._stack.append(
                keras.layers.Dense(width, activation, kernel_regularizer=penalty, dtype=policy)
            )
            if normalises:
                self._stack.append(
                    keras.layers.BatchNormalization(
                        momentum=_NORM_MOMENTUM, epsilon=_NORM_EPSILON, dtype=policy
                    )
                )
                self._stack.append(keras.layers.Activation("relu", dtype=policy))
            if self.dropout and not is_linear:
                self._stack.append(keras.layers.Dropout(self.dropout, dtype=self.dtype_policy))

    @property
    def last(self) -> Any:
        """The last `keras.layers.Dense`."""
        return next(part for part in reversed(self._stack) if isinstance(part, keras.layers.Dense))

    def build(self, input_shape: Any) -> None:
        """Creates the weights for inputs [batch, n]."""
        shape = tuple(input_shape)
        for layer in self._stack:
            layer.build(shape)
            shape = tuple(layer.compute_output_shape(shape))
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns [batch, widths[-1]] for [batch, n]."""
        # Keras hands `training` on to the layers that are called in here.
        for layer in self._stack:
            inputs = layer(inputs)
        return inputs

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """Returns (batch, widths[-1])."""
        return (input_shape[0], self.widths[-1])

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`."""
        return {
            **super().get_config(),
            "widths": list(self.widths),
            "last_is_linear": self.last_is_linear,
            "dropout": self.dropout,
            "batch_norm": self.batch_norm,
            "l2": self.l2,
        }


class ClickModel(LossFeedback, keras.Model):
    """Base of models that predict the probability of a click.

    Args:
        embeddings: the layer that turns keys into vectors.
        dense_features: numeric features per input, 0 or more.
        dropout: share of units dropped after each hidden layer of the last MLP, 0 to below 1.
        returns_logits: whether the output is a logit instead of a probability.
        batch_norm: whether hidden layers of the MLPs have batch normalisation, see `MLP`. Its
            moving averages are each rank's own, and an empty batch spoils them: for one process.
        l2: factor on the squared weights of all layers but the tables, biases apart, a penalty in
            the loss; 0: none. (Rows have `optimizers.SparseOptimizer.l2`.)
        **kwargs: of `keras.Model`: name, dtype, trainable.

    Attributes:
        dims: values per vector, by feature.
        output_layer: the `keras.layers.Dense` whose bias is added to the logit.

    Raises:
        ValueError: an argument is of the wrong type or range, or the dtype policy needs loss
            scaling.
    """

    # The axes of "dense" in front of the features'.
    dense_axes: tuple[str, ...] = ("batch",)
    # Whether each feature gives a vector per key, [batch, steps, dim]; else one, [batch, dim].
    takes_sequences: bool = False
    output_layer: Any

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        dense_features: int,
        dropout: float,
        returns_logits: bool,
        batch_norm: bool = False,
        l2: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        place = type(self).__name__
        self.l2 = float(require_number("l2", l2, minimum=0.0, place=place))
        if not isinstance(batch_norm, bool):
            raise invalid("batch_norm", batch_norm, place, "True or False")
        self.batch_norm = batch_norm
        if not isinstance(embeddings, EmbeddingCollection):
            allowed = "a slipstream_tf.keras.EmbeddingCollection"
            raise invalid("embeddings", embeddings, place, allowed)
        require_integer("dense_features", dense_features, 0, None, place)
        self.dropout = require_dropout(dropout, place)
        if self.compute_dtype == "float16":
            allowed = "'float32' or 'mixed_bfloat16' (float16 needs loss scaling)"
            raise invalid("dtype policy", self.dtype_policy.name, place, allowed)
        self.embeddings = embeddings
        self.dense_features = dense_features
        self.returns_logits = bool(returns_logits)
        self._require_combiners(embeddings)
        dims = {table.name: table.dim for table in embeddings.tables}
        self.dims = {spec.name: dims[spec.table] for spec in embeddings.specs}

    def _require_combiners(self, embeddings: EmbeddingCollection) -> None:
        place = type(self).__name__
        unpooled = [spec.name for spec in embeddings.specs if spec.combiner is None]
        pooled = {spec.name: spec.combiner for spec in embeddings.specs if spec.combiner}
        if unpooled and not self.takes_sequences:
            allowed = "a combiner for every feature: a vector per feature goes into the model"
            raise invalid("combiner", None, f"features {unpooled} of a {place}", allowed)
        if pooled and self.takes_sequences:
            allowed = (
                "None for every feature, as in Table(name, dim, combiner=None): a vector per step "
                "goes into the model"
            )
            raise invalid("combiner", pooled, f"the features of a {place}", allowed)

    def logits(self, dense: Any, vectors: list[Any] | Any, training: bool | None) -> Any:
        """Computes the logits; a model implements it.

        Args:
            dense: [batch, dense_features] or None where there are none.
            vectors: [batch, features, dim], or a list of [batch, dim_f] for dictionary keys.
            training: whether dropout is on.

        Returns:
            [batch, 1].
        """
        raise NotImplementedError

    def end_with(self, output_layer: Any) -> None:
        """Takes the output layer, when all layers are made; the model is then built."""
        # Past Keras, which would track the layer twice.
        object.__setattr__(self, "output_layer", output_layer)
        self.built = True

    def start_at(self, base_rate: float) -> None:
        """Sets the output's bias to the log odds of a click; call it before training.

        Without it the first steps teach the model little but how rare clicks are.

        Args:
            base_rate: share of the labels that are 1, above 0 and below 1.

        Raises:
            ValueError: `base_rate` is out of range.
        """
        place = type(self).__name__
        require_number("base_rate", base_rate, 0.0, 1.0, place, open_minimum=True)
        if base_rate == 1.0:
            raise invalid("base_rate", base_rate, place, "a number above 0 and below 1")
        self.output_layer.bias.assign([math.log(base_rate / (1.0 - base_rate))])

    def mlp(self, name: str, widths: Sequence[int], inputs: int, **options: Any) -> MLP:
        """Returns a built MLP of the model's dtype policy.

        Args:
            name: of the layer.
            widths: of its layers.
            inputs: values per row that it takes.
            **options: of `MLP`.
        """
        own = {"batch_norm": self.batch_norm, "l2": self.l2, "dtype": self.dtype_policy}
        options = {**own, **options}
        layer = MLP(widths, name=name, **options)
        layer.build((None, inputs))
        return layer

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; see `call`."""
        return super().__call__(_compat.arrays_to_tensors(inputs), *args, **kwargs)

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Predicts clicks.

        Args:
            inputs: {"dense": float [batch, dense_features], "keys": as `EmbeddingCollection` takes
                them}; no "dense" where `dense_features` is 0. "skippable", bool [batch], may be
                there for the recording of losses and is not read here. Nor is "next_keys" (see
                `distributed.with_next`), but in training with embeddings of `prefetch=True`, which
                need it.
            training: whether to train the embeddings and to drop units.

        Returns:
            Probabilities (or logits), float32 [batch, 1] whatever the dtype policy.

        Raises:
            ValueError: an input is missing, unknown or of another width.
        """
        dense, keys = self._split(inputs)
        vectors = self.look_up(keys, inputs, training)
        return self.prediction(self.logits(dense, vectors, training))

    def look_up(self, keys: Any, inputs: Mapping[str, Any], training: bool | None) -> Any:
        """Returns the vectors of keys in the compute dtype.

        Args:
            keys: as `EmbeddingCollection` takes them.
            inputs: of the model; they have the next keys, in training with prefetch.
            training: whether to train the embeddings.

        Returns:
            [batch, features, dim]; for dictionary keys a list with a tensor per feature, as the
            layer gives them.

        Raises:
            ValueError: the inputs have no next keys, in training with prefetch.
        """
        next_keys = None
        if training and self.embeddings.prefetch:
            if NEXT_KEYS not in inputs:
                allowed = (
                    f"{NEXT_KEYS!r}, too, in training with prefetch=True: put the data through "
                    "slipstream_tf.distributed.with_next"
                )
                raise invalid("inputs", sorted(inputs), f"model {self.name!r}", allowed)
            next_keys = inputs[NEXT_KEYS]
        vectors = self.embeddings(keys, training=training, next_inputs=next_keys)
        if isinstance(vectors, Mapping):
            return [tf.cast(vector, self.compute_dtype) for vector in vectors.values()]
        return tf.cast(vectors, self.compute_dtype)

    def prediction(self, logits: Any) -> tf.Tensor:
        """Returns logits [batch, 1] as the model gives them, float32."""
        logits = tf.cast(logits, tf.float32)
        return logits if self.returns_logits else tf.sigmoid(logits)

    def one_dim(self, cause: str) -> int:
        """Returns the dimension of all features' tables.

        Raises:
            ValueError: there are several.
        """
        if len(set(self.dims.values())) > 1:
            allowed = f"one dimension for all features ({cause} need it)"
            raise invalid("dim", dict(self.dims), type(self).__name__, allowed)
        return next(iter(self.dims.values()))

    def _split(self, inputs: Any) -> tuple[Any, Any]:
        expected = ["dense", "keys"] if self.dense_features else ["keys"]
        names = set(inputs) - {*NOTES, NEXT_KEYS} if isinstance(inputs, Mapping) else set()
        if sorted(names) != expected:
            given = sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
            allowed = f"a dictionary with {expected} (dense_features={self.dense_features})"
            raise invalid("inputs", given, f"model {self.name!r}", allowed)
        if not self.dense_features:
            return None, inputs["keys"]
        dense = inputs["dense"]
        shape = (*self.dense_axes, self.dense_features)
        if len(dense.shape) != len(shape) or dense.shape[-1] not in (None, shape[-1]):
            allowed = (
                f"[{', '.join(map(str, shape))}], as dense_features={self.dense_features} says"
            )
            raise invalid("dense", tuple(dense.shape), f"model {self.name!r}", allowed)
        return dense, inputs["keys"]

    def input_signature(self) -> dict[str, Any]:
        """Returns the specs of the inputs of a prediction, with one key per feature.

        Returns:
            {"dense": float32 [None, dense_features], "keys": int64 [None, features], or, where
            tables have several dimensions, {feature: int64 [None]}}; no "dense" where there are no
            numbers.
        """
        keys: Any = tf.TensorSpec([None, len(self.dims)], tf.int64)
        if len(set(self.dims.values())) > 1:
            keys = {name: tf.TensorSpec([None], tf.int64) for name in self.dims}
        if not self.dense_features:
            return {"keys": keys}
        shape = [*[None] * len(self.dense_axes), self.dense_features]
        return {"dense": tf.TensorSpec(shape, tf.float32), "keys": keys}

    def build(self, input_shape: Any = None) -> None:
        """Does nothing: all weights are created with the model, whose sizes are known then."""
        self.built = True

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, int]:
        """Returns (batch, 1) for the shapes of the inputs."""
        keys = input_shape["keys"]
        while isinstance(keys, Mapping):
            keys = next(iter(keys.values()))
        return (keys[0], 1)

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`; no weights or rows in it."""
        return {
            **keras.layers.Layer.get_config(self),
            "embeddings": keras.saving.serialize_keras_object(self.embeddings),
            "dense_features": self.dense_features,
            "dropout": self.dropout,
            "returns_logits": self.returns_logits,
            "batch_norm": self.batch_norm,
            "l2": self.l2,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "ClickModel":
        """Builds the model, with fresh weights and empty tables, that `get_config` described."""
        config = dict(config)
        config["embeddings"] = keras.saving.deserialize_keras_object(
            config["embeddings"], custom_objects=custom_objects
        )
        return cls(**config)
