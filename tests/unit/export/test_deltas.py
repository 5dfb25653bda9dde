"""Tests that `export.apply_delta` on an old export reproduces the new export exactly."""

from __future__ import annotations

import json
import subprocess
import sys

import keras
import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf import Retention, Table, export, initializers, optimizers
from slipstream_tf.export.deltas import changed, changes, read_changes, write_changes
from slipstream_tf.export.rows import ExportedTable
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.models import DLRM

SPEC = tf.TensorSpec([None, 2], tf.int64)


def make_layer(**kwargs):
    tables = [
        Table("a", 4, **kwargs),
        Table("b", 4, initializer=initializers.Constant(0.5)),
    ]
    return EmbeddingCollection(tables, optimizers.SGD(0.1))


def make_model():
    keras.utils.set_random_seed(0)
    model = DLRM(make_layer(), 3, bottom=[8, 4], top=[8, 1])
    model.compile("adam", "binary_crossentropy")
    return model


def data(low, high, count=64):
    generator = np.random.default_rng(low)
    keys = generator.integers(low, high, (count, 2))
    dense = generator.normal(size=(count, 3)).astype(np.float32)
    return {"keys": keys, "dense": dense}, (keys.sum(axis=1) % 2).astype(np.float32)


def train(layer, keys):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(np.stack([keys, keys], axis=1), training=True) ** 2)
    tape.gradient(loss, layer.trainable_variables)


def predictions(path, inputs):
    loaded = tf.saved_model.load(str(path))
    tensors = {name: tf.constant(value) for name, value in inputs.items()}
    return loaded.signatures["serving_default"](**tensors)["outputs"].numpy()


@pytest.mark.parametrize("since", ["export", "token"])
def test_delta_applied_to_old_export_equals_new_export(since, tmp_path):
    model = make_model()
    model.fit(*data(0, 30), verbose=0)
    export.saved_model(model, tmp_path / "1")
    token = export.token(model)
    model.fit(*data(20, 45), verbose=0)  # TableDelta rows, keys and weights.
    before = tmp_path / "1" if since == "export" else token
    export.delta(model, tmp_path / "delta", since=before)
    export.saved_model(model, tmp_path / "2")
    export.apply_delta(tmp_path / "1", tmp_path / "delta", tmp_path / "updated")
    inputs, _ = data(0, 60, 200)
    expected = predictions(tmp_path / "2", inputs)
    np.testing.assert_array_equal(predictions(tmp_path / "updated", inputs), expected)
    old = predictions(tmp_path / "1", inputs)
    assert (old != expected).any()
    np.testing.assert_allclose(expected, model.predict(inputs, verbose=0), atol=1e-6)
    export.apply_delta(tmp_path / "1", tmp_path / "delta")  # In place.
    np.testing.assert_array_equal(predictions(tmp_path / "1", inputs), expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "delta", "updated"]
    # An updated export is a valid base for the next delta.
    model.fit(*data(50, 70), verbose=0)
    export.delta(model, tmp_path / "delta2", since=tmp_path / "1")
    export.apply_delta(tmp_path / "1", tmp_path / "delta2")
    export.saved_model(model, tmp_path / "3")
    np.testing.assert_array_equal(
        predictions(tmp_path / "1", inputs), predictions(tmp_path / "3", inputs)
    )


def test_delta_contains_changed_rows_only(tmp_path):
    layer = make_layer()
    train(layer, np.arange(10))
    export.saved_model(layer, tmp_path / "1", signature=SPEC)
    train(layer, np.array([3, 12, 7]))
    export.delta(layer, tmp_path / "delta", since=tmp_path / "1")
    assert sorted(p.name for p in (tmp_path / "delta").iterdir()) == [
        "manifest.json",
        "table_0.parquet",
        "table_1.parquet",
    ]
    table = pq.read_table(tmp_path / "delta" / "table_0.parquet")
    assert table.schema.to_string() == (
        "key: int64 not null\nrow: list<element: float>\n  child 0, element: float\n"
        "step: int64 not null"
    )
    assert table["key"].to_pylist() == [3, 7, 12]
    assert table["step"].to_pylist() == [2, 2, 2]
    rows = layer.store.gather("a", tf.constant([3, 7, 12], tf.int64))[0]
    np.testing.assert_array_equal(np.array(table["row"].to_pylist(), np.float32), rows)
    manifest = json.loads((tmp_path / "delta" / "manifest.json").read_text())
    first = manifest["tables"][0]
    assert (first["changed"], first["removed"], first["step"]) == (3, 0, 2)
    assert first["since"]["step"] == 1
    # The delta of a layer does not change the other weights.
    export.apply_delta(tmp_path / "1", tmp_path / "delta")
    keys = np.stack([np.arange(20)] * 2, axis=1)
    np.testing.assert_array_equal(predictions(tmp_path / "1", {"inputs": keys}), layer(keys))


