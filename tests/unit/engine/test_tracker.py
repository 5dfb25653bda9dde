"""Tests of the window loop of `engine.tracker` on known data."""

from __future__ import annotations

import collections
import dataclasses
import json

import numpy as np
import pytest
from engine_settings import engine_settings

from slipstream_tf.baselines.skipping import random_fractions
from slipstream_tf.config import Table, Window
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.engine.tracker import SaturationTracker
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.ops.update_policy import UpdateCounts
from slipstream_tf.tables.base import TrackedStore

DIM = 2
SPECS = [FeatureSpec("user", "user"), FeatureSpec("item", "item")]


class SmallStore(TrackedStore):
    """Minimal in-memory store for the tracker."""

    def __init__(self, *names: str):
        self.tables = tuple(Table(name, DIM) for name in names)
        self.rows = {name: {} for name in names}
        self.counts = {name: collections.Counter() for name in names}
        self.max_requested = 0
        self.policies = {}
        self.flags = {name: {} for name in names}

    def train(self, table: str, change: dict, accesses: int = 1) -> None:
        for key, delta in change.items():
            row = self.rows[table].get(key, np.zeros(DIM, np.float32))
            self.rows[table][key] = row + np.float32(delta)
            self.counts[table][key] += accesses

    def size(self, table):
        return len(self.rows[table])

    def hot_keys(self, table, k):
        self.max_requested = max(self.max_requested, k)
        ordered = sorted(self.counts[table].items(), key=lambda item: (-item[1], item[0]))[:k]
        keys = np.array([key for key, _ in ordered], np.int64)
        return keys, np.array([count for _, count in ordered], np.float32)

    def gather(self, table, keys):
        rows = [self.rows[table].get(int(key), np.zeros(DIM)) for key in keys]
        found = [int(key) in self.rows[table] for key in keys]
        return np.array(rows, np.float32).reshape(-1, DIM), np.array(found, bool)

    def policy_of(self, table):
        return self.policies.get(table)

    def set_update_policy(self, table, policy):
        self.policies[table] = policy

    def set_row_flags(self, table, keys, flags):
        self.flags[table] = dict(zip(map(int, keys), map(int, flags), strict=True))

    def update_counts(self, table):
        return UpdateCounts(offered=10 * len(self.rows[table]))

    def decay_counts(self, factor):
        for counts in self.counts.values():
            for key in counts:
                counts[key] *= factor


def make(*policies, store=None, **settings):
    """Returns a store and a tracker.

    Without policies, the tracker skips half of the examples by drift.
    """
    store = store or SmallStore("user", "item")
    defaults = {"window_steps": 10, "sample": 64, "warmup": 0}
    if not policies and "random_fractions" not in settings:
        policies = ("skip_examples",)
        defaults["fraction"] = 0.5
    chosen = engine_settings(*policies, **{**defaults, **settings})
    return store, SaturationTracker(store, chosen, SPECS)


def one_window(store, tracker, user_drifts):
    """Changes user rows and classifies one example per user.

    The row of item 0 does not change.
    """
    store.train("user", user_drifts)
    store.train("item", {0: 0.0})
    users = np.array(list(user_drifts), np.int64)
    inputs = np.stack([users, np.zeros_like(users)], axis=1)
    skippable = tracker.classifier.classify(inputs, SPECS).skippable
    return skippable.numpy()


DRIFTS = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}


def test_tracker_finds_saturated_keys_and_skips_target_fraction():
    store, tracker = make()
    assert not one_window(store, tracker, DRIFTS).any()
    first = tracker.end_window()
    assert (first.window, first.hot_keys, first.threshold, first.saturated_keys) == (0, 0, 0.0, 0)
    assert (first.next_hot_keys, first.hot_set_overlap, first.is_skipping) == (5, 0.0, False)
    assert dict(first.drift_quantiles) == {}

    assert not one_window(store, tracker, DRIFTS).any(), "no drift is known in the second window"
    second = tracker.end_window()
    assert second.hot_keys == 5 and second.snapshot_bytes == 5 * DIM * 4
    assert second.threshold == pytest.approx(0.3)
    # Users 0 and 1, and item 0.
    assert second.saturated_keys == 3 and second.saturated_fraction == 0.6
    assert second.is_skipping and second.hot_set_overlap == 1.0
    assert second.drift_quantiles[1.0] == pytest.approx(0.4)
    assert (second.examples_seen, second.examples_skipped, second.hot_examples) == (4, 0, 0)

    np.testing.assert_array_equal(one_window(store, tracker, DRIFTS), [True, True, False, False])
    third = tracker.end_window()
    assert (third.examples_seen, third.examples_skipped, third.hot_examples) == (4, 2, 4)
    assert third.skipped_fraction == 0.5 and third.hot_example_fraction == 1.0
    assert tracker.reports == (first, second, third)


def test_step_ends_window_at_window_length():
    store, tracker = make()
    one_window(store, tracker, DRIFTS)
    reports = [tracker.step() for _ in range(25)]
    assert [i for i, report in enumerate(reports) if report] == [9, 19]
    assert [report.step for report in tracker.reports] == [10, 20]
    tracker.end_window()  # Called directly, after 5 of 10 steps.
    assert tracker.step(9) is None
    assert tracker.step(4).step == 38
    with pytest.raises(ValueError, match="Invalid `steps`"):
        tracker.step(-1)


