"""Tests of each table's update rule and learning rate in every store."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from thread_jobs import Threads

from slipstream_tf import Table, checkpoint, distributed, initializers, optimizers
from slipstream_tf.checkpoint.store_state import export_state, restore_state
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.optimizers import SGD, Adagrad, Adam
from slipstream_tf.tables import NativeStore

SPECS = [FeatureSpec(name, name, "sum") for name in ("a", "b")]
Schedule = keras.optimizers.schedules.PiecewiseConstantDecay


def tables(own: Any = None) -> list[Table]:
    start = initializers.Zeros()
    return [Table("a", 2, initializer=start), Table("b", 2, own, initializer=start)]


def train(store: Any, keys: list[int], gradient: float = 1.0) -> None:
    both = {name: tf.constant(keys, tf.int64) for name in ("a", "b")}
    pooled, plan = store.lookup(pack(both, SPECS), training=True)
    store.apply_gradients(plan, [tf.fill(rows.shape, gradient) for rows in pooled])


def rows_of(store: Any, table: str) -> list[float]:
    return store.export_table(table)["rows"][:, 0].tolist()


def stores(own: Any, optimizer: Any) -> list[Any]:
    comm = distributed.SingleProcess()
    return [
        NativeStore(tables(own), optimizer),
        distributed.ReplicatedStore(tables(own), optimizer, comm),
        distributed.ShardedStore(tables(own), optimizer, comm),
    ]


@pytest.mark.parametrize("kind", range(3))
def test_tables_have_separate_rules_and_rates(kind: int) -> None:
    store = stores(Adagrad(0.5, 0.0, 1e-10), SGD(0.25))[kind]
    train(store, [1], 4.0)
    assert rows_of(store, "a") == [-1.0] and rows_of(store, "b") == [-0.5]
    assert store.learning_rate is None
    assert [store.learning_rate_of(name) for name in ("a", "b")] == [0.25, 0.5]
    assert [type(store.optimizer_of(name)) for name in ("a", "b")] == [SGD, Adagrad]
    assert store.slot_layout("b").initial.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["ReplicatedStore", "ShardedStore"])
def test_ranks_use_rule_and_rate_of_each_table(kind: str) -> None:
    own = Adagrad(Schedule([0], [0.5, 0.125]), 0.0, 1e-10)

    def job(comm: Any) -> Any:
        store = getattr(distributed, kind)(tables(own), SGD(0.25), comm)
        for _ in range(2):
            train(store, [1, 2], 4.0)
        rates = [store.learning_rate_of(name) for name in ("a", "b")]
        found = [store.export_table(name) for name in ("a", "b")]
        return rates, [dict(zip(f["keys"].tolist(), f["rows"][:, 0], strict=True)) for f in found]

    alone = NativeStore(tables(own), SGD(0.25))
    for _ in range(2):
        train(alone, [1, 2], 4.0)
    for rates, (of_a, of_b) in Threads(2).run(job):
        assert rates == [0.25, 0.125]
        assert all(row == rows_of(alone, "a")[0] for row in of_a.values())
        assert all(row == rows_of(alone, "b")[0] for row in of_b.values())
    assert rows_of(alone, "a") == [-2.0, -2.0]


def test_collected_gradients_use_rate_of_each_table() -> None:
    store = NativeStore(tables(SGD(0.5)), SGD(0.25))
    both = {name: tf.constant([1], tf.int64) for name in ("a", "b")}
    pooled, plan = store.lookup(pack(both, SPECS), training=True)
    store.apply_collected(store.collect_gradients(plan, [tf.ones_like(rows) for rows in pooled]))
    assert rows_of(store, "a") == [-0.25] and rows_of(store, "b") == [-0.5]


def test_tables_without_optimizer_share_store_rate() -> None:
    store = NativeStore(tables(), SGD(0.5))
    assert store.learning_rate is not None
    store.learning_rate.assign(0.25)
    train(store, [1])
    assert rows_of(store, "a") == rows_of(store, "b") == [-0.25]
    assert isinstance(NativeStore(tables()).optimizer_of("a"), Adagrad)


def test_shared_constant_rate_adds_no_graph_operation() -> None:
    store = NativeStore(tables(), SGD(0.5))
    assert store.rates.now() is store.learning_rate


def test_variable_rate_is_read_in_every_update() -> None:
    rate = tf.Variable(0.5)
    store = NativeStore(tables(SGD(rate)), SGD(1.0))
    train(store, [1])
    rate.assign(0.25)
    train(store, [1])
    assert rows_of(store, "b") == [-0.75] and rows_of(store, "a") == [-2.0]


def test_schedule_follows_updates_of_table_and_is_restored() -> None:
    rule = SGD(Schedule([1, 2], [1.0, 0.5, 0.25]))
    store = NativeStore(tables(rule), SGD(1.0))

    @tf.function
    def three_steps() -> None:
        for _ in tf.range(3):
            train(store, [1])

    three_steps()
    assert rows_of(store, "b") == [-1.0 - 1.0 - 0.5]
    assert store.learning_rate_of("b") == 0.25
    other = NativeStore(tables(rule), SGD(0.125))
    restore_state(other, export_state(store), "a test")
    assert other.learning_rate_of("b") == 0.25 and other.learning_rate_of("a") == 1.0
    train(other, [1])
    assert rows_of(other, "b") == [-2.75]
    with pytest.raises(ValueError, match=r"`learning_rate`: 0.5 for table 'b' with a Piecewise"):
        other.rates.assign(1, 0.5)


def test_restoring_other_rule_raises() -> None:
    saved = export_state(NativeStore(tables(Adam(0.1)), SGD(1.0)))
    other = NativeStore(tables(SGD(0.1)), SGD(1.0))
    with pytest.raises(ValueError, match="table 'b' was saved with the optimizer Adam"):
        restore_state(other, saved, "a test")
    restore_state(NativeStore(tables(Adam(0.5)), SGD(2.0)), saved, "a test")


def test_checkpoint_contains_rule_and_rate_of_each_table(tmp_path: Any) -> None:
    def job(rate: float) -> Any:
        return NativeStore(tables(Adagrad(rate)), SGD(rate))

    store = job(0.5)
    train(store, [1, 2])
    store.rates.assign(1, 0.125)
    comm = distributed.SingleProcess()
    whole = tf.train.Checkpoint(x=tf.Variable(1.0))
    distributed.CheckpointManager(str(tmp_path), whole, comm, store, background=False).save(1)
    other = job(2.0)
    distributed.CheckpointManager(str(tmp_path), whole, comm, other).restore()
    assert [other.learning_rate_of(name) for name in ("a", "b")] == [0.5, 0.125]
    np.testing.assert_array_equal(
        other.export_table("b")["slots"], store.export_table("b")["slots"]
    )
    wrong = NativeStore(tables(SGD(0.5)), SGD(0.5))
    with pytest.raises(checkpoint.CheckpointMismatchError, match="optimizer Adagrad"):
        distributed.CheckpointManager(str(tmp_path), whole, comm, wrong).restore()


def test_sok_refuses_different_rules() -> None:
    with pytest.raises(
        ValueError, match=r"`optimizer`.*SOK's tables.*same optimizer and learning rate"
    ):
        optimizers.shared_optimizer(tables(SGD(0.5)), SGD(0.25), "SOK's tables")
    assert optimizers.shared_optimizer(tables(SGD(0.5)), SGD(0.5), "SOK's tables") == SGD(0.5)
