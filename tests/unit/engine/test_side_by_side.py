"""Tests of parallel work on tables: ordered results, errors, and equal windows."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import tensorflow as tf
from engine_settings import engine_settings

from slipstream_tf import optimizers
from slipstream_tf.config import Table
from slipstream_tf.distributed.exchanged import ExchangedStore
from slipstream_tf.engine import tracked_table, tracker
from slipstream_tf.engine.tracked_table import for_each, tables_at_once
from slipstream_tf.engine.tracker import SaturationTracker
from slipstream_tf.ops import features
from slipstream_tf.tables.base import TrackedStore
from slipstream_tf.tables.native import NativeStore

DIM, KEYS = 4, 200
TABLES = [f"t{i}" for i in range(5)]
SPECS = [features.FeatureSpec(name, name) for name in TABLES]


def make_store() -> NativeStore:
    return NativeStore([Table(name, DIM) for name in TABLES], optimizers.Adagrad(0.05))


def end_windows(metric: str, policy: str):
    """Returns reports, tables and state after three windows on random examples.

    The examples are the same in every call.
    """
    store = make_store()
    threshold = 0.05 if metric == "linf" else 0.05 * DIM**0.5
    settings = engine_settings(
        policy, window_steps=4, warmup=0, drift_metric=metric, threshold=threshold
    )
    engine = SaturationTracker(store, settings, SPECS)
    rng = np.random.default_rng(3)
    for _ in range(12):
        keys = {name: np.minimum(rng.zipf(1.3, 64), KEYS).astype(np.int64) for name in TABLES}
        pooled, plan = store.lookup(features.pack(keys, SPECS), training=True)
        noise = [tf.constant(rng.normal(size=p.shape), tf.float32) for p in pooled]
        store.apply_gradients(plan, noise)
        engine.step()
    reports = [dataclasses.replace(report, seconds=0.0) for report in engine.reports]
    return reports, [store.export_table(name) for name in TABLES], engine.state()["tables"]


@pytest.mark.parametrize("policy", ["skip_examples", "mask_gradients"])
@pytest.mark.parametrize("metric", ["linf", "l2"])
def test_window_end_is_independent_of_threads(monkeypatch, metric, policy):
    monkeypatch.setattr(tracker, "FEW_KEYS", 0)
    results = []
    for threads in (1, 2, 8):
        monkeypatch.setattr(tracker, "tables_at_once", lambda store, ranks, n=threads: n)
        results.append(end_windows(metric, policy))
    assert results[0][0][-1].saturated_keys > 0
    for other in results[1:]:
        assert other[0] == results[0][0]
        tf.nest.map_structure(np.testing.assert_array_equal, other[1:], results[0][1:])


def test_two_items_run_concurrently():
    meet = threading.Barrier(2, timeout=60)
    assert len(for_each(lambda _: meet.wait(), 2, range(4))) == 4


def test_large_window_end_processes_tables_concurrently(monkeypatch):
    used = []
    original = for_each

    def noting(work, threads, *arguments):
        used.append(threads)
        return original(work, threads, *arguments)

    monkeypatch.setattr(tracker, "for_each", noting)
    monkeypatch.setattr(tracker, "tables_at_once", lambda store, ranks: 3)
    end_windows("linf", "skip_examples")
    assert set(used) == {1}  # A thousand keys are too few for threads.
    monkeypatch.setattr(tracker, "FEW_KEYS", 100)
    end_windows("linf", "skip_examples")
    assert 3 in used


def test_results_keep_order_and_first_error_is_raised():
    assert for_each(lambda a, b: a - b, 3, [5, 6, 7], [1, 2, 3]) == [4, 4, 4]
    for threads in (1, 4):
        ended = []

        def fail(item: int, ended: list[int] = ended) -> None:
            ended.append(item)
            if item >= 2:
                raise ValueError(f"item {item}")

        with pytest.raises(ValueError, match="item 2"):
            for_each(fail, threads, range(100))
        assert {0, 1, 2} <= set(ended)
        assert len(ended) < 50  # No item is started after a failure.


@pytest.mark.parametrize("started", [0, 1])
def test_started_threads_finish_all_work_if_thread_start_fails(monkeypatch, started):
    real, starts = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if len(starts) == started:
            raise RuntimeError("can't start new thread")
        starts.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert for_each(lambda item: 2 * item, 4, range(20)) == list(range(0, 40, 2))
    assert len(starts) == started


def test_tables_run_sequentially_with_ranks_or_sequential_store(monkeypatch):
    monkeypatch.setattr(
        tracked_table.tf.config.threading, "get_intra_op_parallelism_threads", lambda: 3
    )
    assert tables_at_once(make_store(), 1) == 3
    monkeypatch.setattr(
        tracked_table.tf.config.threading, "get_intra_op_parallelism_threads", lambda: 64
    )
    assert tables_at_once(make_store(), 1) == tracked_table.MAX_AT_ONCE
    monkeypatch.setattr(
        tracked_table.tf.config.threading, "get_intra_op_parallelism_threads", lambda: 0
    )
    processors = len(tracked_table.os.sched_getaffinity(0))
    assert tables_at_once(make_store(), 1) == min(processors, tracked_table.MAX_AT_ONCE)
    assert tables_at_once(make_store(), 2) == 1
    assert not TrackedStore.takes_tables_at_once
    assert not ExchangedStore.takes_tables_at_once
