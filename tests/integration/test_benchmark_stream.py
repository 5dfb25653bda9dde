"""stream.py predicts every example, including the examples that training skips."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmark_programs import needs_sources, rows_of, run_benchmark


@pytest.fixture
def clicks(tmp_path: Path) -> str:
    """Writes a file of clicks in order of time; returns its path."""
    columns = ("user", "article", "environment", "device", "os", "country", "region", "referrer")
    count, generator = 3000, np.random.default_rng(0)
    arrays = {name: generator.integers(0, 50, count).astype(np.int32) for name in columns}
    arrays["click_ts"] = np.arange(count, dtype=np.int64) * 60
    arrays["session_size"] = generator.integers(2, 9, count).astype(np.int32)
    np.savez(tmp_path / "globo_clicks.npz", **arrays)
    return str(tmp_path / "globo_clicks.npz")


def prepared(clicks: str, *flags: str) -> str:
    """Prepares the clicks in order of time and returns the folder."""
    folder = clicks.replace(".npz", "")
    done = run_benchmark("datasets/globo.py", clicks, f"--output={folder}", "--split=time", *flags)
    assert done.returncode == 0, done.stderr
    return folder


@needs_sources
def test_stream_compares_predictions_before_training(
    warm: list[str], tmp_path: Path, clicks: str
) -> None:
    flags = ("--task=globo_1", f"--data={prepared(clicks)}", f"--output={tmp_path}", "--seeds=0")
    done = run_benchmark("stream.py", *flags, "--runs=inputs,mask", "--train_flag=batch_size=64",
                         "--train_flag=window_steps=10", f"--records={tmp_path / 'runs'}",
                         warm=warm)  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain, inputs, mask = rows_of(tmp_path, "stream")
    assert [run["run"] for run in (plain, inputs, mask)] == ["plain", "inputs", "mask"]
    assert plain["examples"] == mask["examples"] == [1] and inputs["examples"][0] < 1
    assert plain["rows sent / plain"] == [1] and mask["rows sent / plain"][0] < 1
    reported = json.loads((tmp_path / "runs/globo_1/seed0/inputs/metrics.json").read_text())
    assert reported["examples_trained"] < reported["inputs_predicted"] == 5400


@needs_sources
def test_controls_train_same_number_and_predict_all_examples(
    warm: list[str], tmp_path: Path, clicks: str
) -> None:
    data = prepared(clicks, "--negatives=9", "--clicks=1000")
    small = ("mlp=8", "dim=4", "batch_size=64", "window_steps=10")
    flags = ("--task=globo_49", f"--data={data}", f"--output={tmp_path}", "--seeds=0")
    done = run_benchmark("stream.py", *flags, "--runs=random,stop",
                         *(f"--train_flag={flag}" for flag in small),
                         f"--records={tmp_path / 'runs'}", warm=warm)  # fmt: skip
    assert done.returncode == 0, done.stderr
    reported = {
        name: json.loads((tmp_path / f"runs/globo_49/seed0/{name}/metrics.json").read_text())
        for name in ("plain", "fm", "random", "stop")
    }
    assert all(one["inputs_predicted"] == 9000 for one in reported.values())
    assert reported["plain"]["examples_trained"] == 9000
    trained = reported["fm"]["examples_trained"]
    assert trained < 5000
    assert abs(reported["stop"]["examples_trained"] - trained) < 64
    assert abs(reported["random"]["examples_trained"] - trained) < 300
