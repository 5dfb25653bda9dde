"""Defers gradients of plain `keras.layers.Embedding` layers in a Horovod job.

Run: horovodrun -np 2 python examples/keras_embedding_ranks.py

Without horovodrun the example trains with a single rank. Rank 0 prints the deferred and sent
gradient rows, the bytes between ranks by kind, and the test AUC.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip

USERS, ITEMS, DIM = 5_000, 2_000, 16
BATCH_SIZE = 256  # Examples per rank.


class TwoTables(slip.keras.LossFeedback, keras.Model):
    """Keras embeddings of users and items with an MLP.

    The mixin `LossFeedback` weights the loss of each rank, so that the gradient is the mean over
    the examples of all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.users = keras.layers.Embedding(USERS, DIM)
        self.items = keras.layers.Embedding(ITEMS, DIM)
        self.head = keras.Sequential(
            [keras.layers.Dense(32, "relu"), keras.layers.Dense(1, "sigmoid")]
        )

    def build(self, input_shape: Any = None) -> None:
        """Creates all variables; store and optimizer need them before training."""
        self.users.build()
        self.items.build()
        self.head.build((None, 2 * DIM))
        self.built = True

    def call(self, keys: Any) -> Any:
        """Maps {"user", "item"}, int64 [batch], to click probabilities [batch, 1]."""
        rows = [self.users(keys["user"]), self.items(keys["item"])]
        return self.head(tf.concat(rows, axis=1))


def clicks(count: int, seed: int) -> tf.data.Dataset:
    """Returns generated clicks.

    The distribution of keys is skewed, and each key changes the click probability.
    """
    generator = np.random.default_rng(seed)
    users, items = (generator.zipf(1.3, count) % size for size in (USERS, ITEMS))
    probability = 1 / (1 + np.exp(0.5 - 2 * np.sin(users) - 2 * np.sin(items)))
    labels = (generator.random(count) < probability).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices(({"user": users, "item": items}, labels[:, None]))


def main() -> None:
    """Trains on this rank's part of the data; tests on rank 0."""
    comm = slip.distributed.init()
    keras.utils.set_random_seed(0)
    model = TwoTables()
    model.build()
    optimizer = keras.optimizers.Adagrad(0.05)
    variables = {"user": model.users.embeddings, "item": model.items.embeddings}
    store = slip.tables.VariableStore(variables)
    averaging = slip.distributed.DistributedOptimizer(optimizer, comm, store)
    averaging.build(model.trainable_variables)
    slipstream = slip.Slipstream(
        store,
        slip.DeferGradients(slip.Movement(0.005)),
        slip.Window(steps=50, warmup=50),
        comm=comm,
    )
    model.compile(averaging, "binary_crossentropy", metrics=["AUC"])
    train = clicks(80_000, seed=1).shard(comm.size, comm.rank).batch(BATCH_SIZE)
    model.fit(
        slipstream.apply(train, batch_size=BATCH_SIZE),
        shuffle=False,
        callbacks=[slipstream.callback()],
        verbose=0,
    )
    # All ranks have the same model, because `fit` exchanges the deferred gradients at its end.
    if comm.rank == 0:
        print(slipstream.report())
        print("bytes sent by rank 0:", dict(comm.traffic().bytes))
        _, auc = model.evaluate(clicks(20_000, seed=2).batch(4096), verbose=0)
        print(f"test AUC {auc:.4f}, trained by {comm.size} rank(s)")


if __name__ == "__main__":
    main()
