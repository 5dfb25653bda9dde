"""Tests of bounded tables and of exported rows, as in TensorFlow Recommenders Addons (TFRA).

A restrict policy of TFRA removes the keys that were used least recently or least often, with their
optimizer slots and status. Here `Retention` does: a full table evicts before it creates rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip

DIM = 3
OPTIMIZERS = {
    "SGD": slip.optimizers.SGD(0.1),
    "momentum": slip.optimizers.SGD(0.1, momentum=0.5),
    "Adagrad": slip.optimizers.Adagrad(0.1, 0.1),
    "RowWiseAdagrad": slip.optimizers.RowWiseAdagrad(0.1, 0.1),
    "Adam": slip.optimizers.Adam(0.1),
    "Ftrl": slip.optimizers.Ftrl(0.1, initial_accumulator_value=0.1),
}
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def table_of(
    optimizer: Any = OPTIMIZERS["Adagrad"],
    retention: slip.Retention | None = None,
    initializer: Any = "zeros",
) -> Any:
    """Returns a layer of one table."""
    table = slip.Table("t", DIM, optimizer, None, initializer, retention)
    return slip.keras.EmbeddingCollection([table])


def train(layer: Any, keys: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer({"t": tf.constant(keys, tf.int64)}, training=True)["t"])
    tape.gradient(loss, layer.trainable_variables)


def exported(layer: Any) -> dict[str, np.ndarray]:
    return layer.store.export_table("t")


@every_optimizer
def test_lru_removes_rows_and_slots_of_oldest_keys(optimizer: Any) -> None:
    layer = table_of(optimizer, slip.Retention(6, "lru"))
    train(layer, range(6))
    for key in (2, 0, 5):
        train(layer, [key])
    before = layer.table("t").read([0, 2, 5])
    train(layer, [6, 7, 8])
    found = exported(layer)
    assert found["keys"].tolist() == [0, 2, 5, 6, 7, 8]
    assert len(found["rows"]) == len(found["slots"]) == len(found["counts"]) == 6
    np.testing.assert_array_equal(layer.table("t").read([0, 2, 5]), before)
    assert layer.store.statistics("t").evicted_rows == 3
    # A key that returns starts from its initial row and slots.
    train(layer, [1])
    fresh = table_of(optimizer)
    for _ in range(5):
        train(fresh, [9])  # Adam's bias correction counts the steps of the table.
    train(fresh, [1])
    np.testing.assert_array_equal(layer.table("t").read([1]), fresh.table("t").read([1]))
    assert layer.table("t").has([2, 1]).tolist() == [False, True]


@every_optimizer
def test_lfu_removes_rows_and_slots_of_rarest_keys(optimizer: Any) -> None:
    layer = table_of(optimizer, slip.Retention(6, "lfu"))
    train(layer, np.repeat(np.arange(6), [5, 2, 4, 5, 1, 4]))
    train(layer, [1, 4])  # The rarest keys are the most recent ones.
    assert exported(layer)["counts"].tolist() == [5, 3, 4, 5, 2, 4]
    before = layer.table("t").read([0, 2, 3, 5])
    train(layer, [6, 6, 6, 6])
    assert exported(layer)["keys"].tolist() == [0, 1, 2, 3, 5, 6]
    train(layer, [7])
    found = exported(layer)
    assert found["keys"].tolist() == [0, 2, 3, 5, 6, 7]
    assert found["counts"].tolist() == [5, 4, 5, 4, 4, 1]
    assert len(found["rows"]) == len(found["slots"]) == 6
    np.testing.assert_array_equal(layer.table("t").read([0, 2, 3, 5]), before)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_restriction_does_not_act_below_its_capacity(eviction: str) -> None:
    layer = table_of(retention=slip.Retention(100, eviction))
    train(layer, range(6))
    train(layer, range(4, 9))
    assert exported(layer)["keys"].tolist() == list(range(9))
    assert layer.store.statistics("t").evicted_rows == 0


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_evaluation_does_not_count_as_use(eviction: str) -> None:
    layer = table_of(retention=slip.Retention(3, eviction))
    train(layer, [0, 1, 2])
    train(layer, [1, 2])
    for _ in range(3):
        layer({"t": tf.constant([0, 9])}, training=False)
    train(layer, [3])
    assert exported(layer)["keys"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_batch_beyond_the_capacity_raises_and_changes_no_row(eviction: str) -> None:
    layer = table_of(retention=slip.Retention(4, eviction))
    train(layer, [0, 1, 2])
    before = exported(layer)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="'t'"):
        train(layer, range(10, 15))
    after = exported(layer)
    for name in ("keys", "rows", "slots", "counts"):
        np.testing.assert_array_equal(after[name], before[name])


@every_optimizer
def test_unused_rows_expire_after_steps(optimizer: Any) -> None:
    layer = table_of(optimizer, slip.Retention(expire_after=8))
    train(layer, range(6))
    for _ in range(11):  # Rows may stay a quarter longer.
        train(layer, range(4, 9))
    found = exported(layer)
    assert found["keys"].tolist() == [4, 5, 6, 7, 8]
    assert len(found["rows"]) == len(found["slots"]) == len(found["last_used"]) == 5


KEYS = np.array([-(2**63), -1, 0, 1, 7, 2**40, 2**63 - 1])
ROWS = np.arange(len(KEYS) * DIM, dtype=np.float32).reshape(len(KEYS), DIM)


def test_written_rows_are_found_replaced_and_removed() -> None:
    table = table_of(initializer=slip.initializers.Constant(-1.5)).table("t")
    assert len(table) == 0 and not table.has(KEYS).any()
    table.write(KEYS[::-1], ROWS[::-1])
    np.testing.assert_array_equal(table.keys(), KEYS)
    np.testing.assert_array_equal(table.read(KEYS[[3, 0, 3]]), ROWS[[3, 0, 3]])
    table.write(KEYS[:2], -ROWS[:2])
    np.testing.assert_array_equal(table.read(KEYS), np.concatenate([-ROWS[:2], ROWS[2:]]))
    assert table.remove([KEYS[0], 12345]) == 1
    assert table.has(KEYS).tolist() == [False] + [True] * 6
    np.testing.assert_array_equal(table.read([KEYS[0], 12345]), np.full((2, DIM), -1.5))
    table.clear()
    assert len(table) == 0 and table.keys().size == 0


@every_optimizer
def test_imported_table_continues_identically(optimizer: Any) -> None:
    first = table_of(optimizer, initializer="uniform")
    first.table("t").write(KEYS, ROWS)
    # The lookup would ignore -1, the default padding, and deletes no row.
    train(first, [7, 7, 1, 2**40, 99])
    contents = exported(first)
    assert contents["keys"].tolist() == sorted([*KEYS.tolist(), 99])
    assert contents["rows"].shape == (8, DIM) and contents["rows"].dtype == np.float32
    assert contents["slots"].shape == (8, optimizer.slots_per_row(DIM))
    second = table_of(optimizer, initializer="uniform")
    train(second, [5])  # An import replaces all rows.
    second.store.import_table("t", contents)
    for layer in (first, second):
        train(layer, [1, 99, 3, -(2**63)])
    ours, theirs = exported(second), exported(first)
    for name in ("keys", "rows", "slots", "counts"):
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_large_table_is_exported_completely() -> None:
    random = np.random.default_rng(2)
    keys = np.unique(random.integers(-(2**63), 2**63 - 1, 20_000))
    rows = random.normal(size=(len(keys), DIM)).astype(np.float32)
    order = random.permutation(len(keys))
    first, second = table_of(), table_of()
    first.table("t").write(keys[order], rows[order])
    second.store.import_table("t", exported(first))
    for layer in (first, second):
        assert len(layer.table("t")) == len(keys)
        found = exported(layer)
        np.testing.assert_array_equal(found["keys"], keys)
        np.testing.assert_array_equal(found["rows"], rows)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_eviction_order_survives_weight_files(eviction: str, tmp_path: Path) -> None:
    def bounded() -> tuple[Any, keras.Model]:
        layer = table_of(retention=slip.Retention(4, eviction))
        inputs = {"t": keras.Input((), dtype="int64", name="t")}
        return layer, keras.Model(inputs, layer(inputs))

    (first, trained), (second, loaded) = bounded(), bounded()
    train(first, [0, 1, 2, 3])
    for key in (3, 1, 3, 0, 0):
        train(first, [key])
    trained.save_weights(tmp_path / "x.weights.h5")
    loaded.load_weights(tmp_path / "x.weights.h5")
    for layer in (first, second):
        train(layer, [10])
        assert exported(layer)["keys"].tolist() == [0, 1, 3, 10]
