"""Tests of `CheckpointManager` in one process: valid, damaged and refused checkpoints."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table
from slipstream_tf._utils import disk
from slipstream_tf._utils.agreement import on_all_ranks
from slipstream_tf.checkpoint import CheckpointMismatchError
from slipstream_tf.checkpoint.manifest import sealed
from slipstream_tf.distributed import CheckpointManager, SingleProcess
from slipstream_tf.optimizers import Adagrad
from slipstream_tf.tables.native import NativeStore

DATA = "rank-0/state.data-00000-of-00001"


class FakeRank(SingleProcess):
    """Simulates one rank of a job.

    The other ranks send the same data as this rank, or the given `others`, for example an error.
    """

    def __init__(self, rank: int, size: int, others: list[Any] | None = None) -> None:
        self.rank, self.size, self._others = rank, size, others

    def gather(self, tensor: Any, kind: Any, name: str) -> tf.Tensor:
        if self._others is None:
            return tf.concat([tensor] * self.size, 0)
        lines = [json.dumps(value).encode() + b"\n" for value in self._others]
        parts = [tf.constant(np.frombuffer(line, np.uint8)) for line in lines]
        parts.insert(self.rank, tensor)
        return tf.concat(parts, 0)


def job(
    directory: Path, value: float = 0.0, **settings: Any
) -> tuple[tf.Variable, CheckpointManager]:
    variable = tf.Variable(tf.fill([100], value))
    checkpoint = tf.train.Checkpoint(variable=variable)
    settings = {"background": False, **settings}
    return variable, CheckpointManager(directory, checkpoint, SingleProcess(), None, **settings)


def saved(directory: Path, steps: int = 3) -> list[Path]:
    """Saves one checkpoint per step; the variable's value is the step."""
    variable, checkpoints = job(directory)
    paths = []
    for step in range(1, steps + 1):
        variable.assign(tf.fill([100], float(step)))
        paths.append(checkpoints.save(step).path)
    return paths


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_newest_checkpoint_is_restored_and_old_checkpoints_are_removed(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "by it"
    paths = saved(directory, 5)
    assert names(directory) == ["checkpoint-000003", "checkpoint-000004", "checkpoint-000005"]
    variable, checkpoints = job(directory)
    found = checkpoints.restore()
    assert found is not None
    assert (found.path, found.step, found.world_size) == (paths[-1], 5, 1)
    assert found.placement == "replicated"
    np.testing.assert_array_equal(variable, np.full(100, 5.0, np.float32))


def test_empty_directory_restores_nothing(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        variable, checkpoints = job(directory, 7.0)
        assert checkpoints.restore() is None
        assert variable[0] == 7.0


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), **entries})))


