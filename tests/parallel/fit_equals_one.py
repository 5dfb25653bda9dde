"""Compares `model.fit` on ranks with one process that trains all examples.

A program of test_programs.py. Arguments: update rule of the rows, placement of the tables (empty
for the default), "plain" or "defer". Deferring changes later gradients. Therefore with "defer" the
single process defers like simulated ranks, which requires batches of equal size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip

sys.path.append(str(Path(__file__).resolve().parents[1]))
from rank_simulation import simulate_ranks

FIELDS, DIM = 3, 4
Batch = tuple[dict[str, np.ndarray], np.ndarray]


class TrainedInputs(keras.metrics.Metric):
    """Counts the trained examples."""

    def __init__(self) -> None:
        super().__init__(name="trained_inputs")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del y_pred, sample_weight
        self.count.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))

    def result(self) -> Any:
        return self.count


def batches_of(rank: int, is_even: bool = False) -> list[Batch]:
    """Returns the batches of one rank.

    If `is_even` is false, their sizes vary and higher ranks have more batches.
    """
    random = np.random.default_rng(7 + rank)
    made = []
    for _ in range(12 if is_even else 4 + 3 * rank):
        size = 6 if is_even else int(random.integers(1, 12))
        keys = random.integers(0, 1 << random.integers(1, 8), (size, FIELDS))
        dense = random.normal(size=(size, 2)).astype(np.float32)
        labels = random.integers(0, 2, size).astype(np.float32)
        made.append(({"keys": keys.astype(np.int64), "dense": dense}, labels))
    return made


def union(ranks: Sequence[list[Batch]]) -> list[Batch]:
    """Returns the batches of the single process.

    Each batch joins the batches of all ranks that still have one in this step.
    """
    steps = max(len(batches) for batches in ranks)
    joined = []
    for step in range(steps):
        parts = [batches[step] for batches in ranks if step < len(batches)]
        features = {n: np.concatenate([part[0][n] for part in parts]) for n in ("keys", "dense")}
        joined.append((features, np.concatenate([part[1] for part in parts])))
    return joined


def dataset_of(batches: list[Batch]) -> tf.data.Dataset:
    spec = (
        {
            "keys": tf.TensorSpec([None, FIELDS], tf.int64),
            "dense": tf.TensorSpec([None, 2], tf.float32),
        },
        tf.TensorSpec([None], tf.float32),
    )

    def generate() -> Iterator[Batch]:
        yield from batches

    return tf.data.Dataset.from_generator(generate, output_signature=spec)


def train(
    batches: list[Batch],
    rule: str,
    comm: Any,
    placement: str,
    way: str,
    ranks: int = 1,
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Trains and returns all rows, slots and weights, and the last metrics."""
    keras.utils.set_random_seed(3)
    rules = {
        "sgd": slip.optimizers.SGD(0.5),
        "adagrad": slip.optimizers.Adagrad(0.1, 0.0, 1e-8),
    }
    tables = [
        slip.Table(f"f{i}", dim=DIM, initializer=slip.initializers.RandomUniform(seed=i))
        for i in range(FIELDS)
    ]
    embeddings = slip.keras.EmbeddingCollection(
        tables, rules[rule], comm=comm, **({"placement": placement} if placement else {})
    )
    model = slip.models.DCNv2(embeddings, 2, 1, deep=[8])
    optimizer: Any = keras.optimizers.SGD(0.1)
    if comm is not None:
        optimizer = slip.distributed.DistributedOptimizer(optimizer, comm)
    model.compile(optimizer, "binary_crossentropy", metrics=[TrainedInputs(), "AUC"])
    policies: list[Any] = []
    if way == "defer":
        policies = [slip.DeferGradients(slip.Movement(0.02, max_age=5))]
        if ranks > 1:
            simulate_ranks(embeddings.store, ranks)
    slipstream = slip.Slipstream(embeddings, policies, window=slip.Window(4, warmup=0))
    data = dataset_of(batches)
    if comm is not None:
        data = slip.distributed.pad_to_equal_steps(data, comm)
    fitted = model.fit(data, verbose=0, callbacks=[slipstream.callback()], shuffle=False)
    state = [w.numpy() for w in model.trainable_variables]
    deferred = sum(embeddings.store.update_counts(table.name).deferred for table in tables)
    assert (deferred > 0) == (way == "defer" and len(batches) > 0), deferred
    for table in tables:
        contents = embeddings.store.export_table(table.name)
        parts = [contents[name] for name in ("keys", "rows", "slots")]
        state += of_all_ranks(comm, parts) if placement == "sharded" else parts
    return state, {name: values[-1] for name, values in fitted.history.items()}


def of_all_ranks(comm: Any, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the contents of a sharded table, gathered and ordered by key."""
    gathered = [comm.gather(tf.constant(part), "control", "test.export").numpy() for part in parts]
    order = np.argsort(gathered[0])
    return [part[order] for part in gathered]


def require_same_metrics(got: dict[str, float], wanted: dict[str, float], count: int) -> None:
    """Asserts that the metrics count every example of all ranks exactly once."""
    assert got["trained_inputs"] == count == wanted["trained_inputs"], (got, count, wanted)
    np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=1e-4)
    np.testing.assert_allclose(got["AUC"], wanted["AUC"], atol=2e-3)


def main() -> None:
    """Compares one configuration with the single process."""
    rule, placement, way = sys.argv[1:4]
    comm = slip.distributed.init()
    is_even = way == "defer"
    ranks = [batches_of(rank, is_even) for rank in range(comm.size)]
    if not is_even:
        ranks[-1] = []  # This rank never has an example.
    state, metrics = train(ranks[comm.rank], rule, comm, placement, way)
    wanted, wanted_metrics = train(union(ranks), rule, None, "", way, comm.size if is_even else 1)
    for got, one in zip(state, wanted, strict=True):
        np.testing.assert_allclose(got, one, rtol=2e-4, atol=2e-5)
    count = sum(len(labels) for batches in ranks for _, labels in batches)
    require_same_metrics(metrics, wanted_metrics, count)
    print(f"rank {comm.rank} of {comm.size}: equal; {comm.traffic().bytes}", flush=True)


if __name__ == "__main__":
    main()
