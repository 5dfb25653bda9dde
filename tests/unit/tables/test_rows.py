"""Tests of `TableRows` in every store, and of imported rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from thread_jobs import Threads

from slipstream_tf import Table, distributed, initializers, optimizers
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.tables import NativeStore, VariableStore, from_embedding, rename_keys
from slipstream_tf.tables.rows import TableRows

START = initializers.Constant(0.5)
RULE = optimizers.Adagrad(0.5, 0.0, 1e-10)


def make(*arguments: Any, kind: Any = NativeStore) -> TableRows:
    return TableRows(kind([Table("t", 2, initializer=START)], RULE, *arguments), "t")


def test_rows_are_read_written_removed_and_listed() -> None:
    table = make()
    table.write([3, -1], [[1.0, 2.0], [3.0, 4.0]])
    assert len(table) == 2 and table.keys().tolist() == [-1, 3] and table.dim == 2
    assert table.read([3, 9]).tolist() == [[1.0, 2.0], [0.5, 0.5]]
    assert table.has([3, 9]).tolist() == [True, False]
    assert len(table) == 2  # Reading does not create a row.
    assert table.remove([3, 9, 3]) == 1
    assert table.keys().tolist() == [-1]
    assert table.read([]).shape == (0, 2) and table.remove([]) == 0
    table.write(np.array([2**64 - 1], np.uint64), [[0.0, 0.0]])
    assert table.read([-1]).tolist() == [[0.0, 0.0]]
    assert table.optimizer == RULE and table.learning_rate == 0.5
    table.learning_rate = 0.25
    assert float(table.store.learning_rate) == 0.25


@pytest.mark.parametrize(
    ("keys", "rows", "message"),
    [
        ([1], [[1.0]], r"`rows`: \[1, 1\] for table 't'. Expected the shape \[1, 2\]"),
        ([1, 2], [[1.0, 2.0]], r"`rows`: \[1, 2\]"),
        ([0.5], [[1.0, 2.0]], r"`keys`: 'float64 \[1\]'"),
        ([[1]], [[1.0, 2.0]], r"`keys`: 'int64 \[1, 1\]'"),
        ([None], [[1.0, 2.0]], r"`keys`: 'object \[1\]'"),
        (np.array([True], object), [[1.0, 2.0]], r"`keys`: 'object \[1\]'"),
        (np.array([1 << 64], object), [[1.0, 2.0]], r"`keys`: 'object \[1\]'"),
        (np.array(["a", 1], object), [[1.0, 2.0]], r"`keys`: 'object \[2\]'"),
    ],
)
def test_invalid_writes_raise(keys: Any, rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().write(keys, rows)
    with pytest.raises(ValueError, match=r"`table`: 'x'.*'t'"):
        TableRows(make().store, "x")


def test_layer_reads_initial_row_after_removal() -> None:
    layer = EmbeddingCollection([Table("t", 2, initializer=START)], RULE)
    keys = tf.constant([[1], [2]], tf.int64)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(keys, training=True))
    tape.gradient(loss, layer.trainable_variables)
    table = layer.table("t")
    assert table.read([1]).tolist() == [[0.0, 0.0]]
    assert table.remove([1]) == 1
    assert layer(keys).numpy()[:, 0].tolist() == [[0.5, 0.5], [0.0, 0.0]]
    with pytest.raises(ValueError, match="`table`: 'x'"):
        layer.table("x")


def test_cleared_table_starts_from_scratch() -> None:
    table = make()
    store: Any = table.store
    table.write(np.arange(50_000), np.ones((50_000, 2)))
    nbytes = store.statistics("t").allocated_bytes
    table.clear()
    assert len(table) == 0 and store.statistics("t").allocated_bytes < nbytes / 10
    assert table.read([3]).tolist() == [[0.5, 0.5]]
    table.write([3], [[1.0, 2.0]])
    assert table.keys().tolist() == [3]


def test_shrunk_table_keeps_rows() -> None:
    table = make()
    store: Any = table.store
    keys = np.arange(50_000)
    table.write(keys, np.stack([keys, -keys], 1))
    table.remove(keys[:49_990])
    before, nbytes = store.export_table("t"), store.statistics("t").allocated_bytes
    freed = table.shrink()
    assert freed > 0.9 * nbytes and store.statistics("t").allocated_bytes == nbytes - freed
    for name, values in store.export_table("t").items():
        np.testing.assert_array_equal(values, before[name])
    assert table.shrink() == 0


def test_training_continues_after_table_shrinks_and_clears() -> None:
    """Rows move or disappear between a lookup and its update."""
    layers = [EmbeddingCollection([Table("t", 2, initializer=START)], RULE) for _ in range(2)]
    for change in ("shrink", "clear"):
        for layer in layers:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(np.array([[1], [2]]), training=True))
            if layer is layers[0]:
                getattr(layer.table("t"), change)()
            elif change == "clear":
                layer.table("t").remove([1, 2])
            tape.gradient(loss, layer.trainable_variables)
        contents, expected = (layer.store.export_table("t") for layer in layers)
        for name, values in contents.items():
            np.testing.assert_array_equal(values, expected[name])


@pytest.mark.parametrize(
    ("keys", "equal"),
    [
        (np.array(["a", "b"], object), ["a", "b"]),
        (np.array([b"a", "b"], object), ["a", "b"]),
        (tf.constant(["a", "b"]), ["a", "b"]),
        (np.array([3, -1], object), [3, -1]),
        (tf.constant([3, -1], tf.int32), [3, -1]),
        (np.array([2**64 - 1, 1], object), [-1, 1]),
    ],
)
def test_objects_and_tensors_are_keys(keys: Any, equal: Any) -> None:
    table = make()
    table.write(keys, [[1.0, 2.0], [3.0, 4.0]])
    assert table.read(equal).tolist() == table.read(keys).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert table.has(keys).tolist() == [True, True] and table.remove(keys) == 2


def test_stores_and_rows_print_their_tables() -> None:
    table = make()
    assert repr(table.store) == "<NativeStore with tables ['t']>"
    assert repr(table) == f"<TableRows of table 't' with dim=2 in {table.store!r}>"
    variables = VariableStore({"t": tf.Variable(tf.ones([3, 2]))})
    assert repr(variables) == "<VariableStore with tables ['t']>"
    ranks = Threads(2).run(lambda comm: repr(make(comm, kind=distributed.ShardedStore).store))
    assert ranks == [f"<ShardedStore with tables ['t'] on rank {rank} of 2>" for rank in (0, 1)]


def test_variable_store_refuses_row_writes() -> None:
    table = TableRows(VariableStore({"t": tf.Variable(tf.ones([3, 2]))}), "t")
    assert table.read([1]).tolist() == [[1.0, 1.0]] and len(table) == 3
    with pytest.raises(ValueError, match=r"`store`: 'VariableStore' for a change of table 't'"):
        table.remove([1])


@pytest.mark.parametrize("kind", ["ReplicatedStore", "ShardedStore"])
def test_ranks_write_and_remove_collectively(kind: str) -> None:
    def job(comm: Any) -> Any:
        table = make(comm, kind=getattr(distributed, kind))
        keys = np.arange(10)
        table.write(keys, np.repeat(keys[:, None], 2, 1).astype(np.float32))
        before = len(table), table.keys().tolist(), table.read([7, 99]).tolist()
        removed = table.remove([3, 7, 99])
        return before, removed, len(table), table.has([3, 4]).tolist()

    expected = (10, list(range(10)), [[7.0, 7.0], [0.5, 0.5]]), 2, 8, [False, True]
    if kind == "ReplicatedStore":
        # A key that another rank may have looked up counts as found.
        expected = *expected[:3], [True, True]
    assert Threads(3).run(job) == [expected] * 3


@pytest.mark.parametrize("kind", ["ReplicatedStore", "ShardedStore"])
def test_ranks_clear_collectively(kind: str) -> None:
    def job(comm: Any) -> Any:
        table = make(comm, kind=getattr(distributed, kind))
        table.write(np.arange(9000), np.ones((9000, 2)))
        table.remove(np.arange(8990))
        is_freed = table.shrink() > 0
        before = len(table)
        table.clear()
        return is_freed, before, len(table), table.read([8999]).tolist()

    assert Threads(2).run(job) == [(True, 10, 0, [[0.5, 0.5]])] * 2


def test_ranks_writing_different_rows_raise() -> None:
    def job(comm: Any) -> str:
        table = make(comm, kind=distributed.ReplicatedStore)
        with pytest.raises(
            ValueError, match="a call that writes or removes rows on rank 1"
        ) as error:
            table.write([1], [[comm.rank, 0.0]])
        return str(error.value)

    Threads(2).run(job)


def test_removing_sharded_rows_drops_replicas_and_deferred_gradients() -> None:
    from slipstream_tf.ops.features import FeatureSpec, pack
    from slipstream_tf.ops.update_policy import UpdatePolicy

    specs = [FeatureSpec("t", "t", "sum")]

    def job(comm: Any) -> Any:
        table = make(comm, kind=distributed.ShardedStore)
        store: Any = table.store
        store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=99, max_rows=1000))
        keys = pack({"t": tf.constant([1, 2], tf.int64)}, specs)
        pooled, plan = store.lookup(keys, training=True)
        store.apply_gradients(plan, [tf.ones_like(pooled[0])])
        deferred = store.export_deferred("t")["keys"].tolist()
        table.remove([1])
        table.write([2], [[8.0, 8.0]])
        left = store.export_deferred("t")["keys"].tolist()
        pooled, _ = store.lookup(keys, training=True)
        return deferred, left, pooled[0].numpy().tolist()

    assert Threads(2).run(job) == [([1, 2], [], [[0.5, 0.5], [8.0, 8.0]])] * 2


def test_rows_are_imported_from_keras_embedding() -> None:
    table = make()
    old = keras.layers.Embedding(3, 2)
    with pytest.raises(ValueError, match=r"`weights`.*built"):
        from_embedding(table, old)
    old.build()
    assert from_embedding(table, old) == 3
    np.testing.assert_array_equal(table.read([0, 1, 2]), old.get_weights()[0])
    from_embedding(table, np.ones((2, 2)), keys=[7, 1])
    assert table.keys().tolist() == [0, 1, 2, 7] and table.read([1]).tolist() == [[1.0, 1.0]]
    with pytest.raises(ValueError, match=r"`weights`: \[2, 3\].*\[n, 2\]"):
        from_embedding(table, np.ones((2, 3)))


def test_keys_are_renamed_to_other_vocabulary() -> None:
    table = make()
    table.write([1, 2, 3], [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    assert rename_keys(table, {1: 2, 2: 1, 9: 4}, keep_others=True) == 2
    assert table.read([1, 2, 3]).tolist() == [[2.0, 2.0], [1.0, 1.0], [3.0, 3.0]]
    with pytest.raises(ValueError, match="`new_keys`: 3 for table 't'"):
        rename_keys(table, {1: 3}, keep_others=True)
    assert rename_keys(table, {1: 70, 2: -5}) == 2
    assert table.keys().tolist() == [-5, 70] and table.read([70]).tolist() == [[2.0, 2.0]]
    assert rename_keys(table, {}) == 0 and len(table) == 0


def test_strings_are_accepted_as_keys() -> None:
    table = make()
    table.write(["a"], [[1.0, 2.0]])
    assert table.read(["a"]).tolist() == [[1.0, 2.0]] and table.remove([b"a"]) == 1
