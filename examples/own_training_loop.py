"""Skips examples in a custom training loop with a `tf.function` step.

Run: python examples/own_training_loop.py

The example prints a line per window, a table of the skipped examples, and the number of rows
in the restored checkpoint.
"""

from __future__ import annotations

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip

BATCH_SIZE = 128


def generate_bags(
    count: int, seed: int
) -> tuple[dict[str, tf.Tensor | tf.RaggedTensor], tf.Tensor]:
    """Returns user, bag of read articles, and click label per example."""
    generator = np.random.default_rng(seed)
    users = generator.zipf(1.4, count) % 3_000
    lengths = generator.integers(0, 6, count)
    articles = generator.zipf(1.4, int(lengths.sum())) % 1_000
    history = tf.RaggedTensor.from_row_lengths(articles.astype(np.int64), lengths)
    taste = tf.reduce_sum(tf.sin(tf.cast(history, tf.float32)), axis=1).numpy()
    label = (np.sin(users) + taste > 0).astype(np.float32)
    return {"user": tf.constant(users, tf.int64), "history": history}, tf.constant(label)


def main() -> None:
    """Trains a Keras model in a custom loop and saves it."""
    keras.utils.set_random_seed(0)
    train = tf.data.Dataset.from_tensor_slices(generate_bags(60_000, seed=1)).batch(BATCH_SIZE)
    embeddings = slip.keras.EmbeddingCollection(
        [slip.Table("user", dim=8), slip.Table("article", dim=16, combiner="mean")],
        optimizer=slip.optimizers.Adam(0.01),
        features={"user": "user", "history": "article"},
    )
    tower = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    slipstream = slip.Slipstream(
        embeddings,
        # `RowDrift` is the rule of the paper, a baseline. With dry_run=True, the engine would only
        # estimate the savings.
        slip.SkipExamples(slip.RowDrift()),
        slip.Window(steps=50, warmup=100),
    )
    optimizer = keras.optimizers.Adam(1e-3)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)
    def train_step(keys: dict[str, tf.Tensor], label: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            vectors = embeddings(keys, training=True)
            logits = tower(tf.concat([vectors["user"], vectors["history"]], axis=1))
            loss = loss_of(label, logits[:, 0])
        # `embeddings.trainable_variables` contains the update anchor. Its gradient makes the
        # backward pass update the rows.
        variables = embeddings.trainable_variables + tower.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    for keys, label in slipstream.apply(train, batch_size=BATCH_SIZE):
        loss = train_step(keys, label)
        report = slipstream.step()
        if report is not None:
            print(
                f"step {report.step}: loss {float(loss):.4f}, T {report.threshold:.3g}, "
                f"{report.skipped_fraction:.0%} of the examples skipped"
            )
    print(slipstream.report().table())
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tf.train.Checkpoint(embeddings=embeddings, tower=tower)
        path = checkpoint.save(os.path.join(folder, "model"))
        checkpoint.restore(path).assert_consumed()
        print(f"saved and restored {embeddings.store.size('article')} articles")


if __name__ == "__main__":
    main()
