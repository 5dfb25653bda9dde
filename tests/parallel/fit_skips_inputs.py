"""Runs `fit` with skipped examples on ranks with uneven data, for test_programs.py.

Argument: placement of the tables (empty for the default).
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_equals_one import DIM, FIELDS, Batch, TrainedInputs

import slipstream_tf as slip

BATCH_SIZE = 8


def batches_of(rank: int) -> list[Batch]:
    """Returns the batches of one rank. Higher ranks have more batches.

    The keys of half of the examples move little.
    """
    random = np.random.default_rng(11 + rank)
    made = []
    for _ in range(24 + 9 * rank):
        calm = random.random(BATCH_SIZE) < 0.5
        keys = np.where(calm[:, None], 0, random.integers(1, 6, (BATCH_SIZE, FIELDS)))
        dense = random.normal(size=(BATCH_SIZE, 2)).astype(np.float32)
        labels = np.where(calm, 1, random.integers(0, 2, BATCH_SIZE)).astype(np.float32)
        made.append(({"keys": keys.astype(np.int64), "dense": dense}, labels))
    return made


def train(comm: Any, placement: str, policy: Any, epochs: int = 1) -> tuple[slip.Slipstream, int]:
    """Trains and returns the engine and the last epoch's example count."""
    keras.utils.set_random_seed(3)
    tables = [
        slip.Table(f"f{i}", dim=DIM, initializer=slip.initializers.RandomUniform(seed=i))
        for i in range(FIELDS)
    ]
    embeddings = slip.keras.EmbeddingCollection(
        tables,
        slip.optimizers.Adagrad(0.1),
        comm=comm,
        **({"placement": placement} if placement else {}),
    )
    model = slip.models.DCNv2(embeddings, 2, 1, deep=[8])
    optimizer = slip.distributed.DistributedOptimizer(keras.optimizers.SGD(0.1), comm)
    model.compile(optimizer, "binary_crossentropy", metrics=[TrainedInputs()])
    slipstream = slip.Slipstream(embeddings, policy, window=slip.Window(5, warmup=0))
    examples = tf.nest.map_structure(lambda *of: np.concatenate(of), *batches_of(comm.rank))
    batches = tf.data.Dataset.from_tensor_slices(examples).batch(BATCH_SIZE)
    data = slipstream.apply(batches)
    callbacks = [slipstream.callback()]
    fitted = model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks, shuffle=False)
    slipstream.end_window()
    return slipstream, int(fitted.history["trained_inputs"][-1])


def main() -> None:
    """Trains, and checks that every example was trained or skipped."""
    comm = slip.distributed.init()
    slipstream, trained = train(comm, sys.argv[1], slip.SkipExamples(slip.RowDrift(), fraction=0.5))
    given = sum(BATCH_SIZE * len(batches_of(rank)) for rank in range(comm.size))
    savings = slipstream.report()
    assert savings.examples_seen == given, (savings.examples_seen, given)
    assert savings.examples_skipped > given // 20, savings.examples_skipped
    assert trained + savings.examples_skipped == given, (trained, savings.examples_skipped, given)
    # Half of the examples are skipped in the first epoch only, so that the later epochs are longer.
    halves = slip.baselines.SkipAtRandom((*[0.5] * 4, 0.0))
    longer, of_last = train(comm, sys.argv[1], halves, epochs=3)
    assert longer.report().examples_seen == 3 * given, (longer.report().examples_seen, given)
    assert longer.report().examples_skipped > given // 20, longer.report().examples_skipped
    assert of_last == given, (of_last, given)
    reports = [(r.threshold, r.saturated_keys, r.examples_skipped) for r in savings.reports]
    digest = hashlib.blake2b(repr(reports).encode(), digest_size=8)
    for table in slipstream.store.tables:
        rows = slipstream.store.gather(table.name, np.arange(6))[0]
        if sys.argv[1] == "sharded":
            own = slipstream.store.owners(table.name, np.arange(6)) == comm.rank
            rows = comm.sum(tf.where(own[:, None], rows, 0.0), "control", "test.rows")
        digest.update(rows.numpy().tobytes())
    own = tf.constant(np.frombuffer(digest.digest(), np.int64))
    digests = comm.gather(own, "control", "test.digest").numpy()
    assert (digests == digests[0]).all(), digests
    print(
        f"rank {comm.rank} of {comm.size}: {savings.examples_skipped} of {given} skipped",
        flush=True,
    )


if __name__ == "__main__":
    main()
