"""Tests that table schedules agree across ranks and resume after restores."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from slipstream_tf import Table, distributed, optimizers
from slipstream_tf.ops.features import FeatureSpec, pack

SPECS = [FeatureSpec("a", "a"), FeatureSpec("b", "b")]
SCHEDULES = keras.optimizers.schedules
WARMUP = SCHEDULES.CosineDecay(0.0, 6, warmup_target=0.5, warmup_steps=3)
STEPS = 6


def tables():
    return [
        Table("a", 4, optimizer=optimizers.Adagrad(WARMUP)),
        Table("b", 4, optimizer=optimizers.Adam(SCHEDULES.ExponentialDecay(0.1, 2, 0.5))),
    ]


def train(store, comm, steps):
    """Trains on a rank's part of each batch.

    In the last step rank 0 has the whole batch.
    """
    for step in steps:
        random = np.random.default_rng(step)
        keys = random.integers(0, 5 if step % 2 else 50, (8, 2))
        gradient = random.normal(size=(8, 8)).astype(np.float32)
        mine = slice(comm.rank, None, comm.size) if step < STEPS - 1 else slice(8 * comm.rank, None)
        features = {"a": keys[mine, 0], "b": keys[mine, 1]}
        _, plan = store.lookup(pack(features, SPECS), training=True)
        own = gradient[mine] * comm.size
        store.apply_gradients(plan, [own[:, :4], own[:, 4:]])


def rows(store):
    """Returns this rank's keys and rows, and the next learning rates."""
    found = [store.export_table(name) for name in "ab"]
    rates = [store.learning_rate_of(name) for name in "ab"]
    return [(table["keys"], table["rows"]) for table in found], rates


@pytest.mark.parametrize("kind", ["ReplicatedStore", "ShardedStore"])
def test_ranks_use_learning_rate_of_single_process(run_as_ranks, kind):
    def program(comm):
        store = getattr(distributed, kind)(tables(), None, comm)
        train(store, comm, range(STEPS))
        return rows(store)

    ((alone, rates),) = run_as_ranks(1, program)
    assert rates == pytest.approx([0.25, 0.1 * 0.5**3], abs=1e-6)
    for found, reported in run_as_ranks(3, program):
        assert reported == rates
        for (keys, values), (all_keys, all_values) in zip(found, alone, strict=True):
            expected = all_values[np.searchsorted(all_keys, keys)]
            np.testing.assert_allclose(values, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["ReplicatedStore", "ShardedStore"])
def test_restored_schedule_continues(run_as_ranks, kind):
    def program(comm):
        whole = getattr(distributed, kind)(tables(), None, comm)
        train(whole, comm, range(3))
        saved = {name: whole.export_table(name) for name in "ab"}
        restored = getattr(distributed, kind)(tables(), None, comm)
        for name, contents in saved.items():
            restored.import_table(name, contents)
        for store in (whole, restored):
            train(store, comm, range(3, STEPS))
        return rows(whole), rows(restored)

    for (plain, rates), (again, reported) in run_as_ranks(2, program):
        assert reported == rates
        for (keys, values), (other_keys, other_values) in zip(plain, again, strict=True):
            np.testing.assert_array_equal(keys, other_keys)
            np.testing.assert_array_equal(values, other_values)
