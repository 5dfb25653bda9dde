"""Imports reject values that no export produces, and change no state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Retention, Table, optimizers
from slipstream_tf.ops.deferred_gradients import DeferredGradients
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables import NativeStore, VariableStore

NAN = np.float32(np.nan)


def contents() -> dict[str, Any]:
    return {
        "keys": np.array([3, 8]),
        "rows": np.ones((2, 2), np.float32),
        "slots": np.ones((2, 2), np.float32),
        "counts": np.ones(2, np.float32),
        "last_used": np.array([1, 2]),
        "steps": np.array([4, 5]),
    }


def deferred() -> dict[str, Any]:
    return {
        "keys": np.array([3, 8]),
        "ages": np.array([1, 0]),
        "ranks": np.zeros(2, np.int32),
        "sums": np.ones((2, 2), np.float32),
        "learning_rate": np.float32(0.1),
    }


@pytest.mark.parametrize(
    ("column", "place", "value", "message"),
    [
        ("rows", (1, 0), NAN, "a row value of key 8 .*'t'.* index 1, is nan"),
        ("slots", (0, 1), np.inf, "a slot value of key 3 .*'t'.* index 0, is inf"),
        ("counts", 1, -2.0, "access count of key 8 .*'t'.* index 1, is -2"),
        ("counts", 0, NAN, "access count of key 3 .* is nan"),
        ("last_used", 1, 1 << 60, "last use of key 8 .* is 1152921504606846976"),
        ("steps", 0, -1, "are -1 updates"),
    ],
)
def test_import_table_rejects_invalid_values(
    column: str, place: Any, value: Any, message: str
) -> None:
    table = Table("t", 2, retention=Retention(9, eviction="lru"))
    store = NativeStore([table], optimizers.Adagrad(0.1))
    store.import_table("t", contents())
    bad = contents()
    bad["keys"] = bad["keys"] + 0
    bad[column][place] = value
    with pytest.raises(tf.errors.InvalidArgumentError, match=message + ".*expected"):
        store.import_table("t", bad)
    np.testing.assert_array_equal(store.export_table("t")["rows"], contents()["rows"])


def test_import_table_accepts_lru_times_in_seconds() -> None:
    table = Table("t", 2, retention=Retention(9, eviction="lru", expire_after="7d"))
    store = NativeStore([table], optimizers.Adagrad(0.1))
    seconds = np.array([2_000_000_001, 2_000_000_002])
    store.import_table("t", {**contents(), "last_used": seconds})
    np.testing.assert_array_equal(store.export_table("t")["last_used"], seconds)


@pytest.mark.parametrize(
    ("column", "place", "value", "message"),
    [
        ("sums", (1, 1), NAN, r"sums\[1\] of table 't' for key 8 contains nan"),
        ("ages", 0, 1 << 62, r"ages\[0\] .* key 3 is 4611686018427387904"),
    ],
)
def test_import_deferred_rejects_invalid_values(
    column: str, place: Any, value: Any, message: str
) -> None:
    store = NativeStore([Table("t", 2)], optimizers.Adagrad(0.1))
    store.import_table("t", {**contents(), "last_used": np.empty(0, np.int64)})
    store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=99, max_rows=99))
    store.import_deferred("t", deferred())
    bad = deferred()
    bad[column][place] = value
    with pytest.raises(tf.errors.InvalidArgumentError, match=message + ".*expected"):
        store.import_deferred("t", bad)
    assert np.isfinite(store.export_deferred("t")["sums"]).all()


def test_buffer_rejects_invalid_values() -> None:
    buffer = DeferredGradients(2)
    keys, ages = np.array([3, 8]), np.array([1, 0])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"sums\[1\] for key 8 contains nan"):
        buffer.replace(keys, ages, np.array([[1, 1], [NAN, 1]], np.float32))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"ages\[0\] for key 3 is 4611"):
        buffer.replace(keys, np.array([1 << 62, 0]), np.ones((2, 2), np.float32))
    assert buffer.state().num_deferred == 0
    store = VariableStore({"t": tf.Variable(tf.zeros([9, 2]))})
    bad = contents()
    bad["rows"][1, 1] = NAN
    with pytest.raises(ValueError, match=r"`rows`: nan for key 8 of table 't' at index 1"):
        store.import_table("t", bad)
    assert not store.export_table("t", flush=False)["rows"].any()


def test_export_marks_sums_being_flushed() -> None:
    store = VariableStore({"t": tf.Variable(tf.zeros([9, 2]))})
    store.set_update_policy("t", UpdatePolicy("defer", trigger="interval", max_age=9, max_rows=9))
    store.import_deferred("t", deferred())
    assert not store.export_deferred("t")["is_leaving"]
    store.flush_with_next_step("t")
    assert store.export_deferred("t")["is_leaving"]
