"""Resumes checkpoints of tables in SOK with another number of ranks (test_resuming.py).

    resuming.py FOLDER FROM TO

FROM is the job in FOLDER whose checkpoint is restored, or "none". TO is this job. It trains to the
end, saves checkpoints on the way, and must end with the rows of the job "whole".
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import CheckpointManager, init

KEYS, BATCH, STEPS, SAVED = 50, 24, 8, 4


def batch_of(step: int, comm) -> dict:
    """Returns this rank's keys of the step. A quarter is new."""
    random = np.random.default_rng(step)
    keys = random.integers(0, KEYS * (step + 4) // (STEPS + 4), (BATCH, 3))
    return {"t": tf.constant(np.split(keys, comm.size)[comm.rank])}


def train(comm, layer, head, step: int) -> None:
    with tf.GradientTape() as tape:
        rows = layer(batch_of(step, comm), training=True)["t"]
        loss = tf.reduce_mean(tf.square(rows * head - 1.0))
    anchor = layer.update_anchor.value
    gradient, _ = tape.gradient(loss, [head, anchor])
    head.assign_sub(0.1 * comm.sum(gradient, "dense", f"head.{step}") / comm.size)


def compare(comm, folder: Path, source: str, job: str) -> None:
    tables = [slip.Table("t", 4, combiner="mean", retention=slip.Retention(256, eviction="lru"))]
    rule = slip.optimizers.Adam(0.05)
    layer = slip.keras.EmbeddingCollection(tables, rule, store="sok", comm=comm)
    head, step_of = tf.Variable(tf.ones([4])), tf.Variable(0)
    checkpoint = tf.train.Checkpoint(layer=layer, head=head, step=step_of)

    def checkpoints_of(job: str) -> CheckpointManager:
        return CheckpointManager(folder / job, checkpoint, comm, layer.store)

    checkpoints = checkpoints_of(job)
    start = 0
    if source != "none":
        saved = checkpoints_of(source).restore()
        assert saved is not None and saved.placement == "spread" and saved.step == SAVED
        assert int(step_of) == start + SAVED
        start = saved.step
    for step in range(start, STEPS):
        train(comm, layer, head, step)
        if step + 1 == SAVED:
            step_of.assign(step + 1)
            checkpoints.save(step + 1)
    keys = np.arange(KEYS)
    rows = layer({"t": keys})["t"].numpy()
    file = folder / "rows.npz"
    if job == "whole":
        if comm.rank == 0:
            np.savez(file, rows=rows, head=head.numpy(), size=comm.size)
        return
    whole = np.load(file)
    same = comm.size == whole["size"] and source in ("none", "whole")
    for mine, theirs in ((rows, whole["rows"]), (head.numpy(), whole["head"])):
        if same:
            np.testing.assert_array_equal(mine, theirs)
        else:
            np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=1e-5)


def main() -> None:
    comm = init()
    folder, source, job = sys.argv[1:]
    compare(comm, Path(folder), source, job)
    print("all checks passed")


if __name__ == "__main__":
    main()
