"""Tests that `disk` replaces a file completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream_tf._utils import disk


def test_file_is_renamed_after_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, done = tmp_path / "file", []
    path.write_text("before")
    for name in ("sync", "rename"):
        action = getattr(disk, name)

        def act(*paths: Path, action: object = action, name: str = name) -> None:
            done.append((name, paths[0].name.replace(str(os.getpid()), "PID"), path.read_text()))
            action(*paths)  # type: ignore[operator]

        monkeypatch.setattr(disk, name, act)
    disk.write_text(path, "after")
    assert done == [
        ("sync", "file.PID.part", "before"),
        ("rename", "file.PID.part", "before"),
        ("sync", tmp_path.name, "after"),
    ]
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("is_present", [False, True])
def test_failed_writer_keeps_existing_file(tmp_path: Path, is_present: bool) -> None:
    path = tmp_path / "file"
    if is_present:
        path.write_text("before")
    with pytest.raises(KeyboardInterrupt), disk.whole_file(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == (["file"] if is_present else [])
    assert not is_present or path.read_text() == "before"