DAMAGES = {
    "file missing": (lambda p: (p / DATA).unlink(), f"{DATA}: the file is missing"),
    "file cut short": (
        lambda p: truncate(p / DATA),
        f"{DATA}, offset 492: the file has 492 bytes; expected 496",
    ),
    "bit flipped": (lambda p: flip(p / DATA), f"{DATA}: the file does not match its checksum"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json: the file is missing"),
    "torn manifest": (
        lambda p: truncate(p / "manifest.json"),
        "manifest.json: the manifest is damaged",
    ),
    "no object": (
        lambda p: (p / "manifest.json").write_text("[]"),
        "manifest.json: the manifest is damaged",
    ),
    "no step": (
        lambda p: edit(p / "manifest.json", step=None),
        "manifest.json: the manifest has `step` None",
    ),
    "no files": (
        lambda p: edit(p / "manifest.json", files=[]),
        "manifest.json: the manifest has `files` []",
    ),
    "empty": (lambda p: [shutil.rmtree(p), p.mkdir()], "manifest.json: the file is missing"),
    "a way out": (
        lambda p: edit(p / "manifest.json", files={"../x": {"bytes": 1}}),
        "lists '../x'; expected files in folders",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_not_restored(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harm, reason = DAMAGES[damage]
    paths = saved(tmp_path)
    harm(paths[-1])
    variable, checkpoints = job(tmp_path)
    with caplog.at_level(logging.WARNING, "absl"):
        found = checkpoints.restore()
    assert found is not None and (found.path, found.step) == (paths[1], 2)
    assert variable[0] == 2.0
    assert str(paths[-1]) in caplog.text and reason in caplog.text

    # The number of a damaged checkpoint is not reused, and the checkpoint does not count toward the
    # checkpoints to keep. A flipped bit is an exception, because saving does not compare checksums.
    assert checkpoints.save(3).path.name == "checkpoint-000004"
    left = (2, 3, 4) if damage == "bit flipped" else (1, 2, 3, 4)
    assert names(tmp_path) == [f"checkpoint-00000{number}" for number in left]
    for step in (4, 5):
        checkpoints.save(step)
    assert names(tmp_path) == [f"checkpoint-00000{number}" for number in (4, 5, 6)]


def test_only_damaged_checkpoints_raise_error_naming_all(tmp_path: Path) -> None:
    paths = saved(tmp_path, 2)
    flip(paths[0] / DATA)
    (paths[1] / DATA).unlink()
    variable, checkpoints = job(tmp_path, 7.0)
    with pytest.raises(RuntimeError, match=r"are incomplete or damaged\. Error of rank") as raised:
        checkpoints.restore()
    for path in paths:
        assert str(path) in str(raised.value)
    assert variable[0] == 7.0


def test_unfinished_checkpoint_is_ignored(tmp_path: Path) -> None:
    paths = saved(tmp_path)
    paths[-1].rename(tmp_path / ".saving")
    _, checkpoints = job(tmp_path)
    found = checkpoints.restore()
    assert found is not None and found.step == 2
    assert checkpoints.save(3).path == paths[-1]
    assert ".saving" not in names(tmp_path)


def test_failed_write_keeps_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = saved(tmp_path)
    variable, checkpoints = job(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(4)
    found = checkpoints.restore()
    assert found is not None and found.path == paths[-1]
    assert variable[0] == 3.0


def test_variables_of_other_program_raise(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    other = tf.train.Checkpoint(other=tf.Variable(0.0))
    with pytest.raises(ValueError, match=r"it has other variables, .* optimizer\.build"):
        CheckpointManager(tmp_path, other, SingleProcess(), None).restore()


def test_other_version_is_not_reported_as_damage(tmp_path: Path) -> None:
    """An older checkpoint does not help, because the newest one is intact."""
    paths = saved(tmp_path, 2)
    edit(paths[-1] / "manifest.json", format=6)
    variable, checkpoints = job(tmp_path, 7.0)
    message = "manifest has format 6; this version reads format 5. Restore the checkpoint with the"
    with pytest.raises(CheckpointMismatchError, match=message):
        checkpoints.restore()
    assert variable[0] == 7.0


@pytest.mark.parametrize("keep", [0, 1.5, True])
def test_invalid_max_to_keep_raises(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Invalid `max_to_keep`"):
        job(tmp_path, max_to_keep=keep)


def test_invalid_step_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Invalid `step`: -1"):
        job(tmp_path)[1].save(-1)
    assert names(tmp_path) == []


def test_save_continues_in_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, checkpoints = job(tmp_path, 1.0, background=True)
    may_go, sync = threading.Event(), disk.sync

    def slow(path: Path) -> None:
        may_go.wait()
        sync(path)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "sync", slow)
        found = checkpoints.save(1, position={"batches": 3}, rng=[1, 2])
        variable.assign(tf.fill([100], 2.0))
        assert not found.path.exists()
        may_go.set()
        checkpoints.wait()
    assert found.path.exists()
    restored = checkpoints.restore()
    assert restored == found and restored.position == {"batches": 3} and restored.rng == [1, 2]
    assert variable[0] == 1.0


def test_interrupted_wait_blocks_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, checkpoints = job(tmp_path, 1.0, background=True)
    may_go, sync = threading.Event(), disk.sync

    def slow(path: Path) -> None:
        may_go.wait()
        sync(path)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(disk, "sync", slow)
        found = checkpoints.save(1)
        with monkeypatch.context() as waiting:
            waiting.setattr(futures, "wait", interrupted)
            waiting.setattr(futures.Future, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.wait()
        threading.Timer(0.2, may_go.set).start()
        checkpoints.save(2)
        assert found.path.exists(), "the second began before the first was written"
    checkpoints.wait()
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]


def test_background_error_is_raised_by_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for call in ("wait", "restore", "save"):
        _, checkpoints = job(tmp_path / call, background=True)
        with monkeypatch.context() as patched:
            patched.setattr(disk, "rename", full)
            checkpoints.save(1)
            futures.wait([checkpoints._work])
        with pytest.raises(OSError, match="No space left"):
            getattr(checkpoints, call)(*([2] if call == "save" else []))
        assert checkpoints.save(3).step == 3
        checkpoints.wait()
        assert names(tmp_path / call) == ["checkpoint-000001"]


def test_process_exits_after_checkpoint_is_written(tmp_path: Path) -> None:
    program = (
        "import sys, time, tensorflow as tf\n"
        "from slipstream_tf._utils import disk\n"
        "from slipstream_tf.distributed import CheckpointManager, SingleProcess\n"
        "sync = disk.sync\n"
        "disk.sync = lambda path: (time.sleep(0.1), sync(path))\n"
        "checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))\n"
        "CheckpointManager(sys.argv[1], checkpoint, SingleProcess(), None).save(1)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert names(tmp_path) == ["checkpoint-000001"]


def test_position_that_is_not_json_raises_before_writing(tmp_path: Path) -> None:
    _, checkpoints = job(tmp_path)
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(1, position=np.arange(3))


def test_full_disk_keeps_last_checkpoint(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs to mount a small file system")
    try:
        store = NativeStore([Table("t", 4)], Adagrad(0.1))
        settings: dict[str, Any] = {"max_to_keep": 9, "background": True}
        checkpoints = CheckpointManager(
            small / "c", tf.train.Checkpoint(), SingleProcess(), store, **settings
        )
        with pytest.raises((OSError, tf.errors.OpError), match=r"No space left|ResourceExhausted"):
            for step in range(50):
                store.import_table("t", contents(np.arange(500), float(step)))
                checkpoints.save(step)
        found = checkpoints.restore()
        assert found is not None and found.step > 1
        assert (store.export_table("t")["rows"] == found.step).all()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def contents(keys: np.ndarray, value: float, dim: int = 4, slots: int = 4) -> dict[str, np.ndarray]:
    return {
        "keys": keys,
        "rows": np.full((keys.size, dim), value, np.float32),
        "slots": np.full((keys.size, slots), value, np.float32),
        "counts": np.full(keys.size, value, np.float32),
        "last_used": np.empty(0, np.int64),
        "steps": np.zeros(2, np.int64),
    }


def test_only_changed_rows_are_written_unless_last_write_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NativeStore([Table("t", 4)], Adagrad(0.1))
    kept = CheckpointManager(
        tmp_path, tf.train.Checkpoint(), SingleProcess(), store, max_to_keep=1, background=False
    )
    expected = np.zeros((2000, 4), np.float32)

    def change(rows: int, value: float) -> None:
        expected[:rows] = value
        store.write_rows("t", np.arange(rows), expected[:rows])

    def save(step: int) -> int:
        return (kept.save(step).path / "rank-0" / "table-000").stat().st_size

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    change(2000, 1.0)
    whole = save(1)
    change(10, 2.0)
    assert save(2) < whole / 20
    change(20, 3.0)
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            kept.save(3)
    change(5, 4.0)
    assert save(4) > whole * 0.9
    change(5, 5.0)
    assert save(5) < whole / 20
    change(2000, -1.0)  # These rows are in no checkpoint.
    found = kept.restore()
    assert found is not None and found.step == 5
    expected[:20], expected[20:] = 3.0, 1.0
    expected[:5] = 5.0
    np.testing.assert_array_equal(store.export_table("t")["rows"], expected)
    change(1, 6.0)
    assert save(6) > whole * 0.9


def test_read_only_directory_raises(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "c").write_text("a file in its place")
    else:
        tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="c"):
        job(tmp_path / "c")[1].save(1)


def test_error_on_one_rank_raises_on_all_ranks() -> None:
    assert on_all_ranks(FakeRank(1, 3), lambda: {"a": 1}, "x", "write") == [{"a": 1}] * 3

    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        on_all_ranks(FakeRank(1, 2, [[None, 5]]), fail, "x", "write")
    message = "Rank 0 could not write: OSError: disk full"
    with pytest.raises(RuntimeError, match=message):
        on_all_ranks(FakeRank(1, 2, [["OSError: disk full", None]]), lambda: 5, "x", "write")
