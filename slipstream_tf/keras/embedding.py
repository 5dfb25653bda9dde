"""One table as a layer, called as `keras.layers.Embedding` is. In: keys of any shape. Out: rows."""

import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf import initializers
from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf.config import Table
from slipstream_tf.keras import feature_layouts as layouts
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.ops.features import FeatureSpec, as_keys, ragged

_REFUSED = ("weights", "lora_rank", "lora_alpha", "quantization_config")


@keras.saving.register_keras_serializable(package="slipstream_tf")
class Embedding(EmbeddingCollection):
    """Turns keys into rows of one table: [...] -> [..., output_dim].

        keras.Sequential([slip.keras.Embedding(50_000, 32, mask_zero=True), keras.layers.GRU(32)])

    Called and constructed as `keras.layers.Embedding`, in the same order. What differs: rows have
    an optimizer of their own, and are there once they are trained (see `EmbeddingCollection`); keys
    are not cast; and with `mask_zero` key 0 gives zeros instead of a row. To `Slipstream.apply` the
    layer is a feature of the table's name.

    The table has the layer's name; without a name of one's own it is "embedding". Where a model has
    several such layers, name them.

    Args:
        input_dim: keys are 0 to `input_dim` - 1; another is an error, on every device. None: any
            key, a text, too.
        output_dim: values per row.
        embeddings_initializer: how a row starts; of `initializers.get`.
        embeddings_regularizer: None: rows have no regularizer.
        embeddings_constraint: None: rows have no constraint.
        mask_zero: whether key 0 (of texts the empty one) is padding: zeros, no row, and masked.
        optimizer: the rule of the rows, as `EmbeddingCollection` takes it.
        **kwargs: of `EmbeddingCollection`: `store`, `comm`, `placement`, `apply` and others; and of
            `keras.layers.Layer`: name, dtype, trainable.

    Raises:
        ValueError: an argument that cannot work, or that Keras's layer has and this one has not.
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
        **kwargs: Any,
    ) -> None:
        place = f"slip.keras.Embedding {kwargs.get('name') or ''}".strip()
        refused = {name: kwargs.pop(name, None) for name in _REFUSED}
        refused["embeddings_regularizer"] = embeddings_regularizer
        refused["embeddings_constraint"] = embeddings_constraint
        for argument, value in refused.items():
            if value is not None:
                raise invalid(argument, value, place, "None: rows are no Keras weights")
        if input_dim is not None:
            input_dim = require_integer("input_dim", input_dim, 1, (1 << 63) - 1, place)
        table = Table(
            # Without the number that Keras counts up: models built twice have the same tables.
            re.sub(r"^embedding_\d+$", "embedding", kwargs.get("name") or "embedding"),
            require_integer("output_dim", output_dim, 1, place=place),
            combiner=None,
            initializer=initializers.get(embeddings_initializer),
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

    @property
    def output_dim(self) -> int:
        """Values per row."""
        return self.tables[0].dim

    def _as_inputs(self, inputs: Any) -> Any:
        return layouts.as_tensor(inputs, f"layer {self.name!r}")

    def call(self, inputs: Any, training: bool | None = None) -> Any:  # type: ignore[override]
        """Looks up the rows of keys.

        Args:
            inputs: integers or texts of any shape, or a RaggedTensor of any or a SparseTensor
                [batch, width] of them.
            training: whether to add missing keys, count accesses and update rows.

        Returns:
            [..., output_dim]; a RaggedTensor for ragged or sparse keys.

        Raises:
            tf.errors.InvalidArgumentError: a key is not below `input_dim`.
        """
        if isinstance(inputs, tf.SparseTensor):
            inputs = ragged(inputs, f"layer {self.name!r}")
        is_ragged = isinstance(inputs, tf.RaggedTensor)
        flat = tf.reshape(inputs.flat_values if is_ragged else inputs, [-1])
        (spec,) = self.specs
        rows = super().call({spec.name: self._checked(flat)}, training=training)[spec.name]
        if is_ragged:
            return inputs.with_flat_values(rows)
        return tf.reshape(rows, tf.concat([tf.shape(inputs), [self.output_dim]], 0))

    def _checked(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns keys as int64 [n], all of which the table may have."""
        place = f"layer {self.name!r}"
        if self.input_dim is not None and keys.dtype == tf.string:
            raise invalid("input_dim", self.input_dim, f"{place} with texts as keys", "None")
        keys = as_keys(keys, self.specs[0].padding_key, place)
        if self.input_dim is None:
            return keys
        allowed = f"Keys of {place} must be 0 to {self.input_dim - 1}; input_dim=None takes any."
        least, most = tf.reduce_min(keys), tf.reduce_max(keys)
        checks = [
            tf.debugging.assert_non_negative(least, allowed),
            tf.debugging.assert_less(most, np.int64(self.input_dim), allowed),
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.identity(keys)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Returns which keys are not 0, bool in their shape; None without `mask_zero`."""
        return layouts.mask_of(self.specs[0], inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:  # type: ignore[override]
        """Returns the keys' shape with `output_dim` behind it."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the output as a `keras.KerasTensor`, without a lookup."""
        layouts.require_dtype(inputs, f"layer {self.name!r}")
        return layouts.output_spec(self.specs[0], inputs, self.output_dim, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`; no rows in it."""
        config = super().get_config()
        for name in ("tables", "features", "stacked"):
            del config[name]
        return {
            **config,
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": initializers.serialize(self.tables[0].initializer),
            "mask_zero": self.mask_zero,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Embedding":
        """Builds the layer, with an empty table, that `get_config` described."""
        return super(EmbeddingCollection, cls).from_config(config)
