"""A job that ends within a window resumes bitwise, for test_moving.py.

Arguments: cases, each "store,rule,way".
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf
from jobs import DIMS, Job

from slipstream_tf._utils.agreement import gather_json
from slipstream_tf.distributed import init

STEPS, SAVED = 22, 10
# Excluded from comparisons after a restore, because no computation uses this value.
OF_STORE = ("held learning_rate",)


def compare(comm, folder: Path, store: str, rule: str, way: str) -> None:
    straight = Job(comm, store, rule, way)
    straight.train(0, STEPS)
    stopped = Job(comm, store, rule, way)
    stopped.train(0, SAVED)
    stopped.checkpoints(folder).save(SAVED)
    was = stopped.found()
    # The checkpoint does not contain these steps.
    stopped.train(SAVED, SAVED + 3)
    resumed = Job(comm, store, rule, way)
    last = resumed.checkpoints(folder).restore()
    assert last is not None and last.step == SAVED and last.placement == "spread"
    same(was, resumed.found(), but=OF_STORE)
    resumed.train(SAVED, STEPS)
    one, other = straight.found(), resumed.found()
    same(one, other)
    deferred = sum(was[f"{name} held keys"].size for name in DIMS)
    reports = resumed.engine.tracker.reports
    masked = sum(table.rows.masked for report in reports for table in report.tables)
    assert (masked > 0) == (way == "mask"), masked
    deferred = sum(gather_json(comm, deferred, f"held.{store}.{rule}.{way}"))
    assert (deferred > 0) == (way != "mask"), deferred
    print(store, rule, way, masked, "masked", deferred, "deferred")


def through_tensorflow(comm, folder: Path, store: str, rule: str, way: str) -> None:
    """Saves and restores with `tf.train.Checkpoint` and `BackupAndRestore`, in one process.

    Tests both orders of restoring the layer and the engine.
    """
    straight, stopped = Job(comm, store, rule, way), Job(comm, store, rule, way)
    straight.train(0, STEPS)
    stopped.train(0, SAVED)
    ways = {
        "layer first": lambda job: tf.train.Checkpoint(a=job.layer, b=job.engine, head=job.head),
        "engine first": lambda job: tf.train.Checkpoint(a=job.engine, b=job.layer, head=job.head),
    }
    for name, checkpoint_of in ways.items():
        path = checkpoint_of(stopped).write(str(folder / name))
        resumed = Job(comm, store, rule, way)
        checkpoint_of(resumed).read(path).assert_consumed()
        resumed.train(SAVED, STEPS)
        same(straight.found(), resumed.found(), but=OF_STORE)
    resumed, weights = Job(comm, store, rule, way), {}
    for job in (stopped, resumed):
        job.engine.back_up(True)
    stopped.layer.save_own_variables(weights)
    resumed.layer.load_own_variables(weights)
    resumed.head.assign(stopped.head)
    resumed.train(SAVED, STEPS)
    same(straight.found(), resumed.found(), but=OF_STORE)
    # Native tables can load the checkpoint, and SOK's tables can load theirs.
    native, again = Job(comm, "native", rule, way), Job(comm, store, rule, way)
    for source, target in ((stopped, native), (native, again)):
        path = tf.train.Checkpoint(layer=source.layer).write(str(folder / "layer"))
        tf.train.Checkpoint(layer=target.layer).read(path).assert_consumed()
        for table in DIMS:
            was, now = (job.store.export_table(table) for job in (source, target))
            for part in ("keys", "slots", "counts", "steps"):
                np.testing.assert_array_equal(now[part], was[part], part)
            # SOK stores the difference of a row from its initial row, which rounds.
            np.testing.assert_allclose(now["rows"], was["rows"], rtol=0, atol=1e-6)
    deferred = sum(stopped.store.update_counts(name).deferred_now for name in DIMS)
    assert deferred == 0
    print(store, rule, way, "through TensorFlow")


def same(one, other, but: tuple[str, ...] = ()) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        if not name.endswith(but or ("nothing",)):
            np.testing.assert_array_equal(values, other[name], name)


def main() -> None:
    comm = init()
    for case in sys.argv[1:]:
        # All ranks use the folder of rank 0.
        folder = gather_json(comm, tempfile.mkdtemp(), f"folder.{case}")[0]
        compare(comm, Path(folder), *case.split(","))
        # Saving through TensorFlow applies deferred sums, so that only masking is exact.
        if comm.size == 1 and case.endswith("mask"):
            through_tensorflow(comm, Path(folder), *case.split(","))
    print("all checks passed")


if __name__ == "__main__":
    main()
