"""A one-minute soak test with one or two kills fulfills all guarantees."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from benchmark_programs import BENCHMARKS, claims_of, load, needs_sources, rows_of

pytestmark = needs_sources


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Provides the module soak_report.py."""
    return load("soak_report", monkeypatch)


def test_slope_is_computed_within_groups(report: ModuleType) -> None:
    times = np.arange(0.0, 600.0, 5.0)
    groups = [(times, 1e9 + times * 2**20 / 60), (times + 900, 2e8 + times * 2**20 / 60)]
    assert report.slope_of(groups) == pytest.approx(60.0)
    assert report.slope_of([([1.0], [5.0])]) is None


def test_repeated_and_missing_steps_are_found(report: ModuleType) -> None:
    def part(first: int, last: int, by: float = 0.0) -> list[dict[str, float]]:
        return [{"step": s, "loss": 0.5 + s / 100 + by} for s in range(first, last + 1)]

    found = report.continuity([part(1, 10), [], part(7, 12), part(14, 15), part(13, 15, 0.1)])
    assert [entry["repeated"] for entry in found] == [4, 0, 2]
    assert [entry["is_complete"] for entry in found] == [True, False, True]
    assert found[0]["largest_difference"] == 0.0 and found[2]["largest_difference"] > 0.1


@pytest.mark.slow
def test_soak_runs_for_one_minute(report: ModuleType, tmp_path: Path) -> None:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("no Horovod: run `make horovod`")
    done = subprocess.run(
        [
            sys.executable, str(BENCHMARKS / "soak.py"), "--minutes=1", "--calm_minutes=0.4",
            "--kill_every=0.3", "--step_seconds=0.1", "--checkpoint_every=20",
            "--sample_seconds=1", "--warm_up_seconds=5", "--flat_mib_per_hour=1e9",
            "--data=generated:4000:2000", f"--output={tmp_path / 'soak'}",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    claims = claims_of(tmp_path / "soak", "soak")
    assert claims["hangs"]["value"] == 0 == claims["unexpected_ends"]["value"]
    assert all(report.summary.reached(claim) for claim in claims.values())
    values = {row["measurement"]: row for row in rows_of(tmp_path / "soak", "soak")}
    shown = {what: row["value, or minimum, mean and maximum"] for what, row in values.items()}
    assert shown["kills"] >= 1 and shown["last step"] > 20 and min(shown["rss mib"]) > 10
    assert (tmp_path / "soak" / "soak.png").stat().st_size > 1000
    # No rank is left.
    assert f"{tmp_path}" not in subprocess.run(["ps", "ax"], capture_output=True, text=True).stdout
