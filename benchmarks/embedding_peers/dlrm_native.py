"""Trains slipstream_tf's DLRM with a custom `tf.function` step or with `model.fit`.

The argument "layers" measures only the dense part: every step gets the same rows, and their
gradient is discarded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import dlrm_start
import keras
import numpy as np
import tensorflow as tf
import worker

import slipstream_tf as slip
from slipstream_tf.models import DLRM
from slipstream_tf.models.interaction import pair_order

# Variants in which the optimizer also receives the gradients of rows, and their `global_clipnorm`.
# The norm is never reached, so that the updates equal those of the other variants.
_APPLIED: Mapping[str, float | None] = {"collected": None, "clipped": 1e6}


def _model(settings: Mapping[str, Any]) -> DLRM:
    """Returns the model with the initial values that all libraries share."""
    dim = settings["dim"]
    tables = [slip.Table(f"t{i}", dim) for i in range(len(settings["cardinalities"]))]
    embeddings = slip.keras.EmbeddingCollection(
        tables,
        slip.optimizers.Adagrad(
            settings["rows_rate"], 0.0, epsilon=dlrm_start.ROWS_EPSILON**2
        ),
        apply="step" if set(_APPLIED) & set(sys.argv[1:]) else "backward",
        dtype=settings["dtype"],
    )  # fmt: skip
    for index, rows in enumerate(settings["cardinalities"]):
        # Insert the rows in random order, because keys are not sorted in training either.
        order = np.random.default_rng(index).permutation(rows)
        contents = {
            "keys": order.astype(np.int64),
            "rows": dlrm_start.initial_rows(settings, index)[order],
            "slots": np.zeros((rows, dim), np.float32),
            "counts": np.zeros(rows, np.float32),
            "last_used": np.zeros(0, np.int64),
            "steps": np.zeros(2, np.int64),
        }
        embeddings.store.import_table(f"t{index}", contents)
    model = DLRM(
        embeddings, settings["numbers"], settings["bottom"], settings["top"],
        returns_logits=True, dtype=settings["dtype"],
    )  # fmt: skip
    bottom, top = dlrm_start.dense_weights(settings)
    vectors = len(tables) + 1
    place = {pair: number for number, pair in enumerate(dlrm_start.pairs(vectors))}
    rows_of_dots = [dim + place[pair] for pair in pair_order(vectors)]
    top[0] = top[0][[*range(dim), *rows_of_dots]]
    model.bottom.set_weights(bottom)
    model.top.set_weights(top)
    return model


def _optimizer(settings: Mapping[str, Any]) -> keras.optimizers.Optimizer:
    applied = [name for name in _APPLIED if name in sys.argv[1:]]
    clips = {"global_clipnorm": _APPLIED[applied[0]]} if applied else {}
    if settings["dense_optimizer"] == "sgd":
        optimizer = keras.optimizers.SGD(settings["dense_rate"], **clips)
    else:
        optimizer = keras.optimizers.Adagrad(
            settings["dense_rate"],
            initial_accumulator_value=dlrm_start.DENSE_ACCUMULATOR,
            epsilon=dlrm_start.DENSE_EPSILON,
            **clips,
        )
    return slip.keras.CombinedOptimizer(optimizer) if applied else optimizer


def make_step(settings: Mapping[str, Any], keys: np.ndarray) -> worker.Step:
    """Builds the model and returns a custom training step; see `worker.serve`."""
    worker.limit_threads(tf, settings["threads"])
    model, optimizer = _model(settings), _optimizer(settings)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
    given = dlrm_start.read_batches(settings)
    batches = [
        tuple(map(tf.constant, of_batch))
        for of_batch in zip(given.dense, keys, given.labels, strict=True)
    ]

    shape = (settings["batch"], len(settings["cardinalities"]), settings["dim"])
    rows = tf.constant(np.random.default_rng(0).normal(0.0, 0.1, shape), model.compute_dtype)

    @tf.function
    def layers(dense: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            loss = loss_of(labels, model.logits(dense, rows, True)[:, 0])
        variables = model.trainable_variables
        gradients, of_rows = tape.gradient(loss, ([v.value for v in variables], rows))
        optimizer.apply(gradients, variables)
        return loss, of_rows

    if "layers" in sys.argv[1:]:
        return lambda number: float(layers(batches[number][0], batches[number][2])[0])

    @tf.function
    def one(dense: tf.Tensor, of_batch: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model({"dense": dense, "keys": of_batch}, training=True)
            loss = loss_of(labels, logits[:, 0])
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
        return loss

    one.get_concrete_function(*batches[0])
    return lambda number: float(one(*batches[number]))


def make_fit(settings: Mapping[str, Any], keys: np.ndarray) -> worker.Step:
    """Builds the model and returns a step that runs `fit`.

    The step trains one epoch of all batches; see `worker.serve`.
    """
    worker.limit_threads(tf, settings["threads"])
    model = _model(settings)
    model.compile(
        optimizer=_optimizer(settings),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=len(keys),
        jit_compile=False,
    )
    given = dlrm_start.read_batches(settings)
    inputs = {"dense": given.dense, "keys": keys}
    data = tf.data.Dataset.from_tensor_slices((inputs, given.labels)).repeat().prefetch(2)
    data = worker.without_autotune(tf, data)

    def step(_: int) -> float:
        history = model.fit(data, steps_per_epoch=len(keys), verbose=0).history
        return float(history["loss"][-1])

    return step


if __name__ == "__main__":
    worker.serve(
        make_fit if "fit" in sys.argv[1:] else make_step,
        {
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "slipstream_tf": slip.__version__,
        },
    )