def test_delta_without_changes_is_empty(tmp_path):
    layer = make_layer()
    train(layer, np.arange(10))
    export.saved_model(layer, tmp_path / "1", signature=SPEC)
    layer(np.array([[1, 90]]))
    export.delta(layer, tmp_path / "delta", since=tmp_path / "1")
    assert pq.read_table(tmp_path / "delta" / "table_0.parquet").num_rows == 0
    export.apply_delta(tmp_path / "1", tmp_path / "delta")
    keys = np.stack([np.arange(20)] * 2, axis=1)
    np.testing.assert_array_equal(predictions(tmp_path / "1", {"inputs": keys}), layer(keys))


def test_delta_removes_evicted_keys(tmp_path):
    layer = make_layer(retention=Retention(8))
    train(layer, np.arange(8))
    export.saved_model(layer, tmp_path / "1", signature=SPEC)
    train(layer, np.repeat(np.arange(20, 25), 3))
    assert layer.store.size("a") == 8
    export.delta(layer, tmp_path / "delta", since=tmp_path / "1")
    table = pq.read_table(tmp_path / "delta" / "table_0.parquet")
    assert sum(row is None for row in table["row"].to_pylist()) == 5
    export.apply_delta(tmp_path / "1", tmp_path / "delta")
    keys = np.stack([np.arange(30)] * 2, axis=1)
    np.testing.assert_array_equal(predictions(tmp_path / "1", {"inputs": keys}), layer(keys))


def test_delta_of_hot_keys_only(tmp_path):
    layer = make_layer()
    train(layer, np.arange(20))
    export.saved_model(layer, tmp_path / "1", keys={"a": [1, 2, 3]}, signature=SPEC)
    train(layer, np.arange(20))
    export.delta(layer, tmp_path / "delta", since=tmp_path / "1", keys={"a": [3, 4]})
    export.apply_delta(tmp_path / "1", tmp_path / "delta")
    export.saved_model(layer, tmp_path / "2", keys={"a": [3, 4]}, signature=SPEC)
    keys = {"inputs": np.stack([np.arange(20)] * 2, axis=1)}
    np.testing.assert_array_equal(
        predictions(tmp_path / "1", keys), predictions(tmp_path / "2", keys)
    )


def test_delta_applies_without_op_library(tmp_path):
    layer = make_layer()
    export.saved_model(layer, tmp_path / "1", signature=SPEC)
    train(layer, np.arange(20))
    export.delta(layer, tmp_path / "delta", since=tmp_path / "1")
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from slipstream_tf import export\n"
        "export.apply_delta('1', 'delta', '2')\n"
        "assert '_slipstream_ops' not in open('/proc/self/maps').read()\n"
        "assert 'keras' not in {n for n in sys.modules if n == 'slipstream_tf.keras'}\n"
    )
    subprocess.run([sys.executable, "-c", program, *sys.path], cwd=tmp_path, check=True)
    keys = np.stack([np.arange(30)] * 2, axis=1)
    np.testing.assert_array_equal(predictions(tmp_path / "2", {"inputs": keys}), layer(keys))


def rows_of(contents, dim):
    keys = np.array(sorted(contents), np.int64)
    rows = np.array([contents[key] for key in sorted(contents)], np.float32).reshape(-1, dim)
    return ExportedTable("t", Table("t", dim), keys, rows, 1)


CONTENTS = st.dictionaries(
    st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-4, 4),
    st.lists(st.floats(width=32), min_size=2, max_size=2),
    max_size=9,
)


@settings(max_examples=60)
@given(before=CONTENTS, now=CONTENTS, shared=CONTENTS)
def test_random_changes_round_trip(tmp_path_factory, before, now, shared):
    old, new = rows_of({**before, **shared}, 2), rows_of({**shared, **now}, 2)
    found = changes(old, new)
    for key, row in zip(found.keys, found.rows, strict=True):
        was = old.rows[old.keys == key]
        assert was.tobytes() != row.tobytes()
    path = tmp_path_factory.mktemp("delta") / "table.parquet"
    write_changes(path, found, 5)
    result = changed(old, read_changes(path, 2), 1)
    np.testing.assert_array_equal(result.keys, new.keys)
    assert result.rows.tobytes() == new.rows.tobytes()
    assert result.digest == new.digest


