"""The base class of the click models and their MLP layer."""

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
from slipstream_tf.models.standardization import Standardization
from slipstream_tf.ops.features import of_specs

# The defaults of PyTorch, with which the published models were trained. With the Keras momentum of
# 0.99 the averages lag by more than an epoch of a small data set, and the Keras epsilon of 1e-3
# exceeds the variance of the vectors of new rows.
_NORM_MOMENTUM, _NORM_EPSILON = 0.9, 1e-5


def require_widths(
    argument: str, widths: Sequence[int], place: str, may_be_empty: bool = False
) -> tuple[int, ...]:
    """Validates the widths of an MLP.

    Args:
        argument: Name of the argument, for the error.
        widths: A list or tuple of integers, at least 1 each.
        place: Class with the argument, for the error.
        may_be_empty: Whether no width is valid, too.

    Returns:
        The widths as a tuple.

    Raises:
        ValueError: The widths are invalid.
    """
    allowed = f"a {'' if may_be_empty else 'non-empty '}list of integers >= 1"
    if not isinstance(widths, (list, tuple)) or not (widths or may_be_empty):
        raise invalid(argument, widths, place, allowed)
    for width in widths:
        require_integer(argument, width, 1, None, place)
    return tuple(widths)


def require_dropout(dropout: float, place: str) -> float:
    """Returns `dropout` as a float; raises ValueError outside of [0, 1)."""
    require_number("dropout", dropout, minimum=0.0, maximum=1.0, place=place)
    if dropout == 1.0:
        raise invalid("dropout", dropout, place, "a number >= 0 and < 1")
    return float(dropout)


def side_by_side(dense: Any, vectors: Any) -> tf.Tensor:
    """Concatenates numeric features and embeddings to one matrix.

    Args:
        dense: Numeric features, float [batch, n], or None.
        vectors: Embeddings, [batch, features, dim] or a list of [batch, dim], as
            `ClickModel.logits` receives them.

    Returns:
        [batch, width], the numeric features first.
    """
    if not isinstance(vectors, list):
        vectors = [tf.reshape(vectors, [-1, vectors.shape[1] * vectors.shape[2]])]
    return tf.concat(vectors if dense is None else [dense, *vectors], axis=1)


def penalty_of(l2: float) -> Any:
    """Returns a Keras regularizer with factor `l2`; None for 0."""
    return keras.regularizers.L2(l2) if l2 else None


