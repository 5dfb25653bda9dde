"""Reads, writes and removes rows; adds a feature; uses two optimizers.

Run: python examples/rows.py

The example also imports rows from a Keras embedding. It prints the number of rows after each step
and the loss before and after training with the added feature.
"""

from __future__ import annotations

import pathlib
import tempfile

import keras
import numpy as np

import slipstream_tf as slip

COUNT = 20_000


def generate_clicks() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns keys of three features, and labels that depend on all three."""
    generator = np.random.default_rng(0)
    keys = {name: generator.integers(0, 50, COUNT) for name in ("user", "item", "city")}
    logit = sum(np.sin(values + i) for i, values in enumerate(keys.values()))
    label = generator.random(COUNT) < 1 / (1 + np.exp(-2 * logit))
    return keys, label.astype(np.float32)


def make_model(features: list[str]) -> keras.Model:
    """Returns a model with a table per feature; items use Adam."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=100, decay_rate=0.9)
    rules = {"item": slip.optimizers.Adam(schedule)}
    embeddings = slip.keras.EmbeddingCollection(
        [slip.Table(name, dim=8, optimizer=rules.get(name)) for name in features],
        optimizer="adagrad",
        name="embeddings",
    )
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in features}
    rows = keras.layers.Concatenate()(list(embeddings(inputs).values()))
    click = keras.layers.Dense(1, activation="sigmoid", name=f"of_{len(features)}")(rows)
    model = keras.Model(inputs, click)
    model.compile("adam", "binary_crossentropy")
    return model


def main() -> None:
    """Trains with two features, changes rows, and continues with a third feature."""
    keras.utils.set_random_seed(0)
    keys, label = generate_clicks()
    model = make_model(["user", "item"])
    items = model.get_layer("embeddings").table("item")

    old = keras.layers.Embedding(50, 8)
    old.build()
    print("rows imported from Keras:", slip.tables.from_embedding(items, old))
    model.fit(
        {name: keys[name] for name in ("user", "item")},
        label,
        batch_size=200,
        verbose=0,
        callbacks=[slip.keras.LearningRates()],
    )
    print(f"learning rate of items after {len(label) // 200} steps: {items.learning_rate:.3f}")

    items.write([1000], items.read([7]))  # Initialize a new item with the row of a similar item.
    print("rows removed:", items.remove([7, 8, 12345]))
    print("number of items:", len(items), "last keys:", items.keys()[-2:])
    print("keys renamed:", slip.tables.rename_keys(items, {1000: 7}, keep_others=True))

    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "clicks.weights.h5")
        model.save_weights(path)
        wider = make_model(["user", "item", "city"])
        before = wider.evaluate(keys, label, batch_size=2000, verbose=0)
        with slip.checkpoint.tables_by_name():
            # The last layer differs, so its weights are skipped. Tables are loaded by name.
            wider.load_weights(path, skip_mismatch=True)
    wider.fit(keys, label, batch_size=200, verbose=0)
    after = wider.evaluate(keys, label, batch_size=2000, verbose=0)
    print(f"loss with the new feature before and after training: {before:.3f}, {after:.3f}")


if __name__ == "__main__":
    main()