def test_invalid_delta_arguments_raise(tmp_path):
    layer = make_layer()
    train(layer, np.arange(5))
    export.saved_model(layer, tmp_path / "1", signature=SPEC)
    train(layer, np.arange(5))
    export.delta(layer, tmp_path / "delta", since=tmp_path / "1")
    with pytest.raises(ValueError, match=r"Invalid `since`: 7.*do not store a step per row"):
        export.delta(layer, tmp_path / "x", since=7)
    with pytest.raises(ValueError, match=r"Invalid `since`.*export without a readable"):
        export.delta(layer, tmp_path / "x", since=tmp_path)
    other = EmbeddingCollection([Table("a", 3)], optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=r"Invalid `since`: .*\('a', 4\).*\('a', 3\)"):
        export.delta(other, tmp_path / "x", since=tmp_path / "1")
    with pytest.raises(ValueError, match="a new or empty folder"):
        export.delta(layer, tmp_path / "delta", since=tmp_path / "1")
    with pytest.raises(ValueError, match=r"Invalid `delta_path`.*without a readable manifest.json"):
        export.apply_delta(tmp_path / "1", tmp_path / "1")
    with pytest.raises(ValueError, match="a new or empty folder"):
        export.apply_delta(tmp_path / "1", tmp_path / "delta", tmp_path / "delta")
    export.apply_delta(tmp_path / "1", tmp_path / "delta", tmp_path / "2")
    with pytest.raises(
        ValueError, match=r"'a' at step 2 of the SavedModel. Expected .*since step 1"
    ):
        export.apply_delta(tmp_path / "2", tmp_path / "delta")
    keys = {"inputs": np.array([[1, 1]])}
    before = predictions(tmp_path / "1", keys)
    file = tmp_path / "delta" / "table_0.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"Invalid `delta_path`.*table_0.parquet"):
        export.apply_delta(tmp_path / "1", tmp_path / "delta")
    write_changes(file, changes(rows_of({}, 4), rows_of({1: [0, 0, 0, 1]}, 4)), 2)
    with pytest.raises(ValueError, match=r"table 'a'. Expected rows with the digest in the delta"):
        export.apply_delta(tmp_path / "1", tmp_path / "delta")
    write_changes(file, changes(rows_of({}, 3), rows_of({1: [0, 0, 0]}, 3)), 2)
    with pytest.raises(ValueError, match=r"its rows have \[3\] values.*list<float> with 4 values"):
        export.apply_delta(tmp_path / "1", tmp_path / "delta")
    np.testing.assert_array_equal(predictions(tmp_path / "1", keys), before)


def test_delta_supports_other_weight_types_and_nested_layer(tmp_path):
    layer = make_layer()
    keys = keras.Input((2,), dtype="int64")
    hidden = keras.layers.Dense(3, dtype="bfloat16")(keras.layers.Flatten()(layer(keys)))
    model = keras.Model(keys, keras.layers.BatchNormalization()(hidden))
    batch = np.stack([np.arange(9)] * 2, axis=1)
    export.saved_model(model, tmp_path / "1")
    train(layer, np.arange(4))
    export.delta(layer, tmp_path / "delta", since=tmp_path / "1")  # Only the rows.
    export.apply_delta(tmp_path / "1", tmp_path / "delta")
    export.saved_model(model, tmp_path / "2")
    old = predictions(tmp_path / "2", {"inputs": batch})
    np.testing.assert_array_equal(predictions(tmp_path / "1", {"inputs": batch}), old)
    dense = model.layers[-2]
    dense.set_weights([weight + 1 for weight in dense.get_weights()])
    export.delta(model, tmp_path / "delta2", since=tmp_path / "1")
    export.apply_delta(tmp_path / "1", tmp_path / "delta2")
    export.saved_model(model, tmp_path / "3")
    new = predictions(tmp_path / "3", {"inputs": batch})
    assert (new != old).any()
    np.testing.assert_array_equal(predictions(tmp_path / "1", {"inputs": batch}), new)


def test_mismatched_weights_raise(tmp_path):
    model = make_model()
    export.saved_model(model, tmp_path / "1")
    export.delta(model, tmp_path / "delta", since=tmp_path / "1")
    file = tmp_path / "delta" / "weights.npz"
    with np.load(file) as arrays:
        values = dict(arrays)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"an unreadable weights.npz"):
        export.apply_delta(tmp_path / "1", tmp_path / "delta")
    np.savez(file, **{**values, "1": np.zeros(3, np.float32)})
    with pytest.raises(
        ValueError, match=r"Invalid `delta_path`.*with shape \[3\]\. Expected shape"
    ):
        export.apply_delta(tmp_path / "1", tmp_path / "delta")
    manifest = tmp_path / "delta" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["weights"][1]["shape"] = [99]
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"Invalid `delta_path`.*weights"):
        export.apply_delta(tmp_path / "1", tmp_path / "delta")
