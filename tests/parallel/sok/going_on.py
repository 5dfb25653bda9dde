"""Run by test_moving.py: a job that ends in the midst of a window goes on bitwise as it would have.

Arguments: cases, each "store,rule,way".
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from jobs import DIMS, Job

from slipstream_tf.distributed import init
from slipstream_tf.distributed.agreement import gather_json

STEPS, SAVED = 22, 10


def compare(comm, folder: Path, store: str, rule: str, way: str) -> None:
    straight = Job(comm, store, rule, way)
    straight.train(0, STEPS)
    stopped = Job(comm, store, rule, way)
    stopped.train(0, SAVED)
    stopped.checkpoints(folder).save(SAVED)
    was = stopped.found()
    frozen = [getattr(stopped.store, "frozen_keys", lambda _: 0)(name) for name in DIMS]
    # What it goes on with after that, is not in the checkpoint.
    stopped.train(SAVED, SAVED + 3)
    resumed = Job(comm, store, rule, way)
    last = resumed.checkpoints(folder).restore()
    assert last is not None and last.step == SAVED and last.placement == "spread"
    same(was, resumed.found(), but=("held learning_rate",))
    resumed.train(SAVED, STEPS)
    one, other = straight.found(), resumed.found()
    same(one, other)
    held = sum(was[f"{name} held keys"].size for name in DIMS)
    reports = resumed.engine.tracker.reports
    masked = sum(table.rows.masked for report in reports for table in report.tables)
    assert (masked > 0) == (way == "mask"), masked
    held = sum(gather_json(comm, held, f"held.{store}.{rule}.{way}"))
    assert (held > 0) == (way != "mask"), held
    assert (sum(frozen) > 0) == (comm.size > 1 and store == "sok" and way != "movement"), frozen
    print(store, rule, way, masked, "masked", held, "held", sum(frozen), "frozen")


def same(one, other, but: tuple[str, ...] = ()) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        if not name.endswith(but or ("nothing",)):
            np.testing.assert_array_equal(values, other[name], name)


def main() -> None:
    comm = init()
    for case in sys.argv[1:]:
        # Of rank 0, which all see.
        folder = gather_json(comm, tempfile.mkdtemp(), f"folder.{case}")[0]
        compare(comm, Path(folder), *case.split(","))
    print("all is well")


if __name__ == "__main__":
    main()
