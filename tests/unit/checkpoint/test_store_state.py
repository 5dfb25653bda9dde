"""Tests of store states as arrays, matched by table name."""

from __future__ import annotations

import json
import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from slipstream_tf import Retention, Table, checkpoint, distributed, optimizers
from slipstream_tf.checkpoint.store_state import export_state, flatten, restore_state, unflatten
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables import NativeStore
from slipstream_tf.tables.rows import TableRows

ADAGRAD, SGD = optimizers.Adagrad(0.5, 0.25), optimizers.SGD(0.5)
# Table "same" matches, "removed" is only in the checkpoint, and the others differ in settings.
SAVED = [
    *(Table("removed", 2), Table("same", 2, ADAGRAD)),
    *(Table("wider", 2), Table("other_rule", 2, SGD)),
]
HERE = [
    *(Table("other_rule", 2, ADAGRAD), Table("added", 2)),
    *(Table("wider", 3), Table("same", 2, optimizers.Adagrad(0.125, 0.25))),
]


def trained(tables: list[Table], key: int) -> NativeStore:
    store = NativeStore(tables, SGD)
    specs = [FeatureSpec(table.name, table.name, "sum") for table in tables]
    keys = {spec.name: tf.constant([key, key + 1], tf.int64) for spec in specs}
    pooled, plan = store.lookup(pack(keys, specs), training=True)
    store.apply_gradients(plan, [tf.ones_like(rows) for rows in pooled])
    return store


def check(store: NativeStore, before: dict[str, Any], saved: NativeStore) -> None:
    """Checks that matching tables were restored and the other tables are unchanged."""
    for name in ("added", "wider"):
        for part, values in store.export_table(name).items():
            np.testing.assert_array_equal(values, before[name][part])
    for name in ("same", "other_rule"):
        found, expected = store.export_table(name), saved.export_table(name)
        np.testing.assert_array_equal(found["rows"], expected["rows"])
        np.testing.assert_array_equal(found["counts"], expected["counts"])
    np.testing.assert_array_equal(
        store.export_table("same")["slots"], saved.export_table("same")["slots"]
    )
    assert (store.export_table("other_rule")["slots"] == 0.25).all()
    assert store.learning_rate_of("same") == 0.5


LOG = [
    "Loading table 'same' of ",
    "Loading table 'other_rule' of ",
    "Its slots start from scratch, because their optimizer was SGD instead of Adagrad.",
    "Table 'added' stays unchanged: ",
    "has it with dim=2 instead of dim=3.",
    "Ignored table 'removed' of ",
]


@pytest.mark.parametrize("form", ["state", "job"])
def test_tables_are_restored_by_name(form: str, tmp_path: Any, caplog: Any) -> None:
    saved, store = trained(SAVED, 1), trained(HERE, 7)
    before = {table.name: store.export_table(table.name) for table in HERE}
    dense, comm = tf.train.Checkpoint(x=tf.Variable(1.0)), distributed.SingleProcess()

    def load() -> None:
        if form == "state":
            restore_state(store, export_state(saved), "a test")
        else:
            distributed.CheckpointManager(str(tmp_path), dense, comm, store).restore()

    if form == "job":
        distributed.CheckpointManager(str(tmp_path), dense, comm, saved, background=False).save(1)
    with pytest.raises((ValueError, checkpoint.CheckpointError), match=r"tables_by_name\(\)"):
        load()
    for name, contents in before.items():
        np.testing.assert_array_equal(store.export_table(name)["rows"], contents["rows"])
    with caplog.at_level(logging.INFO, "absl"), checkpoint.tables_by_name():
        load()
    check(store, before, saved)
    for line in LOG:
        assert line in caplog.text
    with pytest.raises((ValueError, checkpoint.CheckpointError), match="saved with"):
        load()


def test_state_of_table_without_filter_clears_filter() -> None:
    admits = Table("t", 2, retention=Retention(admit_after=3))
    store, saved = trained([admits], 1), trained([Table("t", 2)], 1)
    assert store.export_admission("t")["counters"].any() and store.size("t") == 0
    restore_state(store, export_state(saved), "a test")
    assert not store.export_admission("t")["counters"].size and store.size("t") == 2


def make_model(tables: list[str]) -> keras.Model:
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in tables}
    layer = EmbeddingCollection([Table(name, 2) for name in tables], SGD, name="tables")
    joined = keras.layers.Concatenate()(list(layer(inputs).values()))
    dense = keras.layers.Dense(1, name="last")(keras.layers.Dense(3, name="first")(joined))
    model = keras.Model(inputs, dense)
    model.compile("sgd", "mse")
    return model


def test_weights_load_into_model_with_added_feature(tmp_path: Any) -> None:
    keys = np.arange(8)
    old, new = make_model(["user", "item"]), make_model(["user", "item", "city"])
    old.fit({"user": keys, "item": keys}, keys, verbose=0)
    path = str(tmp_path / "old.weights.h5")
    old.save_weights(path)
    with pytest.warns(UserWarning, match="first"), checkpoint.tables_by_name():
        new.load_weights(path, skip_mismatch=True)
    for name in ("user", "item"):
        rows = TableRows(new.get_layer("tables").store, name).read(keys)
        expected = TableRows(old.get_layer("tables").store, name).read(keys)
        np.testing.assert_array_equal(rows, expected)
        assert rows.any()
    np.testing.assert_array_equal(
        new.get_layer("last").kernel.numpy(), old.get_layer("last").kernel.numpy()
    )
    # Without `tables_by_name()` Keras skips the layer, and the warning names the fix.
    with pytest.warns(UserWarning, match=r"tables_by_name\(\)"):
        new.load_weights(path, skip_mismatch=True)


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
)
trees = st.recursive(
    leaves,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=4), parts),
    max_leaves=10,
)


@given(trees, st.integers(0, 5))
def test_random_tree_round_trip(tree: object, rows: int) -> None:
    array = np.arange(rows, dtype=np.float32)
    skeleton, arrays = flatten({"tree": tree, "arrays": [array, {"deep": array[:1]}]})
    back = unflatten(json.loads(json.dumps(skeleton)), arrays)
    assert back["tree"] == tree
    np.testing.assert_array_equal(back["arrays"][0], array)
    np.testing.assert_array_equal(back["arrays"][1]["deep"], array[:1])


def test_numpy_numbers_become_python_numbers_and_infinities_stay() -> None:
    skeleton, _ = flatten({"a": np.float32(0.1), "b": float("inf"), "c": (np.int64(3),)})
    assert json.loads(json.dumps(skeleton)) == {"a": float(np.float32(0.1)), "b": np.inf, "c": [3]}


def test_missing_array_raises() -> None:
    skeleton, _ = flatten({"a": np.zeros(3)})
    with pytest.raises(KeyError):
        unflatten(skeleton, {})
