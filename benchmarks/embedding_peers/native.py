"""Measures slipstream_tf's native store by ops or by `model.fit`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import rules
import tensorflow as tf
import worker

import slipstream_tf as slip
from slipstream_tf.ops import features
from slipstream_tf.tables import NativeStore


def _store(settings: Mapping[str, Any]) -> tuple[NativeStore, list[features.FeatureSpec]]:
    """Returns a store with all rows, and its feature specs."""
    names = [f"t{i}" for i in range(settings["tables"])]
    specs = [features.FeatureSpec(name, name) for name in names]
    name = settings["rule"]
    if "alone" in sys.argv[1:]:
        name = rules.ALONE[name]
    rule = rules.make(slip.optimizers, name, settings["learning_rate"])
    # Format: "dtype of values,dtype of slots".
    dtypes = [arg.split(",") for arg in sys.argv[1:] if "float" in arg]
    storage = slip.Storage(*dtypes[0]) if dtypes else slip.Storage()
    tables = [slip.Table(name, settings["dim"], storage=storage) for name in names]
    store = NativeStore(tables, rule)
    # Allocate the rows in random order, because keys are not sorted in training either.
    every = np.random.default_rng(0).permutation(settings["rows"])
    for part in np.array_split(every, max(1, len(every) // 50_000)):
        column = np.tile(part[:, None], (1, len(names)))
        store.lookup(features.pack(column, specs), training=True, stacked=True)
    return store, specs


def make_ops(settings: Mapping[str, Any], keys: np.ndarray) -> worker.Step:
    """Builds the tables and returns a step that runs all batches.

    The batches run in a loop in the graph.
    """
    worker.limit_threads(tf, settings["threads"])
    store, specs = _store(settings)
    shape = [settings["batch"], settings["tables"], settings["dim"]]
    gradient = tf.random.stateless_normal(shape, [0, 0])
    batches = tf.constant(keys)

    # One graph call runs all steps, as with `steps_per_execution`, to exclude the cost of Python.
    @tf.function
    def all_steps() -> None:
        for number in tf.range(len(keys)):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            packed = features.pack(batches[number], specs)
            rows, plan = store.lookup(packed, training=True, stacked=True)
            with tf.control_dependencies(rows):
                store.apply_gradients(plan, [gradient])

    def step(_: int) -> None:
        all_steps()

    step(0)
    return step


class GivenGradient(keras.Model):
    """A model that passes a given gradient to the layer's output."""

    def __init__(self, layer: keras.layers.Layer, gradient: tf.Tensor):
        super().__init__()
        self.layer, self.gradient = layer, gradient

    def call(self, keys: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.layer(keys, training=training)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> tf.Tensor:  # fmt: skip
        @tf.custom_gradient
        def loss(_: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return tf.zeros(()), lambda _: self.gradient

        # The gradient is an input for all libraries, because computing it takes 1 ms per step.
        return loss(y_pred)


def make_fit(settings: Mapping[str, Any], keys: np.ndarray) -> worker.Step:
    """Builds a model and returns a step that runs `fit`.

    The step trains one epoch of all batches.
    """
    worker.limit_threads(tf, settings["threads"])
    store, specs = _store(settings)
    layer = slip.keras.EmbeddingCollection(
        store.tables, store.optimizer, specs, store=store, stacked=True
    )
    shape = [settings["batch"], settings["tables"], settings["dim"]]
    model = GivenGradient(layer, tf.random.stateless_normal(shape, [0, 0]))
    model.compile(optimizer="sgd", steps_per_execution=len(keys), jit_compile=False)
    data = worker.without_autotune(tf, tf.data.Dataset.from_tensor_slices(keys).repeat())

    def step(_: int) -> None:
        model.fit(data, steps_per_epoch=len(keys), verbose=0)

    step(0)
    return step


if __name__ == "__main__":
    worker.serve(
        make_fit if "fit" in sys.argv[1:] else make_ops,
        {
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "slipstream_tf": slip.__version__,
        },
    )
