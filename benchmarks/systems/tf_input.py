"""The batches of a task as a data set of TensorFlow's own ops, which other processes can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from task import Recorder, Task


def dataset(task: Task) -> tf.data.Dataset:
    """Returns ({"keys": int64 [n, fields], "dense": float32 [n, numbers]}, labels float32 [n])."""
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
    """Makes a step of every batch, in a loop; returns what was recorded.

    Args:
        task: what is trained.
        step: of an element of `dataset`.
        logits: of keys and numbers.
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
    """Gives TensorFlow so many threads; before its first op."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
