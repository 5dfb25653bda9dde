"""Tests of the window loop with the native store and a data set."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from engine_settings import engine_settings

from slipstream_tf import optimizers
from slipstream_tf.baselines.skipping import random_fractions
from slipstream_tf.config import Table
from slipstream_tf.engine.tracker import SaturationTracker
from slipstream_tf.ops import features
from slipstream_tf.sampling.classifier import skip_inputs
from slipstream_tf.tables.native import NativeStore

SPECS = [features.FeatureSpec("user", "user"), features.FeatureSpec("item", "item")]
INPUTS, BATCH, DIM = 40_000, 200, 4


def train(*policies, **settings):
    """Fits random labels on Zipf-distributed keys with two embeddings."""
    store = NativeStore([Table("user", DIM), Table("item", DIM)], optimizers.Adagrad(0.05))
    windows = {"window_steps": 20, "sample": 1000, "hot_set_memory": 60 * DIM * 4}
    tracker = SaturationTracker(store, engine_settings(*policies, **windows, **settings), SPECS)
    rng = np.random.default_rng(0)
    keys = np.minimum(rng.zipf(1.3, (INPUTS, 2)), 10_000).astype(np.int64)
    labels = rng.random(INPUTS).astype(np.float32)
    batches = tf.data.Dataset.from_tensor_slices(({"keys": keys}, labels)).batch(
        BATCH, drop_remainder=True
    )

    @tf.function
    def step(keys, labels):
        pooled, plan = store.lookup(features.pack(keys, SPECS), training=True)
        error = tf.reduce_sum(pooled[0] * pooled[1], axis=1) - labels
        gradient = (2.0 * error / tf.cast(tf.size(labels), tf.float32))[:, None]
        store.apply_gradients(plan, [gradient * pooled[1], gradient * pooled[0]])

    trained = 0
    for batch, batch_labels in skip_inputs(batches.prefetch(2), tracker.classifier, SPECS):
        step(batch["keys"], batch_labels)
        trained += int(tf.size(batch_labels))
        tracker.step()
    tracker.end_window()
    return store, tracker, trained


def test_skipping_starts_after_warmup_and_repeats_bitwise():
    runs = [train("skip_examples", fraction=0.3, warmup=60) for _ in range(2)]
    (store, tracker, trained), (other_store, other_tracker, _) = runs
    reports = tracker.reports
    assert sum(r.examples_seen for r in reports) == INPUTS
    assert sum(r.examples_skipped for r in reports) == INPUTS - trained > 0
    for report in reports:
        assert report.hot_keys <= 60
        assert report.is_warming_up == (report.step <= 60)
        if report.is_warming_up:
            assert report.examples_skipped == 0
    assert [r.threshold for r in reports] == [r.threshold for r in other_tracker.reports]
    for name in ("user", "item"):
        mine, other = store.export_table(name), other_store.export_table(name)
        for part in mine:
            np.testing.assert_array_equal(mine[part], other[part])


@pytest.mark.parametrize("metric", ["linf", "l2"])
@pytest.mark.parametrize("policy", ["skip_examples", "mask_gradients"])
def test_window_end_is_independent_of_hot_key_order(monkeypatch, metric, policy):
    def run(by_key):
        monkeypatch.setattr(NativeStore, "lists_hot_keys_by_key", by_key)
        store, tracker, _ = train(policy, drift_metric=metric, fraction=0.3, warmup=60)
        state = tracker.state()
        reports = [dataclasses.replace(r, seconds=0.0) for r in tracker.reports]
        return reports, state["tables"], store.export_table("item")

    by_key, by_count = run(True), run(False)
    assert max(report.saturated_keys for report in by_key[0]) > 0
    assert by_key[0] == by_count[0]
    for mine, others in zip(by_key[1:], by_count[1:], strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, mine, others)


@pytest.mark.parametrize("metric", ["linf", "l2"])
def test_window_end_is_equal_without_one_pass_measure(monkeypatch, metric):
    def run():
        store, tracker, _ = train("mask_gradients", drift_metric=metric, fraction=0.3, warmup=60)
        reports = [dataclasses.replace(r, seconds=0.0) for r in tracker.reports]
        return reports, store.export_table("item")

    at_once = run()
    monkeypatch.delattr(NativeStore, "measure")
    one_by_one = run()
    assert max(report.saturated_keys for report in at_once[0]) > 0
    assert at_once[0] == one_by_one[0]
    tf.nest.map_structure(np.testing.assert_array_equal, at_once[1], one_by_one[1])


def test_random_control_skips_same_fraction():
    _, tracker, trained = train("skip_examples", fraction=0.5, warmup=40)
    _, _, control = train(random_fractions=random_fractions(tracker.reports), warmup=40)
    assert control == pytest.approx(trained, rel=0.02)
    assert trained < 0.95 * INPUTS
