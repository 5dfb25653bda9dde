"""benchmarks/time_to_quality.py trains all systems on the same rows with the same metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_programs import BENCHMARKS, claims_of, load, needs_sources, rows_of, run_benchmark

from slipstream_tf.cli import train
from slipstream_tf.cli.defaults import DataFacts
from slipstream_tf.cli.settings import resolve
from slipstream_tf.telemetry.metrics import click_metrics


@pytest.fixture(name="task")
def fixture_task(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provides the module that all systems in benchmarks/systems share."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "systems"))
    return load("systems/task", monkeypatch)


@needs_sources
def test_systems_are_timed_to_same_quality(warm: list[str], tmp_path: Path) -> None:
    systems = ["slipstream", "slipstream_both", "hotline", "keras"]
    flags = [
        "--data=criteo", "--examples=40000", "--trials=1", "--seeds=0", "--points=1",
        f"--systems={','.join(systems)}", f"--output={tmp_path}", f"--records={tmp_path}/runs",
    ]  # fmt: skip
    done = run_benchmark("time_to_quality.py", *flags, warm=warm)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path, "time_to_quality_criteo")
    assert [row["system"] for row in rows] == [
        "slipstream_tf",
        "ours, both",
        "Hotline's schedule",
        "Keras Embedding layers",
    ]
    for row in rows:
        assert 0.5 < row["auc"][0] < 1.0 and row["total s"][0] > 0
    (ours, _, hotline, keras) = (
        json.loads((tmp_path / f"runs/criteo-40000/runs/{name}/seed_0/metrics.json").read_text())
        for name in systems
    )
    # 40,000 examples are 19 batches of 2,048. With the same rows and rates the final AUC is
    # similar.
    assert ours["evaluations"][-1]["steps"] == keras["evaluations"][-1]["steps"] == 19
    ends = [record["evaluations"][-1]["auc"] for record in (ours, keras)]
    # Keras adds the squares of all gradients of a key in a batch. This package squares their sum.
    assert ends[0] == pytest.approx(ends[1], abs=0.04)
    # Hotline trains the same steps and differs only in the order of sums.
    assert hotline["evaluations"][-1]["auc"] == pytest.approx(ends[0], abs=1e-3)
    assert hotline["hot_examples"] >= 0.75 and hotline["hot_rows"] > 0
    assert claims_of(tmp_path, "time_to_quality_criteo")["criteo_over_keras"]["value"] > 0
    # Finished runs are not repeated.
    again = run_benchmark("time_to_quality.py", *flags, "--report", warm=warm)
    assert again.returncode == 0 and "keras, seed_0:" not in again.stdout


@needs_sources
def test_benchmark_metrics_equal_package_metrics(task: Any) -> None:
    random = np.random.default_rng(0)
    labels = (random.random(2000) < 0.3).astype(np.float32)
    # Rounding produces ties.
    logits = np.round(labels + random.normal(size=2000), 1).astype(np.float32)
    found = click_metrics(labels, logits)
    assert task.auc(labels, logits) == pytest.approx(found.auc, abs=1e-6)
    assert task.log_loss(labels, logits) == pytest.approx(found.log_loss, abs=1e-6)


@needs_sources
def test_hot_keys_reach_minimum_accesses(
    task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot_keys = load("systems/hot_keys", monkeypatch)
    # Two fields and a label. Key 0 of both fields occurs three times, the other keys once.
    keys = np.array([[0, 0], [0, 0], [0, 0], [1, 2]], np.int32)
    np.concatenate([keys, np.zeros((4, 1), np.int32)], axis=1).tofile(tmp_path / "train.bin")
    settings = {"cardinalities": [3, 3], "numbers": 0, "steps": 2, "batch": 2}
    settings["train"] = str(tmp_path / "train.bin")
    found = hot_keys.choose(task.Task(settings), fraction=0.75)
    assert [keys.tolist() for keys in found.keys] == [[0], [0]]
    assert (found.fraction, found.accesses) == (0.75, 0.75)
    assert found.reported(dim=16)["hot_bytes"] == 128
    # Keys that do not occur are not hot.
    every = hot_keys.choose(task.Task(settings), fraction=1.0)
    assert [keys.tolist() for keys in every.keys] == [[0, 1], [0, 2]]


@needs_sources
def test_clock_excludes_building_and_evaluation(
    task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.arange(8, dtype=np.int32).reshape(4, 2)  # A key and a label.
    rows[:, 1] = np.array([0, 1, 0, 1], np.float32).view(np.int32)
    rows.tofile(tmp_path / "measured.bin")
    settings = {"cardinalities": [8], "numbers": 0, "steps": 6, "batch": 2, "every": 2}
    settings["measured"] = str(tmp_path / "measured.bin")
    now = [0.0]
    monkeypatch.setattr(task.time, "perf_counter", lambda: now[0])
    recorder = task.Recorder(task.Task(settings))

    def predict(keys: np.ndarray, dense: np.ndarray) -> np.ndarray:
        now[0] += 100.0
        return keys[:, 0].astype(np.float32)

    for seconds in (50.0, 1.0, 2.0, 3.0, 1.0):  # The first step includes tracing.
        now[0] += seconds
        recorder.step(predict)
    recorder.end(predict)
    recorder.finish(str(tmp_path / "record.json"), {})
    points = json.loads((tmp_path / "record.json").read_text())["evaluations"]
    assert [(point["steps"], point["seconds"]) for point in points] == [
        (2, 2.0),
        (4, 7.0),
        (5, 8.0),
    ]
    assert points[0]["examples_trained"] == 4 and points[0]["auc"] == 0.75


@needs_sources
def test_default_settings_draws_valid_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load("default_settings", monkeypatch)
    facts, flags = DataFacts(name="table", fields=4), train.make_flags()
    for model in benchmark.MODELS:
        for trial in range(20):
            drawn = benchmark.draw(np.random.default_rng(trial), model)
            values, names = flags.parse(["--data=x", *(f"--{n}={v}" for n, v in drawn.items())])
            assert resolve(values, names, lambda _: facts, flags).model == model
    assert not benchmark.flags.FLAGS["search"].validators  # Required by tuning.py only.
