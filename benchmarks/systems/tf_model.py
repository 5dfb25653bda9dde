"""DLRM behind its tables, of ordinary layers of whatever Keras a system has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf


class DenseLayers:
    """MLPs and dots of pairs; with no numbers there is no bottom MLP.

    Attributes:
        variables: of the MLPs.
    """

    def __init__(self, keras: Any, settings: Mapping[str, Any], fields: int) -> None:
        numbers, dim = settings["numbers"], settings["dim"]
        vectors = fields + bool(numbers)
        lower = [(i, j) for i in range(vectors) for j in range(i)]
        self._pairs = np.array([i * vectors + j for i, j in lower], np.int32)
        self._vectors = vectors
        self._bottom = _stack(keras, settings["bottom"], numbers, "relu") if numbers else None
        width = len(lower) + (dim if numbers else 0)
        self._top = _stack(keras, settings["top"], width, None)
        layers = [self._top] if self._bottom is None else [self._bottom, self._top]
        self.variables = [v for layer in layers for v in layer.trainable_variables]

    def logits(self, dense: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Returns [n] of numbers [n, numbers] and rows [n, fields, dim]."""
        bottom = None if self._bottom is None else self._bottom(dense)
        if bottom is not None:
            rows = tf.concat([bottom[:, tf.newaxis], rows], axis=1)
        dots = tf.matmul(rows, rows, transpose_b=True)
        dots = tf.gather(tf.reshape(dots, [-1, self._vectors**2]), self._pairs, axis=1)
        found = dots if bottom is None else tf.concat([bottom, dots], axis=1)
        return self._top(found)[:, 0]


def _stack(keras: Any, widths: list[int], width: int, last: str | None) -> Any:
    layers = [keras.layers.Dense(units, activation="relu") for units in widths[:-1]]
    stack = keras.Sequential([*layers, keras.layers.Dense(widths[-1], activation=last)])
    stack.build((None, width))
    return stack
