"""One reading of feature normalisation: rows of skipped keys get the norm of their table's rows.

A summary of the paper says that features are normalised, to recover accuracy; it does not say how.
Read so: before the interaction a row whose key is saturated, and whose examples are skipped, is
rescaled to the running mean of the norms of the rows that its table's lookups give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip

_MOMENTUM, _SMALLEST = 0.99, 1e-6


class NormalisedRows(slip.keras.EmbeddingCollection):
    """Embeddings of keys that are numbered from 0 on in each field."""

    def __init__(self, *arguments: Any, cardinalities: Sequence[int], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._first = np.cumsum([0, *cardinalities[:-1]])
        with tf.device("CPU:0"):
            self._is_skipped = tf.Variable(tf.zeros([sum(cardinalities)], tf.bool), trainable=False)
            self._norms = tf.Variable(tf.zeros([len(cardinalities)]), trainable=False)

    def call(self, inputs: Any, training: bool | None = None, **settings: Any) -> tf.Tensor:
        """Returns rows [batch, fields, dim] of a key matrix."""
        rows = super().call(inputs, training=training, **settings)
        is_skipped = tf.gather(self._is_skipped, tf.cast(inputs, tf.int64) + self._first)
        norms = tf.maximum(tf.norm(tf.stop_gradient(rows), axis=2), _SMALLEST)
        if training:
            mean = tf.reduce_mean(norms, axis=0)
            known = tf.where(self._norms > 0, self._norms, mean)
            self._norms.assign(_MOMENTUM * known + (1 - _MOMENTUM) * mean)
        is_rescaled = is_skipped & (self._norms > 0)
        return rows * tf.where(is_rescaled, self._norms / norms, 1.0)[:, :, tf.newaxis]

    def skip(self, states: Mapping[str, Any]) -> None:
        """Takes over which keys are saturated: table -> its states, tables in the fields' order."""
        flags = np.zeros(self._is_skipped.shape, bool)
        for first, of_table in zip(self._first, states.values(), strict=True):
            flags[first + of_table.keys[of_table.is_saturated]] = True
        self._is_skipped.assign(flags)


class FollowsWindows(keras.callbacks.Callback):
    """Tells the rows of each window's saturated keys; behind the engine's own callback."""

    def __init__(self, engine: slip.Slipstream, rows: NormalisedRows) -> None:
        super().__init__()
        self._engine, self._rows, self._windows = engine, rows, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Is called after some steps."""
        tracker = self._engine.tracker
        if len(tracker.reports) > self._windows:
            self._windows = len(tracker.reports)
            self._rows.skip(tracker.states)
