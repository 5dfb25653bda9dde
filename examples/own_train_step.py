"""Skips examples in a two-task model with a custom `train_step`.

Run: python examples/own_train_step.py

The example prints the validation losses after each epoch, the skipped examples, and the effect of
`max_auc_loss`.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip

BATCH_SIZE, EPOCHS = 128, 5


def generate_visits(count: int, seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns user and item per visit, and labels "click" and "minutes"."""
    generator = np.random.default_rng(seed)
    user, item = (generator.zipf(1.3, count) % keys for keys in (2_000, 500))
    taste = np.sin(user) + np.sin(3.0 * item)
    click = generator.random(count) < 1.0 / (1.0 + np.exp(-2.0 * taste))
    minutes = np.maximum(taste + generator.normal(0.0, 0.2, count), 0.0)
    labels = {"click": click[:, None], "minutes": minutes[:, None]}
    return {"user": user, "item": item}, {k: v.astype(np.float32) for k, v in labels.items()}


class TwoTasks(slip.keras.Model):
    """Predicts clicks and minutes.

    The loss of the minutes counts only for clicks.
    """

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Trains on a batch and records the click losses for the engine."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            clicks = keras.losses.binary_crossentropy(y["click"], predicted["click"])
            error = keras.losses.mean_squared_error(y["minutes"], predicted["minutes"])
            losses = clicks + 0.5 * y["click"][:, 0] * error
            loss = tf.reduce_mean(losses if weight is None else losses * weight)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        # Pass all of `x`: `Slipstream.apply` has added entries that the engine needs here.
        self.record_losses(x, clicks, y["click"], sample_weight=weight)
        return {"mean_loss": loss}


def main() -> None:
    """Skips examples within a bound of the estimated AUC loss."""
    keras.utils.set_random_seed(0)
    embeddings = slip.keras.EmbeddingCollection(
        [slip.Table("user", dim=8), slip.Table("item", dim=8)], slip.optimizers.Adagrad(0.1)
    )
    inputs = {name: keras.Input((), name=name, dtype="int64") for name in ("user", "item")}
    vectors = keras.layers.Concatenate()(list(embeddings(inputs).values()))
    hidden = keras.layers.Dense(32, "relu")(vectors)
    outputs = {
        "click": keras.layers.Dense(1, "sigmoid", name="click")(hidden),
        "minutes": keras.layers.Dense(1, name="minutes")(hidden),
    }
    model = TwoTasks(inputs, outputs)
    model.compile("adam", {"click": "binary_crossentropy", "minutes": "mse"})

    train, test = (
        tf.data.Dataset.from_tensor_slices(generate_visits(count, seed)).batch(BATCH_SIZE)
        for count, seed in ((40_000, 1), (8_000, 2))
    )
    slipstream = slip.Slipstream(
        embeddings,
        policies=slip.SkipExamples(score=slip.RowDrift(), fraction=0.3, keep_rate=0.2),
        max_auc_loss=0.005,
    )
    model.fit(
        slipstream.apply(train),
        epochs=EPOCHS,
        validation_data=test,
        callbacks=[slipstream.callback()],
        verbose=2,
    )
    print(slipstream.report())


if __name__ == "__main__":
    main()