def test_warmup_skips_nothing_but_reports_the_threshold():
    store, tracker = make(warmup=30)
    for window in range(4):
        assert tracker.is_warming_up == (window < 3)
        assert not one_window(store, tracker, DRIFTS).any()
        report = tracker.step(10)
        assert report.is_warming_up == (window < 3)
        assert report.is_skipping == (window >= 2)
        assert (report.threshold > 0) == (window >= 1)
        if window == 2:
            break
    np.testing.assert_array_equal(one_window(store, tracker, DRIFTS), [True, True, False, False])


def test_tracker_without_policies_only_reports():
    store = SmallStore("user", "item")
    settings = EngineSettings(window=Window(10, warmup=0))
    tracker = SaturationTracker(store, settings, SPECS)
    for _ in range(3):
        assert not one_window(store, tracker, DRIFTS).any()
        report = tracker.end_window()
    # The default fraction is 0.3.
    assert report.threshold > 0 and report.saturated_keys == 2 and not report.is_skipping


@pytest.mark.parametrize("warmup", [0, 10])
def test_random_fractions_start_after_warmup(warmup):
    store, tracker = make(random_fractions=(1.0, 0.0), warmup=warmup)
    skipped = []
    for _ in range(4):
        skipped.append(bool(one_window(store, tracker, DRIFTS).all()))
        tracker.step(10)
    first = warmup // 10
    assert skipped == [i == first for i in range(4)], "the last share repeats"
    assert random_fractions(tracker.reports) == (1.0, 0.0, 0.0, 0.0)[: 4 - first]


def test_random_fractions_without_windows_are_zero():
    assert random_fractions([]) == (0.0,)


def test_anomalous_keys_are_not_saturated():
    store, tracker = make(fraction=1.0)
    one_window(store, tracker, DRIFTS)
    tracker.end_window()
    one_window(store, tracker, {**DRIFTS, 1: np.nan, 2: np.inf})
    report = tracker.end_window()
    assert report.anomalies == 2
    assert report.saturated_keys == 3
    np.testing.assert_array_equal(one_window(store, tracker, DRIFTS), [True, False, False, True])


def test_evicted_keys_are_dropped_and_restart_cold():
    store, tracker = make(fraction=1.0)
    one_window(store, tracker, DRIFTS)
    tracker.end_window()
    one_window(store, tracker, DRIFTS)
    del store.rows["user"][3], store.counts["user"][3]
    report = tracker.end_window()
    assert (report.hot_keys, report.evicted, report.anomalies) == (5, 1, 0)
    assert (report.next_hot_keys, report.hot_set_overlap) == (4, 1.0)
    np.testing.assert_array_equal(one_window(store, tracker, DRIFTS), [True, True, True, False])


def test_hot_set_follows_counts_within_budget():
    store, tracker = make(hot_set_memory=3 * DIM * 4 + 1, count_decay=0.0)
    store.train("user", {7: 0.0}, accesses=9)
    store.train("user", {6: 0.0, 5: 0.0}, accesses=5)
    store.train("item", {1: 0.0}, accesses=5)
    report = tracker.end_window()
    assert report.next_hot_keys == 3 and store.max_requested <= 3
    assert [states.keys.tolist() for states in tracker.states.values()] == [[5, 6, 7], []]
    store.train("item", {1: 0.0, 2: 0.0})
    store.train("user", {7: 0.0})
    report = tracker.end_window()  # With a factor of 0, only accesses of the last window count.
    assert report.hot_set_overlap == pytest.approx(1 / 3)
    assert report.snapshot_bytes == 3 * DIM * 4
    assert [states.keys.tolist() for states in tracker.states.values()] == [[7], [1, 2]]


def test_threshold_cap_is_reported():
    store, tracker = make(max_threshold=0.25)
    for _ in range(2):
        one_window(store, tracker, DRIFTS)
        report = tracker.end_window()
    assert report.is_threshold_capped and report.threshold == pytest.approx(0.25)
    assert report.threshold <= 0.25


def test_only_tables_of_features_are_tracked():
    store = SmallStore("other", "item", "user")
    _, tracker = make(store=store)
    assert tracker.classifier.tables == ("item", "user")
    store.train("other", {1: 0.0}, accesses=100)
    one_window(store, tracker, DRIFTS)
    assert tracker.end_window().next_hot_keys == 5


def test_empty_store_and_empty_windows_are_accepted():
    _, tracker = make()
    for _ in range(3):
        report = tracker.end_window()
    assert report.threshold == 0.0 and report.hot_keys == 0 and not report.is_skipping


def test_report_is_frozen_and_converts_to_json():
    store, tracker = make()
    for _ in range(2):
        one_window(store, tracker, DRIFTS)
        report = tracker.end_window()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.window = 3
    values = json.loads(json.dumps(report.to_dict()))
    assert values["saturated_fraction"] == 0.6 and values["drift_quantiles"]["0.5"] > 0
    assert report.seconds > 0


def test_invalid_features_raise():
    with pytest.raises(ValueError, match=r"Invalid `table`: 'shop' for feature 'x'.*user, item"):
        SaturationTracker(SmallStore("user", "item"), EngineSettings(), [FeatureSpec("x", "shop")])
    with pytest.raises(ValueError, match="Invalid `specs`"):
        SaturationTracker(SmallStore("user"), EngineSettings(), [])
