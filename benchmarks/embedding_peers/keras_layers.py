"""Measures Keras 3 with an Embedding layer per table."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
import worker

_RULES = {
    "sgd": keras.optimizers.SGD,
    "momentum": functools.partial(keras.optimizers.SGD, momentum=0.9),
    "adagrad": keras.optimizers.Adagrad,
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "ftrl": keras.optimizers.Ftrl,
}


def make(settings: Mapping[str, Any], keys: np.ndarray) -> worker.Step:
    """Builds the layers and returns a step; see `worker.serve`."""
    worker.limit_threads(tf, settings["threads"])
    tables, dim, batch = settings["tables"], settings["dim"], settings["batch"]
    layers = [keras.layers.Embedding(settings["rows"], dim) for _ in range(tables)]
    for layer in layers:
        layer.build()
    optimizer = _RULES[settings["rule"]](settings["learning_rate"])
    variables = [layer.trainable_variables[0].value for layer in layers]
    optimizer.build([layer.trainable_variables[0] for layer in layers])
    gradient = tf.random.stateless_normal([batch, tables, dim], [0, 0])
    batches = [tf.constant(of_batch) for of_batch in keys]

    @tf.function(reduce_retracing=True)
    def one(of_batch: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            rows = tf.stack([layer(of_batch[:, i]) for i, layer in enumerate(layers)], axis=1)
        gradients = tape.gradient(rows, variables, gradient)
        optimizer.apply(gradients, [layer.trainable_variables[0] for layer in layers])

    one(batches[0])
    return lambda number: one(batches[number])


if __name__ == "__main__":
    worker.serve(make, {"tensorflow": tf.__version__, "keras": keras.__version__})
