"""A small model in `model.fit` with `keras.layers.Embedding`, and with this package's layer.

In: the rows of the table. Out: a step's seconds of both, measured in one process. `slipstream-demo`
runs it in a process of its own, which prints them as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf.config import Table
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.optimizers import Adagrad

_DIM, _BATCH_SIZE = 32, 512
_RATE = 0.05
# Steps of Keras's layer take a hundred times as long.
_STEPS = {"keras": 20, "slipstream": 200}
_UNTIMED = 5


def measure(rows: int) -> dict[str, float]:
    """Trains with both layers, one after the other.

    Args:
        rows: keys are drawn evenly from so many.

    Returns:
        "rows", "dim", "batch_size"; "keras", "slipstream" -> median seconds of a step.
    """

    def by_keras(item: Any) -> Any:
        return keras.layers.Embedding(rows, _DIM)(item)

    def by_slipstream(item: Any) -> Any:
        return EmbeddingCollection([Table("item", _DIM)], Adagrad(_RATE))({"item": item})["item"]

    embed = {"keras": by_keras, "slipstream": by_slipstream}
    seconds = {name: _seconds(embed[name], rows, steps) for name, steps in _STEPS.items()}
    return {"rows": rows, "dim": _DIM, "batch_size": _BATCH_SIZE, **seconds}


def _seconds(embed: Callable[[Any], Any], rows: int, steps: int) -> float:
    items = np.random.default_rng(0).integers(0, rows, steps * _BATCH_SIZE)
    item = keras.Input((), dtype="int64", name="item")
    model = keras.Model(item, keras.layers.Dense(1, "sigmoid")(embed(item)))
    model.compile(keras.optimizers.Adagrad(_RATE), "binary_crossentropy")
    ends: list[float] = []
    timer = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
    )
    model.fit(items, items % 2, batch_size=_BATCH_SIZE, callbacks=[timer], verbose=0)
    return statistics.median(np.diff(ends[_UNTIMED:]))


def entry_point(arguments: Sequence[str] | None = None) -> None:
    """Prints what `measure` returns; arguments: rows, and threads (0: all cores)."""
    rows, threads = map(int, sys.argv[1:] if arguments is None else arguments)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    print(json.dumps(measure(rows)))
