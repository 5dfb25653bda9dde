"""This library: its DLRM in `model.fit`, plain or with what it saves, or by another's schedule.

Arguments beside the settings and the record: "bfloat16", "skipping", "paper", "normalised", "fae",
"hotline"; and "ranks", under a launcher: tables are sharded, and the wire's dtype is measured.
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
# Skipping by a foreseen loss: of the steps, before the pilot has learned enough; and batches that
# are read at once, of which whole ones are made of what is kept.
_WARMUP, _READ_AT_ONCE = 0.05, 8

# Running mean of norms of rows, and the smallest norm.
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


class Measures(keras.callbacks.Callback):
    """Tells the recorder of the steps that were made."""

    def __init__(self, recorder: Recorder, predict: Predict) -> None:
        super().__init__()
        self._recorder, self._predict, self._steps = recorder, predict, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Is called after some steps."""
        before, self._steps = self._steps, int(self.model.optimizer.iterations)
        self._recorder.step(self._predict, self._steps - before)


def policies_of(ways: Sequence[str], settings: Mapping[str, Any]) -> list[Any]:
    """Returns what is saved."""
    if "skipping" in ways:
        return [slip.SkipExamples(by=slip.ForeseenLoss(), share=settings["skip_share"])]
    if "paper" in ways:
        return [slip.SkipExamples(by=slip.RowDrift())]
    return []


def tables_of(ways: Sequence[str], task: Task, comm: Any, hot: HotKeys | None) -> Any:
    """Returns the layer of the tables."""
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
    """Returns the compiled model."""
    settings = task.settings
    kind: Any = type("HotlineDLRM", (Hotline, DLRM), {}) if "hotline" in ways else DLRM
    model = kind(
        embeddings, task.numbers, settings["bottom"] or (1,), settings["top"],
        returns_logits=True, dtype=embeddings.dtype_policy,
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
    """Returns the batches, or a rank's parts of them."""
    data = tf_parts.dataset(task)
    if not task.numbers:
        data = data.map(lambda features, labels: ({"keys": features["keys"]}, labels))
    if hot is not None and "fae" in ways:
        # The last batches of each kind, which are not whole, are left out.
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
    # A rank has one processor.
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

    # Ranks measure alike: rows come from all of them.
    recorder = Recorder(task)
    model.fit(data, verbose=0, callbacks=[*callbacks, Measures(recorder, predict)])
    recorder.end(predict)
    if comm is None or comm.rank == 0:
        versions = {"tensorflow": tf.__version__, "slipstream_tf": slip.__version__}
        recorder.finish(record, versions, **({} if hot is None else hot.told(settings["dim"])))


if __name__ == "__main__":
    main()
