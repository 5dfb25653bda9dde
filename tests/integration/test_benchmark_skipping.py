"""skipping.py runs with tiny settings and writes its comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_programs import TINY, claims_of, load, needs_sources, rows_of, run_benchmark


@needs_sources
def test_skipping_compares_runs_and_reuses_finished_runs(warm: list[str], tmp_path: Path) -> None:
    output = tmp_path / "results"
    flags = [
        "--task=generated_2", "--data=generated:4000", "--seeds=3,4", "--runs=fm,uniform,stop",
        f"--output={output}", f"--records={tmp_path / 'runs'}",
        *(f"--train_flag={flag}" for flag in TINY), "--thin_flag=window_steps=5",
        "--points=200",
    ]  # fmt: skip
    first = run_benchmark("skipping.py", *flags, warm=warm)
    assert first.returncode == 0, first.stderr
    runs = {run.pop("run"): run for run in rows_of(output, "skipping", "2 seeds")}
    assert (output / "skipping_generated_2.png").exists()
    assert list(runs) == ["plain", "fm", "uniform", "stop"]
    assert runs["plain"]["trained"] == 1
    for name in ("fm", "uniform", "stop"):
        assert 0.1 < runs[name]["trained"] < 0.9, name
    assert runs["stop"]["trained"] == pytest.approx(runs["fm"]["trained"], abs=0.02)
    claims = claims_of(output, "skipping")
    pairs = zip(runs["fm"]["auc"], runs["plain"]["auc"], strict=True)
    difference = sum(one - other for one, other in pairs) / 2
    assert claims["generated_2_auc_minus_plain"]["value"] == pytest.approx(difference, abs=1e-5)
    # Finished runs are not repeated.
    again = run_benchmark("skipping.py", *flags, warm=warm)
    assert again.returncode == 0 and rows_of(output, "skipping", "2 seeds")[0]["run"] == "plain"


@needs_sources
def test_interval_equals_students_t(monkeypatch: pytest.MonkeyPatch) -> None:
    interval = load("common", monkeypatch).interval
    assert interval([1.0]) is None
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2.0 - 2.4843, 2.0 + 2.4843), abs=1e-3)
