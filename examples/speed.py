"""Compares the speed of `keras.layers.Embedding` with this package's layer.

Run: python examples/speed.py [ROWS]

ROWS is the number of rows of the table, by default 1,000,000. The example prints the milliseconds
per training step with each layer in the same model, and their ratio. Both layers apply the same
updates, but Keras's optimizer updates the whole table in each step, and this package's layer only
the rows of the batch.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import keras
import numpy as np

import slipstream_tf as slip

DIM, BATCH_SIZE, STEPS, UNTIMED = 32, 512, 40, 10


def train(embedding: Any, rule: Any, rows: int, callbacks: list[Any]) -> None:
    """Trains a plain Keras model on keys drawn uniformly from `rows` keys."""
    items = np.random.default_rng(0).integers(0, rows, STEPS * BATCH_SIZE)
    item = keras.Input((), dtype="int64")
    click = keras.layers.Dense(1, "sigmoid")(embedding(item))
    model = keras.Model(item, click)
    model.compile(rule, "binary_crossentropy")
    model.fit(items, items % 2, batch_size=BATCH_SIZE, callbacks=callbacks, verbose=0)


def main() -> None:
    """Measures both layers in the same process."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    rules = [keras.optimizers.Adagrad(0.05) for _ in range(2)]
    layers = [
        keras.layers.Embedding(rows, DIM),
        slip.keras.Embedding(rows, DIM, optimizer=rules[1]),
    ]
    milliseconds = []
    for layer, rule in zip(layers, rules, strict=True):
        ends: list[float] = []
        timer = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, ends=ends: ends.append(time.perf_counter())
        )
        train(layer, rule, rows, [timer])
        milliseconds.append(1e3 * statistics.median(np.diff(ends[UNTIMED:])))
    theirs, ours = milliseconds
    print(f"keras.layers.Embedding: {theirs:.2f} ms per step, table of {rows:,} x {DIM}")
    print(f"slip.keras.Embedding:   {ours:.2f} ms per step, {theirs / ours:.0f} times as fast")


if __name__ == "__main__":
    main()
