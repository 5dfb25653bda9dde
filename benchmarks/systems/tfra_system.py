"""Trains with TensorFlow Recommenders Addons: one dynamic embedding per field."""

from __future__ import annotations

import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import tensorflow as tf
import tf_parts
from task import read_arguments
from tensorflow_recommenders_addons import dynamic_embedding
from tf_parts import DenseLayers

_LEGACY = tf.keras.optimizers.legacy


def main() -> None:
    import tensorflow_recommenders_addons as addons

    task, record = read_arguments(sys.argv)
    settings = task.settings
    tf_parts.limit_threads(settings["threads"])
    tf.keras.utils.set_random_seed(settings["seed"])
    tables = [
        dynamic_embedding.keras.layers.Embedding(
            settings["dim"],
            initializer=tf.keras.initializers.RandomUniform(-0.05, 0.05, seed=settings["seed"]),
            devices=["/CPU:0"],
            init_capacity=2 * rows,
            name=f"table_{index}",
        )
        for index, rows in enumerate(settings["cardinalities"])
    ]
    dense_layers = DenseLayers(tf.keras, settings, task.fields)
    of_rows = dynamic_embedding.DynamicEmbeddingOptimizer(
        _LEGACY.Adagrad(settings["rows_rate"], settings["damping"])
    )
    of_weights = _LEGACY.Adam(settings["rate"])

    def logits(keys: tf.Tensor, dense: tf.Tensor) -> tf.Tensor:
        rows = [table(keys[:, field]) for field, table in enumerate(tables)]
        return dense_layers.logits(dense, tf.stack(rows, axis=1))

    @tf.function
    def step(features: dict[str, tf.Tensor], labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            found = logits(features["keys"], features["dense"])
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, found)
            loss = tf.reduce_mean(losses)
        rows = [variable for table in tables for variable in table.trainable_variables]
        gradients = tape.gradient(loss, [*rows, *dense_layers.variables])
        of_rows.apply_gradients(zip(gradients[: len(rows)], rows, strict=True))
        of_weights.apply_gradients(zip(gradients[len(rows) :], dense_layers.variables, strict=True))

    recorder = tf_parts.train(task, step, logits)
    recorder.finish(record, {"tensorflow": tf.__version__, "tfra": addons.__version__})


if __name__ == "__main__":
    main()
