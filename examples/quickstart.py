"""A plain Keras model on this package's embedding layer, and a dry run of what could be saved.

Run: python examples/quickstart.py
Prints Keras's lines of training and test quality, the examples per second, and what policies would
have saved. The dry run saves nothing: it trains as without it. See speed.py for the layer beside
`keras.layers.Embedding`.
"""

from __future__ import annotations

import time

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip

BATCH_SIZE = 256


def generate_clicks(count: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns keys and labels: popular keys are frequent, each key has a taste of its own."""
    generator = np.random.default_rng(seed)
    # The layer's tables grow with their keys: these may be any int64.
    users = generator.zipf(1.3, count) % 5_000
    items = generator.zipf(1.3, count) % 2_000
    probability = 1 / (1 + np.exp(0.5 - 2 * np.sin(users) - 2 * np.sin(items)))
    labels = (generator.random(count) < probability).astype(np.float32)
    return {"user": users, "item": items}, labels


def main() -> None:
    """Trains, evaluates, and prints what could be saved."""
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
        # Two ways to save: fewer gradient rows between ranks, and the paper's rule, a baseline.
        policies=[slip.DeferGradients(), slip.SkipExamples(slip.ForeseenLoss())],
        dry_run=True,
    )
    start = time.perf_counter()
    model.fit(
        slipstream.apply(train),
        shuffle=False,
        callbacks=[slipstream.callback()],
        verbose=2,
    )
    print(f"{200_000 / (time.perf_counter() - start):,.0f} examples per second, watched")
    model.evaluate(test, verbose=2)
    print(slipstream.report())


if __name__ == "__main__":
    main()
