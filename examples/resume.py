"""Resumes a killed training with the same result as without interruption.

Run:
    python examples/resume.py           trains with and without a kill, to compare the results
    python examples/resume.py FOLDER    trains, or resumes from the checkpoints in FOLDER
    horovodrun -np 2 python examples/resume.py FOLDER

Each start prints its first step. Each finished training prints a digest of the trained rows.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip

STEPS, SAVE_EVERY, BATCH_SIZE = 120, 25, 128
KILL_AT = "EXAMPLE_KILL_AT"


def batch(step: int, rank: int) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Returns the batch of a step.

    Batches depend only on step and rank, so that a resumed program continues at the right place in
    the data.
    """
    generator = np.random.default_rng([step, rank])
    keys = generator.zipf(1.3, (BATCH_SIZE, 2)) % 3_000
    labels = (np.sin(keys).sum(1) + generator.normal(size=BATCH_SIZE) > 0).astype(np.float32)
    dense = generator.normal(size=(BATCH_SIZE, 2)).astype(np.float32)
    return {"keys": tf.constant(keys), "dense": tf.constant(dense)}, tf.constant(labels[:, None])


def train(folder: str) -> None:
    """Trains to the last step from the newest checkpoint in `folder`."""
    comm = slip.distributed.init()
    keras.utils.set_random_seed(0)
    embeddings = slip.keras.EmbeddingCollection(
        [slip.Table("user", dim=8), slip.Table("item", dim=8)],
        optimizer="adagrad",
        comm=comm,
    )
    model = slip.models.DCNv2(embeddings, 2, 1, deep=[16])
    model(batch(0, comm.rank)[0])
    optimizer = slip.distributed.DistributedOptimizer(keras.optimizers.Adam(0.01), comm)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.BinaryCrossentropy()

    @tf.function
    def train_step(features: dict[str, tf.Tensor], labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(features, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    # A checkpoint contains rows, slots, access counts, dense layers and the optimizer. It is
    # written to a temporary folder and renamed, so that a kill never leaves a partial checkpoint.
    state = tf.train.Checkpoint(model=model, optimizer=optimizer)
    checkpoints = slip.distributed.CheckpointManager(folder, state, comm, embeddings.store)
    last = checkpoints.restore()
    print(f"starts at step {0 if last is None else last.step}", flush=True)
    for step in range(0 if last is None else last.step, STEPS):
        train_step(*batch(step, comm.rank))
        if (step + 1) % SAVE_EVERY == 0:
            checkpoints.save(step + 1)
        if step + 1 == int(os.environ.get(KILL_AT, -1)):
            os.kill(os.getpid(), signal.SIGKILL)
    content = embeddings.store.export_table("item")
    digest = hashlib.sha256(content["rows"].tobytes() + content["slots"].tobytes())
    print(f"trained {STEPS} steps: {digest.hexdigest()[:16]}", flush=True)


def main() -> None:
    """Trains in a folder, or compares trainings with and without kill."""
    if len(sys.argv) > 1:
        train(sys.argv[1])
        return
    for kill_at in ({}, {KILL_AT: "90"}):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, folder]
            ended = subprocess.run(command, env={**os.environ, **kill_at}, check=False)
            if kill_at:
                assert ended.returncode == -signal.SIGKILL
                print("killed at step 90", flush=True)
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
