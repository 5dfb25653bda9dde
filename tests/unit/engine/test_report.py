"""Tests of `engine.report`: quantiles, histograms, JSON, and compressed logs of many windows."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

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
        policies={"SkipExamples": {"predicted_loss_threshold": None if window % 5 else 0.5}},
        auc_loss_plan="relaxed",
        tables=tuple(
            TableWindow(f"t{i}", 4, 7, {"cold": i, "varying": window}, UpdateCounts(*counts))
            for i in range(tables)
        ),
        traffic={"rows": window},
    )


def test_reports_keep_order_in_checkpoint() -> None:
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


def test_old_report_uses_at_most_an_eighth_of_new_report() -> None:
    tracemalloc.start()
    log, used = ReportLog(), []
    for window in range(8 * BLOCK):
        if window % BLOCK == 0:
            gc.collect()  # Do not attribute uncollected garbage to the log.
            used.append(tracemalloc.get_traced_memory()[0])
        log.append(report_of(window, tables=10))
    tracemalloc.stop()
    new, old = used[1] - used[0], (used[-1] - used[2]) / (len(used) - 3)
    assert old < new / 8, (old, new)


def test_block_that_unpacks_beyond_report_size_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = ReportLog()
    for window in range(2 * BLOCK):
        log.append(report_of(window))
    monkeypatch.setattr(report_module, "_MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        list(log)


def histogram_of(drift):
    return drift_histogram(np.sort(drift[np.isfinite(drift)]))


def test_without_finite_drifts_there_are_no_buckets():
    assert histogram_of(np.empty(0, np.float32)) == ()
    assert histogram_of(np.array([np.nan, np.inf], np.float32)) == ()


def test_buckets_are_quarter_decades():
    found = histogram_of(np.array([0.0, 0.011, 0.012, 0.02, 1e30, 5e-10], np.float32))
    assert [count for _, _, count in found] == [2, 2, 1, 1]
    np.testing.assert_allclose(
        [bounds[:2] for bounds in found],
        [[0.0, 1e-9], [0.01, 10**-1.75], [10**-1.75, 10**-1.5], [10**8.75, 1e9]],
    )


@given(hnp.arrays(np.float32, st.integers(0, 50), elements=st.floats(0, 1e8, width=32)))
def test_every_finite_drift_is_in_matching_bucket(drift):
    drift, given_drift = drift.astype(np.float64), drift
    found = histogram_of(given_drift)
    assert sum(count for _, _, count in found) == drift.size
    for lower, upper, count in found:
        assert count == ((drift >= lower) & (drift < upper)).sum() > 0
    assert list(found) == sorted(found)


def test_random_drifts_are_in_matching_buckets():
    rng = np.random.default_rng(0)
    drift = (10.0 ** rng.uniform(-12, 12, 150_000)).astype(np.float32)
    bounds = (10.0 ** (np.arange(-36, 37) / 4)).astype(np.float32)
    # Neighbors of the bounds, where the last bit decides.
    others = [np.nextafter(bounds, np.float32(to)) for to in (0.0, np.inf)]
    drift = np.concatenate([drift, bounds, *others, np.zeros(9, np.float32), [np.nan, np.inf]])
    found = histogram_of(drift.astype(np.float32))
    exact = np.concatenate([[0.0], 10.0 ** (np.arange(-36, 37) / 4)])
    values = np.minimum(drift[np.isfinite(drift)].astype(np.float64), 1e9)
    counts, _ = np.histogram(values, exact)
    assert found == tuple(zip(exact[:-1], exact[1:], counts, strict=True))
