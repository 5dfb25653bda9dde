"""Measures TensorFlow Recommenders Addons: dynamic embeddings in a CPU cuckoo hash table."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
import worker
from tensorflow_recommenders_addons import dynamic_embedding

_LEGACY = tf.keras.optimizers.legacy
_RULES = {
    "sgd": _LEGACY.SGD,
    "momentum": functools.partial(_LEGACY.SGD, momentum=0.9),
    "adagrad": _LEGACY.Adagrad,
    "adam": _LEGACY.Adam,
    "ftrl": _LEGACY.Ftrl,
}


def make(settings: Mapping[str, Any], keys: np.ndarray) -> worker.Step:
    """Builds the tables and returns a step; see `worker.serve`."""
    worker.limit_threads(tf, settings["threads"])
    tables, dim, batch = settings["tables"], settings["dim"], settings["batch"]
    layers = [
        dynamic_embedding.keras.layers.Embedding(
            dim,
            initializer=tf.keras.initializers.RandomUniform(-0.05, 0.05, seed=0),
            devices=["/CPU:0"],
            init_capacity=2 * settings["rows"],
            name=f"table_{i}",
        )
        for i in range(tables)
    ]
    optimizer = dynamic_embedding.DynamicEmbeddingOptimizer(
        _RULES[settings["rule"]](settings["learning_rate"])
    )
    gradient = tf.random.stateless_normal([batch, tables, dim], [0, 0])
    batches = [tf.constant(of_batch) for of_batch in keys]

    @tf.function(reduce_retracing=True)
    def step(of_batch: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            rows = tf.stack([layer(of_batch[:, i]) for i, layer in enumerate(layers)], axis=1)
        variables = [variable for layer in layers for variable in layer.trainable_variables]
        gradients = tape.gradient(rows, variables, gradient)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    every = np.random.default_rng(0).permutation(settings["rows"])
    for part in np.array_split(every, max(1, len(every) // 50_000)):
        rows = tf.random.stateless_uniform([len(part), dim], [0, 1], -0.05, 0.05)
        for layer in layers:
            layer.params.upsert(tf.constant(part), rows)
    step(batches[0])
    return lambda number: step(batches[number])


if __name__ == "__main__":
    import tensorflow_recommenders_addons as addons

    worker.serve(make, {"tensorflow": tf.__version__, "tfra": addons.__version__})
