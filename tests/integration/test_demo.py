"""slipstream-demo: its speed, dry run and four runs, its verdict, and the data that it chooses."""

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
) -> tuple[str, dict[str, Any]]:
    """What a quick demo prints, and its demo.json."""
    folder = tmp_path_factory.mktemp("demo")
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from slipstream_tf.cli.demo import entry_point; entry_point()"
    )
    flags = ["--quick", f"--output={folder}", "--skip_alpha=0.6", "--skip_share=0.6"]
    environment = {**os.environ, "WARM_PYTHON": str(Path(warm[-1]) / "python")}
    result = subprocess.run(
        [sys.executable, *warm, "-c", code, *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads((folder / "demo.json").read_text())


def test_demo_tells_the_layers_speed_then_the_dry_run_then_the_comparison(
    demo_output: tuple[str, dict[str, Any]],
) -> None:
    text, record = demo_output
    speed = record["speed"]
    assert set(speed) == {"rows", "dim", "batch_size", "keras", "slipstream"}
    parts = [
        demo.speed_words(**speed),
        "Data: generated:30000",
        "A dry run saves nothing",
        record["runs"]["plain"]["report"],
        "It is a baseline, and expected to lose",
        demo.comparison(record["runs"]),
        record["verdict"],
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "You would have saved, after the warm-up," in parts[3]


def test_demo_prints_a_row_per_run(demo_output: tuple[str, dict[str, Any]]) -> None:
    text, record = demo_output
    for name, label in demo.LABELS.items():
        (row,) = (line for line in text.splitlines() if line.startswith(f"{label}  "))
        auc = record["runs"][name]["test"]["auc"]
        assert row.removeprefix(label).split()[0] == f"{auc:.4f}"


def test_speed_words_tell_both_layers_in_the_same_unit() -> None:
    words = demo.speed_words(1_000_000, 32, 512, keras=0.1, slipstream=0.002)
    rows = {line.split()[0]: line.split()[1:] for line in words.splitlines() if line}
    assert rows["keras.layers.Embedding"] == ["100.00", "5,120"]
    assert rows["slip.keras.Embedding"] == ["2.00", "256,000"]
    assert "1,000,000 x 32" in words and "50 times as fast" in words


def test_demo_runs_are_the_same_experiment(demo_output: tuple[str, dict[str, Any]]) -> None:
    runs = demo_output[1]["runs"]
    trained = {name: run["examples"]["trained"] for name, run in runs.items()}
    assert trained["stop"] == trained["paper"] < trained["plain"]
    assert trained["random"] == pytest.approx(trained["paper"], rel=0.02)
    for name in ("seed", "data", "batch_size", "model", "dim", "max_examples"):
        assert len({str(run["settings"][name]) for run in runs.values()}) == 1


def test_demo_refuses_data_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(demo, "_speed")
    flags = [f"--data={tmp_path / 'nowhere.npz'}", f"--output={tmp_path}"]
    assert run_program(demo.make_flags(), demo.main, flags) == 2


def test_demo_passes_on_why_a_run_was_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="A run was refused, see above"):
        demo._train({"data": "nowhere.npz"})
    assert "Invalid flag --data=nowhere.npz" in capfd.readouterr().err


def _records(plain: float, paper: float, random: float, stop: float) -> dict[str, Any]:
    aucs = {"plain": plain, "paper": paper, "random": random, "stop": stop}
    inputs = {"seen": 1000, "trained": 800, "skipped": 200}
    return {name: {"test": {"auc": auc}, "examples": inputs} for name, auc in aucs.items()}


def test_verdict_follows_from_the_numbers() -> None:
    worse = demo.verdict(_records(0.72, 0.715, 0.7149, 0.718))
    assert "20.0%" in worse and "lost 0.0050 AUC" in worse
    assert "level with random" in worse and "worse than plain training stopped" in worse
    assert "nothing shows" in worse
    better = demo.verdict(_records(0.72, 0.7202, 0.71, 0.715))
    assert "better than random" in better and "was worth more" in better
    assert "better still" in worse and "better still" not in better
    nothing = _records(0.72, 0.72, 0.72, 0.72)
    nothing["paper"]["examples"] = {"seen": 1000, "trained": 1000, "skipped": 0}
    assert "skipped nothing" in demo.verdict(nothing)


def test_demo_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SLIPSTREAM_DATA", raising=False)
    checkout = tmp_path / "checkout"
    (checkout / "cc_ops").mkdir(parents=True)
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "a" / "b" / "c" / "demo.py"))
    # A folder where a server would be: nothing is reached over the network in this test.
    monkeypatch.setattr(demo, "MOVIELENS_URL", (tmp_path / "ml-1m.zip").as_uri())

    choice = demo.choose(None)
    assert choice.data == "generated" and "could not be downloaded" in choice.reason
    assert "no download wanted" in demo.choose(None, downloads=False).reason

    (tmp_path / "ml-1m.zip").write_bytes(b"another file")
    assert "SHA-256" in demo.choose(None).reason
    assert os.listdir(tmp_path / "cache" / "slipstream_tf") == []

    digest = demo._sha256(b"another file")
    monkeypatch.setattr(demo, "MOVIELENS_SHA256", digest)
    choice = demo.choose(None)
    assert choice.data.endswith("ml-1m.zip") and "GroupLens" in choice.reason

    shared = tmp_path / "shared" / "data"
    shared.mkdir(parents=True)
    (shared / "globo_clicks.npz").write_bytes(b"")
    assert demo.choose(None).data == str(shared / "globo_clicks.npz")

    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    with pytest.raises(Exception, match=r"Invalid SLIPSTREAM_DATA=.*globo_clicks\.npz"):
        demo.choose(None)
    (tmp_path / "globo_clicks.npz").write_bytes(b"")
    assert demo.choose(None).data == str(tmp_path / "globo_clicks.npz")
    assert demo.choose("mine.tsv").data == "mine.tsv"
