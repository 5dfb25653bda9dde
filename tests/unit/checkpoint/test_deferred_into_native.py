"""Deferred gradients in checkpoints reach the rows of a native table: none is lost, none is NaN."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from store_files import DEFERS, SPECS, TABLE, InSok, restore, save
from thread_jobs import Job, Threads

from slipstream_tf import optimizers
from slipstream_tf.ops.features import pack
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.optimizers import SparseOptimizer
from slipstream_tf.tables import NativeStore, VariableStore

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
    """Has deferred gradients of the `DEFERRED` rows."""
    rows = tf.Variable(np.arange(2.0 * ROWS, dtype=np.float32).reshape(ROWS, 2))
    store = VariableStore({"t": rows}, optimizer)
    store.set_update_policy("t", DEFERS)
    store.set_row_flags("t", np.array(DEFERRED), np.ones(len(DEFERRED), np.uint8))
    values = tf.constant([gradient(key) for key in DEFERRED])
    store.mask_gradients(
        "t", tf.IndexedSlices(values, tf.constant(DEFERRED), tf.constant([ROWS, 2]))
    )
    assert store.deferred_rows() == {"t": len(DEFERRED)}
    return store


def in_sok() -> InSok:
    """Of a loop whose optimizer nobody knows: neither slots, nor steps, nor a rate."""
    store = InSok(0, 1, optimizer=None).fill(range(ROWS))
    store.contents.update(slots=np.empty((ROWS, 0), np.float32), steps=np.zeros(2, np.int64))
    store.deferred["learning_rate"] = np.float32(0.0)
    return store


def new_slots(rule: SparseOptimizer, rows: int) -> np.ndarray:
    initial = getattr(rule, "initial_accumulator_value", 0.0)
    return np.full((rows, rule.slots_per_row(2)), initial, np.float32)


def updated(was: dict[str, Any], deferred: dict[str, Any], rule: SparseOptimizer) -> np.ndarray:
    """The rows after a first update with the deferred gradients."""
    store = NativeStore([TABLE], rule)
    slots = new_slots(rule, len(was["keys"]))
    names = ("keys", "rows", "counts", "last_used", "steps")
    store.import_table("t", {**{name: was[name] for name in names}, "slots": slots})
    packed = pack({"t": tf.constant(deferred["keys"])}, SPECS)
    _, plan = store.lookup(packed, SPECS, training=True)
    store.apply_gradients(plan, [tf.constant(deferred["sums"])])
    return store.export_table("t")["rows"]


@each_rule
@pytest.mark.parametrize("kind", ["variable", "variable with a rate", "sok"])
def test_rows_move_as_by_an_update(kind: str, rule: SparseOptimizer, tmp_path: Path) -> None:
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
def test_sums_that_stay_deferred_are_applied_by_a_later_flush(
    rule: SparseOptimizer, tmp_path: Path
) -> None:
    saved = variable_store()
    manifest = save(tmp_path, [saved], "replicated")
    now = NativeStore([TABLE], rule)
    restore(tmp_path, manifest, [now], "replicated", DEFERS)
    assert now.update_counts("t").deferred_now == len(DEFERRED)
    now.flush()
    was, deferred = saved.export_table("t"), saved.export_deferred("t")
    np.testing.assert_array_equal(now.export_table("t")["rows"], updated(was, deferred, rule))


@each_rule
def test_a_store_of_its_own_that_never_saw_an_update(rule: SparseOptimizer) -> None:
    saved, now = variable_store(), NativeStore([TABLE], rule)
    now.import_table("t", {**saved.export_table("t"), "slots": new_slots(rule, ROWS)})
    now.set_update_policy("t", DEFERS)
    deferred = saved.export_deferred("t")
    deferred.pop("is_leaving")
    now.import_deferred("t", {**deferred, "learning_rate": np.float32(0.0)})
    packed = pack({"t": tf.range(ROWS, dtype=tf.int64)}, SPECS)
    # An evaluation applies what is deferred.
    (rows,), _ = now.lookup(packed, SPECS, training=False)
    np.testing.assert_array_equal(rows, updated(saved.export_table("t"), deferred, rule))


def test_the_log_says_what_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = save(tmp_path, [variable_store()], "replicated")
    caplog.set_level(logging.WARNING)
    restore(tmp_path, manifest, [NativeStore([TABLE], RULES[0])], "replicated", APPLIES)
    assert "3 deferred gradients of table 't' are applied now" in caplog.text
    caplog.clear()
    store = VariableStore({"t": tf.Variable(tf.zeros([ROWS, 2]))})
    restore(tmp_path, manifest, [store], "replicated", APPLIES)
    assert "3 deferred gradients of table 't' are applied with the next step" in caplog.text
    assert store.deferred_rows() == {"t": 3}


def test_ranks_of_a_sharded_job_tell_the_rate_that_they_train_with(tmp_path: Path) -> None:
    def train(comm: Any) -> None:
        job = Job(comm, "sharded", tmp_path / str(comm.rank))
        job.store.learning_rate.assign(0.05)
        job.train(0, 6)
        deferred = job.store.export_deferred("a")
        assert deferred["keys"].size and deferred["learning_rate"] == np.float32(0.05)

    Threads(2).run(train)