@keras.saving.register_keras_serializable(package="slipstream_tf")
class MLP(keras.layers.Layer):
    """A stack of dense layers with ReLU, dropout and optional batch normalization.

    Example:

    >>> mlp = slip.models.MLP([8, 1], last_is_linear=True)
    >>> mlp(np.zeros((2, 4), "float32")).shape
    TensorShape([2, 1])

    Args:
        widths: Number of units of each layer, at least one layer.
        last_is_linear: Whether the last layer has no ReLU, dropout or batch normalization, so that
            it returns logits. Such a layer is computed in float32 with every dtype policy.
        dropout: Dropout rate after each ReLU, in [0, 1).
        batch_norm: Whether a `keras.layers.BatchNormalization` with momentum 0.9 and epsilon 1e-5
            precedes each ReLU.
        l2: Factor of the squared kernel weights in the loss, without biases. 0 disables it.
        **kwargs: Arguments of `keras.layers.Layer`.

    Raises:
        ValueError: A width, the dropout rate or `l2` is out of range.
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
            # Logits in bfloat16 have 8 bits, which causes ties in the ranking and poor calibration.
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
        """The last `keras.layers.Dense` of the stack."""
        return next(part for part in reversed(self._stack) if isinstance(part, keras.layers.Dense))

    def build(self, input_shape: Any) -> None:
        """Creates the weights for inputs of shape [batch, n]."""
        shape = tuple(input_shape)
        for layer in self._stack:
            layer.build(shape)
            shape = tuple(layer.compute_output_shape(shape))
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Maps inputs of shape [batch, n] to [batch, widths[-1]]."""
        # Keras propagates `training` to the inner layers.
        for layer in self._stack:
            inputs = layer(inputs)
        return inputs

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """Returns (batch, widths[-1])."""
        return (input_shape[0], self.widths[-1])

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary for `from_config`."""
        return {
            **super().get_config(),
            "widths": list(self.widths),
            "last_is_linear": self.last_is_linear,
            "dropout": self.dropout,
            "batch_norm": self.batch_norm,
            "l2": self.l2,
        }


def _key_spec(keys: Any) -> Any:
    """Returns the spec of keys with any number of examples and of keys per example."""
    if isinstance(keys, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, None], keys.dtype, 1, keys.row_splits.dtype)
    if isinstance(keys, tf.SparseTensor):
        return tf.SparseTensorSpec([None, None], keys.dtype)
    if not hasattr(keys, "dtype"):
        keys = tf.convert_to_tensor(keys)
    return tf.TensorSpec([None] * len(keys.shape), tf.as_dtype(keys.dtype))


class ClickModel(LossFeedback, keras.Model):
    """Base class of models that predict the probability of a click.

    A subclass implements `logits`, creates its layers in the constructor and passes the output
    layer to `end_with`.

    Args:
        embeddings: The layer that looks up the keys.
        dense_features: Number of numeric features per example, at least 0.
        dropout: Dropout rate, in [0, 1), for the MLPs to which the subclass applies it.
        returns_logits: Whether the model returns logits instead of probabilities.
        batch_norm: Whether the hidden layers of the MLPs use batch normalization, see `MLP`. Note:
            use it in a single process only, because each rank has separate moving averages and an
            empty batch corrupts them.
        l2: Factor of the squared kernel weights of all layers in the loss, without biases and
            tables. 0 disables it. The L2 factor of rows is `optimizers.SparseOptimizer.l2`.
        standardization: The layer that scales the numeric features. None uses them unchanged; then
            none may be missing (NaN).
        **kwargs: Arguments of `keras.Model`: name, dtype, trainable.

    Attributes:
        dense_width: Number of numeric features after `standardization`.
        dims: Number of values per vector, by feature name.
        output_layer: The `keras.layers.Dense` whose bias is a summand of the logit. `start_at` sets
            that bias.

    Raises:
        ValueError: An argument has the wrong type or is out of range, or the dtype policy needs
            loss scaling.
    """

    # The leading axes of "dense", before the feature axis.
    dense_axes: tuple[str, ...] = ("batch",)
    # Whether features are sequences, [batch, steps, dim], instead of single vectors, [batch, dim].
    takes_sequences: bool = False
    output_layer: Any
    # Specs of the keys of the last call, and whether that call was a training call.
    _key_specs: Any = None
    _has_trained: bool = False

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        dense_features: int,
        dropout: float,
        returns_logits: bool,
        batch_norm: bool = False,
        l2: float = 0.0,
        standardization: Standardization | None = None,
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
            allowed = "'float32' or 'mixed_bfloat16', because float16 requires loss scaling"
            raise invalid("dtype policy", self.dtype_policy.name, place, allowed)
        self.embeddings = embeddings
        self.dense_features = self.dense_width = dense_features
        self.standardization = standardization
        if standardization is not None:
            scales = getattr(standardization, "scales", None)
            if scales is None or len(scales) != dense_features:
                allowed = f"a Standardization with dense_features={dense_features} scales, or None"
                raise invalid("standardization", scales or standardization, place, allowed)
            self.dense_width = standardization.width
        self.returns_logits = bool(returns_logits)
        self._require_combiners(embeddings)
        dims = {table.name: table.dim for table in embeddings.tables}
        self.dims = {spec.name: dims[spec.table] for spec in embeddings.specs}

    def _require_combiners(self, embeddings: EmbeddingCollection) -> None:
        place = type(self).__name__
        unpooled = [spec.name for spec in embeddings.specs if spec.combiner is None]
        pooled = {spec.name: spec.combiner for spec in embeddings.specs if spec.combiner}
        if unpooled and not self.takes_sequences:
            allowed = (
                "a combiner for every feature, because the model uses one vector per feature. For "
                "example, pass Table(name, dim, combiner='sum')"
            )
            raise invalid("combiner", None, f"features {unpooled} of a {place}", allowed)
        if pooled and self.takes_sequences:
            allowed = (
                "None for every feature, because the model uses one vector per step. Pass "
                "Table(name, dim, combiner=None)"
            )
            raise invalid("combiner", pooled, f"the features of a {place}", allowed)

    def logits(self, dense: Any, vectors: list[Any] | Any, training: bool | None) -> Any:
        """Computes the logits; subclasses implement it.

        Args:
            dense: Numeric features, [batch, dense_width], or None if the model has none.
            vectors: Embeddings, [batch, features, dim], or for dictionary keys a list with one
                tensor [batch, dim] per feature.
            training: Whether dropout is active.

        Returns:
            Logits, [batch, 1].
        """
        raise NotImplementedError

    def end_with(self, output_layer: Any) -> None:
        """Sets `output_layer` and marks the model as built.

        Args:
            output_layer: A built `keras.layers.Dense` with one unit and a bias.
        """
        # Bypasses attribute tracking, because Keras would track the layer twice.
        object.__setattr__(self, "output_layer", output_layer)
        self.built = True

    def start_at(self, base_rate: float) -> None:
        """Sets the output bias to the log odds of the click rate.

        Call it before training. Otherwise the first steps mostly teach the model that clicks are
        rare.

        Args:
            base_rate: Fraction of labels that are 1, in (0, 1).

        Raises:
            ValueError: `base_rate` is out of range.
        """
        place = type(self).__name__
        require_number("base_rate", base_rate, 0.0, 1.0, place, open_minimum=True)
        if base_rate == 1.0:
            raise invalid("base_rate", base_rate, place, "a number > 0 and < 1")
        self.output_layer.bias.assign([math.log(base_rate / (1.0 - base_rate))])

    def mlp(self, name: str, widths: Sequence[int], inputs: int, **options: Any) -> MLP:
        """Returns a built `MLP` with the model's `batch_norm`, `l2` and dtype.

        Args:
            name: Name of the layer.
            widths: Number of units of each layer.
            inputs: Number of input values per example.
            **options: Further arguments of `MLP`.
        """
        own = {"batch_norm": self.batch_norm, "l2": self.l2, "dtype": self.dtype_policy}
        options = {**own, **options}
        layer = MLP(widths, name=name, **options)
        layer.build((None, inputs))
        return layer

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = _compat.arrays_to_tensors(inputs)
        if self.standardization is not None and isinstance(inputs, Mapping) and "dense" in inputs:
            # Before Keras casts the inputs, because bfloat16 has 8 bits, too few for a year.
            inputs = {**inputs, "dense": self.standardization(inputs["dense"])}
        return super().__call__(inputs, *args, **kwargs)

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Predicts clicks.

        Args:
            inputs: A dictionary with "keys", in a format that `EmbeddingCollection` accepts, and,
                unless `dense_features` is 0, "dense", float [batch, dense_features]. The notes that
                `Slipstream.apply` adds, for example "skippable" (bool [batch]), are allowed and
                ignored. "next_keys" (see `distributed.prefetch_keys`) is only read in training with
                embeddings that have `prefetch=True`, which require it.
            training: Whether to train the embeddings and to apply dropout.

        Returns:
            Probabilities or logits, float32 [batch, 1] for every dtype policy.

        Raises:
            ValueError: An input is missing, unknown or has the wrong width.
            tf.errors.InvalidArgumentError: A number is NaN or infinite, without standardization.
        """
        dense, keys = self._split(inputs)
        vectors = self.look_up(keys, inputs, training)
        return self.prediction(self.logits(dense, vectors, training))

    def look_up(self, keys: Any, inputs: Mapping[str, Any], training: bool | None) -> Any:
        """Looks up keys and casts the vectors to the compute dtype.

        Args:
            keys: Keys in a format that `EmbeddingCollection` accepts.
            inputs: Inputs of the model, which contain the next keys in training with prefetch.
            training: Whether to train the embeddings.

        Returns:
            [batch, features, dim], or for dictionary keys a list with one tensor per feature.

        Raises:
            ValueError: The inputs have no next keys in training with prefetch.
        """
        if isinstance(keys, Mapping):
            keys = of_specs(keys, self.embeddings.specs, f"model {self.name!r}")
        next_keys = None
        if training and self.embeddings.prefetch:
            if NEXT_KEYS not in inputs:
                allowed = (
                    f"the additional input {NEXT_KEYS!r}, which training with prefetch=True "
                    "requires. Apply slipstream_tf.distributed.prefetch_keys to the dataset"
                )
                raise invalid("inputs", sorted(inputs), f"model {self.name!r}", allowed)
            next_keys = inputs[NEXT_KEYS]
        self._remember(keys, training)
        vectors = self.embeddings(keys, training=training, next_inputs=next_keys)
        if isinstance(vectors, Mapping):
            return [tf.cast(vector, self.compute_dtype) for vector in vectors.values()]
        return tf.cast(vectors, self.compute_dtype)

    def prediction(self, logits: Any) -> tf.Tensor:
        """Converts logits [batch, 1] to the float32 output of the model."""
        logits = tf.cast(logits, tf.float32)
        return logits if self.returns_logits else tf.sigmoid(logits)

    def shared_dim(self, cause: str) -> int:
        """Returns the dimension that all tables of the features share.

        Args:
            cause: The part of the model that needs a single dimension, for the error.

        Raises:
            ValueError: The tables have different dimensions.
        """
        if len(set(self.dims.values())) > 1:
            allowed = f"the same dimension for all features, because {cause} require it"
            raise invalid("dim", dict(self.dims), type(self).__name__, allowed)
        return next(iter(self.dims.values()))

    def _split(self, inputs: Any) -> tuple[Any, Any]:
        expected = ["dense", "keys"] if self.dense_features else ["keys"]
        names = set(inputs) - {*NOTES, NEXT_KEYS} if isinstance(inputs, Mapping) else set()
        if sorted(names) != expected:
            given = sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
            allowed = f"a dictionary with {expected} for dense_features={self.dense_features}"
            raise invalid("inputs", given, f"model {self.name!r}", allowed)
        if not self.dense_features:
            return None, inputs["keys"]
        dense = inputs["dense"]
        shape = (*self.dense_axes, self.dense_width)
        if len(dense.shape) != len(shape) or dense.shape[-1] not in (None, shape[-1]):
            axes = ", ".join(map(str, shape))
            allowed = f"shape [{axes}] for dense_features={self.dense_features}"
            raise invalid("dense", tuple(dense.shape), f"model {self.name!r}", allowed)
        if self.standardization is None and dense.dtype.is_floating:
            dense = tf.debugging.check_numerics(
                dense,
                f"Invalid dense: a missing or infinite number for model {self.name!r}. Expected "
                "finite numbers. Pass standardization=slip.models.Standardization(spec.scales) to "
                "the model, or replace missing numbers",
            )
        return dense, inputs["keys"]

    def input_signature(self) -> dict[str, Any]:
        """Returns the input specs of a prediction.

        Each feature has the layout and dtype of the last training call, or of the last call if the
        model was never trained: one key per example, a padded bag, or a ragged bag. A model that
        was never called has one int64 key per feature.

        Returns:
            A dictionary with "keys" and, if the model has numeric features, "dense", float32
            [None, dense_features]. "keys" is [None, features], or a dictionary from feature name to
            [None], [None, None] or a `tf.RaggedTensorSpec`.
        """
        keys = self._own_keys() if self._key_specs is None else self._key_specs
        if not self.dense_features:
            return {"keys": keys}
        shape = [*[None] * len(self.dense_axes), self.dense_features]
        return {"dense": tf.TensorSpec(shape, tf.float32), "keys": keys}

    def _own_keys(self) -> Any:
        """Returns the specs of the keys of a model that was never called."""
        if len(set(self.dims.values())) > 1:
            return {name: tf.TensorSpec([None], tf.int64) for name in self.dims}
        return tf.TensorSpec([None, len(self.dims)], tf.int64)

    def _remember(self, keys: Any, training: bool | None) -> None:
        """Stores the specs of the keys of a call for `input_signature`."""
        if training or not self._has_trained:
            if isinstance(keys, Mapping):
                specs: Any = {name: _key_spec(part) for name, part in keys.items()}
            else:
                specs = tf.TensorSpec([None, len(self.dims)], _key_spec(keys).dtype)
            # Keras would track the attribute as a part of the model.
            object.__setattr__(self, "_key_specs", specs)
            object.__setattr__(self, "_has_trained", self._has_trained or bool(training))

    def build(self, input_shape: Any = None) -> None:
        """Does not create weights, because the constructor creates them."""
        self.built = True

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, int]:
        """Returns (batch, 1).

        Args:
            input_shape: Shapes of the inputs, a dictionary with "keys".
        """
        keys = input_shape["keys"]
        while isinstance(keys, Mapping):
            keys = next(iter(keys.values()))
        return (keys[0], 1)

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary for `from_config`, without weights and rows."""
        return {
            **keras.layers.Layer.get_config(self),
            "embeddings": keras.saving.serialize_keras_object(self.embeddings),
            "dense_features": self.dense_features,
            "dropout": self.dropout,
            "returns_logits": self.returns_logits,
            "batch_norm": self.batch_norm,
            "l2": self.l2,
            "standardization": keras.saving.serialize_keras_object(self.standardization),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "ClickModel":
        """Creates a model with new weights and empty tables.

        Args:
            config: The result of `get_config`.
            custom_objects: Classes by name, for the embedding layer.
        """
        config = dict(config)
        for name in ("embeddings", "standardization"):
            config[name] = keras.saving.deserialize_keras_object(
                config.get(name), custom_objects=custom_objects
            )
        return cls(**config)
