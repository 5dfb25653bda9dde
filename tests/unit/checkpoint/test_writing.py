"""Tests of checkpoint writers that wait for ranks or are killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream_tf._utils import disk
from slipstream_tf.checkpoint import writing
from slipstream_tf.checkpoint.manifest import Manifest, read_manifest, require_whole
from slipstream_tf.checkpoint.table_parts import TablePart
from slipstream_tf.checkpoint.table_state import TableState
from slipstream_tf.checkpoint.tables import SavedTable, keep_most_valuable
from slipstream_tf.checkpoint.writing import RankFiles, finish_with_all, read_engines, write_rank


def manifest(size: int) -> Manifest:
    return Manifest("me", 7, size, "replicated", [], {}, [], [], None, {})


def note(staging: Path, rank: int) -> None:
    (staging / f"rank-{rank}").mkdir(exist_ok=True)
    reported = {"checkpoint": "me", "files": {}, "tables": [], "position": None, "rng": None}
    path = staging / f"rank-{rank}.json"
    path.with_suffix(".partial").write_text(json.dumps({**reported, "saturation": None}))
    path.with_suffix(".partial").rename(path)


def test_dead_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_PATIENCE_SECONDS", 0.3)
    staging = tmp_path / ".saving"
    staging.mkdir()
    note(staging, 0)
    (staging / "rank-1").mkdir()
    with pytest.raises(RuntimeError, match=r"Rank 1 did not write .*rank-1 did not change for"):
        writing.finish_with_all(tmp_path, "checkpoint-000001", manifest(2), 3)
    assert not (tmp_path / "checkpoint-000001").exists()


def test_slow_rank_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(writing, "_BEAT_SECONDS", 0.05)
    staging = tmp_path / ".saving"
    (staging / "rank-1").mkdir(parents=True)
    note(staging, 0)

    def write_slowly() -> None:
        with writing._heartbeat(staging / "rank-1"):
            time.sleep(3.0)
        note(staging, 1)

    thread = threading.Thread(target=write_slowly)
    thread.start()
    writing.finish_with_all(tmp_path, "checkpoint-000001", manifest(2), 3)
    thread.join()
    assert (tmp_path / "checkpoint-000001" / "manifest.json").exists()
    assert os.listdir(tmp_path) == ["checkpoint-000001"]


def test_import_beyond_capacity_evicts_like_full_table() -> None:
    contents = {
        "keys": np.arange(5),
        "rows": np.arange(10, dtype=np.float32).reshape(5, 2),
        "slots": np.zeros((5, 0), np.float32),
        "counts": np.array([3, 1, 2, 9, 1], np.float32),
        "last_used": np.array([1, 2, 3, 4, 5]),
        "steps": np.array([7, 8]),
    }
    pinned = np.array([1])
    by_count = keep_most_valuable(contents, 3, pinned, "lfu")
    assert by_count["keys"].tolist() == [0, 1, 3]
    assert by_count["rows"].tolist() == contents["rows"][[0, 1, 3]].tolist()
    assert keep_most_valuable(contents, 3, pinned, "lru")["keys"].tolist() == [1, 3, 4]
    assert keep_most_valuable(contents, 5, pinned, "lru") is contents
    # Pinned rows are kept even if they exceed the limit.
    assert keep_most_valuable(contents, 0, np.arange(5), "lfu")["keys"].size == 5


ROWS, DIM, POINTS = 100, 2, 60
ACTIONS = ("write", "sync", "rename", "make_folder", "remove")


def part(step: int, table: int) -> TablePart:
    """Returns a table in which every value is the step."""
    keys = np.arange(ROWS) * (table + 1)
    contents = {
        "keys": keys,
        "rows": np.full((ROWS, DIM), step, np.float32),
        "slots": np.full((ROWS, DIM), step, np.float32),
        "counts": np.full(ROWS, step, np.float32),
        "last_used": np.empty(0, np.int64),
        "steps": np.array([step, step]),
    }
    deferred = {
        "keys": keys[:3],
        "ages": np.array([3, 2, 1]),
        "ranks": np.zeros(3, np.int32),
        "sums": np.full((3, DIM), step, np.float32),
        "learning_rate": np.float32(step),
    }
    state = TableState(f"t{table}", contents, deferred, num_deferred=3)
    return TablePart(state, DIM, DIM, "Adagrad", rows=ROWS)


def save(directory: Path, step: int, keep: int = 2) -> None:
    """Writes a checkpoint as `CheckpointManager` does, without the TensorFlow files."""
    name = writing.stage(directory)
    (directory / writing.STAGING / "rank-0").mkdir()
    files = RankFiles(
        0, [part(step, 0), part(step, 1)], {"learning_rate": step}, _state(step), step, None
    )
    write_rank(directory / writing.STAGING, f"id-{step}", files)
    manifest = Manifest(f"id-{step}", step, 1, "replicated", [], {}, [], [], None, {})
    finish_with_all(directory, name, manifest, keep)


def _state(step: int) -> dict[str, Any]:
    tables = {"t0": {"keys": np.full(5, step)}}
    loop = {"step": step, "threshold": 0.5}
    return {"tracker": {"reports": {"windows": 0}, "loop": loop, "tables": tables}}


def newest(directory: Path) -> int:
    """Returns the step of the newest valid checkpoint, after checking its values."""
    name = next(name for name in writing.names(directory) if writing.is_whole(directory / name))
    folder = directory / name
    manifest = read_manifest(folder)
    require_whole(folder, manifest, ["rank-0"])
    step = manifest.step
    for index, entry in enumerate(manifest.tables):
        table = SavedTable([folder / f"rank-0/table-{index:03d}"], manifest.checkpoint, entry)
        contents = table.contents()
        assert len(contents["keys"]) == ROWS
        for column in ("rows", "slots", "counts", "steps"):
            assert (contents[column] == step).all(), (column, step)
        assert (table.deferred(0, 1)["sums"] == step).all()
    rates, states = read_engines(folder, manifest)
    assert rates is not None and rates["learning_rate"] == step
    assert (states[0]["tracker"]["tables"]["t0"]["keys"] == step).all()
    assert manifest.positions == [step]
    return step


def in_a_process(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process and returns the exit code."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_actions(directory: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    counted = [0]
    with monkeypatch.context() as patched:
        for name in ACTIONS:
            action = getattr(disk, name)

            def count(*arguments: Any, action: Any = action) -> None:
                counted[0] += 1
                action(*arguments)

            patched.setattr(disk, name, count)
        save(directory, 3)
    return counted[0]


def killed_at(point: int, is_after: bool) -> None:
    """Makes the process kill itself at disk operation number `point`."""
    left = [point]
    for name in ACTIONS:
        action = getattr(disk, name)

        def act(*arguments: Any, action: Any = action, name: str = name) -> None:
            left[0] -= 1
            if left[0] == 0:
                if is_after:
                    action(*arguments)
                elif name == "write":
                    file, data = arguments
                    view = memoryview(data).cast("B")
                    file.write(view[: len(view) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            action(*arguments)

        setattr(disk, name, act)


def test_killed_writer_keeps_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = tmp_path / "counted"
    for step in (1, 2):
        save(counted, step)
    total = count_actions(counted, monkeypatch)
    assert newest(counted) == 3 and total >= POINTS // 2
    points = [(at, after) for after in (False, True) for at in range(1, total + 1)]
    assert len(points) >= POINTS
    found = []
    for at, after in points:
        directory = tmp_path / f"{at}-{after}"
        save(directory, 1)
        save(directory, 2)

        def work(directory: Path = directory, at: int = at, after: bool = after) -> None:
            killed_at(at, after)
            save(directory, 3)

        assert in_a_process(work) == -signal.SIGKILL, (at, after)
        step = newest(directory)
        assert step in (2, 3)
        found.append(step)
        # The next checkpoint is written normally.
        save(directory, 4)
        assert newest(directory) == 4
        assert not (directory / writing.STAGING).exists()
    assert set(found) == {2, 3}


def test_randomly_killed_writers_keep_complete_checkpoint(tmp_path: Path) -> None:
    """Kills 50 successive writers at random times without injected faults."""
    random = np.random.default_rng(1)
    step = 1
    save(tmp_path, step)
    for _ in range(50):
        first = step + 1

        def work(first: int = first) -> None:
            for later in range(first, first + 1000):
                save(tmp_path, later)

        child = os.fork()
        if child == 0:
            try:
                work()
            finally:
                os._exit(1)
        time.sleep(random.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        now = newest(tmp_path)
        assert now >= step
        step = now


def test_rank_with_full_disk_reports_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note: without this error file, rank 0 would wait forever."""
    room = 5000
    write = disk.write

    def write_if_there_is_room(file: Any, data: Any) -> None:
        used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        left = room - used
        write(file, memoryview(data).cast("B")[: max(left, 0)])
        if len(memoryview(data).cast("B")) > left:
            raise OSError(28, "No space left on device")

    writing.stage(tmp_path)
    staging = tmp_path / writing.STAGING
    (staging / "rank-1").mkdir()
    files = RankFiles(1, [part(1, 0), part(1, 1)], {"learning_rate": 1.0}, _state(1), 1, None)
    with monkeypatch.context() as patched:
        patched.setattr(disk, "write", write_if_there_is_room)
        with pytest.raises(OSError, match="No space left"):
            write_rank(staging, "id", files)
    note = json.loads((staging / "rank-1.json").read_text())
    assert note == {"checkpoint": "id", "error": "OSError: [Errno 28] No space left on device"}
