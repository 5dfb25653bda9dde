"""A stack of dense layers, as the click models use it. In: [batch, n]. Out: [batch, widths[-1]]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from slipstream_tf.errors import invalid, require_integer, require_number


def require_widths(argument: str, widths: Sequence[int], place: str, may_be_empty: bool) -> None:
    """Raises ValueError unless `widths` is a list of integers >= 1."""
    allowed = "a list of integers >= 1" + ("" if may_be_empty else ", not empty")
    if not isinstance(widths, (list, tuple)) or not (widths or may_be_empty):
        raise invalid(argument, widths, place, allowed)
    for width in widths:
        require_integer(argument, width, 1, None, place)


@keras.saving.register_keras_serializable(package="slipstream_tf")
class MLP(keras.layers.Layer):
    """Dense layers with ReLU and dropout between them.

    Args:
        widths: units of each layer, one layer or more.
        last_is_linear: whether the last layer has neither ReLU nor dropout: it gives logits, and
            is computed in float32 whatever the dtype policy.
        dropout: share of units dropped after each ReLU in training, 0 to below 1.
        **kwargs: of `keras.layers.Layer`.

    Raises:
        ValueError: a width or the dropout is out of range.
    """

    def __init__(
        self,
        widths: Sequence[int],
        last_is_linear: bool = False,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_widths("widths", widths, "MLP", may_be_empty=False)
        require_dropout(dropout, "MLP")
        self.widths = tuple(widths)
        self.last_is_linear = bool(last_is_linear)
        self.dropout = float(dropout)
        self._stack = []
        for index, width in enumerate(self.widths):
            is_linear = self.last_is_linear and index == len(self.widths) - 1
            # Logits in bfloat16 have 8 bits: ties in the ranking and a coarse calibration.
            policy = "float32" if is_linear else self.dtype_policy
            activation = None if is_linear else "relu"
            self._stack.append(keras.layers.Dense(width, activation, dtype=policy))
            if self.dropout and not is_linear:
                self._stack.append(keras.layers.Dropout(self.dropout, dtype=self.dtype_policy))

    def build(self, input_shape: Any) -> None:
        """Creates the weights for inputs [batch, n]."""
        shape = tuple(input_shape)
        for layer in self._stack:
            layer.build(shape)
            shape = tuple(layer.compute_output_shape(shape))
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns [batch, widths[-1]] for [batch, n]."""
        del training  # Keras hands it on to the layers that are called in here.
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
        }


def require_dropout(dropout: float, place: str) -> None:
    """Raises ValueError unless `dropout` is in [0, 1)."""
    require_number("dropout", dropout, minimum=0.0, maximum=1.0, place=place)
    if dropout == 1.0:
        raise invalid("dropout", dropout, place, "a number >= 0 and < 1")
