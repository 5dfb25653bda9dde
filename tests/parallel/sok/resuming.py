"""Run by test_resuming.py: what some ranks saved of tables in SOK, others go on from.

    resuming.py FOLDER FROM TO

FROM: a job of FOLDER whose checkpoint is restored, or "none". TO: this job, which trains from there
to the end, saves on the way, and must end with the rows that the job "whole" had, or "older", which
is the same, but writes a checkpoint as earlier versions did.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf._utils.agreement import gather_json
from slipstream_tf.checkpoint.manifest import Manifest, entry_of
from slipstream_tf.checkpoint.writing import RankFiles, write_rank
from slipstream_tf.distributed import JobCheckpoints, init

KEYS, BATCH, STEPS, SAVED = 50, 24, 8, 4


def batch_of(step: int, comm) -> dict:
    """This rank's share of the step's keys, one in four of which is new in the step."""
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


def write_older(directory: Path, checkpoint: tf.train.Checkpoint, comm) -> None:
    """Each rank's rows are within its `tf.train.Checkpoint`; there are no files of tables."""
    folder = directory / "checkpoint-000001"
    prefix = f"rank-{comm.rank}/state"
    checkpoint.write(str(folder / prefix))
    files = RankFiles(comm.rank, [], None, None, None, None)
    write_rank(folder, "older", files)
    gather_json(comm, 0, f"older.{directory.name}")
    if comm.rank == 0:
        parts = sorted(path for path in folder.glob("rank-*/*"))
        entries = {f"{path.parent.name}/{path.name}": entry_of(path) for path in parts}
        ranks = [None] * comm.size
        Manifest("older", SAVED, comm.size, "spread", [], entries, ranks, ranks, None, {}).write(
            folder
        )
    gather_json(comm, 0, f"older.{directory.name}.done")


def compare(comm, folder: Path, source: str, job: str) -> None:
    tables = [slip.Table("t", 4, combiner="mean", retention=slip.Retention(256, eviction="lru"))]
    rule = slip.optimizers.Adam(0.05)
    layer = slip.keras.EmbeddingCollection(tables, rule, store="sok", comm=comm)
    head, step_of = tf.Variable(tf.ones([4])), tf.Variable(0)
    checkpoint = tf.train.Checkpoint(layer=layer, head=head, step=step_of)

    def checkpoints_of(job: str) -> JobCheckpoints:
        return JobCheckpoints(folder / job, checkpoint, comm, layer.store)

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
            if job == "older":
                write_older(folder / job, checkpoint, comm)
            else:
                checkpoints.save(step + 1)
    keys = np.arange(KEYS)
    rows = layer({"t": keys})["t"].numpy()
    file = folder / "rows.npz"
    if job in ("whole", "older"):
        if comm.rank == 0:
            np.savez(file, rows=rows, head=head.numpy(), size=comm.size)
        return
    whole = np.load(file)
    same = comm.size == whole["size"] and source in ("none", "whole", "older")
    for mine, theirs in ((rows, whole["rows"]), (head.numpy(), whole["head"])):
        if same:
            np.testing.assert_array_equal(mine, theirs)
        else:
            np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=1e-5)


def main() -> None:
    comm = init()
    folder, source, job = sys.argv[1:]
    compare(comm, Path(folder), source, job)
    print("all is well")


if __name__ == "__main__":
    main()
