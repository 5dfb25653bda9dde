"""A rank of test_resume.py: trains, saves every few steps, goes on from what was saved.

    resuming.py DIRECTORY RESULTS PLACEMENT WHAT

DIRECTORY: of the checkpoints. RESULTS: folder for what each rank has in the end. WHAT: "train", to
the end; "crawl": slowly, so that the job is lost in the middle; "die": rank 1 is killed while it
writes the third checkpoint; "load": not at all, what was saved is all.
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
# Seconds per step of a job that is to be lost: more in all than a busy machine takes to do so.
PACE = 0.5


def batch(step: int, rank: int) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """The inputs of one rank and step, found again by their numbers."""
    random = np.random.default_rng([step, rank])
    keys = random.integers(0, 50 + 5 * step, (BATCH, FIELDS))
    dense = random.normal(size=(BATCH, 2)).astype(np.float32)
    labels = random.integers(0, 2, (BATCH, 1)).astype(np.float32)
    return {"keys": tf.constant(keys), "dense": tf.constant(dense)}, tf.constant(labels)


def die_while_writing() -> None:
    """Has this process killed when its third part of a checkpoint is half written."""
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
    """Trains to the last step, or as far as it gets."""
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
    saved = slip.distributed.JobCheckpoints(directory, checkpoint, comm, embeddings.store)
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
        # Counts are a rank's own, of which only rank 0's are saved of replicated tables.
        contents = embeddings.store.export_table(table.name)
        state |= {f"{table.name}_{n}": contents[n] for n in ("keys", "rows", "slots", "steps")}
    np.savez(Path(results) / f"rank{comm.rank}.npz", **state)
    print(f"rank {comm.rank} of {comm.size}: trained", flush=True)


if __name__ == "__main__":
    main()
