"""slipstream-train with rows on disk, and with the schedules of baselines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from train_programs import SMALL, refused

from slipstream_tf.cli import build as train_build
from slipstream_tf.cli import train
from slipstream_tf.cli.program import run_program


def trained(output: Path, *flags: str) -> dict[str, Any]:
    """Runs slipstream-train in this process and returns its record."""
    assert run_program(train.make_flags(), train.main, [*flags, f"--output={output}"]) == 0
    return json.loads((output / "metrics.json").read_text())


@pytest.mark.parametrize("policy", ["", "--policies=skip_examples"])
def test_spilled_tables_give_same_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    stores = []
    build = train_build.build_embeddings
    monkeypatch.setattr(
        train_build, "build_embeddings", lambda *a: stores.append(build(*a)) or stores[-1]
    )
    # With this dimension a page holds four rows.
    flags = (*SMALL, "--dim=128", *filter(None, [policy]))
    on_disk = trained(tmp_path / "a", *flags, "--memory=1MB", f"--spill={spill}")
    assert on_disk["test"] == trained(tmp_path / "b", *flags)["test"]
    tables = stores[0].store.tables
    read = [stores[0].store.spill_statistics(table.name) for table in tables]
    assert sum(r.rows_read_ahead for r in read) > sum(r.rows_read for r in read) / 2 > 100


def test_invalid_spill_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spill = f"--spill={tmp_path / 'none'}"
    assert "cannot create a file in" in refused(capsys, *SMALL, "--memory=1MB", spill)
    assert "It requires --memory; otherwise" in refused(capsys, *SMALL, spill)
    few = refused(capsys, *SMALL, "--memory=1KB", f"--spill={tmp_path}", code=1)
    assert "a batch needs" in few and "its memory of 1000 bytes holds 64 rows" in few


@pytest.mark.parametrize("schedule", ["fae", "hotline"])
def test_baseline_trains_every_example_once(tmp_path: Path, schedule: str) -> None:
    flags = (*SMALL, "--max_examples=3000", f"--schedule={schedule}", "--hot_set_memory=50KiB")
    record = trained(tmp_path, *flags)
    assert record["examples"]["trained"] == record["examples"]["seen"] == 3000
    engine = {"hot_set_memory": "50KiB"}
    assert record["settings"]["schedule"] == schedule and record["settings"]["engine"] == engine
