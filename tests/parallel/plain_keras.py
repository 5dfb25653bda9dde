"""Compares a model with a Keras embedding on ranks with one process.

A program of test_plain_keras.py. Arguments: "tape" (a custom loop) or "fit", and the Keras
optimizer, "sgd" or "adagrad".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import (
    DistributedGradientTape,
    DistributedOptimizer,
    SingleProcess,
    pad_to_equal_steps,
    scale_loss,
)
from slipstream_tf.tables import VariableStore

ROWS, DIM, STEPS = 30, 4, 9
MASKED = [0, 3, 4, 29]
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
}
Batch = tuple[np.ndarray, np.ndarray]


class Clicks(slip.keras.LossFeedback, keras.Model):
    """An embedding and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(ROWS, DIM)
        self.head = keras.layers.Dense(1, activation="sigmoid")
        self.embedding.build(None)
        self.head.build((None, 2 * DIM))

    def call(self, keys: Any) -> Any:
        return self.head(tf.reshape(self.embedding(keys), [-1, 2 * DIM]))


def batches_of(rank: int, size: int) -> list[Batch]:
    """Returns the batches of one rank. Rank 0 has fewer.

    The batches have two sizes, in a different order on each rank.
    """
    random = np.random.default_rng(5 + rank)
    made = []
    for step in range(STEPS - 3 * (rank == 0)):
        inputs = 3 if (step + rank) % size else 7
        keys = random.integers(0, ROWS, (inputs, 2))
        made.append((keys, random.integers(0, 2, inputs).astype(np.float32)))
    return made


def union(ranks: list[list[Batch]]) -> list[Batch]:
    """Returns the batches of the single process, one per step."""
    joined = []
    for step in range(max(map(len, ranks))):
        parts = [batches[step] for batches in ranks if step < len(batches)]
        joined.append(
            (np.concatenate([k for k, _ in parts]), np.concatenate([y for _, y in parts]))
        )
    return joined


def dataset_of(batches: list[Batch]) -> tf.data.Dataset:
    def generate() -> Iterator[Batch]:
        yield from batches

    spec = (tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([None], tf.float32))
    return tf.data.Dataset.from_generator(generate, output_signature=spec)


def train_with_tape(
    model: Clicks, store: Any, batches: list[Batch], optimizer: Any, comm: Any
) -> None:
    """Trains in a custom loop, traced once per batch size and rank."""

    @tf.function
    def step(keys: Any, labels: Any) -> None:
        with DistributedGradientTape(tf.GradientTape(), store, comm) as tape:
            losses = keras.losses.binary_crossentropy(labels[:, None], model(keys))
            loss = scale_loss(tf.reduce_mean(losses), tf.shape(labels)[0], comm)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    optimizer.build(model.trainable_variables)
    for keys, labels in pad_to_equal_steps(dataset_of(batches), comm):
        # The static shape causes a separate trace.
        step(tf.constant(keys.numpy()), tf.constant(labels.numpy()))


def train_with_fit(
    model: Clicks, store: Any, batches: list[Batch], optimizer: Any, comm: Any
) -> None:
    model.train_with(comm)
    model.compile(DistributedOptimizer(optimizer, comm, store), "binary_crossentropy")
    model.fit(pad_to_equal_steps(dataset_of(batches), comm), verbose=0)


def train(how: str, rule: str, batches: list[Batch], comm: Any) -> list[np.ndarray]:
    """Trains, checks the masked rows and the counts, and returns the weights."""
    keras.utils.set_random_seed(3)
    model = Clicks()
    store = VariableStore({"item": model.embedding.embeddings})
    store.set_saturated("item", MASKED)
    before = model.embedding.embeddings.numpy()
    trainers = {"tape": train_with_tape, "fit": train_with_fit}
    trainers[how](model, store, batches, OPTIMIZERS[rule](), comm)
    rows = model.embedding.embeddings.numpy()
    np.testing.assert_array_equal(rows[MASKED], before[MASKED])
    assert (rows != before).any()
    keys = [np.unique(keys) for keys, _ in batches]
    masked = sum(int(np.isin(of_step, MASKED).sum()) for of_step in keys)
    counts = store.update_counts("item")
    assert (counts.offered, counts.masked) == (sum(map(len, keys)), masked), counts
    return [variable.numpy() for variable in model.trainable_variables]


def main() -> None:
    """Compares one configuration with the single process."""
    how, rule = sys.argv[1:3]
    comm = slip.distributed.init()
    ranks = [batches_of(rank, comm.size) for rank in range(comm.size)]
    weights = train(how, rule, ranks[comm.rank], comm)
    wanted = train(how, rule, union(ranks), SingleProcess())
    for index, (got, one) in enumerate(zip(weights, wanted, strict=True)):
        np.testing.assert_allclose(got, one, rtol=2e-4, atol=2e-6)
        of_all = comm.gather(tf.constant(got[None]), "control", f"test.{index}").numpy()
        np.testing.assert_array_equal(of_all, np.broadcast_to(got, of_all.shape))
    print(f"rank {comm.rank} of {comm.size}: equal", flush=True)


if __name__ == "__main__":
    main()
