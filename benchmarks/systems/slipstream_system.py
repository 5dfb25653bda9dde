"""Trains slipstream_tf's DLRM, with a policy or a baseline's schedule.

The arguments after the settings and the record select variants: "bfloat16", "skipping", "paper",
"normalised", "fae", "hotline". "ranks" runs under a launcher with sharded tables and chooses the
wire dtype by measurement.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import hot_keys
import keras
import numpy as np
import tensorflow as tf
import tf_parts
from hot_keys import HotKeys
from task import Predict, Recorder, Task, read_arguments

import slipstream_tf as slip
from slipstream_tf.baselines.hot_rows import Hotline, HotRows
from slipstream_tf.baselines.segregation import segregate
from slipstream_tf.models import DLRM

_STEPS_AT_ONCE = 16
# For skipping by predicted loss: the fraction of the steps in which the pilot only learns, and the
# number of batches that are read together and refilled to whole batches from the kept examples.
_WARMUP, _READ_AT_ONCE = 0.05, 8

# Momentum of the running mean of row norms, and the minimum norm.
_MOMENTUM, _SMALLEST = 0.99, 1e-6


class NormalisedRows(slip.keras.EmbeddingCollection):
    """Rescales rows of skipped keys to the mean norm of their table.

    A summary of the paper reports that features are normalized to recover accuracy, without the
    method. This class is one interpretation: before the interaction, a row with a saturated key
    and skipped examples is rescaled to the running mean of the norms of the table's looked-up
    rows. Keys of each field are numbered from 0.
    """

    def __init__(self, *arguments: Any, cardinalities: Sequence[int], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._first = np.cumsum([0, *cardinalities[:-1]])
        with tf.device("CPU:0"):
            self._is_skipped = tf.Variable(tf.zeros([sum(cardinalities)], tf.bool), trainable=False)
            self._norms = tf.Variable(tf.zeros([len(cardinalities)]), trainable=False)

    def call(self, inputs: Any, training: bool | None = None, **settings: Any) -> tf.Tensor:
        """Returns the rows [batch, fields, dim] of a key matrix [batch, fields]."""
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
        """Sets the skipped keys to the saturated keys.

        Args:
            states: States of the keys by table, with tables in the order of the fields.
        """
        flags = np.zeros(self._is_skipped.shape, bool)
        for first, of_table in zip(self._first, states.values(), strict=True):
            flags[first + of_table.keys[of_table.is_saturated]] = True
        self._is_skipped.assign(flags)


class FollowsWindows(keras.callbacks.Callback):
    """Updates `NormalisedRows` after each window. Must run after the engine's callback."""

    def __init__(self, engine: slip.Slipstream, rows: NormalisedRows) -> None:
        super().__init__()
        self._engine, self._rows, self._windows = engine, rows, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Copies the key states to the layer if a window has ended."""
        tracker = self._engine.tracker
        if len(tracker.reports) > self._windows:
            self._windows = len(tracker.reports)
            self._rows.skip(tracker.states)


class Measures(keras.callbacks.Callback):
    """Reports completed steps to the recorder."""

    def __init__(self, recorder: Recorder, predict: Predict) -> None:
        super().__init__()
        self._recorder, self._predict, self._steps = recorder, predict, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Reports the steps since the last call."""
        before, self._steps = self._steps, int(self.model.optimizer.iterations)
        self._recorder.step(self._predict, self._steps - before)


def policies_of(ways: Sequence[str], settings: Mapping[str, Any]) -> list[Any]:
    """Returns the policies of a variant, or an empty list."""
    if "skipping" in ways:
        return [slip.SkipExamples(score=slip.PredictedLoss(), fraction=settings["skip_fraction"])]
    if "paper" in ways:
        return [slip.SkipExamples(score=slip.RowDrift())]
    return []


def tables_of(ways: Sequence[str], task: Task, comm: Any, hot: HotKeys | None) -> Any:
    """Returns the embedding layer of a variant.

    Args:
        ways: Variants, see the module docstring.
        task: Model, data and settings.
        comm: Communicator, or None for a single process.
        hot: Hot keys, for "fae" and "hotline" only.
    """
    settings = task.settings
    dtype = "mixed_bfloat16" if "bfloat16" in ways else "float32"
    tables = [slip.Table(f"t{i}", settings["dim"]) for i in range(task.fields)]
    rule = slip.optimizers.Adagrad(settings["rows_rate"], settings["damping"])
    if hot is not None and ("hotline" in ways or comm is not None):
        return HotRows(tables, rule, hot.keys, comm, dtype=dtype)
    if "normalised" in ways:
        return NormalisedRows(tables, rule, cardinalities=settings["cardinalities"], dtype=dtype)
    placed = {"placement": "sharded", "wire_dtype": "auto"} if comm is not None else {}
    return slip.keras.EmbeddingCollection(tables, rule, comm=comm, dtype=dtype, **placed)


