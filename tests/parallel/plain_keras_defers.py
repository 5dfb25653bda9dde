"""Compares deferred gradients of a Keras embedding on ranks with one process.

A program of test_plain_keras.py. Arguments: "tape" (a custom loop) or "fit", and the trigger,
"movement" or "interval". The loss is linear in the rows, so that deferring does not change later
gradients.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from plain_keras import DIM, ROWS, Batch, batches_of, dataset_of, union

import slipstream_tf as slip
from slipstream_tf.distributed import (
    DistributedGradientTape,
    DistributedOptimizer,
    SingleProcess,
    flush_deferred,
    pad_to_equal_steps,
    scale_loss,
)
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables import VariableStore

EPOCHS = 3
POLICIES = {
    "movement": UpdatePolicy("defer", "movement", movement=0.05, max_age=7, max_rows=12),
    "interval": UpdatePolicy("defer", "interval", max_age=5, max_rows=100),
    "": UpdatePolicy(),
}


class Linear(slip.keras.LossFeedback, keras.Model):
    """Returns the weighted sum of the rows' values, with fixed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(ROWS, DIM)
        self.embedding.build(None)
        self.factors = tf.constant(np.random.default_rng(2).normal(size=(2, DIM)), tf.float32)

    def call(self, keys: Any) -> Any:
        return tf.reduce_sum(self.embedding(keys) * self.factors, axis=[1, 2])


def product(labels: Any, predictions: Any) -> Any:
    """Returns the loss of each example, linear in the predictions."""
    return (labels - 0.3) * predictions


def train(how: str, trigger: str, batches: list[Batch], comm: Any) -> np.ndarray:
    """Trains, flushes deferred gradients, and returns the rows."""
    keras.utils.set_random_seed(3)
    model = Linear()
    store = VariableStore({"item": model.embedding.embeddings})
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.5), comm, store)
    store.set_row_flags("item", np.arange(20), np.full(20, SATURATED))
    store.set_update_policy("item", POLICIES[trigger])
    if how == "fit":
        model.compile(optimizer, product)
        ranks = slip.keras.RanksCallback(comm, store)
        data = pad_to_equal_steps(dataset_of(batches), comm)
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[ranks])
    else:
        train_with_tape(model, store, batches, comm)
    counts = store.update_counts("item")
    assert (counts.deferred > 0) == (trigger != ""), counts
    assert counts.deferred_now == 0 and (counts.flushed > 0) == (trigger != ""), counts
    return model.embedding.embeddings.numpy()


def train_with_tape(model: Linear, store: Any, batches: list[Batch], comm: Any) -> None:
    """Trains in a custom loop."""
    optimizer = keras.optimizers.SGD(0.5)
    store.use_optimizer(optimizer)
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def step(keys: Any, labels: Any) -> None:
        with DistributedGradientTape(tf.GradientTape(), store, comm) as tape:
            loss = tf.reduce_mean(product(labels, model(keys)))
            loss = scale_loss(loss, tf.shape(labels)[0], comm)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for _ in range(EPOCHS):
        for keys, labels in pad_to_equal_steps(dataset_of(batches), comm):
            step(keys, labels)
    flush_deferred(store, optimizer, comm)


def main() -> None:
    """Compares rows and bytes."""
    how, trigger = sys.argv[1:3]
    comm = slip.distributed.init()
    ranks = [batches_of(rank, comm.size) for rank in range(comm.size)]
    rows = train(how, trigger, ranks[comm.rank], comm)
    deferred = comm.traffic()
    plain = train(how, "", ranks[comm.rank], comm)
    sent = {kind: comm.traffic().bytes[kind] - deferred.bytes[kind] for kind in deferred.bytes}
    wanted = train(how, "", union(ranks), SingleProcess())
    np.testing.assert_allclose(plain, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows, wanted, rtol=1e-4, atol=1e-5)
    of_all = comm.gather(tf.constant(rows[None]), "control", "test.rows").numpy()
    np.testing.assert_array_equal(of_all, np.broadcast_to(rows, of_all.shape))
    assert deferred.bytes["deferred"] < sent["gradients"], (deferred, sent)
    assert deferred.bytes["keys"] < sent["keys"], (deferred, sent)
    print(f"rank {comm.rank} of {comm.size}: equal; {deferred.bytes}, plain {sent}", flush=True)


if __name__ == "__main__":
    main()
