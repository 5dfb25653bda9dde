"""Trains a Keras model with slipstream_tf's embedding layer and a dry run.

Run: python examples/quickstart.py

The example prints the training and test metrics, the examples per second, and the estimated savings
of two policies. A dry run does not change the training. See speed.py for a comparison of the layer
with `keras.layers.Embedding`.
"""

from __future__ import annotations

import time

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip

BATCH_SIZE = 256


def generate_clicks(count: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns generated clicks.

    The distribution of keys is skewed, and each key changes the click probability.
    """
    generator = np.random.default_rng(seed)
    # The tables grow with the number of distinct keys. A key may be any int64.
    users = generator.zipf(1.3, count) % 5_000
    items = generator.zipf(1.3, count) % 2_000
    probability = 1 / (1 + np.exp(0.5 - 2 * np.sin(users) - 2 * np.sin(items)))
    labels = (generator.random(count) < probability).astype(np.float32)
    return {"user": users, "item": items}, labels


def main() -> None:
    """Trains, evaluates, and prints the estimated savings."""
    keras.utils.set_random_seed(0)
    train = tf.data.Dataset.from_tensor_slices(generate_clicks(200_000, seed=1)).batch(BATCH_SIZE)
    test = tf.data.Dataset.from_tensor_slices(generate_clicks(40_000, seed=2)).batch(4096)

    keys = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    embeddings = slip.keras.EmbeddingCollection(
        [slip.Table(name, dim=16) for name in keys],
        optimizer="adagrad",
    )
    rows = embeddings(keys)
    hidden = keras.layers.Dense(64, "relu")(keras.layers.concatenate(list(rows.values())))
    model = keras.Model(keys, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["AUC"])

    slipstream = slip.Slipstream(
        embeddings,
        # The first policy sends and applies fewer gradient rows, the second trains fewer examples.
        policies=[slip.DeferGradients(), slip.SkipExamples(slip.PredictedLoss())],
        dry_run=True,
    )
    start = time.perf_counter()
    model.fit(
        slipstream.apply(train),
        shuffle=False,
        callbacks=[slipstream.callback()],
        verbose=2,
    )
    print(f"{200_000 / (time.perf_counter() - start):,.0f} examples per second in the dry run")
    model.evaluate(test, verbose=2)
    print(slipstream.report())


if __name__ == "__main__":
    main()
