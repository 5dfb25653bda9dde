"""Tests of report files, text tables, the clock and progress bars."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from slipstream_tf._utils import disk
from slipstream_tf.telemetry import run_record, table
from slipstream_tf.telemetry.progress import TrainingBar


def test_json_is_complete_and_has_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.json"
    run_record.write_json(
        str(path), {"a": float("nan"), "b": [np.float32(0.5), np.int64(3)], "c": (1, None)}
    )
    assert json.loads(path.read_text()) == {"a": None, "b": [0.5, 3], "c": [1, None]}
    assert os.listdir(path.parent) == ["metrics.json"]


def test_failed_write_keeps_old_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    run_record.write_json(str(path), {"run": 1})
    with pytest.raises(TypeError):
        run_record.write_json(str(path), {"run": object()})
    assert json.loads(path.read_text()) == {"run": 1}
    assert os.listdir(tmp_path) == ["metrics.json"]


def test_failed_rename_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: str) -> None:
        raise OSError("no space")

    monkeypatch.setattr(disk, "rename", fail)
    with pytest.raises(OSError, match="no space"):
        run_record.write_json(str(tmp_path / "metrics.json"), {"run": 1})
    assert os.listdir(tmp_path) == []


def test_versions_and_machine_are_json_without_paths() -> None:
    text = json.dumps({"versions": run_record.versions(), "machine": run_record.machine()})
    assert "tensorflow" in text and "cores" in text
    assert os.getcwd() not in text


def test_clock_moves_seconds_between_phases() -> None:
    clock = run_record.PhaseClock()
    with clock.phase("training"):
        pass
    clock.seconds["training"] = 3.0
    clock.move(1.0, "training", "window_ends")
    assert clock.seconds == {"reading": 0, "training": 2.0, "window_ends": 1.0, "evaluation": 0}


def test_table_aligns_text_left_and_numbers_right() -> None:
    text = table.format_table(("run", "AUC"), [("plain", "0.72"), ("x", "1")])
    assert text.splitlines() == ["run     AUC", "-----  ----", "plain  0.72", "x         1"]


def test_row_of_wrong_length_is_named_in_error() -> None:
    with pytest.raises(ValueError, match=r"row 0.*2 cells"):
        table.format_table(("run", "AUC"), [("plain",)])


def test_numbers_and_seconds_are_formatted() -> None:
    assert table.number(None, 4) == "n/a" and table.number(0.71234, 4) == "0.7123"
    assert table.seconds(3.14159) == "3.1" and table.seconds(1234.5) == "1,234"


def test_bar_shows_loss_auc_and_skipped_fraction() -> None:
    stream = io.StringIO()
    with TrainingBar(100, "skip inputs", stream=stream) as bar:
        bar.update(100, 75, 0.5, 0.7123)
    text = stream.getvalue()
    for part in ("skip inputs", "100%", "loss 0.5000", "AUC 0.7123", "skipped 25.0%"):
        assert part in text


def test_hidden_bar_writes_nothing() -> None:
    stream = io.StringIO()
    with TrainingBar(None, is_shown=False, stream=stream) as bar:
        bar.update(10, 10, None, None)
    assert stream.getvalue() == ""
