"""Tests that checkpoints of spilled tables link row files without copying."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Storage, Table, initializers, optimizers
from slipstream_tf._utils import disk
from slipstream_tf.checkpoint.manifest import NAME, read_manifest
from slipstream_tf.distributed import CheckpointManager, SingleProcess
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables import NativeStore

SPECS = [FeatureSpec("t", "t", padding_key=None)]
DIM, KEYS = 32, 20_000
STORAGES = (Storage(), Storage(dtype="bfloat16"), Storage("float16", "bfloat16"))


def store_of(spill: Path | None, storage: Storage = STORAGES[0]) -> NativeStore:
    if spill is not None:
        spill.mkdir(exist_ok=True)
        storage = Storage(storage.dtype, storage.slot_dtype, memory="400KB", spill=str(spill))
    table = Table("t", DIM, initializer=initializers.RandomUniform(seed=4), storage=storage)
    return NativeStore([table], optimizers.Adagrad(0.1))


def train(store: NativeStore, begin: int, end: int) -> None:
    for step in range(begin, end):
        random = np.random.default_rng(step)
        keys = tf.constant(random.integers(0, KEYS, 500))
        _, plan = store.lookup(pack({"t": keys}, SPECS), training=True)
        gradient = random.normal(size=(500, DIM)).astype(np.float32)
        store.apply_gradients(plan, [tf.constant(gradient)])


def checkpoints(folder: Path, store: NativeStore, keep: int = 2) -> CheckpointManager:
    checkpoint = tf.train.Checkpoint(x=tf.Variable(1.0))
    return CheckpointManager(
        folder, checkpoint, SingleProcess(), store, max_to_keep=keep, background=False
    )


def files_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.glob("rank-0/*-rows-*")}


def assert_same(ours: NativeStore, theirs: NativeStore) -> None:
    left, right = ours.export_table("t"), theirs.export_table("t")
    for name, values in left.items():
        np.testing.assert_array_equal(values, right[name], err_msg=name)


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """Returns a folder on another file system, or skips without one."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("no second file system to write to")
    folder = Path(tempfile.mkdtemp(dir=memory))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_rows_and_counts_are_restored(storage: Storage, tmp_path: Path) -> None:
    store, whole = store_of(tmp_path / "spill", storage), store_of(None, storage)
    for one in (store, whole):
        train(one, 0, 30)
    checkpoints(tmp_path / "saved", store).save(30)
    assert store.spill_statistics("t").rows_on_disk > 5000
    for spill in (tmp_path / "spill", None):
        back = store_of(spill, storage)
        checkpoints(tmp_path / "saved", back).restore()
        assert_same(back, whole)
        train(back, 30, 35)
    train(whole, 30, 35)
    assert_same(back, whole)
    # The saved store continues to train, too.
    train(store, 30, 35)
    assert_same(store, whole)


def test_unchanged_rows_are_not_written_again(tmp_path: Path) -> None:
    store = store_of(tmp_path / "spill")
    train(store, 0, 60)
    saved = checkpoints(tmp_path / "saved", store)
    first = files_of(saved.save(60).path)
    before = store.spill_statistics("t").rows_written
    train(store, 60, 62)
    second = files_of(saved.save(62).path)
    assert len(set(first) & set(second)) > len(first) / 2
    assert all(first[name].samefile(second[name]) for name in set(first) & set(second))
    # At most the rows that were in memory and the rows of compacted files are written again.
    assert store.spill_statistics("t").rows_written - before < store.size("t") / 3
    # The second checkpoint contains only files with rows that are still in use.
    used = sum(path.stat().st_blocks * 512 for path in second.values())
    assert used < 3 * store.size("t") * 2 * 4 * DIM


