"""checkpoint.writing: rank 0 waits for ranks that are alive, and no longer."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from slipstream_tf.checkpoint import writing
from slipstream_tf.checkpoint.manifest import Manifest
from slipstream_tf.checkpoint.tables import without_least


def manifest(size: int) -> Manifest:
    return Manifest("me", 7, size, "replicated", [], {}, [], [], None, {})


def note(staging: Path, rank: int) -> None:
    (staging / f"rank-{rank}").mkdir(exist_ok=True)
    told = {"checkpoint": "me", "files": {}, "tables": [], "position": None, "rng": None}
    path = staging / f"rank-{rank}.json"
    path.with_suffix(".partial").write_text(json.dumps({**told, "saturation": None}))
    path.with_suffix(".partial").rename(path)


def test_a_rank_that_died_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_PATIENCE_SECONDS", 0.3)
    staging = tmp_path / ".saving"
    staging.mkdir()
    note(staging, 0)
    (staging / "rank-1").mkdir()
    with pytest.raises(RuntimeError, match=r"Rank 1 did not write .* no sign of life in .*rank-1"):
        writing.finish_with_all(tmp_path, "checkpoint-000001", manifest(2), 3)
    assert not (tmp_path / "checkpoint-000001").exists()


def test_a_rank_that_lives_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(writing, "_BEAT_SECONDS", 0.05)
    staging = tmp_path / ".saving"
    (staging / "rank-1").mkdir(parents=True)
    note(staging, 0)

    def write_slowly() -> None:
        with writing._signs_of_life(staging / "rank-1"):
            time.sleep(3.0)
        note(staging, 1)

    thread = threading.Thread(target=write_slowly)
    thread.start()
    writing.finish_with_all(tmp_path, "checkpoint-000001", manifest(2), 3)
    thread.join()
    assert (tmp_path / "checkpoint-000001" / "manifest.json").exists()
    assert os.listdir(tmp_path) == ["checkpoint-000001"]


def test_rows_leave_as_they_would_from_a_full_table() -> None:
    contents = {
        "keys": np.arange(5),
        "rows": np.arange(10, dtype=np.float32).reshape(5, 2),
        "slots": np.zeros((5, 0), np.float32),
        "counts": np.array([3, 1, 2, 9, 1], np.float32),
        "last_used": np.array([1, 2, 3, 4, 5]),
        "steps": np.array([7, 8]),
    }
    pinned = np.array([1])
    by_count = without_least(contents, 3, pinned, "lfu")
    assert by_count["keys"].tolist() == [0, 1, 3]
    assert by_count["rows"].tolist() == contents["rows"][[0, 1, 3]].tolist()
    assert without_least(contents, 3, pinned, "lru")["keys"].tolist() == [1, 3, 4]
    assert without_least(contents, 5, pinned, "lru") is contents
    # Pinned ones stay, whatever the room.
    assert without_least(contents, 0, np.arange(5), "lfu")["keys"].size == 5
