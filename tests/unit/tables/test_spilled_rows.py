"""Tests of tables that exceed memory and spill rows to disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from store_files import restore, save
from thread_jobs import Threads

from slipstream_tf import Slipstream, Storage, Table, Window, initializers, optimizers
from slipstream_tf.distributed import ShardedStore
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables import NativeStore

SPECS = [FeatureSpec("t", "t", padding_key=None)]
DIM = 32
MAX_ROWS = 512
MEMORY = MAX_ROWS * Storage().row_bytes(DIM, DIM)


def store_of(spill: Path | None, memory: int | str = MEMORY) -> NativeStore:
    storage = Storage() if spill is None else Storage(memory=memory, spill=str(spill))
    table = Table("t", DIM, initializer=initializers.RandomUniform(seed=4), storage=storage)
    return NativeStore([table], optimizers.Adagrad(0.1))


def batches(
    count: int, seed: int = 0, maximum: int = 8000
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(seed)
    for _ in range(count):
        keys = np.minimum(generator.zipf(1.2, 200) * 7, maximum) + generator.integers(0, 40, 200)
        yield keys, generator.normal(size=(200, DIM)).astype(np.float32)


def train(store: Any, count: int, seed: int = 0) -> None:
    for keys, gradient in batches(count, seed):
        packed = pack({"t": tf.constant(keys)}, SPECS)
        _, plan = store.lookup(packed, training=True)
        store.apply_gradients(plan, [tf.constant(gradient)])


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name], err_msg=name)


def test_spilled_rows_equal_table_in_memory(tmp_path: Path) -> None:
    spilled, memory = store_of(tmp_path), store_of(None)
    for store in (spilled, memory):
        train(store, 60)
    assert_same(spilled.export_table("t"), memory.export_table("t"))
    keys = np.arange(8000)
    for ours, theirs in zip(spilled.gather("t", keys), memory.gather("t", keys), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    snapshot = tf.zeros((keys.size, DIM))
    for ours, theirs in zip(
        spilled.measure("t", keys, snapshot, "linf"),
        memory.measure("t", keys, snapshot, "linf"),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)
    found = spilled.spill_statistics("t")
    assert found.rows_in_memory <= MAX_ROWS + 200
    assert found.rows_in_memory + found.rows_on_disk == memory.size("t")
    assert found.rows_read > 0 and found.rows_written > 0 and found.disk_bytes > 0
    assert memory.spill_statistics("t").rows_on_disk == 0
    # The files have no directory entry.
    assert not list(tmp_path.iterdir())


def test_prefetch_reads_rows_in_advance(tmp_path: Path) -> None:
    spilled, memory = store_of(tmp_path), store_of(None)
    for store in (spilled, memory):
        train(store, 30)
    before = spilled.spill_statistics("t")
    for keys, gradient in batches(30, seed=1):
        for store in (spilled, memory):
            packed = pack({"t": tf.constant(keys)}, SPECS)
            store.prefetch_rows(packed)
            _, plan = store.lookup(packed, training=True)
            store.apply_gradients(plan, [tf.constant(gradient)])
    after = spilled.spill_statistics("t")
    read = after.rows_read - before.rows_read
    assert read > 0
    assert after.rows_read_ahead - before.rows_read_ahead == read
    assert_same(spilled.export_table("t"), memory.export_table("t"))


@pytest.mark.parametrize("mode", ["mask", "defer"])
def test_policies_equal_table_in_memory(mode: str, tmp_path: Path) -> None:
    policy = UpdatePolicy(mode)
    if mode == "defer":
        policy = UpdatePolicy("defer", "movement", movement=0.05, max_age=7, max_rows=10_000)
    spilled, memory = store_of(tmp_path), store_of(None)
    hot = np.arange(7, 200, 7)
    for store in (spilled, memory):
        train(store, 10)
        store.set_update_policy("t", policy)
        store.set_row_flags("t", hot, np.ones(hot.size, np.uint8))
        train(store, 30, seed=1)
        store.flush()
    assert_same(spilled.export_table("t"), memory.export_table("t"))
    assert spilled.update_counts("t").sent == memory.update_counts("t").sent


def test_checkpoint_moves_between_spilled_table_and_memory(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    whole = store_of(None)
    train(whole, 40)
    manifest = save(tmp_path / "1", [whole], "replicated")
    spilled = store_of(tmp_path / "spill")
    restore(tmp_path / "1", manifest, [spilled], "replicated", UpdatePolicy())
    assert spilled.spill_statistics("t").rows_on_disk > 0
    train(spilled, 10, seed=1)
    manifest = save(tmp_path / "2", [spilled], "replicated")
    back = store_of(None)
    restore(tmp_path / "2", manifest, [back], "replicated", UpdatePolicy())
    train(whole, 10, seed=1)
    assert_same(back.export_table("t"), whole.export_table("t"))


def test_model_trains_and_predicts_like_in_memory(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 3000, (2048, 2))
    label = (keys.sum(axis=1) % 2).astype(np.float32)
    predictions = []
    for spill in (None, tmp_path):
        keras.utils.set_random_seed(0)
        storage = Storage() if spill is None else Storage(memory=MEMORY, spill=str(spill))
        table = Table("t", DIM, initializer=initializers.RandomUniform(seed=4), storage=storage)
        layer = EmbeddingCollection([table], optimizers.Adagrad(0.1))
        inputs = {"t": keras.Input((2,), dtype="int64", name="t")}
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)["t"]))
        model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
        model.fit({"t": keys}, label, batch_size=128, epochs=2, verbose=0, shuffle=False)
        predictions.append(model.predict({"t": keys}, batch_size=256, verbose=0))
        if spill is not None:
            assert layer.store.spill_statistics("t").rows_on_disk > 1000
    np.testing.assert_array_equal(*predictions)


@pytest.mark.parametrize("by", ["layer", "engine", "engine of two layers"])
def test_datasets_prefetch_rows_of_batches(by: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 3000, (4096, 2))
    label = (keys.sum(axis=1) % 2).astype(np.float32)
    storage = Storage(memory=MEMORY, spill=str(tmp_path))
    # A model may use some features of a layer, while an engine counts the keys of all features.
    features = {"t": "t", "unused": "t"} if by == "layer" else None
    tables = [Table("t", DIM, storage=storage)]
    layer = EmbeddingCollection(tables, optimizers.Adagrad(0.1), features)
    in_memory = EmbeddingCollection([Table("u", DIM)], optimizers.Adagrad(0.1))
    inputs = {name: keras.Input((2,), dtype="int64", name=name) for name in ("t", "u")}
    pooled = layer({"t": inputs["t"]})["t"] + in_memory({"u": inputs["u"]})["u"]
    model = keras.Model(inputs, keras.layers.Dense(1)(pooled))
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensor_slices(({"t": keys, "u": keys}, label)).batch(128)
    callbacks = []
    if by == "layer":
        data = layer.prefetch_rows(data).prefetch(2)
    else:
        slipstream = Slipstream(layer if by == "engine" else [layer, in_memory], window=Window(8))
        data, callbacks = slipstream.apply(data), [slipstream.callback()]
    model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
    found = layer.store.spill_statistics("t")
    assert found.rows_read > 3000
    # An engine also reads rows of hot keys at window ends, which are not prefetched.
    assert found.rows_read_ahead > 0.5 * found.rows_read
    # `prefetched` returns the data set itself if all tables are in memory.
    other = EmbeddingCollection([Table("t", DIM)], optimizers.Adagrad(0.1))
    assert other.prefetch_rows(data) is data


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"memory": "1GB"},
            r"`spill`: None for Storage\(memory='1GB'\).*both `memory` and `spill`",
        ),
        ({"spill": "/tmp"}, r"`memory`: None for Storage\(spill='/tmp'\).*both"),
        ({"memory": 0, "spill": "/tmp"}, r"`memory`: 0 for Storage"),
        ({"memory": "much", "spill": "/tmp"}, r"`memory`: 'much'"),
        ({"memory": 1, "spill": ""}, r"`spill`: ''.*a non-empty path of a folder"),
        ({"memory": 1, "spill": 5}, r"`spill`: 5.*a non-empty path of a folder"),
    ],
)
def test_invalid_settings_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Storage(**arguments)


def test_missing_directory_is_named_at_construction(tmp_path: Path) -> None:
    # Not earlier, because a configuration may be loaded on another machine.
    table = Table("t", DIM, storage=Storage(memory=1 << 20, spill=tmp_path / "none"))
    assert Table.from_config(table.get_config()) == table
    with pytest.raises(ValueError, match=rf"'t'.*{tmp_path}/none.*with write permission\.$"):
        NativeStore([table])


def test_batch_larger_than_memory_raises(tmp_path: Path) -> None:
    store = store_of(tmp_path, memory=64 * 256)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"a batch needs \d+ rows.*holds 64"):
        train(store, 1)
    assert store.size("t") == 0


def test_owners_prefetch_rows_for_other_ranks(tmp_path: Path) -> None:
    steps = 40

    def run(comm: Any, spill: Path | None) -> Any:
        (table,) = store_of(spill).tables
        store = ShardedStore([table], optimizers.Adagrad(0.1), comm, prefetch=spill is not None)
        drawn = [*batches(steps, seed=comm.rank), (np.arange(9), np.zeros((9, DIM), np.float32))]
        packed = [pack({"t": tf.constant(keys)}, SPECS) for keys, _ in drawn]
        for now, following, (_, gradient) in zip(packed, packed[1:], drawn, strict=False):
            _, plan = store.lookup(now, training=True)
            if spill is not None:
                store.prefetch_keys(following)
            store.apply_gradients(plan, [tf.constant(gradient)])
        read = store.spill_statistics("t")
        return store.export_table("t"), read.rows_read, read.rows_read_ahead

    for ours, theirs in zip(
        Threads(2).run(lambda comm: run(comm, tmp_path)),
        Threads(2).run(lambda comm: run(comm, None)),
        strict=True,
    ):
        assert_same(ours[0], theirs[0])
        _, rows_read, rows_read_ahead = ours
        assert rows_read_ahead > rows_read / 2 > 0


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mounts a file system of the given size, or skips the test."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_raises_and_keeps_rows(tmp_path: Path) -> None:
    with small_disk(tmp_path, "1m"):
        spilled, memory = store_of(tmp_path), store_of(None)
        keys = np.arange(20_000)
        rows = np.random.default_rng(0).normal(size=(keys.size, DIM)).astype(np.float32)
        written = 0
        with pytest.raises(
            tf.errors.ResourceExhaustedError, match=f"cannot allocate.*{tmp_path}.*No space"
        ):
            for part in np.array_split(keys, 200):
                spilled.write_rows("t", part, rows[part])
                written += part.size
        assert MAX_ROWS < written < keys.size
        memory.write_rows("t", keys[:written], rows[:written])
        ours, theirs = (store.gather("t", keys[:written])[0] for store in (spilled, memory))
        np.testing.assert_array_equal(ours, theirs)
        # The table works again when the disk has free space.
        subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path)], check=True)
        for part in np.array_split(keys, 200):
            spilled.write_rows("t", part, rows[part])
        np.testing.assert_array_equal(spilled.gather("t", keys)[0], rows)
        del spilled
