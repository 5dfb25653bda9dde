"""The soak in small: about a minute, a kill or two, and all promises held."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="no benchmarks/ beside tests/")


@pytest.fixture(scope="module")
def report() -> ModuleType:
    """The module soak_report.py."""
    spec = importlib.util.spec_from_file_location("soak_report", BENCHMARKS / "soak_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_slope_is_that_within_groups(report: ModuleType) -> None:
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
def test_a_minute(report: ModuleType, tmp_path: Path) -> None:
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
    found = json.loads((tmp_path / "soak" / "soak.json").read_text())
    summary = found["summary"]
    assert summary["kills"] >= 1 and summary["hangs"] == 0 == summary["unexpected_ends"]
    assert all(summary["verdicts"].values())
    assert summary["last_step"] > 20 and len(found["memory"]) > 10
    assert {sample["rank"] for sample in found["memory"]} == {0, 1}
    assert (tmp_path / "soak" / "soak.png").stat().st_size > 1000
    assert "| no hang | yes |" in (tmp_path / "soak" / "soak.md").read_text()
    # No rank is left.
    assert f"{tmp_path}" not in subprocess.run(["ps", "ax"], capture_output=True, text=True).stdout
