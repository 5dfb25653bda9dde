"""A small model in `model.fit` with `keras.layers.Embedding`, and with this package's layer.

In: the rows of the table. Out: a step's seconds of both, measured in one process. `slipstream-demo`
runs it in a process of its own, which prints them as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf.keras import Embedding

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

    rules = {name: keras.optimizers.Adagrad(_RATE) for name in _STEPS}
    layers = {
        "keras": keras.layers.Embedding(rows, _DIM),
        "slipstream": Embedding(rows, _DIM, optimizer=rules["slipstream"]),
    }
    seconds = {name: _seconds(layers[name], rules[name], rows, _STEPS[name]) for name in _STEPS}
    return {"rows": rows, "dim": _DIM, "batch_size": _BATCH_SIZE, **seconds}


def _seconds(layer: Any, rule: Any, rows: int, steps: int) -> float:
    items = np.random.default_rng(0).integers(0, rows, steps * _BATCH_SIZE)
    item = keras.Input((), dtype="int64")
    model = keras.Model(item, keras.layers.Dense(1, "sigmoid")(layer(item)))
    model.compile(rule, "binary_crossentropy")
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
