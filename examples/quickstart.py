"""Trains a DLRM on generated clicks with `model.fit`, skipping inputs made of saturated keys.

Run: python examples/quickstart.py
Prints Keras's lines of training and test quality, then the ledger: what each window skipped.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip

BATCH_SIZE = 256
NUM_DENSE = 4


def generate_clicks(count: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns inputs and labels: popular keys are frequent, each key has a taste of its own."""
    generator = np.random.default_rng(seed)
    users = generator.zipf(1.3, count) % 5_000
    items = generator.zipf(1.3, count) % 2_000
    dense = generator.normal(size=(count, NUM_DENSE)).astype(np.float32)
    logit = 2 * np.sin(users) + 2 * np.sin(items) + 0.5 * dense[:, 0] - 0.5
    label = (generator.random(count) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    return {"dense": dense, "keys": np.stack([users, items], axis=1).astype(np.int64)}, label


def main() -> None:
    """Trains, evaluates, and prints what was skipped."""
    keras.utils.set_random_seed(0)
    train = tf.data.Dataset.from_tensor_slices(generate_clicks(200_000, seed=1)).batch(BATCH_SIZE)
    test = tf.data.Dataset.from_tensor_slices(generate_clicks(40_000, seed=2)).batch(4096)

    embeddings = slip.keras.EmbeddingCollection(
        [slip.Table("user", dim=16), slip.Table("item", dim=16)],
        optimizer=slip.optimizers.Adagrad(0.05, initial_accumulator_value=0.0, epsilon=1e-8),
    )
    model = slip.models.DLRM(embeddings, NUM_DENSE, bottom=[64, 16], top=[64, 32, 1])
    slipstream = slip.Slipstream(
        embeddings,
        slip.SaturationConfig(
            target_skip=0.3, snapshot_interval=50, warmup_steps=200, hot_budget_bytes=64 << 10
        ),
    )
    model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["AUC"])
    model.fit(
        slipstream.apply(train, batch_size=BATCH_SIZE),
        shuffle=False,
        callbacks=[slipstream.callback()],
        validation_data=test,
        verbose=2,
    )
    print(slipstream.ledger)


if __name__ == "__main__":
    main()
