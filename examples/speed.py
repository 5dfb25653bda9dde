"""One table of 1,000,000 rows in `fit`: `keras.layers.Embedding`, then this package's layer.

Run: python examples/speed.py [ROWS]
ROWS: of the table, by default 1,000,000.
Prints the milliseconds of a training step with each layer in the same model, and their ratio.
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


def keras_layer(item: Any, rows: int) -> Any:
    """Embeds by a layer that has all rows from the start; a step updates every one of them."""
    return keras.layers.Embedding(rows, DIM)(item)


def our_layer(item: Any, rows: int) -> Any:
    """Embeds by a table that gets its rows as keys come; a step updates those of its batch."""
    del rows
    tables, rule = [slip.Table("item", DIM)], slip.optimizers.Adagrad(0.05)
    return slip.keras.EmbeddingCollection(tables, rule)({"item": item})["item"]


def milliseconds(embed: Any, rows: int) -> float:
    """Trains a small model; returns the median of a step's milliseconds."""
    items = np.random.default_rng(0).integers(0, rows, STEPS * BATCH_SIZE)
    item = keras.Input((), dtype="int64", name="item")
    model = keras.Model(item, keras.layers.Dense(1, "sigmoid")(embed(item, rows)))
    model.compile(keras.optimizers.Adagrad(0.05), "binary_crossentropy")
    ends: list[float] = []
    timer = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, logs=None: ends.append(time.time())
    )
    model.fit(items, items % 2, batch_size=BATCH_SIZE, callbacks=[timer], verbose=0)
    return 1e3 * statistics.median(np.diff(ends[UNTIMED:]))


def main() -> None:
    """Measures both layers in one process."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    theirs, ours = (milliseconds(embed, rows) for embed in (keras_layer, our_layer))
    print(f"keras.layers.Embedding: {theirs:.2f} ms a step, table of {rows:,} x {DIM}")
    print(f"EmbeddingCollection:    {ours:.2f} ms a step, {theirs / ours:.0f} times as fast")


if __name__ == "__main__":
    main()
