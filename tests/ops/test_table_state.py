"""Deferred gradients, row flags and windows are exported and imported exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table, initializers, optimizers
from slipstream_tf.ops import update_policy
from slipstream_tf.ops.classifier import InputClassifier
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables import NativeStore

SPECS = [FeatureSpec("f", "t", "sum")]
DEFER = UpdatePolicy("defer", movement=1e9, max_age=1000, max_rows=1000)


def make_store(policy: UpdatePolicy = DEFER) -> NativeStore:
    table = Table("t", 2, initializer=initializers.Zeros())
    store = NativeStore([table], optimizers.SGD(0.5))
    store.set_update_policy("t", policy)
    return store


def step(store: NativeStore, keys: list[int], gradient: float) -> None:
    packed = pack({"f": tf.constant(keys, tf.int64)}, SPECS)
    pooled, plan = store.lookup(packed, training=True)
    store.apply_gradients(plan, [tf.fill(pooled[0].shape, gradient)])


def test_sums_ages_and_rows_equal_numpy() -> None:
    store = make_store()
    expected: dict[int, list[float]] = {}
    steps = [([1, 2, 2], 1.0), ([2, 5], 0.25), ([9, 1], -3.0)]
    for number, (keys, gradient) in enumerate(steps, 1):
        step(store, keys, gradient)
        for key in keys:
            total, since = expected.get(key, (0.0, number))
            expected[key] = [total + gradient, since]
    deferred = store.export_deferred("t")
    found = {
        int(k): [float(s[0]), len(steps) - int(a)]
        for k, a, s in zip(deferred["keys"], deferred["ages"], deferred["sums"], strict=True)
    }
    assert found == expected
    assert float(deferred["learning_rate"]) == 0.5 and (deferred["ranks"] == 0).all()
    # The sums stay deferred and the exported rows do not include them.
    assert store.update_counts("t").deferred_now == 4
    assert (store.export_table("t", flush=False)["rows"] == 0.0).all()
    contents = store.export_table("t", flush=False)

    other = make_store()
    other.import_table("t", contents)
    other.import_deferred("t", deferred)
    for name, values in other.export_deferred("t").items():
        np.testing.assert_array_equal(values, deferred[name])
    flushed, expected_rows = other.export_table("t"), store.export_table("t")
    np.testing.assert_array_equal(flushed["rows"], expected_rows["rows"])
    totals = np.array([expected[int(key)][0] for key in flushed["keys"]])
    np.testing.assert_allclose(flushed["rows"][:, 0], -0.5 * totals)


def test_empty_state_round_trip() -> None:
    store = make_store()
    deferred = store.export_deferred("t")
    assert deferred["keys"].shape == (0,) and deferred["sums"].shape == (0, 2)
    store.import_deferred("t", deferred)
    assert store.row_flags("t", np.empty(0, np.int64)).shape == (0,)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "sums": ({"sums": np.zeros((1, 3), np.float32)}, r"sums of table 't' has shape \[1,3\]"),
    "ages": ({"ages": [0, 1]}, "have 1 keys, 2 ages"),
    "rank": ({"ranks": [1]}, r"ranks\[0\] of table 't' is 1"),
    "age": ({"ages": [-1]}, r"ages\[0\] of table 't' for key 1 is -1"),
    "key": ({"keys": [8]}, "is 8; expected a key that has a row"),
    "matrix": ({"keys": [[1]]}, "keys of table 't' has shape|Shape must be rank 1"),
}


@pytest.mark.parametrize("what", BAD)
def test_invalid_sums_raise_and_change_nothing(what: str) -> None:
    changes, message = BAD[what]
    store = make_store()
    step(store, [1], 2.0)
    deferred = store.export_deferred("t")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        store.import_deferred("t", {**deferred, **changes})
    np.testing.assert_array_equal(store.export_deferred("t")["sums"], deferred["sums"])


def test_missing_and_unknown_arrays_raise() -> None:
    with pytest.raises(ValueError, match=r"Invalid `contents`: arrays .* for import_deferred"):
        make_store().import_deferred("t", {"keys": [1]})
    classifier = InputClassifier(["t"])
    with pytest.raises(ValueError, match="Invalid `contents`"):
        classifier.import_window({"keys": [1]})


def test_import_of_sums_requires_deferring_policy() -> None:
    store = make_store()
    step(store, [1], 2.0)
    other = make_store(UpdatePolicy())
    with pytest.raises(tf.errors.InvalidArgumentError, match="Set a policy with mode 'defer'"):
        other.import_deferred("t", store.export_deferred("t"))


def test_row_flags_are_set_and_read() -> None:
    store = make_store(UpdatePolicy())
    step(store, [1, 2, 3], 1.0)
    store.set_row_flags("t", [1, 2, 7], [SATURATED, 0, SATURATED])
    np.testing.assert_array_equal(store.row_flags("t", [1, 2, 3, 7]), [SATURATED, 0, 0, 0])
    with pytest.raises(tf.errors.InvalidArgumentError):
        update_policy.row_flags(store._handles[0], [[1, 2]])


def classifier() -> InputClassifier:
    made = InputClassifier(["t"], reservoir_size=4, seed=3)
    made.set_drift(np.zeros(32), np.arange(32), np.linspace(0.0, 1.0, 32))
    return made


def feed(found: InputClassifier, begin: int, end: int) -> None:
    for i in range(begin, end):
        keys = {"f": tf.constant([[i, i + 1], [i, 7]], tf.int64)}
        result = found.classify(keys, SPECS)
        found.record_losses([0.1 * i, 0.3], [1.0, 0.0], result.skippable, [1.0, 2.0])


@pytest.mark.parametrize("mode", ["random", "drift"])
@pytest.mark.parametrize("steps", [0, 1, 3, 12])
def test_window_continues_identically_after_restore(mode: str, steps: int) -> None:
    one = classifier()
    one.configure(mode, threshold=0.5, random_fraction=0.5)
    feed(one, 0, steps)
    window = one.export_window()
    feed(one, steps, steps + 20)

    other = classifier()
    feed(other, 50, 60)
    other.configure(mode, threshold=0.5, random_fraction=0.5)
    other.import_window(window)
    feed(other, steps, steps + 20)
    actual = other.export_window()
    for name, values in one.export_window().items():
        np.testing.assert_array_equal(values, actual[name], err_msg=name)
    assert one.end_window() == other.end_window()


BAD_WINDOWS: dict[str, tuple[str, Any, str]] = {
    "tables": ("tables", np.int32(1), "lookup in table 1; expected a table from 0 to 0"),
    "negative": ("tables", np.int32(-1), "lookup in table -1"),
    "ends": ("ends", np.int64(100), "sample to import has 4 of the window's 6 examples"),
    "backwards": ("ends", np.int64(-1), "the sample to import"),
    "numbers": ("numbers", np.int64(-5), r"numbers\[0\] is -5"),
}


@pytest.mark.parametrize("what", BAD_WINDOWS)
def test_invalid_window_raises_and_changes_nothing(what: str) -> None:
    name, value, message = BAD_WINDOWS[what]
    found = classifier()
    feed(found, 0, 3)
    window = found.export_window()
    changed = window[name].copy()
    changed[0] = value
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        found.import_window({**window, name: changed})
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected all examples"):
        found.import_window({**window, "losses": window["losses"][:-1]})
    with pytest.raises(tf.errors.InvalidArgumentError):
        found.import_window({**window, "sums": window["sums"][:-1]})
    for array, values in found.export_window().items():
        np.testing.assert_array_equal(values, window[array])