def test_removing_old_checkpoints_frees_disk_space(tmp_path: Path) -> None:
    store = store_of(tmp_path / "spill")
    saved = checkpoints(tmp_path / "saved", store)
    for step in range(0, 200, 10):
        train(store, step, step + 10)
        saved.save(step + 10)
    names: dict[int, int] = {}
    for path in (tmp_path / "saved").glob("*/rank-0/*-rows-*"):
        names[path.stat().st_ino] = path.stat().st_blocks * 512
    rows = store.size("t") * 2 * 4 * DIM
    assert sum(names.values()) < 6 * rows
    assert store.spill_statistics("t").disk_bytes < 3 * rows
    # The number of descriptors does not grow with the number of checkpoints.
    assert len(os.listdir("/proc/self/fd")) < 400


def test_other_file_system_receives_copy_of_new_files(tmp_path: Path, elsewhere: Path) -> None:
    store, whole = store_of(elsewhere / "spill"), store_of(None)
    train(store, 0, 30)
    saved = checkpoints(tmp_path / "saved", store)
    first = files_of(saved.save(30).path)
    train(store, 30, 32)
    second = files_of(saved.save(32).path)
    both = set(first) & set(second)
    assert both and all(first[name].samefile(second[name]) for name in both)
    back = store_of(elsewhere / "other")
    checkpoints(tmp_path / "saved", back).restore()
    train(whole, 0, 32)
    assert_same(back, whole)


def test_damage_is_detected_before_store_changes(tmp_path: Path) -> None:
    store = store_of(tmp_path / "spill")
    train(store, 0, 20)
    saved = checkpoints(tmp_path / "saved", store)
    saved.save(20)
    train(store, 20, 30)
    last = saved.save(30).path
    first = next(path for path in last.parent.iterdir() if path != last)
    new = [path for name, path in files_of(last).items() if name not in files_of(first)]
    with new[0].open("r+b") as file:
        file.seek(5000)
        (byte,) = file.read(1)
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    back, whole = store_of(tmp_path / "other"), store_of(None)
    restored = checkpoints(tmp_path / "saved", back).restore()
    assert restored is not None and restored.step == 20
    train(whole, 0, 20)
    assert_same(back, whole)
    for path in files_of(first).values():
        path.unlink()
    with pytest.raises(
        RuntimeError,
        match=r"are incomplete or damaged\. Error of rank 0: \S*-rows-\S+: the rows at byte \d+ of "
        r"'\S+' are damaged: they do not match their checksum\. .*-rows-\S+: the file is missing",
    ):
        checkpoints(tmp_path / "saved", back).restore()
    assert_same(back, whole)


def test_manifest_contains_rows_and_sizes(tmp_path: Path) -> None:
    store = store_of(tmp_path / "spill")
    train(store, 0, 5)
    folder = checkpoints(tmp_path / "saved", store).save(5).path
    manifest = read_manifest(folder)
    assert manifest.tables[0]["rows"] == store.size("t")
    names = [name for name in manifest.files if "-rows-" in name]
    assert names and all("sha256" not in manifest.files[name] for name in names)
    assert (folder / NAME).stat().st_size < 10_000


def test_full_disk_keeps_earlier_checkpoint(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(elsewhere / "spill")
    train(store, 0, 20)
    saved = checkpoints(tmp_path / "saved", store)
    saved.save(20)
    train(store, 20, 30)
    monkeypatch.setattr(disk, "link", lambda old, new: new.mkdir())
    with pytest.raises(OSError, match="cannot create"):
        saved.save(30)
    monkeypatch.undo()
    assert saved.save(30).step == 30
    back = store_of(elsewhere / "other")
    checkpoints(tmp_path / "saved", back).restore()
    assert_same(back, store)


def test_unsupported_calls_raise(tmp_path: Path) -> None:
    store, memory = store_of(tmp_path / "spill"), store_of(None)
    train(store, 0, 2)
    contents = store.export_table("t")
    with pytest.raises(tf.errors.InvalidArgumentError, match="has a row already"):
        store.add_rows("t", contents)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"adds is true, but table .* in memory"
    ):
        memory.add_rows("t", contents)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has all rows in memory"):
        memory.seal_rows("t")
