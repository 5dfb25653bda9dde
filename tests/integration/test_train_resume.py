"""slipstream-train is killed with SIGKILL, goes on with --resume, and ends as if it never was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.checkpoint.array_file import ArrayFile
from slipstream_tf.cli import train
from slipstream_tf.cli.flag_set import run_program

PROGRAM = Path(__file__).with_name("killed_train.py")
# Two epochs of 23 and a half batches.
SMALL = (
    "--data=generated:3000:50", "--batch_size=128", "--epochs=2", "--dim=4", "--mlp=8",
    "--bottom=8", "--dropout=0.2",
)  # fmt: skip
EVERY = 7
SKIPS = {
    "none": ("--skip=none",),
    "mask": ("--skip=gradients", "--metric=signal", "--target_skip=0.6", "--rows_optimizer=adam"),
    "defer": ("--skip=defer", "--capacity=40", "--eviction=lfu", "--evaluate_every=9"),
    "inputs": ("--skip=inputs", "--target_skip=0.6", "--keep_rate=0.2", "--alpha=0.5"),
    "remembered": (
        "--skip=inputs", "--score=remembered_loss", "--target_skip=0.5", "--saturated_share=1",
        "--max_skips=2",
    ),
    "shadow": ("--shadow", "--alpha=0.5"),
    "segregate": ("--segregate", "--hot_budget_mb=0.01"),
}  # fmt: skip
# Of the record, what is not of the run itself.
TIMES = ("seconds", "wall_seconds", "seconds_per_step_after_warmup")
PLACES = ("flags", "resumed_at", "machine", "versions", "summary")


def flags_of(way: str) -> list[str]:
    window = () if way in ("none", "segregate") else ("--snapshot_interval=5",)
    return [*SMALL, *SKIPS[way], *window, f"--checkpoint_every={EVERY}"]


def run(output: Path, *flags: str) -> dict[str, Any]:
    assert run_program(train.make_flags(), train.main, [*flags, f"--output={output}"]) == 0
    return json.loads((output / "metrics.json").read_text())


def kill(warm: list[str], step: int, output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *warm, str(PROGRAM), str(step), *flags, f"--output={output}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not k.endswith("seconds")}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def newest(output: Path) -> Path:
    return sorted((output / "checkpoints").glob("checkpoint-*"))[-1]


def require_same_checkpoint(one: Path, other: Path) -> None:
    """The newest checkpoints hold bitwise the same rows, slots, counts, weights and optimizer."""
    steps = [json.loads((p / "manifest.json").read_text())["step"] for p in (one, other)]
    assert steps[0] == steps[1]
    tables = sorted(path.name for path in (one / "rank-0").glob("table-*"))
    assert len(tables) == 26
    for name in tables:
        files = [ArrayFile(path / "rank-0" / name) for path in (one, other)]
        groups = [file.read("rows") for file in files]
        assert len(groups[0]) == len(groups[1])
        for part, values in groups[0].items():
            np.testing.assert_array_equal(values, groups[1][part], err_msg=f"{name} {part}")
    states = [tf.train.load_checkpoint(str(path / "rank-0" / "state")) for path in (one, other)]
    names = states[0].get_variable_to_shape_map()
    assert set(names) == set(states[1].get_variable_to_shape_map()) and len(names) > 10
    for name in names:
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH":
            values = [state.get_tensor(name) for state in states]
            np.testing.assert_array_equal(*values, err_msg=name)


@pytest.mark.parametrize("way", SKIPS)
def test_killed_and_resumed_is_as_if_never_stopped(
    way: str, warm: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags_of(way)
    straight = run(tmp_path / "straight", *flags)
    killed = tmp_path / "killed"
    # In the first epoch, then in the second; once before anything is saved.
    for step, expected in ((5, "from the beginning"), (17, "step 14"), (32, "step 28")):
        done = kill(warm, step, killed, *flags, "--resume")
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        assert not (killed / "metrics.json").exists()
        if step == 5:
            assert expected in done.stdout
    resumed = run(killed, *flags, "--resume")
    assert "step 28" in capsys.readouterr().out
    assert resumed["resumed_at"] == [14, 28] and straight["resumed_at"] == []
    for name in straight:
        if name not in (*TIMES, *PLACES):
            assert without_times(resumed[name]) == without_times(straight[name]), name
    require_same_checkpoint(newest(tmp_path / "straight"), newest(killed))
    assert straight["inputs"]["seen"] == 6_000
    if way in ("inputs", "remembered"):
        assert straight["inputs"]["skipped"] > 200
    if way == "defer":
        assert set(straight["rows"].values()) <= set(range(41))
    # Times add up over the parts.
    seconds = [place["seconds"] for place in resumed["progress"]]
    assert seconds == sorted(seconds) and resumed["seconds"]["training"] > seconds[-1]
    assert resumed["wall_seconds"] > resumed["seconds"]["training"]
