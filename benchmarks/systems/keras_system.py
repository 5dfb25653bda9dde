"""Trains with the Embedding layers and optimizers of Keras 3."""

from __future__ import annotations

import os
import sys

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import tensorflow as tf
import tf_parts
from task import read_arguments
from tf_parts import DenseLayers


def main() -> None:
    task, record = read_arguments(sys.argv)
    settings = task.settings
    tf_parts.limit_threads(settings["threads"])
    keras.utils.set_random_seed(settings["seed"])
    tables = [keras.layers.Embedding(rows, settings["dim"]) for rows in settings["cardinalities"]]
    for table in tables:
        table.build()
    dense_layers = DenseLayers(keras, settings, task.fields)
    rows = [table.trainable_variables[0] for table in tables]
    weights = dense_layers.variables
    # Keras adds epsilon below the square root, like the initial accumulator value. The default of
    # 1e-7 would change the update, therefore pass a negligible value.
    of_rows = keras.optimizers.Adagrad(settings["rows_rate"], settings["damping"], epsilon=1e-12)
    of_weights = keras.optimizers.Adam(settings["rate"])
    of_rows.build(rows)
    of_weights.build(weights)

    def logits(keys: tf.Tensor, dense: tf.Tensor) -> tf.Tensor:
        vectors = [table(keys[:, field]) for field, table in enumerate(tables)]
        return dense_layers.logits(dense, tf.stack(vectors, axis=1))

    @tf.function(jit_compile=False)
    def step(features: dict[str, tf.Tensor], labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            found = logits(features["keys"], features["dense"])
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, found)
            loss = tf.reduce_mean(losses)
        variables = [variable.value for variable in (*rows, *weights)]
        gradients = tape.gradient(loss, variables)
        of_rows.apply(gradients[: len(rows)], rows)
        of_weights.apply(gradients[len(rows) :], weights)

    recorder = tf_parts.train(task, step, logits)
    recorder.finish(record, {"tensorflow": tf.__version__, "keras": keras.__version__})


if __name__ == "__main__":
    main()
