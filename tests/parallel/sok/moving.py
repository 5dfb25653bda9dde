"""Moves tables between native stores and SOK, for test_moving.py.

The number of ranks may change.

    moving.py FOLDER JOB ...

A job is "FROM:STORE:TO". It restores the checkpoint of job FROM ("none" for no checkpoint) into
tables of kind STORE, compares them with the saved state of FROM's ranks, continues training, and
saves as TO.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from jobs import DIMS, Job

from slipstream_tf._utils.agreement import gather_json
from slipstream_tf.distributed import init

STEPS = 10
CASES = (("adam", "interval"), ("sgd", "movement"))
# SOK stores the difference of a row from its initial row. This is the relative rounding error.
ROUNDED = 2.0**-23
# A store with this suffix has another seed for its table "two".
OTHER_SEED = "_other_seed"
# Stores with all rows on every rank.
REPLICATED = ("native", "replicated")


def rows_of(ranks: list, store: str, table: str, part: str) -> dict:
    """Returns key -> row for all ranks.

    Each key is on one rank. In the stores in REPLICATED, all keys are on every rank.
    """
    found = {}
    for has in ranks[:1] if store in REPLICATED else ranks:
        for key, row in zip(has[f"{table} keys"], has[f"{table} {part}"], strict=True):
            assert int(key) not in found
            found[int(key)] = row
    return found


def totals(ranks: list, table: str, what: str) -> dict:
    """Returns key -> the sum of its values on all ranks."""
    keys, values = what.split()
    found: dict = {}
    for has in ranks:
        parts = has[f"{table} {keys} keys"], has[f"{table} {keys} {values}"]
        for key, value in zip(*parts, strict=True):
            found[int(key)] = found.get(int(key), 0.0) + value
    return {key: total for key, total in found.items() if np.any(total)}


def compare(was: list, old_store: str, ranks: list, store: str, job: Job) -> None:
    is_from_native = not old_store.startswith("sok")
    for has in ranks:
        np.testing.assert_array_equal(has["head"], was[0]["head"])
        assert has["threshold"] == was[0]["threshold"] and has["reports"] == was[0]["reports"]
    for table in DIMS:
        deferred = totals(ranks, table, "held sums")
        rows, old_rows = (
            rows_of(r, s, table, "rows") for r, s in ((ranks, store), (was, old_store))
        )
        slots, old_slots = (
            rows_of(r, s, table, "slots") for r, s in ((ranks, store), (was, old_store))
        )
        # Loading allocates a native row for a key that had only a deferred sum or an access count.
        assert set(old_rows) <= set(rows)
        assert job.is_in_sok or set(rows) <= set(old_rows) | set(deferred) | set(
            totals(was, table, "accessed counts")
        )
        keys = np.array(sorted(old_rows), np.int64)
        now, before = (np.stack([r[k] for k in keys.tolist()]) for r in (rows, old_rows))
        if job.is_in_sok and (is_from_native or table == "two"):
            initial = job.store._initial.gather(table, keys)[0].numpy()
            assert (np.abs(now - before) <= ROUNDED * (np.abs(before) + np.abs(initial))).all()
        else:
            np.testing.assert_array_equal(now, before, table)
        for key in old_slots:
            np.testing.assert_array_equal(slots[key], old_slots[key])
        for what in ("held sums", "accessed counts"):
            now, before = totals(ranks, table, what), totals(was, table, what)
            assert set(now) == set(before), (what, set(now) ^ set(before))
            for key, value in before.items():
                np.testing.assert_allclose(now[key], value, rtol=1e-6, err_msg=what)
        for name in (n for n in was[0] if n.startswith(f"{table} states")):
            for has in ranks:
                np.testing.assert_array_equal(has[name], was[0][name], name)


def run(comm, folder: Path, source: str, store: str, target: str, case: tuple) -> None:
    rule, way = case
    # With another seed the initial rows differ, and so do the differences that SOK stores.
    seed = 5 if store.endswith(OTHER_SEED) else 2
    job = Job(comm, store.removesuffix(OTHER_SEED), rule, way, seed=seed, is_traced=False)
    kind = "-".join(case)
    begin = 0
    if source != "none":
        last = job.checkpoints(folder / source / kind).restore()
        assert last is not None
        begin = last.step
        files = sorted((folder / source / kind).glob("has-*.npz"))
        was = [dict(np.load(file)) for file in files]
        assert len(was) == last.world_size
        name = f"found.{target}.{kind}"
        own = {n: np.asarray(v) for n, v in job.found().items()}
        np.savez(folder / f"{name}-{comm.rank}.npz", **own)
        gather_json(comm, 0, name)  # Wait until all ranks have written their files.
        ranks = [dict(np.load(folder / f"{name}-{rank}.npz")) for rank in range(comm.size)]
        compare(was, str(was[0]["store"]), ranks, store, job)
        assert any(totals(was, table, "held sums") for table in DIMS), "no gradient was deferred"
    job.train(begin, begin + STEPS)
    job.checkpoints(folder / target / kind).save(begin + STEPS)
    here = folder / target / kind / f"has-{comm.rank}.npz"
    np.savez(here, **{n: np.asarray(v) for n, v in job.found().items()}, store=store)
    gather_json(comm, 0, f"done.{target}.{kind}")


def main() -> None:
    comm = init()
    folder = Path(sys.argv[1])
    for job in sys.argv[2:]:
        for case in CASES:
            run(comm, folder, *job.split(":"), case)
            print(job, *case)
    print("all checks passed")


if __name__ == "__main__":
    main()
