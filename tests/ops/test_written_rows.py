"""Ops that write and remove rows, and learning rates per table."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Retention, Table, initializers, optimizers
from slipstream_tf.ops import exchange, table
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables import NativeStore

SPECS = [FeatureSpec("a", "a", "sum"), FeatureSpec("b", "b", "sum")]


def make_store(capacity: int | None = None) -> NativeStore:
    bound = None if capacity is None else Retention(capacity)
    start = initializers.Zeros()
    tables = [Table(name, 2, initializer=start, retention=bound) for name in ("a", "b")]
    return NativeStore(tables, optimizers.Adagrad(0.5, 0.0, 1e-10))


def lookup(store: NativeStore, keys: list[int]) -> tuple[list[tf.Tensor], tf.Tensor]:
    both = {"a": tf.constant(keys, tf.int64), "b": tf.constant(keys, tf.int64)}
    return store.lookup(pack(both, SPECS), training=True)


def test_each_table_has_its_learning_rate() -> None:
    store = make_store()
    pooled, plan = lookup(store, [1, 2])
    gradients = [tf.ones_like(rows) for rows in pooled]
    table.apply_gradients(plan, gradients, tf.constant([0.25, 2.0]))
    assert (store.export_table("a")["rows"] == -0.25).all()
    assert (store.export_table("b")["rows"] == -2.0).all()
    assert int(table.step(store._handles[0])) == 1
    _, plan = lookup(store, [1, 2])
    rows = exchange.collect_gradients(plan, gradients, tf.constant([0.25, 2.0]))
    exchange.apply_rows(store._handles, rows, tf.constant([1.0, 0.0]))
    assert (store.export_table("b")["rows"] == -2.0).all()
    assert (store.export_table("a")["rows"] < -0.9).all()


@pytest.mark.parametrize("rates", [[0.1, 0.1, 0.1], [[0.1, 0.1]], [0.1, float("nan")], []])
def test_invalid_rates_raise(rates: list[float]) -> None:
    store = make_store()
    pooled, plan = lookup(store, [1])
    gradients = [tf.ones_like(rows) for rows in pooled]
    rows = exchange.SendBuffer(tf.zeros([1, 2], tf.int64), tf.zeros([0], tf.int64), tf.zeros([0]))
    for apply in (
        lambda: table.apply_gradients(plan, gradients, tf.constant(rates)),
        lambda: exchange.collect_gradients(plan, gradients, tf.constant(rates)),
        lambda: exchange.apply_rows(store._handles, rows, tf.constant(rates)),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="learning_rate"):
            apply()
    assert (store.export_table("a")["rows"] == 0.0).all()


def test_deferred_gradients_flush_at_table_rate() -> None:
    store = make_store()
    for name in ("a", "b"):
        store.set_update_policy(name, UpdatePolicy("defer", movement=1e9, max_rows=1000))
    pooled, plan = lookup(store, [1])
    table.apply_gradients(plan, [tf.ones_like(r) for r in pooled], tf.constant([0.25, 2.0]))
    assert float(store.export_deferred("b")["learning_rate"]) == 2.0
    assert (store.export_table("a")["rows"] == -0.25).all()
    assert (store.export_table("b")["rows"] == -2.0).all()


def test_rows_are_written_and_removed() -> None:
    store = make_store()
    pooled, plan = lookup(store, [1, 2])
    store.apply_gradients(plan, [tf.ones_like(rows) for rows in pooled])
    handle = store._handles[0]
    table.write(handle, [2, 7], [[5.0, 6.0], [7.0, 8.0]])
    found = store.export_table("a")
    assert found["keys"].tolist() == table.keys(handle).numpy().tolist() == [1, 2, 7]
    assert found["rows"].tolist() == [[-0.5, -0.5], [5.0, 6.0], [7.0, 8.0]]
    assert found["slots"].tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    assert found["counts"].tolist() == [1.0, 1.0, 0.0]
    assert int(table.remove(handle, [2, 2, 99])) == 1
    assert table.keys(handle).numpy().tolist() == [1, 7]
    rows, there = store.gather("a", [2])
    assert rows.numpy().tolist() == [[0.0, 0.0]] and not there[0]
    assert store.statistics("a").evicted_rows == 0


def test_removing_row_drops_deferred_gradient_and_flags() -> None:
    store = make_store()
    store.set_update_policy("a", UpdatePolicy("defer", movement=1e9, max_rows=1000))
    pooled, plan = lookup(store, [1, 2, 3])
    store.apply_gradients(plan, [tf.ones_like(rows) for rows in pooled])
    store.set_row_flags("a", np.array([1, 2]), np.full(2, SATURATED, np.uint8))
    table.remove(store._handles[0], [1])
    table.write(store._handles[0], [2], [[4.0, 4.0]])
    assert store.export_deferred("a")["keys"].tolist() == [3]
    table.write(store._handles[0], [1], [[0.0, 0.0]])
    assert store.row_flags("a", np.array([1, 2])).tolist() == [0, SATURATED]


def test_update_of_removed_row_is_dropped() -> None:
    store = make_store()
    pooled, plan = lookup(store, [1, 2])
    table.remove(store._handles[0], [1])
    store.apply_gradients(plan, [tf.ones_like(rows) for rows in pooled])
    assert store.export_table("a")["keys"].tolist() == [2]
    assert store.statistics("a").dropped_updates == 1


def test_empty_keys_are_accepted_and_invalid_keys_raise() -> None:
    store = make_store(capacity=2)
    handle = store._handles[0]
    table.write(handle, np.empty(0, np.int64), np.empty((0, 2), np.float32))
    assert int(table.remove(handle, np.empty(0, np.int64))) == 0
    assert table.keys(handle).shape == (0,)
    invalid = tf.errors.InvalidArgumentError
    with pytest.raises(invalid, match="row to write for key 3 of table 'a' occurs twice"):
        table.write(handle, [3, 3], np.zeros((2, 2), np.float32))
    with pytest.raises(invalid, match="row to write for key 3 of table 'a' contains nan"):
        table.write(handle, [3], [[0.0, np.nan]])
    with pytest.raises(invalid, match=r"rows of table 'a' has shape \[1,3\]"):
        table.write(handle, [3], np.zeros((1, 3), np.float32))
    with pytest.raises(invalid, match="keys"):
        table.remove(handle, [[1]])
    with pytest.raises(tf.errors.ResourceExhaustedError, match="capacity is 2"):
        table.write(handle, [1, 2, 3], np.zeros((3, 2), np.float32))
    assert table.keys(handle).shape == (0,)
    table.write(handle, [1, 2], np.zeros((2, 2), np.float32))
    table.write(handle, [3], np.ones((1, 2), np.float32))
    assert 3 in table.keys(handle).numpy()
