"""Trains, saves every few steps, and resumes from checkpoints, for test_resume.py.

    resuming.py DIRECTORY RESULTS PLACEMENT WHAT

DIRECTORY receives the checkpoints and RESULTS the final state of each rank. WHAT is one of

- "train": train to the end,
- "crawl": train slowly, so that the test can end the job in the middle,
- "die": kill rank 1 while it writes the third checkpoint,
- "load": restore the last checkpoint without training.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.checkpoint import table_parts

STEPS, EVERY, BATCH, FIELDS = 30, 5, 16, 2
TIMEOUT = 12.0
# Seconds per step in a job that the test ends early. The job must still run when a busy machine
# ends it.
PACE = 0.5


def batch(step: int, rank: int) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Returns the batch of one rank and step, which are the seed."""
    random = np.random.default_rng([step, rank])
    keys = random.integers(0, 50 + 5 * step, (BATCH, FIELDS))
    dense = random.normal(size=(BATCH, 2)).astype(np.float32)
    labels = random.integers(0, 2, (BATCH, 1)).astype(np.float32)
    return {"keys": tf.constant(keys), "dense": tf.constant(dense)}, tf.constant(labels)


def die_while_writing() -> None:
    """Kills this process between the two tables of its third checkpoint."""
    write = table_parts.TablePart.write
    count = 0

    def torn(
        part: table_parts.TablePart, path: Path, checkpoint: str, rank: int, earlier: Sequence[Path]
    ) -> int:
        nonlocal count
        count += 1
        written = write(part, path, checkpoint, rank, earlier)
        if count == 3 * FIELDS - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    table_parts.TablePart.write = torn


def main() -> None:
    """Trains to the last step, or until the process is killed."""
    directory, results, placement, what = sys.argv[1:]
    comm = slip.distributed.init(timeout_seconds=TIMEOUT)
    keras.utils.set_random_seed(3)
    configs = [
        slip.Table(f"f{i}", dim=4, initializer=slip.initializers.RandomUniform(seed=i))
        for i in range(FIELDS)
    ]
    rule = slip.optimizers.Adagrad(0.1, 0.0, 1e-8)
    embeddings = slip.keras.EmbeddingCollection(configs, rule, comm=comm, placement=placement)
    model = slip.models.DCNv2(embeddings, 2, 1, deep=[8])
    model(batch(0, comm.rank)[0], training=False)
    optimizer = slip.distributed.DistributedOptimizer(keras.optimizers.Adam(0.01), comm)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.BinaryCrossentropy()

    @tf.function
    def train_step(features: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(features, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    if what == "die" and comm.rank == 1:
        die_while_writing()
    saved = slip.distributed.CheckpointManager(directory, checkpoint, comm, embeddings.store)
    last = saved.restore()
    start = 0 if last is None else last.step
    print(f"starts at step {start} of {last and last.path}", flush=True)
    for step in range(start, start if what == "load" else STEPS):
        train_step(*batch(step, comm.rank))
        if (step + 1) % EVERY == 0:
            began = time.monotonic()
            saved.save(step + 1)
            saved.wait()
            print(f"saved step {step + 1} in {time.monotonic() - began:.2f} s", flush=True)
        if what == "crawl":
            time.sleep(PACE)
    state = {f"weight_{i}": w.numpy() for i, w in enumerate(model.trainable_variables)}
    state |= {f"optimizer_{i}": v.numpy() for i, v in enumerate(optimizer.variables)}
    for table in configs:
        # Exclude counts. They are different on each rank, and of replicated tables only rank 0's
        # are saved.
        contents = embeddings.store.export_table(table.name)
        state |= {f"{table.name}_{n}": contents[n] for n in ("keys", "rows", "slots", "steps")}
    np.savez(Path(results) / f"rank{comm.rank}.npz", **state)
    print(f"rank {comm.rank} of {comm.size}: trained", flush=True)


if __name__ == "__main__":
    main()