def model_of(ways: Sequence[str], task: Task, embeddings: Any, comm: Any) -> Any:
    """Returns the compiled model of a variant; see `tables_of` for the arguments."""
    settings = task.settings
    kind: Any = type("HotlineDLRM", (Hotline, DLRM), {}) if "hotline" in ways else DLRM
    # The other systems have no vector for first-order terms.
    model = kind(
        embeddings, task.numbers, settings["bottom"] or (1,), settings["top"],
        returns_logits=True, first_order=False, dtype=embeddings.dtype_policy,
    )  # fmt: skip
    optimizer: Any = keras.optimizers.Adam(settings["rate"])
    if comm is not None:
        optimizer = slip.distributed.DistributedOptimizer(optimizer, comm)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=_STEPS_AT_ONCE,
        jit_compile=False,
    )
    return model


def batches_of(ways: Sequence[str], task: Task, comm: Any, hot: HotKeys | None) -> tf.data.Dataset:
    """Returns the batches, or this rank's part of each batch."""
    data = tf_parts.dataset(task)
    if not task.numbers:
        data = data.map(lambda features, labels: ({"keys": features["keys"]}, labels))
    if hot is not None and "fae" in ways:
        # Drop the last batch of hot and of cold examples, because it can be smaller.
        data = segregate(data, hot.keys, task.batch_size)
        data = data.filter(lambda _, labels: tf.equal(tf.shape(labels)[0], task.batch_size))
    if comm is None:
        return data
    size = task.batch_size // comm.size
    own = slice(comm.rank * size, (comm.rank + 1) * size)
    return data.map(lambda *batch: tf.nest.map_structure(lambda part: part[own], batch))


def main() -> None:
    task, record = read_arguments(sys.argv)
    ways, settings = sys.argv[3:], task.settings
    # Each rank has one processor.
    tf_parts.limit_threads(1 if "ranks" in ways else settings["threads"])
    comm = slip.distributed.init() if "ranks" in ways else None
    keras.utils.set_random_seed(settings["seed"])
    hot = hot_keys.choose(task) if {"fae", "hotline"} & set(ways) else None
    embeddings = tables_of(ways, task, comm, hot)
    model = model_of(ways, task, embeddings, comm)
    data = batches_of(ways, task, comm, hot)
    callbacks: list[Any] = []
    if policies := policies_of(ways, settings):
        size = task.batch_size // (1 if comm is None else comm.size)
        window = None
        if "skipping" in ways:
            window = slip.Window(warmup=_WARMUP, planned_steps=task.steps)
            data = data.rebatch(_READ_AT_ONCE * size)
        engine = slip.Slipstream(embeddings, policies, window=window)
        data = engine.apply(data, batch_size=size)
        callbacks.append(engine.callback)
        if "normalised" in ways:
            callbacks.append(FollowsWindows(engine, embeddings))
    else:
        data = data.prefetch(2)

    @tf.function(reduce_retracing=True)
    def scores(keys: tf.Tensor, dense: tf.Tensor) -> tf.Tensor:
        features = {"keys": keys, "dense": dense} if task.numbers else {"keys": keys}
        return model(features, training=False)[:, 0]

    def predict(keys: np.ndarray, dense: np.ndarray) -> np.ndarray:
        found = scores(tf.constant(keys, tf.int64), tf.constant(dense))
        return np.asarray(tf.cast(found, tf.float32))

    # All ranks evaluate the same examples, because each rank owns a part of the rows.
    recorder = Recorder(task)
    model.fit(data, verbose=0, callbacks=[*callbacks, Measures(recorder, predict)])
    recorder.end(predict)
    if comm is None or comm.rank == 0:
        versions = {"tensorflow": tf.__version__, "slipstream_tf": slip.__version__}
        recorder.finish(record, versions, **({} if hot is None else hot.reported(settings["dim"])))


if __name__ == "__main__":
    main()
