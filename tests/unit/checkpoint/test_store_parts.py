"""Tests of SOK checkpoints restored into other stores and world sizes.

A stand-in replaces SOK. The same restores run with SOK in tests/parallel/sok. Deferred gradients
reach the rows of a native table without losses and without NaN.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from store_files import DEFERS, RULE, SPECS, TABLE, SokLikeStore, restore, save
from thread_jobs import Job, Threads

from slipstream_tf import Retention, Table, optimizers
from slipstream_tf.checkpoint import CheckpointMismatchError, array_file, store_parts, table_state
from slipstream_tf.ops.features import pack
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.optimizers import SparseOptimizer
from slipstream_tf.tables import NativeStore, VariableStore

FLAGS = np.array([0, 1, 1], np.uint8)  # Flags of the keys 2, 3 and 5.


class SokLikeStoreWithReplicas(SokLikeStore):
    """Store with replicas of rows, as in `SokEmbeddingStore`."""

    has_replicas = True
    copies: dict[str, np.ndarray] | None = None

    def export_copies(self, table: str) -> dict[str, np.ndarray]:
        keys = self.accesses["keys"]
        return {
            **self.accesses,
            **{"steps": np.array([3, 4]), "last_used": keys % 4},
            "marks": (keys % 2).astype(np.uint8),
        }

    def import_copies(
        self, table: str, contents: dict[str, np.ndarray], takes_flags: bool = True
    ) -> None:
        self.copies = contents


def native(keys: Sequence[int]) -> NativeStore:
    """Returns a native table with trained keys and deferred gradients."""
    store = NativeStore([TABLE], RULE)
    for step in range(3):
        if step == 2:
            store.set_update_policy("t", DEFERS)
            store.set_row_flags("t", keys[::2], np.ones(len(keys[::2]), np.uint8))
        packed = pack({"t": tf.constant(keys[: len(keys) - step], tf.int64)}, SPECS)
        (rows,), plan = store.lookup(packed, training=True)
        store.apply_gradients(plan, [rows + 1.0])
    return store


def rows(stores: Sequence[Any], column: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for store in stores:
        contents = store.export_table("t", flush=False)
        for key, values in zip(contents["keys"].tolist(), contents[column].tolist(), strict=True):
            assert key not in found
            found[key] = values
    return found


def total(arrays: Sequence[dict[str, Any]], column: str) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for array in arrays:
        for key, value in zip(array["keys"].tolist(), array[column], strict=True):
            found[key] = found.get(key, 0.0) + value
    return {key: np.asarray(value).tolist() for key, value in found.items()}


def test_native_tables_move_to_sok_and_back(tmp_path: Path) -> None:
    keys = [8, 3, 11, 6, 1, 40]
    first = native(keys)
    was, deferred = first.export_table("t", flush=False), first.export_deferred("t")
    assert deferred["keys"].size == 2
    manifest = save(tmp_path / "a", [first], "replicated")
    spread = [SokLikeStore(r, 3) for r in range(3)]
    restore(tmp_path / "a", manifest, spread, "spread")
    for rank, store in enumerate(spread):
        assert (store.contents["keys"] % 3 == rank).all()
        assert {"trained", "powers"}.isdisjoint(store.contents)
        assert store.contents["steps"].tolist() == was["steps"].tolist()
        store.contents["trained"] = store.contents["rows"]
    by_key = [dict(zip(was["keys"].tolist(), was[n].tolist(), strict=True)) for n in was if n in
              ("rows", "slots")]  # fmt: skip
    assert [rows(spread, "rows"), rows(spread, "slots")] == by_key
    counts = dict(zip(was["keys"].tolist(), was["counts"].tolist(), strict=True))
    assert total([s.accesses for s in spread], "counts") == counts
    assert total([s.deferred for s in spread], "sums") == total([deferred], "sums")

    manifest = save(tmp_path / "b", spread, "spread")
    back = NativeStore([TABLE], RULE)
    restore(tmp_path / "b", manifest, [back], "replicated")
    now = back.export_table("t", flush=False)
    for column in ("keys", "rows", "slots", "counts"):
        np.testing.assert_array_equal(now[column], was[column], column)
    assert total([back.export_deferred("t")], "sums") == total([deferred], "sums")


@pytest.mark.parametrize("writer", [0, 1, 2])
def test_replicated_rows_are_read_from_rank_that_wrote_them(writer: int, tmp_path: Path) -> None:
    keys = [8, 3, 11, 6, 1, 40]
    saved = [native(keys) for _ in range(3)]
    was = saved[0].export_table("t", flush=False)
    manifest = save(tmp_path / "a", saved, "replicated", writer)
    files = [array_file.ArrayFile(tmp_path / "a" / store_parts.file_name(r, 0), "this") for r in
             range(3)]  # fmt: skip
    assert ["contents" in file.groups for file in files] == [r == writer for r in range(3)]
    for size in (1, 3):
        now = [NativeStore([TABLE], RULE) for _ in range(size)]
        restore(tmp_path / "a", manifest, now, "replicated")
        for store in now:
            found = store.export_table("t", flush=False)
            for column in ("keys", "rows", "slots", "steps"):
                np.testing.assert_array_equal(found[column], was[column], column)
            np.testing.assert_array_equal(found["counts"], was["counts"] * 3 / size)
    spread = [SokLikeStore(r, 2) for r in range(2)]
    restore(tmp_path / "a", manifest, spread, "spread")
    assert rows(spread, "rows") == dict(
        zip(was["keys"].tolist(), was["rows"].tolist(), strict=True)
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sok_tables_move_to_any_number_of_ranks(size: int, tmp_path: Path) -> None:
    keys = [2, 3, 5, 7, 11, 13, 17, 19]
    saved = [SokLikeStore(r, 2).fill(keys, [0.5, 0.25]) for r in range(2)]
    manifest = save(tmp_path / "a", saved, "spread")
    now = [SokLikeStore(r, size) for r in range(size)]
    restore(tmp_path / "a", manifest, now, "spread")
    for column in ("rows", "slots", "trained"):
        assert rows(now, column) == rows(saved, column)
    for store in now:
        assert store.contents["powers"].tolist() == [0.5, 0.25]
    for of in ("accesses", "deferred"):
        column = "counts" if of == "accesses" else "sums"
        parts = [[getattr(s, of) for s in stores] for stores in (now, saved)]
        assert total(parts[0], column) == total(parts[1], column)
    if size == 2:
        for store, old in zip(now, saved, strict=True):
            assert store.accesses["counts"].tolist() == old.accesses["counts"].tolist()
            assert store.deferred["keys"].tolist() == old.deferred["keys"].tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_sok_access_counts_move_into_native_rows(size: int, tmp_path: Path) -> None:
    keys = [2, 3, 5, 7, 11, 13]
    saved = [SokLikeStore(r, 3).fill(keys) for r in range(3)]
    manifest = save(tmp_path / "a", saved, "spread")
    now = [NativeStore([TABLE], RULE) for _ in range(size)]
    restore(tmp_path / "a", manifest, now, "replicated")
    parts = [store.export_table("t", flush=False) for store in now]
    assert total(parts, "counts") == total([s.accesses for s in saved], "counts")
    for part in parts:
        assert dict(zip(part["keys"].tolist(), part["rows"].tolist(), strict=True)) == rows(
            saved, "rows"
        )


def test_owner_sums_access_counts_of_all_ranks(tmp_path: Path) -> None:
    class Sharded(NativeStore):
        is_spread = True
        has_replicas = True

        def __init__(self, rank: int) -> None:
            super().__init__([TABLE], RULE)
            self.rank = rank

        def owners(self, table: str, keys: np.ndarray) -> np.ndarray:
            return (keys // 2) % 2

        def import_copies(self, table: str, contents: Any, takes_flags: bool = True) -> None:
            raise AssertionError("copies of another kind of store")

    saved = [SokLikeStoreWithReplicas(r, 2).fill([2, 3, 5, 7, 11, 13]) for r in range(2)]
    manifest = save(tmp_path / "a", saved, "spread")
    now = [Sharded(r) for r in range(2)]
    for number, store in enumerate(now):
        rank = store_parts.Rank(number, 2, "sharded")
        ready = store_parts.prepare(tmp_path / "a", manifest, store, rank)
        table_state.replace(store, ready)
        table_state.replace_replicas(store, ready, is_in_window=True)
    parts = [store.export_table("t", flush=False) for store in now]
    assert total(parts, "counts") == total([s.accesses for s in saved], "counts")
    assert all(part["keys"].size for part in parts)


def test_replicas_are_restored_on_same_number_of_ranks(tmp_path: Path) -> None:
    saved = [SokLikeStoreWithReplicas(r, 2).fill([2, 3, 5]) for r in range(2)]
    manifest = save(tmp_path / "a", saved, "spread")
    now = [SokLikeStoreWithReplicas(r, 2) for r in range(2)]
    restore(tmp_path / "a", manifest, now, "spread")
    for store, old in zip(now, saved, strict=True):
        assert store.copies is not None
        for name, values in old.export_copies("t").items():
            np.testing.assert_array_equal(store.copies[name], values, name)
    (alone,) = one = [SokLikeStoreWithReplicas(0, 1)]
    restore(tmp_path / "a", manifest, one, "spread")
    assert alone.copies is None
    restore(tmp_path / "a", manifest, [SokLikeStore(r, 2) for r in range(2)], "spread")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_deferred_sums_move_to_owner(size: int, tmp_path: Path) -> None:
    saved = [SokLikeStore(r, 2).fill(range(2, 20)) for r in range(2)]
    manifest = save(tmp_path / "a", saved, "spread")
    now = [SokLikeStore(r, size, defers_at_owners=True) for r in range(size)]
    restore(tmp_path / "a", manifest, now, "spread")
    sums = [[s.deferred for s in stores] for stores in (now, saved)]
    assert total(sums[0], "sums") == total(sums[1], "sums")
    for rank, store in enumerate(now):
        deferred = store.deferred["keys"]
        assert (
            deferred.size
            and (deferred % size == rank).all()
            and np.unique(deferred).size == deferred.size
        )


def test_sums_without_deferring_policy_are_applied_at_once(tmp_path: Path) -> None:
    manifest = save(tmp_path / "a", [SokLikeStore(0, 1).fill([2, 3, 5])], "spread")
    store = SokLikeStore(0, 1)
    policy = UpdatePolicy("mask", "interval")
    restore(tmp_path / "a", manifest, [store], "spread", policy)
    # By interval, because a rank cannot compute the movement of rows when SOK stores their slots.
    policies = [(p.mode, p.trigger) for p in store.policies]
    assert policies == [("mask", "interval"), ("defer", "interval"), ("mask", "interval")]
    assert store.flushed == 1 and store.deferred["keys"].size == 1


def test_variables_import_sok_rows(tmp_path: Path) -> None:
    saved = [SokLikeStore(r, 2).fill([2, 3, 5]) for r in range(2)]
    manifest = save(tmp_path / "a", saved, "spread")
    store = VariableStore({"t": tf.Variable(tf.zeros([6, 2]))})
    restore(tmp_path / "a", manifest, [store], "replicated")
    now, was = store.export_table("t"), rows(saved, "rows")
    assert {k: now["rows"][k].tolist() for k in was} == was
    assert now["counts"][[2, 3, 5]].tolist() == [7.0, 3.0, 7.0]


@pytest.mark.parametrize("key", [-1, -4])
def test_keys_reserved_by_sok_raise(key: int, tmp_path: Path) -> None:
    manifest = save(tmp_path / "a", [native([3, key, 8])], "replicated")
    store = SokLikeStore(0, 1).fill([1])
    with pytest.raises(
        CheckpointMismatchError, match=f"has key {key}, but SOK reserves .* into a native"
    ):
        restore(tmp_path / "a", manifest, [store], "spread")
    assert store.contents["keys"].tolist() == [1]


def test_rows_beyond_capacity_of_rank_raise(tmp_path: Path) -> None:
    manifest = save(tmp_path / "a", [native([1, 2, 3])], "replicated")
    store = SokLikeStore(0, 1)
    store.tables = (Table("t", 2, retention=Retention(2, eviction="lru")),)
    with pytest.raises(CheckpointMismatchError, match="3 rows for rank 0, more than its capacity"):
        restore(tmp_path / "a", manifest, [store], "spread")


APPLIES = UpdatePolicy()
RULES = [
    optimizers.SGD(0.1),
    optimizers.Adagrad(0.1, 0.25),
    optimizers.RowWiseAdagrad(0.1, 0.25),
    optimizers.Adam(0.1),
]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
ROWS, DEFERRED = 6, (1, 3, 4)


def gradient(key: int) -> list[float]:
    return [0.5 + key, -0.25 * key]


def variable_store(optimizer: Any = None) -> VariableStore:
    """Returns a store with deferred gradients for the `DEFERRED` rows."""
    rows = tf.Variable(np.arange(2.0 * ROWS, dtype=np.float32).reshape(ROWS, 2))
    store = VariableStore({"t": rows}, optimizer)
    store.set_update_policy("t", DEFERS)
    store.set_row_flags("t", np.array(DEFERRED), np.ones(len(DEFERRED), np.uint8))
    values = tf.constant([gradient(key) for key in DEFERRED])
    store.filter_gradient(
        "t", tf.IndexedSlices(values, tf.constant(DEFERRED), tf.constant([ROWS, 2]))
    )
    assert store.deferred_rows() == {"t": len(DEFERRED)}
    return store


def in_sok() -> SokLikeStore:
    """Returns a store without slots, steps and learning rate.

    A training loop with an unknown optimizer makes stores like this.
    """
    store = SokLikeStore(0, 1, optimizer=None).fill(range(ROWS))
    store.contents.update(slots=np.empty((ROWS, 0), np.float32), steps=np.zeros(2, np.int64))
    store.deferred["learning_rate"] = np.float32(0.0)
    return store


def new_slots(rule: SparseOptimizer, rows: int) -> np.ndarray:
    initial = getattr(rule, "initial_accumulator_value", 0.0)
    return np.full((rows, rule.slots_per_row(2)), initial, np.float32)


def updated(was: dict[str, Any], deferred: dict[str, Any], rule: SparseOptimizer) -> np.ndarray:
    """Returns the rows after a first update with the deferred gradients."""
    store = NativeStore([TABLE], rule)
    slots = new_slots(rule, len(was["keys"]))
    names = ("keys", "rows", "counts", "last_used", "steps")
    store.import_table("t", {**{name: was[name] for name in names}, "slots": slots})
    packed = pack({"t": tf.constant(deferred["keys"])}, SPECS)
    _, plan = store.lookup(packed, training=True)
    store.apply_gradients(plan, [tf.constant(deferred["sums"])])
    return store.export_table("t")["rows"]


@each_rule
@pytest.mark.parametrize("kind", ["variable", "variable with a rate", "sok"])
def test_applied_sums_equal_update(kind: str, rule: SparseOptimizer, tmp_path: Path) -> None:
    saved: Any = in_sok() if kind == "sok" else variable_store()
    rate = 0.1
    if kind == "variable with a rate":
        rate = 0.01
        saved = variable_store(keras.optimizers.SGD(rate))
    was, deferred = saved.export_table("t", flush=False), saved.export_deferred("t")
    manifest = save(tmp_path, [saved], "spread" if kind == "sok" else "replicated")
    now = NativeStore([TABLE], rule)
    restore(tmp_path, manifest, [now], "replicated", APPLIES)
    assert now.export_deferred("t")["keys"].size == 0
    expected = updated(was, deferred, dataclasses.replace(rule, learning_rate=rate))
    np.testing.assert_array_equal(now.export_table("t")["rows"], expected)
    assert (expected != was["rows"]).any(axis=1).sum() == deferred["keys"].size


@each_rule
def test_deferred_sums_are_applied_by_later_flush(rule: SparseOptimizer, tmp_path: Path) -> None:
    saved = variable_store()
    manifest = save(tmp_path, [saved], "replicated")
    now = NativeStore([TABLE], rule)
    restore(tmp_path, manifest, [now], "replicated", DEFERS)
    assert now.update_counts("t").deferred_now == len(DEFERRED)
    now.flush()
    was, deferred = saved.export_table("t"), saved.export_deferred("t")
    np.testing.assert_array_equal(now.export_table("t")["rows"], updated(was, deferred, rule))


@each_rule
def test_sums_imported_without_rate_wait_for_first_update(rule: SparseOptimizer) -> None:
    saved, now = variable_store(), NativeStore([TABLE], rule)
    now.import_table("t", {**saved.export_table("t"), "slots": new_slots(rule, ROWS)})
    now.set_update_policy("t", DEFERS)
    deferred = saved.export_deferred("t")
    deferred.pop("is_leaving")
    now.import_deferred("t", {**deferred, "learning_rate": np.float32(0.0)})
    packed = pack({"t": tf.range(ROWS, dtype=tf.int64)}, SPECS)
    # A lookup for evaluation applies the deferred gradients.
    (rows,), _ = now.lookup(packed, training=False)
    np.testing.assert_array_equal(rows, updated(saved.export_table("t"), deferred, rule))


def test_log_reports_applied_gradients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = save(tmp_path, [variable_store()], "replicated")
    caplog.set_level(logging.WARNING)
    restore(tmp_path, manifest, [NativeStore([TABLE], RULES[0])], "replicated", APPLIES)
    assert "3 deferred gradients of table 't' are applied now" in caplog.text
    caplog.clear()
    store = VariableStore({"t": tf.Variable(tf.zeros([ROWS, 2]))})
    restore(tmp_path, manifest, [store], "replicated", APPLIES)
    assert "3 deferred gradients of table 't' are applied with the next step" in caplog.text
    assert store.deferred_rows() == {"t": 3}


def test_sharded_ranks_save_their_learning_rate(tmp_path: Path) -> None:
    def train(comm: Any) -> None:
        job = Job(comm, "sharded", tmp_path / str(comm.rank))
        job.store.learning_rate.assign(0.05)
        job.train(0, 6)
        deferred = job.store.export_deferred("a")
        assert deferred["keys"].size and deferred["learning_rate"] == np.float32(0.05)

    Threads(2).run(train)
