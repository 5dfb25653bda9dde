"""Tests of `Retention(admit_after, expire_after)`: admission and expiry of rows."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from thread_jobs import KEYS, Job, Threads

from slipstream_tf import Retention, Storage, Table, initializers, optimizers
from slipstream_tf.distributed import (
    CheckpointManager,
    ReplicatedStore,
    ShardedStore,
    SingleProcess,
)
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables import NativeStore
from slipstream_tf.telemetry.savings_report import SavingsReport

DIM = 4
SPECS = [FeatureSpec("t", "t", padding_key=None)]
BOTH = Retention(capacity=400, admit_after=2, expire_after=60)


def store_of(retention: Retention | None, spill: Path | None = None) -> NativeStore:
    storage = Storage() if spill is None else Storage(memory=64 * 32, spill=str(spill))
    start = initializers.RandomUniform(seed=4)
    table = Table("t", DIM, initializer=start, retention=retention, storage=storage)
    return NativeStore([table], optimizers.Adagrad(0.1))


def step(store: Any, keys: Any) -> np.ndarray:
    keys = tf.constant(keys, tf.int64)
    pooled, plan = store.lookup(pack({"t": keys}, SPECS), training=True)
    store.apply_gradients(plan, [tf.ones_like(pooled[0])])
    return pooled[0].numpy()


def drawn(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.concatenate([random.integers(0, 100, 20), random.integers(0, 3000, 20)])


def test_key_is_admitted_at_second_access() -> None:
    store = store_of(Retention(admit_after=2))
    initial = store.gather("t", [5, 6])[0].numpy()
    np.testing.assert_array_equal(step(store, [5, 6, 6]), initial[[0, 1, 1]])
    assert store.keys_of("t").tolist() == [6]
    np.testing.assert_array_equal(step(store, [5]), initial[:1])
    assert store.keys_of("t").tolist() == [5, 6]
    assert (step(store, [5]) != initial[:1]).all()
    assert store.statistics("t").not_admitted == 1
    assert store.update_counts("t").not_admitted == 1
    # A written key gets its row regardless of its frequency.
    store.write_rows("t", np.array([9]), np.zeros((1, DIM), np.float32))
    assert 9 in store.keys_of("t")


def test_row_expires_after_steps() -> None:
    store = store_of(Retention(expire_after=20))
    step(store, [5, 6])
    for _ in range(26):
        step(store, [6])
    assert store.keys_of("t").tolist() == [6]
    assert store.statistics("t").expired_rows == store.update_counts("t").rows_expired == 1


def test_row_expires_after_seconds() -> None:
    store = store_of(Retention(expire_after="1s"))
    step(store, [5, 6])
    deadline = time.monotonic() + 10
    while store.size("t") > 1 and time.monotonic() < deadline:
        step(store, [6])
        time.sleep(0.2)
    assert store.keys_of("t").tolist() == [6]
    assert time.monotonic() > deadline - 9.1


@pytest.mark.parametrize("on_disk", [False, True])
def test_resumed_job_continues_identically(on_disk: bool, tmp_path: Path) -> None:
    spill = tmp_path if on_disk else None

    def saved(store: NativeStore) -> CheckpointManager:
        folder = tmp_path / "saved"
        return CheckpointManager(folder, tf.train.Checkpoint(), SingleProcess(), store)

    straight, first = store_of(BOTH, spill), store_of(BOTH, spill)
    for seed in range(200):
        step(straight, drawn(seed))
    for seed in range(100):
        step(first, drawn(seed))
    job = saved(first)
    job.save(100)
    job.wait()
    resumed = store_of(BOTH, spill)
    saved(resumed).restore()
    for seed in range(100, 200):
        step(resumed, drawn(seed))
    ours, theirs = resumed.export_table("t"), straight.export_table("t")
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values, err_msg=name)
    for name, values in straight.export_admission("t").items():
        np.testing.assert_array_equal(resumed.export_admission("t")[name], values, err_msg=name)
    assert straight.statistics("t").expired_rows > 0
    assert len(ours["last_used"]) == len(ours["keys"])


def test_import_without_access_times_counts_as_accessed_now(tmp_path: Path) -> None:
    plain = store_of(None)
    for seed in range(100):
        step(plain, drawn(seed))
    for retention in (Retention(expire_after=10), Retention(expire_after="1d")):
        store = store_of(retention)
        store.import_table("t", plain.export_table("t"))
        for _ in range(5):
            step(store, [3])
        assert store.size("t") == plain.size("t")
    by_steps = store_of(Retention(expire_after=10_000))
    for seed in range(100):
        step(by_steps, drawn(seed))
    by_time = store_of(Retention(expire_after="1d"))
    by_time.import_table("t", by_steps.export_table("t"))
    step(by_time, [3])
    assert by_time.size("t") == by_steps.size("t")
    by_steps.import_table("t", by_time.export_table("t"))
    step(by_steps, [3])
    assert by_time.size("t") == by_steps.size("t")


def test_ranks_merge_counts_of_rare_keys(tmp_path: Path) -> None:
    retention = Retention(admit_after=3, expire_after=30)

    def run(comm: Any, begin: int, end: int) -> Any:
        job = Job(comm, "sharded", tmp_path, retention=retention)
        job.checkpoints.restore()
        job.train(begin, end)
        keys = job.store.keys_of("a")
        known = job.store.export_admission("a")
        if end < 40:
            job.checkpoints.save(end)
            job.checkpoints.wait()
        counts = job.store.update_counts("a")
        return keys, known["counters"], counts

    before = Threads(2).run(lambda comm: run(comm, 0, 20))
    assert sum(counts.not_admitted for *_, counts in before) > 0
    owned = [keys for keys, *_ in before]
    assert not set(owned[0]) & set(owned[1]) and sum(map(len, owned)) < KEYS
    (after,) = [run(SingleProcess(), 20, 21)]
    everything = np.maximum(before[0][1], before[1][1])
    assert (after[1] >= everything // 2).all() and after[1].any()
    assert set(np.concatenate(owned)) <= set(after[0])


def test_owners_admit_keys_by_requests_of_all_ranks() -> None:
    admit_after, life, steps, rate = 3, 8, 60, 0.5
    table = store_of(Retention(admit_after=admit_after, expire_after=life)).tables[0]
    drawn = np.random.default_rng(0).zipf(1.3, (steps, 2, 12)) % 200

    def run(comm: Any) -> Any:
        store = ShardedStore([table], optimizers.SGD(rate), comm)
        for batch in drawn:
            step(store, batch[comm.rank])
        return store.keys_of("t"), store.gather("t", store.keys_of("t"))[0].numpy()

    owned = Threads(2).run(run)
    start = NativeStore([table], optimizers.SGD(rate))
    # A rank requests each key of its batch once.
    requests, last, moved = Counter(), dict[int, int](), dict[int, float]()
    certain, possible = set[int](), set[int]()
    for now, batch in enumerate(drawn):
        requests.update(key for keys in batch for key in set(keys.tolist()))
        for key, count in Counter(batch.ravel().tolist()).items():
            if now - last.get(key, now) > life:
                # The row may have expired, therefore its value is unknown.
                moved[key] = np.nan
            if requests[key] >= admit_after:
                moved[key] = moved.get(key, 0.0) - rate * count / 2
                last[key] = now
    for key, time_of in last.items():
        age = steps - 1 - time_of
        certain |= {key} if age <= life else set()
        possible |= {key} if age <= life + life // 4 + 1 else set()
    found = {int(key): row for keys, rows in owned for key, row in zip(keys, rows, strict=True)}
    assert certain <= set(found) <= possible
    assert len(set(range(200)) - possible) > 100
    initial = start.gather("t", list(found))[0].numpy()
    known = 0
    for first, (key, row) in zip(initial, found.items(), strict=True):
        if not np.isnan(moved[key]):
            np.testing.assert_allclose(row, first + moved[key], rtol=1e-5)
            known += 1
    assert known > 10


def test_report_has_columns_for_evicted_and_expired_rows(tmp_path: Path) -> None:
    job = Job(SingleProcess(), "native", tmp_path, retention=Retention(15, "lfu", 2, 6))
    job.train(0, 40)
    savings = SavingsReport(job.tracker.reports, job.tracker._settings)
    assert {"evicted", "expired", "not admitted"} <= set(savings._columns())
    left = [report.tables[0].rows for report in job.tracker.reports]
    found = job.store.statistics("a")
    assert sum(counts.rows_expired for counts in left) == found.expired_rows > 0
    assert sum(counts.rows_evicted for counts in left) == found.evicted_rows > 0
    assert sum(counts.not_admitted for counts in left) == found.not_admitted > 0
    plain = Job(SingleProcess(), "native", tmp_path)
    plain.train(0, 8)
    columns = SavingsReport(plain.tracker.reports, plain.tracker._settings)._columns()
    assert not {"evicted", "expired", "not admitted"} & set(columns)


def test_replicated_ranks_refuse_retention() -> None:
    def make(comm: Any) -> None:
        table = Table("t", DIM, retention=Retention(admit_after=2))
        ReplicatedStore([table], optimizers.SGD(0.1), comm)

    with pytest.raises(ValueError, match=r"Invalid `retention`.*replicated table 't'"):
        Threads(2).run(make)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, r"Invalid `capacity`: None .*`admit_after` > 1 and `expire_after`"),
        ({"admit_after": 0}, "Invalid `admit_after`: 0"),
        ({"admit_after": 256}, "Invalid `admit_after`: 256"),
        ({"expire_after": 0}, "Invalid `expire_after`: 0"),
        ({"expire_after": "0s"}, "Invalid `expire_after`: '0s'"),
        ({"expire_after": "2 weeks"}, '"12h" or "30d"'),
        ({"expire_after": 1.5}, r"Invalid `expire_after`: 1\.5"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        Retention(**settings)


def test_config_round_trip() -> None:
    for retention in (Retention(5), BOTH, Retention(expire_after="30d")):
        table = Table("t", DIM, retention=retention)
        assert Table.from_config(table.get_config()) == table
    assert Retention(expire_after="12h").expiry == (12 * 3600, True)
    assert dataclasses.replace(BOTH, expire_after=None).expiry == (0, False)
