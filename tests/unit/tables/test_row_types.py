"""Tests of tables with bfloat16 or float16 rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from store_files import restore, save

from slipstream_tf import Storage, Table, export, initializers, optimizers
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables import NativeStore

NARROW = (
    Storage("bfloat16"),
    Storage("float16"),
    Storage("bfloat16", "bfloat16"),
    Storage("float16", "bfloat16"),
    Storage("float32", "bfloat16"),
)
narrow = pytest.mark.parametrize("storage", NARROW, ids=str)
SPECS = [FeatureSpec("t", "t", padding_key=None)]


def table_of(storage: Storage, dim: int = 8) -> Table:
    return Table("t", dim, initializer=initializers.RandomUniform(seed=4), storage=storage)


def store_of(storage: Storage, dim: int = 8) -> NativeStore:
    return NativeStore([table_of(storage, dim)], optimizers.Adagrad(0.1))


def train(store: Any, steps: int, seed: int = 0) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        packed = pack({"t": tf.constant(generator.integers(0, 50, 40))}, SPECS)
        (rows,), plan = store.lookup(packed, training=True)
        gradient = generator.normal(size=rows.shape).astype(np.float32)
        store.apply_gradients(plan, [tf.constant(gradient)])


def as_read(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(tf.as_dtype(dtype).as_numpy_dtype).astype(np.float32)


def is_lent(storage: Storage) -> bool:
    """Returns whether a value borrows 8 bits of its Adagrad slot.

    Then the value and the slot have 24 bits each.
    """
    return storage.dtype != "float32" and storage.slot_dtype == "float32"


def as_kept(values: np.ndarray, dtype: str, lent: bool) -> np.ndarray:
    if not lent:
        return as_read(values, dtype)
    precision, minimum = {"float32": (16, -140), "bfloat16": (16, -140), "float16": (19, -32)}[
        dtype
    ]
    exponent = np.maximum(np.frexp(values)[1] - precision, minimum)
    steps = np.floor(np.ldexp(np.abs(values, dtype=np.float64), -exponent) + 0.5)
    return (np.sign(values) * np.ldexp(steps, exponent)).astype(np.float32)


def contents_of(store: Any) -> dict[str, np.ndarray]:
    return store.export_table("t", flush=False)


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name], err_msg=name)


@narrow
def test_rows_have_table_dtype_and_approximate_float32(storage: Storage) -> None:
    store, floats = store_of(storage), store_of(Storage())
    for one in (store, floats):
        train(one, 20)
    ours, theirs = contents_of(store), contents_of(floats)
    for part, dtype in (("rows", storage.dtype), ("slots", storage.slot_dtype)):
        kept = as_kept(ours[part], dtype, is_lent(storage))
        np.testing.assert_array_equal(ours[part], kept)
    np.testing.assert_allclose(ours["rows"], theirs["rows"], atol=0.02)
    np.testing.assert_allclose(ours["slots"], theirs["slots"], rtol=0.05)
    gathered, found = store.gather("t", ours["keys"])
    assert found.numpy().all()
    # `gather` rounds to the dtype, with an error of at most half a step.
    step = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[storage.dtype]
    np.testing.assert_array_equal(gathered, as_read(gathered.numpy(), storage.dtype))
    np.testing.assert_allclose(gathered, ours["rows"], rtol=1.001 * step, atol=2.0**-25)


@narrow
def test_same_run_is_bitwise_equal(storage: Storage) -> None:
    first, second = store_of(storage), store_of(storage)
    for store in (first, second):
        train(store, 10)
    assert_same(contents_of(first), contents_of(second))


def test_initial_rows_are_rounded_to_table_dtype() -> None:
    for storage in NARROW:
        store = store_of(storage)
        keys = tf.constant([3, 9, 1 << 40], tf.int64)
        before, found = store.gather("t", keys)
        assert not found.numpy().any()
        (made,), _ = store.lookup(pack({"t": keys}, SPECS), training=True)
        np.testing.assert_array_equal(before, made)


def test_half_precision_halves_memory() -> None:
    keys = np.arange(100_000)
    used = {}
    for storage in (Storage(), Storage("bfloat16", "bfloat16")):
        store = store_of(storage, dim=64)
        store.write_rows("t", keys, np.ones((keys.size, 64), np.float32))
        used[storage.dtype] = store.statistics("t").allocated_bytes
    rows = keys.size * Storage().row_bytes(64, 64)
    # Memory is allocated in large steps.
    assert used["bfloat16"] < 0.7 * used["float32"]
    assert used["float32"] >= rows


@narrow
@pytest.mark.parametrize("policy", ["apply", "mask", "defer"])
def test_restored_table_continues_identically(
    storage: Storage, policy: str, tmp_path: Path
) -> None:
    rule = UpdatePolicy(policy)
    if policy == "defer":
        rule = UpdatePolicy("defer", "movement", movement=0.02, max_age=5, max_rows=1000)
    whole, resumed = store_of(storage), store_of(storage)
    whole.set_update_policy("t", rule)
    train(whole, 10)
    manifest = save(tmp_path, [whole], "replicated")
    restore(tmp_path, manifest, [resumed], "replicated", rule)
    assert_same(contents_of(whole), contents_of(resumed))
    for store in (whole, resumed):
        train(store, 5, seed=1)
        store.flush()
    assert_same(contents_of(whole), contents_of(resumed))


def test_checkpoints_store_rows_in_table_dtype(tmp_path: Path) -> None:
    sizes = {}
    for storage in (Storage(), Storage("bfloat16", "bfloat16"), Storage("float16", "bfloat16")):
        store, name = store_of(storage, dim=64), storage.dtype
        train(store, 3)
        save(tmp_path / name, [store], "replicated")
        (file,) = (tmp_path / name).rglob("table-*")
        sizes[name] = file.stat().st_size - contents_of(store)["keys"].size * 12
    # Rows and slots take nearly the whole file.
    assert sizes["bfloat16"] < 0.6 * sizes["float32"]
    assert sizes["float16"] < 0.6 * sizes["float32"]


@pytest.mark.parametrize("storage", [Storage("bfloat16"), Storage("float16")], ids=str)
def test_checkpoints_convert_between_dtypes(storage: Storage, tmp_path: Path) -> None:
    for number, (first, second) in enumerate([(Storage(), storage), (storage, Storage())]):
        saved, restored = store_of(first), store_of(second)
        train(saved, 5)
        folder = tmp_path / str(number)
        manifest = save(folder, [saved], "replicated")
        restore(folder, manifest, [restored], "replicated")
        was = contents_of(saved)
        expected = {**was, "rows": as_kept(was["rows"], second.dtype, second != Storage())}
        expected["slots"] = as_kept(was["slots"], "float32", second != Storage())
        assert_same(expected, contents_of(restored))


def test_values_beyond_dtype_range_raise() -> None:
    store = store_of(Storage("float16"))
    rows = np.zeros((2, 8), np.float32)
    rows[1, 3] = 70_000
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"key 5.*70000.*at most 65504"):
        store.write_rows("t", np.array([4, 5]), rows)
    assert store.size("t") == 0
    rule = optimizers.AdamW(0.1, decay="all")
    with pytest.raises(ValueError, match=r"float16.*all rows decay"):
        NativeStore([table_of(Storage("float16"))], rule)
    NativeStore([table_of(Storage("bfloat16"))], rule)


def layer_of(storage: Storage) -> EmbeddingCollection:
    layer = EmbeddingCollection([table_of(storage)], optimizers.Adagrad(0.1), SPECS)
    train(layer.store, 5)
    return layer


KEYS = np.array([0, 7, 33, 60, 1 << 40], np.int64)  # The last two keys have no row.


def served(layer: Any, folder: Path, **settings: Any) -> np.ndarray:
    export.saved_model(layer, folder, signature={"t": tf.TensorSpec([None], tf.int64)}, **settings)
    loaded = tf.saved_model.load(str(folder))
    return keras.tree.flatten(loaded.serve({"t": tf.constant(KEYS)}))[0].numpy()


@narrow
def test_saved_model_has_rows_of_table_dtype(storage: Storage, tmp_path: Path) -> None:
    layer = layer_of(storage)
    np.testing.assert_array_equal(served(layer, tmp_path / "1"), layer.store.gather("t", KEYS)[0])
    rows = {table.name: (table.keys, table.rows) for table in export.token(layer).tables}
    keys, found = rows["t"]
    np.testing.assert_array_equal(found, layer.store.gather("t", keys)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_saved_model_can_have_other_row_dtype(dtype: str, tmp_path: Path) -> None:
    layer = layer_of(Storage())
    expected = layer.store.gather("t", KEYS)[0].numpy()
    found = served(layer, tmp_path / "1", rows_dtype=dtype)
    largest = np.abs(expected).max(axis=1, keepdims=True)
    error = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 0.5 / 127}[dtype]
    assert (np.abs(found - expected) <= 1.001 * error * largest).all()
    np.testing.assert_array_equal(found[3:], expected[3:])


def test_deltas_compare_unrounded_rows(tmp_path: Path) -> None:
    layer = layer_of(Storage("bfloat16"))
    served(layer, tmp_path / "kept")
    served(layer, tmp_path / "rounded", rows_dtype="int8")
    train(layer.store, 1, seed=9)
    with pytest.raises(ValueError, match=r"table 't' with rows of dtype int8.*without rows_dtype"):
        export.delta(layer, tmp_path / "delta", since=tmp_path / "rounded")
    export.delta(layer, tmp_path / "delta", since=tmp_path / "kept")
    with pytest.raises(ValueError, match=r"table 't' with rows of dtype int8.*without rows_dtype"):
        export.apply_delta(tmp_path / "rounded", tmp_path / "delta")
    export.apply_delta(tmp_path / "kept", tmp_path / "delta", tmp_path / "new")
    loaded = tf.saved_model.load(str(tmp_path / "new"))
    found = keras.tree.flatten(loaded.serve({"t": tf.constant(KEYS)}))[0]
    np.testing.assert_array_equal(found, layer.store.gather("t", KEYS)[0])


def test_unknown_row_dtypes_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`rows_dtype`: 'int4'.*'int8'"):
        served(layer_of(Storage()), tmp_path / "1", rows_dtype="int4")


def test_model_trains_with_tables_of_different_dtypes() -> None:
    tables = [
        dataclasses.replace(table_of(storage), name=f"t{i}") for i, storage in enumerate(NARROW)
    ]
    layer = EmbeddingCollection(tables, optimizers.Adagrad(0.1))
    inputs = {table.name: keras.Input((3,), dtype="int64", name=table.name) for table in tables}
    joined = keras.layers.Concatenate()(list(layer(inputs).values()))
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    generator = np.random.default_rng(0)
    keys = {table.name: generator.integers(0, 20, (256, 3)) for table in tables}
    label = (keys["t0"].sum(axis=1) % 2).astype(np.float32)
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    losses = model.fit(keys, label, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
