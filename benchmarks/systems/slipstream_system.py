"""This library: its DLRM in `model.fit`, plain or with what it saves.

Arguments beside the settings and the record: "bfloat16", "skipping", "paper".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
import tf_input
from task import Predict, Recorder, read_arguments

import slipstream_tf as slip
from slipstream_tf.models import DLRM

_STEPS_AT_ONCE = 16


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


def main() -> None:
    task, record = read_arguments(sys.argv)
    ways = sys.argv[3:]
    settings = task.settings
    tf_input.limit_threads(settings["threads"])
    keras.utils.set_random_seed(settings["seed"])
    dtype = "mixed_bfloat16" if "bfloat16" in ways else "float32"
    tables = [slip.Table(f"t{i}", settings["dim"]) for i in range(task.fields)]
    embeddings = slip.keras.EmbeddingCollection(
        tables, slip.optimizers.Adagrad(settings["rows_rate"], 0.0), dtype=dtype
    )
    model = DLRM(
        embeddings, task.numbers, settings["bottom"] or (1,), settings["top"],
        returns_logits=True, dtype=dtype,
    )  # fmt: skip
    model.compile(
        optimizer=keras.optimizers.Adam(settings["rate"]),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=_STEPS_AT_ONCE,
        jit_compile=False,
    )
    data = tf_input.dataset(task)
    callbacks: list[Any] = []
    if policies := policies_of(ways, settings):
        engine = slip.Slipstream(embeddings, policies)
        data = engine.apply(data)
        callbacks.append(engine.callback)
    else:
        data = data.prefetch(2)

    @tf.function(reduce_retracing=True)
    def scores(keys: tf.Tensor, dense: tf.Tensor) -> tf.Tensor:
        return model({"keys": keys, "dense": dense}, training=False)[:, 0]

    def predict(keys: np.ndarray, dense: np.ndarray) -> np.ndarray:
        found = scores(tf.constant(keys, tf.int64), tf.constant(dense))
        return np.asarray(tf.cast(found, tf.float32))

    recorder = Recorder(task)
    model.fit(data, verbose=0, callbacks=[*callbacks, Measures(recorder, predict)])
    recorder.end(predict)
    recorder.finish(record, {"tensorflow": tf.__version__, "slipstream_tf": slip.__version__})


if __name__ == "__main__":
    main()
