"""Reports of many windows: packed ones come back as they were, and take little."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc

import numpy as np
import pytest

from slipstream_tf.checkpoint import store_state
from slipstream_tf.engine import report as report_module
from slipstream_tf.engine.report import (
    BLOCK,
    ReportLog,
    TableWindow,
    WindowReport,
    drift_histogram,
    drift_quantiles,
)
from slipstream_tf.ops.update_policy import UpdateCounts


def report_of(window: int, tables: int = 2) -> WindowReport:
    random = np.random.default_rng(window)
    drift = (10.0 ** random.normal(-3, 1, 50)).astype(np.float32)
    counts = [
        int(count) for count in random.integers(0, 10**7, len(dataclasses.fields(UpdateCounts)))
    ]
    return WindowReport(
        window=window,
        step=1000 * window,
        is_warming_up=window < 3,
        hot_keys=int(random.integers(10**6)),
        snapshot_bytes=1 << 40,
        evicted=0,
        anomalies=window % 2,
        drift_quantiles=drift_quantiles(np.sort(drift)),
        drift_histogram=drift_histogram(np.sort(drift)),
        threshold=np.float32(random.random()),
        is_threshold_capped=bool(window % 3),
        is_skipping=True,
        saturated_keys=3,
        examples_seen=10,
        examples_skipped=window % 7,
        hot_examples=4,
        next_hot_keys=5,
        hot_set_overlap=random.random(),
        seconds=0.1,
        policies={"SkipExamples": {"foreseen_threshold": None if window % 5 else 0.5}},
        auc_loss_plan="relaxed",
        tables=tuple(
            TableWindow(f"t{i}", 4, 7, {"cold": i, "varying": window}, UpdateCounts(*counts))
            for i in range(tables)
        ),
        traffic={"rows": window},
    )


def test_all_reports_come_back_in_order_from_a_checkpoint_too() -> None:
    log, expected = ReportLog(), []
    for window in range(3 * BLOCK + 5):
        log.append(report_of(window))
        expected.append(report_of(window))
        assert len(log) == len(expected)
    assert log.examples_skipped == sum(report.examples_skipped for report in expected)
    skeleton, arrays = store_state.flatten(log.state())
    assert len(arrays) == 2
    again = ReportLog.from_state(store_state.unflatten(skeleton, arrays))
    for found in (log, again):
        reports = list(found)
        assert reports == expected and reports[0].to_dict() == expected[0].to_dict()
    for window in range(len(expected), 5 * BLOCK):
        again.append(report_of(window))
    assert [report.window for report in again] == list(range(5 * BLOCK))
    assert again.examples_skipped == sum(report.examples_skipped for report in again)


def test_an_old_report_takes_at_most_an_eighth_of_a_new_one() -> None:
    gc.collect()
    gc.freeze()  # What other tests left need not be looked at again.
    tracemalloc.start()
    log, used = ReportLog(), []
    for window in range(8 * BLOCK):
        if window % BLOCK == 0:
            gc.collect()  # What waits to be collected is not the log's.
            used.append(tracemalloc.get_traced_memory()[0])
        log.append(report_of(window, tables=10))
    tracemalloc.stop()
    gc.unfreeze()
    new, old = used[1] - used[0], (used[-1] - used[2]) / (len(used) - 3)
    assert old < new / 8, (old, new)


def test_a_block_that_unpacks_to_more_than_reports_take_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = ReportLog()
    for window in range(2 * BLOCK):
        log.append(report_of(window))
    monkeypatch.setattr(report_module, "_MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        list(log)
