"""Data set, training loop and dense layers for TensorFlow systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from task import Recorder, Task


class DenseLayers:
    """The MLPs and pairwise dot products of DLRM.

    A model without numeric features has no bottom MLP.

    Attributes:
        variables: Trainable variables of the MLPs.
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
        """Returns logits [n] for numbers [n, numbers] and rows [n, fields, dim]."""
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


def dataset(task: Task) -> tf.data.Dataset:
    """Returns a data set with the training batches of a task.

    Returns:
        A data set of pairs ({"keys": int64 [n, fields], "dense": float32 [n, numbers]}, labels
        float32 [n]).
    """
    fields, batch = task.fields, task.batch_size

    def split(record: tf.Tensor) -> Any:
        rows = tf.reshape(tf.io.decode_raw(record, tf.int32), [batch, task.columns])
        numbers = tf.bitcast(rows[:, fields:], tf.float32)
        keys = tf.cast(rows[:, :fields], tf.int64)
        return {"keys": keys, "dense": numbers[:, :-1]}, numbers[:, -1]

    files = tf.data.FixedLengthRecordDataset(task.settings["train"], 4 * task.columns * batch)
    batches = files.take(task.steps).map(tf.autograph.experimental.do_not_convert(split))
    return batches.apply(tf.data.experimental.assert_cardinality(task.steps))


def train(task: Task, step: Callable[..., Any], logits: Callable[..., tf.Tensor]) -> Recorder:
    """Trains one step per batch and records the run.

    Args:
        task: Task that provides the batches.
        step: Function that trains with an element of `dataset`.
        logits: Function that returns logits for keys and numbers.

    Returns:
        The recorder of the run.
    """
    scores = tf.function(logits, reduce_retracing=True)

    def predict(keys: np.ndarray, dense: np.ndarray) -> np.ndarray:
        return scores(tf.constant(keys, tf.int64), tf.constant(dense)).numpy()

    recorder = Recorder(task)
    for features, labels in dataset(task).prefetch(2):
        step(features, labels)
        recorder.step(predict)
    recorder.end(predict)
    return recorder


def limit_threads(threads: int) -> None:
    """Limits the number of threads that TensorFlow uses.

    Note: TensorFlow accepts the limit only before its first op.
    """
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
