"""slipstream-train with predicted loss: example counts, corrected metrics, dry run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream_tf.cli import train
from slipstream_tf.cli.program import run_program

DATA = (
    "--data=generated:40000:1000:0.05", "--batch_size=256", "--dim=4", "--mlp=8", "--bottom=8",
    "--epochs=1", "--rows_learning_rate=0.05",
)  # fmt: skip
WINDOWS = ("--window_steps=8", "--warmup=0.1", "--skip_fraction=0.8")


@pytest.fixture(name="run")
def fixture_run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Returns a function that runs slipstream-train here and returns its record."""

    def run(name: str, *flags: str) -> dict[str, Any]:
        output = tmp_path / name
        assert run_program(train.make_flags(), train.main, [*flags, f"--output={output}"]) == 0
        return json.loads((output / "metrics.json").read_text())

    return run


@pytest.mark.parametrize("pilot", ["fm", "model"])
def test_subsampling_counts_every_example_and_reports_metrics(
    pilot: str, run: Callable[..., dict[str, Any]]
) -> None:
    plain = run("plain", *DATA)
    flags = (*DATA, "--policies=skip_examples", f"--pilot={pilot}", *WINDOWS)
    subsampled = run("thinned", *flags)
    inputs = subsampled["examples"]
    assert inputs["trained"] + inputs["skipped"] == inputs["seen"] == plain["examples"]["seen"]
    active = [window for window in subsampled["windows"] if not window["is_warming_up"]]
    skipped = sum(window["examples_skipped"] for window in active)
    assert skipped / sum(w["examples_seen"] for w in active) == pytest.approx(0.8, abs=0.1)
    # The training metrics are corrected and describe all examples, not only the kept ones.
    assert subsampled["training"]["loss"] == pytest.approx(plain["training"]["loss"], rel=0.2)
    assert subsampled["test"]["calibration"] == pytest.approx(1.0, abs=0.25)
    assert "Training metrics are computed on the kept examples" in subsampled["report"]


def test_dry_run_estimates_cost_and_names_uniform_control(
    run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run("plain", *DATA)
    capsys.readouterr()
    record = run("dry", *DATA, "--dry_run", "--policies=skip_examples", *WINDOWS)
    text = capsys.readouterr().out
    assert record["test"] == plain["test"] and record["examples"]["skipped"] == 0
    (saving,) = record["dry_run"]["savings"]
    assert saving["fraction"] == pytest.approx(0.8, abs=0.1)
    assert 0 <= saving["min_cost"] < saving["max_cost"]
    assert "The kept examples have larger weights to represent the skipped" in saving["basis"]
    commands = [line.strip() for line in text.splitlines() if line.startswith("  slipstream-train")]
    on, uniform, random, stop = (shlex.split(command)[1:] for command in commands)
    assert "--pilot=label" in uniform and "--pilot=label" not in on
    assert "--control=random" in random and "--control=stop" in stop
    done = run("uniform", *(flag for flag in uniform if not flag.startswith("--output")))
    assert done["examples"]["skipped"] > 0
