"""slipstream-train on two ranks, one of which is killed: --resume ends as if it never was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SMALL = (
    "--data=generated:3900:400", "--dim=4", "--mlp=8", "--bottom=8", "--dropout=0.2",
    "--batch_size=64", "--epochs=2", "--threads=1", "--snapshot_interval=5",
    "--checkpoint_every=8",
)  # fmt: skip
SKIPS = {
    "replicated": ("--skip=both", "--score=remembered_loss", "--saturated_share=1"),
    "sharded": (
        "--skip=defer", "--placement=sharded", "--capacity=150", "--eviction=lfu",
        "--evaluate_every=9",
    ),
}  # fmt: skip


def run(run_ranks: Any, output: Path, *flags: str, first: tuple[str, ...] = ()) -> Any:
    return run_ranks("train_rank.py", 2, *first, *SMALL, *flags, f"--output={output}")


def record_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "metrics.json").read_text())


def numbers(value: Any) -> Any:
    """Without times, and with numbers that compare to float tolerance."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not k.endswith("seconds") and k != "traffic"}
        return {name: numbers(part) for name, part in kept.items()}
    if isinstance(value, list):
        return [numbers(part) for part in value]
    return pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value


@pytest.mark.parametrize("way", SKIPS)
def test_a_killed_rank(run_ranks: Any, way: str, tmp_path: Path) -> None:
    flags, killed = SKIPS[way], tmp_path / "killed"
    done = run(run_ranks, tmp_path / "straight", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    # In the second epoch.
    done = run(run_ranks, killed, *flags, first=("kill-1-at", "37"))
    assert done.returncode != 0 and not (killed / "metrics.json").exists()
    assert " has lost rank 1 (127.0.0.1): its process has ended without a word" in (
        done.stdout + done.stderr
    )
    refused = run(run_ranks, killed, *flags)
    lines = [line for line in refused.stderr.splitlines() if "slipstream-train:" in line]
    assert refused.returncode != 0 and len(lines) == 1 and "--resume" in lines[0]
    done = run(run_ranks, killed, *flags, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("goes on from") == 1
    straight, resumed = record_of(tmp_path / "straight"), record_of(killed)
    # The checkpoint before is the newest where one was being written.
    assert resumed["resumed_at"] in ([24], [32])
    for name in ("test", "training", "inputs", "rows", "progress", "evaluations", "gradient_rows"):
        assert resumed[name] == numbers(straight[name]), name
    assert len(resumed["windows"]) == len(straight["windows"]) > 5
    assert resumed["inputs"]["seen"] == 7_800
    sent, before = resumed["ranks"]["bytes"], straight["ranks"]["bytes"]
    assert sent["gradients"] == pytest.approx(before["gradients"], rel=0.01)


def test_another_number_of_ranks(run_ranks: Any, tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = run(run_ranks, output, "--skip=defer", "--max_inputs=2000")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run_ranks(
        "train_rank.py", 1, *SMALL, "--skip=defer", "--max_inputs=2000", "--resume",
        f"--output={output}",
    )  # fmt: skip
    assert done.returncode == 2 or done.returncode == 1
    assert "is of 2 rank(s), and this job has 1" in done.stderr
