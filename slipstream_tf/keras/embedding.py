"""A drop-in replacement of `keras.layers.Embedding` with one table."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf import _compat, initializers
from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf._utils.hashing import hash_text
from slipstream_tf._utils.memory import require_room
from slipstream_tf.config import Table
from slipstream_tf.keras import feature_layouts as layouts
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.ops.features import (
    FeatureSpec,
    as_keys,
    flat_values,
    ragged,
    with_flat_values,
)

# Arguments of keras.layers.Embedding that must be None -> the reason and the alternative.
_NOT_WEIGHTS = "None, because rows are not Keras weights. "
_NO_LORA = _NOT_WEIGHTS + "Train the rows themselves, which updates only the rows of a batch"
_REFUSED = {
    "embeddings_regularizer": _NOT_WEIGHTS
    + "Pass l2 to the optimizer of the rows, for example optimizer=slip.optimizers.Adam(l2=1e-4)",
    "embeddings_constraint": _NOT_WEIGHTS
    + "Pass max_norm to the optimizer of the rows, for example "
    "optimizer=slip.optimizers.Adam(max_norm=1.0)",
    "lora_rank": _NO_LORA,
    "lora_alpha": _NO_LORA,
    "quantization_config": _NOT_WEIGHTS
    + "For rows in 8 bits, export with slip.export.saved_model(..., rows_dtype='int8')",
    "input_length": "no value, because keys of any length are accepted. Remove the argument",
}


@keras.saving.register_keras_serializable(package="slipstream_tf")
class Embedding(EmbeddingCollection):
    """Maps keys to rows of one table: [...] to [..., output_dim].

    The arguments and their order match `keras.layers.Embedding`. There are three differences. The
    table has a sparse optimizer, and a row is allocated the first time its key is looked up in
    training (see `EmbeddingCollection`). Keys are not cast. With `mask_zero`, key 0 returns zeros
    instead of a row. `Slipstream.apply` reads the keys of this layer from the feature that has the
    name of the table.

    The table has the name that you give to the layer, and is named "embedding" if you give none.
    Layers without a name start with different rows, which depend on the order in which the process
    creates these layers. Name the layers if a model has more than one, because `Slipstream` and
    checkpoints find tables by name, and if you build a model again to load its weights, because
    keys without a row then start with the same values.

    Example:

    >>> layer = slip.keras.Embedding(50_000, 32, mask_zero=True)
    >>> layer(np.array([[5, 8, 0]])).shape
    TensorShape([1, 3, 32])

    With pretrained rows:

    >>> vectors = np.array([[0.5, 1.0], [2.0, 3.0], [4.0, 5.0]])
    >>> slip.keras.Embedding(3, 2, embeddings_initializer=vectors)(np.array([1])).numpy()
    array([[2., 3.]], dtype=float32)

    Args:
        input_dim: Keys are in [0, `input_dim`). Any other key is an error, on every device. None
            accepts any key, including texts.
        output_dim: Number of values per row.
        embeddings_initializer: Initial values of a row, as accepted by `initializers.get`.
            Alternatively the rows of the keys 0 to `input_dim` - 1: a matrix [input_dim,
            output_dim], `keras.initializers.Constant(matrix)`, or another initializer of Keras or
            function `f(shape, dtype)`, which is called once. These rows are created with the layer.
            Rows from a matrix or function are not part of `get_config`. Load them from weights.
        embeddings_regularizer: Must be None, because rows are not Keras weights.
        embeddings_constraint: Must be None, because rows are not Keras weights.
        mask_zero: Whether key 0 (for text keys the empty text) is padding, which has no row,
            returns zeros and is masked.
        weights: A list with one matrix, as in Keras; the same as `embeddings_initializer=matrix`.
        optimizer: Sparse optimizer of the table, as in `EmbeddingCollection`.
        table_name: Name of the table. None uses `name`, or "embedding" for a layer without a name.
        **kwargs: Arguments of `EmbeddingCollection` (such as `store`, `comm`, `placement`, `apply`)
            and of `keras.layers.Layer` (name, dtype, trainable).

    Raises:
        ValueError: An argument is invalid, or is an argument of the Keras layer that this layer
            does not support.
    """

    def __init__(
        self,
        input_dim: int | None,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        optimizer: Any = None,
        weights: Any = None,
        table_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        place = f"slip.keras.Embedding {kwargs.get('name') or ''}".strip()
        kwargs["embeddings_regularizer"] = embeddings_regularizer
        kwargs["embeddings_constraint"] = embeddings_constraint
        for argument, allowed in _REFUSED.items():
            if (value := kwargs.pop(argument, None)) is not None:
                raise invalid(argument, value, place, allowed)
        if input_dim is not None:
            input_dim = require_integer("input_dim", input_dim, 1, (1 << 63) - 1, place)
        output_dim = require_integer("output_dim", output_dim, 1, place=place)
        if weights is not None:
            is_listed = isinstance(weights, (list, tuple)) and len(weights) == 1
            embeddings_initializer = weights[0] if is_listed else weights
        initializer, rows, self._initializer_config = _initial_rows(
            embeddings_initializer, input_dim, output_dim, place
        )
        if table_name is None:
            table_name = kwargs.get("name")
        if table_name is None:
            # Without the counter of Keras's automatic name, so that a model that is built twice has
            # the same tables.
            table_name = "embedding"
            initializer = _with_own_seed(initializer, table_name)
        table = Table(
            table_name,
            output_dim,
            combiner=None,
            initializer=initializer,
        )
        padding_key = 0 if mask_zero else None
        super().__init__(
            [table],
            optimizer,
            [FeatureSpec(table.name, table.name, None, padding_key)],
            **kwargs,
        )
        self.input_dim, self.mask_zero = input_dim, bool(mask_zero)
        self.supports_masking = self.mask_zero
        if rows is not None:
            self.table(table.name).write(np.arange(len(rows)), rows)

    @property
    def output_dim(self) -> int:
        """Number of values per row."""
        return self.tables[0].dim

    @property
    def embeddings(self) -> Any:
        """Not available, because there is no matrix with the rows of all keys.

        Raises:
            AttributeError: Always. It names the functions that read and write rows.
        """
        rows = f"layer.table({self.tables[0].name!r})"
        raise AttributeError(
            f"Layer {self.name!r} has no matrix `embeddings`, because rows are created when keys "
            f"are looked up in training. Read rows with {rows}.read(keys), or write a matrix with "
            f"slipstream_tf.tables.from_embedding({rows}, matrix)."
        )

    def _as_inputs(self, inputs: Any) -> Any:
        return layouts.as_tensor(inputs, f"layer {self.name!r}")

    def call(self, inputs: Any, training: bool | None = None) -> Any:  # type: ignore[override]
        """Looks up the rows of keys.

        Args:
            inputs: Integers or texts: a tensor of any shape, a RaggedTensor of any shape, or a
                SparseTensor [batch, width].
            training: Whether to create rows for new keys, count accesses and update rows.

        Returns:
            A tensor [..., output_dim], or a RaggedTensor for ragged or sparse keys.

        Raises:
            tf.errors.InvalidArgumentError: A key is not in [0, `input_dim`).
        """
        if isinstance(inputs, tf.SparseTensor):
            inputs = ragged(inputs, f"layer {self.name!r}")
        keys = flat_values(inputs)  # Ragged keys may have uniform inner dimensions.
        (spec,) = self.specs
        flat = self._checked(tf.reshape(keys, [-1]))
        rows = super().call({spec.name: flat}, training=training)[spec.name]
        rows = tf.reshape(rows, tf.concat([tf.shape(keys), [self.output_dim]], 0))
        return with_flat_values(inputs, rows)

    def _checked(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns keys as int64 [n] and asserts that they are in range."""
        place = f"layer {self.name!r}"
        if self.input_dim is not None and keys.dtype == tf.string:
            allowed = "None, because text keys are hashed to any int64"
            raise invalid("input_dim", self.input_dim, f"{place} with text keys", allowed)
        keys = as_keys(keys, self.specs[0].padding_key, place)
        if self.input_dim is None:
            return keys
        allowed = (
            f"Invalid `inputs` for {place}. Expected keys >= 0 and < input_dim={self.input_dim}. "
            "Pass input_dim=None to accept all keys."
        )
        minimum, maximum = tf.reduce_min(keys), tf.reduce_max(keys)
        checks = [
            tf.debugging.assert_non_negative(minimum, allowed),
            tf.debugging.assert_less(maximum, np.int64(self.input_dim), allowed),
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.identity(keys)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Returns a bool mask of the keys, False at padding.

        Symbolic keys return a symbolic mask. The result is None without `mask_zero`, and for ragged
        and sparse keys.
        """
        return layouts.mask_of(self.specs[0], inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:  # type: ignore[override]
        """Returns the shape of the keys followed by `output_dim`."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        layouts.require_dtype(inputs, f"layer {self.name!r}")
        return layouts.output_spec(self.specs[0], inputs, self.output_dim, self._row_dtype)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in ("tables", "features", "stacked"):
            del config[name]
        return {
            **config,
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": self._initializer_config
            or initializers.serialize(self.tables[0].initializer),
            "mask_zero": self.mask_zero,
            "table_name": self.tables[0].name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Embedding":
        return super(EmbeddingCollection, cls).from_config(config)


def _initial_rows(
    identifier: Any, input_dim: int | None, output_dim: int, place: str
) -> tuple[initializers.Initializer, np.ndarray | None, dict[str, Any] | None]:
    """Resolves `embeddings_initializer`.

    Returns:
        The initializer of single rows; the rows of all keys as float32 [input_dim, output_dim], or
        None; and the configuration of the Keras initializer that computed them, or None.
    """
    value, config = identifier, None
    if isinstance(identifier, keras.initializers.Constant):
        value = identifier.value
    if not (hasattr(value, "shape") and len(value.shape) == 2):
        try:
            return initializers.get(identifier), None, None
        except ValueError:
            value = _computing_all_rows(identifier)
            if value is None:
                raise
    shape = (input_dim, output_dim)
    if input_dim is None:
        allowed = (
            "the number of rows of the matrix, because embeddings_initializer gives the rows of "
            "all keys. For other keys, write rows with "
            "slip.tables.from_embedding(layer.table(name), matrix, keys)"
        )
        raise invalid("input_dim", None, place, allowed)
    if callable(value):
        details = f"{input_dim} rows x {output_dim} values x 4 bytes"
        require_room("input_dim", input_dim, 4 * input_dim * output_dim, details, place)
        if isinstance(value, keras.initializers.Initializer):
            config = keras.initializers.serialize(value)
        value = value(shape, dtype="float32")
    variable = _compat.tensorflow_variable(value)
    rows = np.asarray(value if variable is None else variable.numpy(), np.float32)
    if rows.shape != shape:
        allowed = f"a matrix of the shape [input_dim, output_dim] = {list(shape)}"
        raise invalid("embeddings_initializer", rows, place, allowed)
    return initializers.RandomUniform(), rows, config


def _computing_all_rows(identifier: Any) -> Callable[..., Any] | None:
    """Returns a function that computes a matrix from its shape, or None.

    It is an initializer of Keras that `initializers.get` does not support, or a user's function.
    """
    if hasattr(identifier, "shape"):
        return None
    try:
        found = keras.initializers.get(identifier)
    except (TypeError, ValueError):
        return None
    is_per_row = type(found).__name__ in initializers.KERAS_CLASSES
    return None if is_per_row or not callable(found) else found


def _with_own_seed(initializer: initializers.Initializer, name: str) -> initializers.Initializer:
    """Returns an initializer with different rows than other layers without a name.

    The first layer of the process, or since `keras.utils.clear_session`, keeps the seed that
    `Table` derives from the name.
    """
    if getattr(initializer, "seed", 0) is not None:
        return initializer
    number = keras.backend.get_uid("slipstream_embedding")
    if number == 1:
        return initializer
    seed = hash_text(f"{name}_{number - 1}")
    return type(initializer)(**{**vars(initializer), "seed": seed})
