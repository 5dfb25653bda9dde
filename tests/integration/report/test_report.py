"""slipstream-report writes the numbers of its records and refuses invalid input."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream_tf.cli import report
from slipstream_tf.cli.program import run_program

needs_matplotlib = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("matplotlib") is None,
    reason="matplotlib is not installed",
)
Write = Callable[[str, Any], str]


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Runs the program with invalid input and returns its one-line error."""
    assert run_program(report.make_flags(), report.main, arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("slipstream-report: ")
    return lines[0]


@needs_matplotlib
def test_report_files_contain_record_values(
    make_record: Callable[..., Any], write_run: Write, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plain, paper = make_record(), make_record(0.5)
    for entry in ("progress", "evaluations"):
        del plain[entry]
    plain["windows"], plain["ranks"]["size"] = [], 1
    paper["settings"]["engine"]["defer_max_age"] = 5
    plain["settings"]["policies"] = []
    folder = tmp_path / "report"
    paths = [write_run("plain", plain), write_run("paper", paper) + "/metrics.json"]
    arguments = [*paths, f"--output={folder}"]
    assert run_program(report.make_flags(), report.main, arguments) == 0
    started, written = capsys.readouterr().out.splitlines(keepends=True)
    assert re.fullmatch(r"Drawing the plots of \d runs? \.\.\.\n", started)
    assert written == f"Report: {folder / 'report.html'}\n"

    pictures = {path.stem for path in (folder / "png").iterdir()}
    tables = {path.stem for path in (folder / "csv").iterdir()}
    assert tables - pictures == {"summary", "settings_that_differ"} and pictures < tables
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in (folder / "png").iterdir())

    first, second = rows_of(folder / "csv" / "summary.csv")
    assert (first["run"], second["run"]) == ("plain", "paper")
    assert float(second["test AUC"]) == paper["test"]["auc"]
    assert float(second["test AUC: difference from the first run"]) == pytest.approx(-0.37)
    assert float(second["gradient rows sent"]) == 1600
    assert float(second["examples trained: difference from the first run, as a fraction"]) == -0.5
    policies, setting = rows_of(folder / "csv" / "settings_that_differ.csv")[1:]
    assert policies == {"setting": "policies", "plain": "(not set)", "paper": "skip_examples"}
    assert setting == {"setting": "engine.defer_max_age", "plain": "3", "paper": "5"}

    quality = rows_of(folder / "csv" / "auc_by_examples.csv")
    expected = [(e["examples_trained"], e["auc"]) for e in paper["evaluations"]]
    assert [(float(r["examples trained"]), float(r["AUC"])) for r in quality] == expected
    assert {(r["run"], r["part"]) for r in quality} == {("paper", "")}
    thresholds = rows_of(folder / "csv" / "threshold.csv")
    assert [r["run"] for r in thresholds] == ["paper"] * 7, "the first window has no drift"
    assert float(thresholds[-1]["examples seen"]) == 4000
    sent = rows_of(folder / "csv" / "rows_sent.csv")
    assert float(sent[-1]["fraction of the rows offered"]) == pytest.approx(330 / 500)
    kinds = {r["category"]: float(r["MB"]) for r in rows_of(folder / "csv" / "bytes_by_kind.csv")}
    assert kinds["gradients"] == 4.0 and kinds["rows"] == 0.0

    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("Not recorded by plain.") >= 10
    assert "plain: a single process sends no bytes between ranks." in page
    assert "paper: 60.0% of the hot keys did not move" in page
    assert "-0.3700" in page and "-50.0%" in page
    assert "http:" not in page.replace("http://www.w3.org/", "") and "https:" not in page
    ids = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(ids) == len(set(ids)) > 100


@needs_matplotlib
def test_plots_without_data_are_omitted(
    make_record: Callable[..., Any], write_run: Write, tmp_path: Path
) -> None:
    from slipstream_tf.telemetry.report.plots import windows
    from slipstream_tf.telemetry.report.runs import read_runs
    from slipstream_tf.telemetry.report.writing import write_report

    record = make_record()
    record["windows"] = []
    runs = read_runs([write_run(name, record) for name in ("a", "b")])
    page = Path(write_report(runs, str(tmp_path / "report"))).read_text(encoding="utf-8")
    drawn = {path.stem for path in (tmp_path / "report" / "png").iterdir()}
    assert len(drawn) == page.count("<figure ") == 12
    for panel in windows(runs):
        assert panel.name not in drawn and f"<h3>{panel.title}</h3>" not in page
    assert "No run has data for: Saturated fraction, Threshold T, " in page


@needs_matplotlib
def test_runs_with_same_name_get_distinct_labels(
    make_record: Callable[..., Any], write_run: Write
) -> None:
    from slipstream_tf.telemetry.report.runs import read_runs

    record = make_record()
    paths = [write_run(name, record) for name in ("x/plain", "y/plain", "y/\u202eodd", "z")]
    assert [run.name for run in read_runs(paths)] == ["x/plain", "y/plain", "\ufffdodd", "z"]


def test_invalid_record_raises(
    make_record: Callable[..., Any], write_run: Write, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    good = write_run("good", make_record())
    (tmp_path / "empty").mkdir()
    older = {**make_record(), "schema": 0}
    newer = {**make_record(), "schema": 2}
    lacking = make_record()
    lacking["windows"] = "none"
    for path, reason in (
        (str(tmp_path / "empty"), "the folder has no metrics.json"),
        (str(tmp_path / "nowhere"), "the path does not exist"),
        (write_run("text", "not json"), "not JSON"),
        (write_run("binary", "\x00\x01"), "not JSON"),
        (write_run("list", "[1, 2]"), "no entry `schema`"),
        (write_run("deep", "[" * 100_000), "not JSON"),
        (write_run("older", older), "schema 0 of an older version"),
        (write_run("newer", newer), "schema 2 of another version"),
        (write_run("lacking", lacking), "entry `windows` is missing or not a list"),
        (good, "passed twice"),
    ):
        line = refused(capsys, good, path)
        assert path in line and reason in line and "Expected " in line
    assert "Missing argument RUN" in refused(capsys)
    assert "'outptu'" in refused(capsys, good, "--outptu=x")


@needs_matplotlib
def test_unwritable_output_raises(
    make_record: Callable[..., Any], write_run: Write, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "file").write_text("")
    line = refused(capsys, write_run("good", make_record()), f"--output={tmp_path}/file/report")
    assert "Invalid flag --output=" in line and "Expected a folder" in line


def test_missing_matplotlib_error_names_install_command(
    make_record: Callable[..., Any], write_run: Write, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    line = refused(capsys, write_run("good", make_record()), code=1)
    assert "pip install 'slipstream-tf[report]'" in line
