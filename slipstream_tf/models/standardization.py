"""Standardizes numeric features with the statistics of the training data."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid, require_number
from slipstream_tf.data.spec import DenseScale


@keras.saving.register_keras_serializable(package="slipstream_tf")
class Standardization(keras.layers.Layer):
    """Scales numeric features to mean 0 and standard deviation 1.

    A number x becomes `(x - mean) / std`. A missing number (NaN) becomes 0, as the mean does. For
    each column with missing numbers in the training data, a column is appended that is 1 if the
    number is missing and 0 otherwise. The layer has no weights: the scales are in its config and in
    exported models. It computes in float32 with every dtype policy.

    Pass it to a click model as `standardization`.

    Example:

    >>> scales = [slip.data.DenseScale(mean=3.0, std=2.0, has_missing=True)]
    >>> layer = slip.models.Standardization(scales)
    >>> layer(np.array([[5.0], [np.nan]], "float32")).numpy().tolist()
    [[1.0, 0.0], [0.0, 1.0]]

    Args:
        scales: The scale of each column, at least one. `DataSpec.scales` of a `PreparedReader` has
            the scales of prepared data.
        **kwargs: Arguments of `keras.layers.Layer`.

    Attributes:
        width: Number of output columns: the columns and the appended columns.

    Raises:
        ValueError: There is no scale, or a scale is invalid.
    """

    def __init__(self, scales: Sequence[DenseScale | dict[str, Any]], **kwargs: Any) -> None:
        super().__init__(**{"dtype": "float32", **kwargs})
        place = type(self).__name__
        if not isinstance(scales, (list, tuple)) or not scales:
            raise invalid("scales", scales, place, "a non-empty list of slip.data.DenseScale")
        self.scales = []
        for scale in scales:
            if isinstance(scale, dict):  # Of `get_config`.
                scale = DenseScale(**scale)
            if not isinstance(scale, DenseScale):
                raise invalid("scales", scale, place, "slip.data.DenseScale for each column")
            mean = float(require_number("mean", scale.mean, place=place))
            std = float(require_number("std", scale.std, 0.0, place=place, open_minimum=True))
            self.scales.append(DenseScale(mean, std, bool(scale.has_missing)))
        self._with_missing = [i for i, scale in enumerate(self.scales) if scale.has_missing]
        self.width = len(self.scales) + len(self._with_missing)

    def call(self, inputs: Any) -> tf.Tensor:
        """Standardizes numbers.

        Args:
            inputs: Numbers, float [..., columns]. NaN is a missing number.

        Returns:
            float32 [..., width].
        """
        if inputs.shape[-1] not in (None, len(self.scales)):
            allowed = f"{len(self.scales)} columns, one per scale"
            raise invalid("dense", tuple(inputs.shape), f"layer {self.name!r}", allowed)
        values = tf.cast(inputs, tf.float32)
        mean = np.array([scale.mean for scale in self.scales], np.float32)
        std = np.array([scale.std for scale in self.scales], np.float32)
        is_missing = tf.math.is_nan(values)
        scaled = tf.where(is_missing, np.float32(0), (values - mean) / std)
        if not self._with_missing:
            return scaled
        flags = tf.cast(tf.gather(is_missing, self._with_missing, axis=-1), tf.float32)
        return tf.concat([scaled, flags], axis=-1)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """Returns (..., width)."""
        return (*input_shape[:-1], self.width)

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary for `from_config`."""
        return {**super().get_config(), "scales": list(map(dataclasses.asdict, self.scales))}
