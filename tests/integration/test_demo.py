"""slipstream-demo: output, dry run, four runs, verdict, and choice of data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream_tf.cli import demo
from slipstream_tf.cli.flag_set import UsageError
from slipstream_tf.cli.program import run_program


@pytest.fixture(scope="module", name="demo_output")
def fixture_demo_output(
    warm: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], Path]:
    """Returns the output of a quick demo, its demo.json and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from slipstream_tf.cli.demo import entry_point; entry_point()"
    )
    flags = ["--quick", f"--output={folder}"]
    environment = {**os.environ, "WARM_PYTHON": str(Path(warm[-1]) / "python")}
    result = subprocess.run(
        [sys.executable, *warm, "-c", code, *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads((folder / "demo.json").read_text()), folder


def test_demo_prints_layer_speed_then_comparison(
    demo_output: tuple[str, dict[str, Any], Path],
) -> None:
    text, record, folder = demo_output
    speed = record["speed"]
    assert set(speed) == {"rows", "dim", "batch_size", "keras", "slipstream"}
    parts = [
        demo.speed_words(**speed),
        "Most examples are easy",
        "Data: generated:39936:100000:0.02",
        demo.comparison(record["runs"]),
        record["verdict"],
        "Details: ",
        "Curves: ",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    page = (folder / "report" / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in demo.LABELS)


def test_demo_runs_have_learning_curves(demo_output: tuple[str, dict[str, Any], Path]) -> None:
    for name, run in demo_output[1]["runs"].items():
        assert 8 <= len(run["evaluations"]) <= 24, name


def test_demo_prints_a_row_per_run(demo_output: tuple[str, dict[str, Any], Path]) -> None:
    text, record, _ = demo_output
    for name, label in demo.LABELS.items():
        (row,) = (line for line in text.splitlines() if line.startswith(f"{label}  "))
        auc = record["runs"][name]["test"]["auc"]
        assert row.removeprefix(label).split()[0] == f"{auc:.4f}"


def test_speed_text_uses_same_unit_for_both_layers() -> None:
    words = demo.speed_words(1_000_000, 32, 512, keras=0.1, slipstream=0.002)
    rows = {line.split()[0]: line.split()[1:] for line in words.splitlines() if line}
    assert rows["keras.layers.Embedding"] == ["100.00", "5,120"]
    assert rows["slip.keras.Embedding"] == ["2.00", "256,000"]
    assert "1,000,000 x 32" in words and "50 times as fast" in words


def test_demo_runs_share_experiment_settings(demo_output: tuple[str, dict[str, Any], Path]) -> None:
    runs = demo_output[1]["runs"]
    trained = {name: run["examples"]["trained"] for name, run in runs.items()}
    assert trained["predicted"] < 0.3 * trained["plain"]
    for name in ("uniform", "random", "stop"):
        assert trained[name] == pytest.approx(trained["predicted"], rel=0.1)
    for name in ("seed", "data", "model", "dim", "max_examples"):
        assert len({str(run["settings"][name]) for run in runs.values()}) == 1


def test_skip_fraction_depends_on_click_rate() -> None:
    for clicks, fraction in ((20, 0.85), (50, 0.85), (100, 0.5), (250, 0.3), (1000, 0.3)):
        assert demo.fraction_for({"test": {"clicks": clicks, "examples": 1000}}) == fraction, clicks


def test_user_data_uses_chosen_batch_size_and_all_examples() -> None:
    assert demo.size_of("generated:50000", 20_000) == (64, 20_000)
    assert demo.size_of("generated:400000", 900_000) == (512, 400_000)


def test_demo_rejects_invalid_data_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(demo, "_run")
    flags = [f"--data={tmp_path / 'nowhere.npz'}", f"--output={tmp_path}"]
    assert run_program(demo.make_flags(), demo.main, flags) == 2


def test_demo_reports_error_of_refused_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="A run stopped at an invalid flag or file"):
        demo._trained(str(tmp_path), "plain", {"data": "nowhere.npz"})
    assert "Invalid flag --data=nowhere.npz" in capfd.readouterr().err


def _records(**aucs: float) -> dict[str, Any]:
    """Returns records of plain training and of shorter runs.

    Plain training takes 10 s and has an AUC of 0.6 after 5 s. The other runs take 4 s.
    """
    records: dict[str, Any] = {}
    for name, auc in aucs.items():
        inputs = {"seen": 1000, "trained": 200, "skipped": 800}
        points = [{"seconds": 4.0, "auc": auc}]
        if name == "plain":
            inputs = {"seen": 1000, "trained": 1000, "skipped": 0}
            points = [{"seconds": 5.0, "auc": 0.6}, {"seconds": 10.0, "auc": auc}]
        records[name] = {"test": {"auc": auc}, "examples": inputs, "evaluations": points}
    return records


def test_verdict_follows_from_metrics() -> None:
    ahead = demo.verdict(
        _records(plain=0.7, predicted=0.7004, uniform=0.698, random=0.65, stop=0.64)
    )
    assert "20% of the examples in 40% of the time of plain training" in ahead
    assert "level with plain training (+0.0004 AUC)" in ahead
    # After 4 of the 5 seconds in which the AUC rises from 0.5 to 0.6.
    assert "0.1204 AUC above plain training after the same time" in ahead
    assert "0.0024 AUC above uniform negative sampling" in ahead and "does not improve" not in ahead
    level = demo.verdict(
        _records(plain=0.7, predicted=0.69, uniform=0.6895, random=0.68, stop=0.69)
    )
    assert "0.0100 AUC below plain training" in level and "0.0100 AUC above random" in level
    assert (
        "level with stopping early (+0.0000 AUC)" in level and "--pilot=label is simpler" in level
    )
    behind = demo.verdict(_records(plain=0.7, predicted=0.68, uniform=0.68, random=0.69, stop=0.68))
    assert "0.0100 AUC below random" in behind and "train all, or skip fewer" in behind
    assert "does not improve" not in behind
    nothing = _records(plain=0.7, predicted=0.7, uniform=0.7, random=0.7, stop=0.7)
    nothing["predicted"]["examples"] = {"seen": 1000, "trained": 1000, "skipped": 0}
    assert "No example was skipped" in demo.verdict(nothing)
    nothing["stop"]["test"]["auc"] = None
    assert "no AUC to compare" in demo.verdict(nothing)
