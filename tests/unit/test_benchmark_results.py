"""Tests of benchmark results: file form, updates, tables and peer processes."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
FILES = sorted((BENCHMARKS / "results").glob("*.json"))
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="no benchmarks/ next to tests/")


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports benchmarks/summary.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("summary")


def made() -> dict[str, Any]:
    reported = dict.fromkeys(("commit", "command", "machine", "date"), "x")
    return {**reported, "versions": {"python": "3"}}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_have_uniform_format(summary: ModuleType, file: Path) -> None:
    assert file.stat().st_size <= summary.LIMIT == 20_000
    found = json.loads(file.read_text(encoding="utf-8"))
    assert list(found) == ["program", *summary.MADE, "claims", "parts"]
    assert found["program"] == file.stem and found["parts"]
    # A program may have multiple pages, for example NAME and NAME_WHAT.
    (program,) = {
        part["command"].split()[1].removesuffix(".py") for part in found["parts"].values()
    }
    assert (ROOT / f"{program}.py").exists()
    assert f"benchmarks/{file.stem}_".startswith(f"{program}_")
    for name, claim in found["claims"].items():
        assert re.fullmatch(r"[a-z0-9_.]+", name) and list(claim) == list(summary.CLAIM), name
        assert claim["better"] in ("lower", "higher") and claim["part"] in found["parts"]
        assert (claim["interval"] is None) == (claim["n"] == 1), name
        if claim["interval"] is not None:
            minimum, maximum = claim["interval"]
            assert minimum <= claim["value"] <= maximum, name
    for part in (found, *found["parts"].values()):
        # Sources copied to a GPU machine have no known commit.
        unknown = "|unknown" if file.stem == "gpu_launchers" else ""
        assert re.fullmatch(rf"[0-9a-f]{{7,40}}{unknown}", part["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", part["date"])
        assert part["command"].startswith(f"python {program}.py") and part["machine"]


def test_write_replaces_its_part(
    summary: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "output", lambda: tmp_path / "results")

    def write(part: str, values: list[float], name: str = "time") -> str:
        claims = {name: summary.claim(values, 2.0), "unknown": summary.claim([None])}
        columns = [summary.column("way", ["a"]), summary.column("ms", [values], "{:.1f}", "median")]
        return summary.write("some", part, {"": columns}, claims, made=made())

    write("first", [1.0, 4.0, 3.0])
    write("second", [1.0], "other")
    page = write("first", [1.23456789], "another")
    found = json.loads((tmp_path / "results/some.json").read_text())
    assert list(found["parts"]) == ["first", "second"]
    assert list(found["claims"]) == ["other", "another"]
    assert found["claims"]["another"]["value"] == 1.23457
    assert page == (tmp_path / "results/some.md").read_text() == summary.draw(found)
    assert "| another | 1.235 | at most 2 | yes | 1 |  |" in page and "| a | 1.2 |" in page
    with pytest.raises(ValueError, match=r"Expected <= 20,000"):
        write("third", [float(n) for n in range(10_000)])
    assert json.loads((tmp_path / "results/some.json").read_text()) == found


def test_cells_use_format_of_column(summary: ModuleType) -> None:
    values = [[0.12345, 0.2, 0.3], [None, 0.1], None, 0.5, True, "text"]
    shown = {"": "12% 20% 30%", "mean": "21% ± 9%", "median each": "20% (12% 20% 30%)"}
    for show, first in shown.items():
        column = summary.column("x", values, "{:.0%}", show)
        cells = [line.split("|")[1].strip() for line in summary.pages._table(column)[2:]]
        assert cells == [first, "n/a", "", "50%", "yes", "text"]
    assert summary.claim([1.0, None]) is None
    assert summary.reached({"value": 1.0, "target": 1.0, "better": "lower"})
    assert not summary.reached({"value": 0.9, "target": 1.0, "better": "higher"})


def test_peers_do_not_import_from_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    peers = importlib.import_module("peers")
    program = tmp_path / "programs" / "peer.py"
    program.parent.mkdir()
    program.write_text(
        "import json, sys\ninput()\n"
        "print(json.dumps({'versions': {'path': sys.path}}), flush=True)\n"
    )
    # Python would find sources without an op library here.
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with peers.Worker(peers.Peer("a peer", None, [str(program)]), tmp_path, 1) as worker:
        found = worker.make({})["path"]
    assert str(program.parent) in found and not {"", str(tmp_path)} & set(found)
