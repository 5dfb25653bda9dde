"""Kept results of the benchmarks: small, of one form, drawn and quoted as they are; and peers."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("*.json"))
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="no benchmarks/ beside tests/")


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module benchmarks/summary.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("summary")


def made() -> dict[str, Any]:
    told = dict.fromkeys(("commit", "command", "machine", "date"), "x")
    return {**told, "versions": {"python": "3"}}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_have_one_form(summary: ModuleType, file: Path) -> None:
    assert file.stat().st_size <= summary.LIMIT == 20_000
    found = json.loads(file.read_text(encoding="utf-8"))
    assert list(found) == ["program", *summary.MADE, "claims", "parts"]
    assert found["program"] == file.stem and found["parts"]
    # A program may have several pages, NAME and NAME_WHAT.
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
            least, most = claim["interval"]
            assert least <= claim["value"] <= most, name
    for part in (found, *found["parts"].values()):
        # Of a copy of the sources on a borrowed GPU machine no commit is known.
        unknown = "|unknown" if file.stem == "gpu_launchers" else ""
        assert re.fullmatch(rf"[0-9a-f]{{7,40}}{unknown}", part["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", part["date"])
        assert part["command"].startswith(f"python {program}.py") and part["machine"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_pages_are_drawn_from_the_results(summary: ModuleType, file: Path) -> None:
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    assert page == summary.draw(json.loads(file.read_text(encoding="utf-8")))
    site = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert f'--8<-- "benchmarks/results/{file.stem}.md"' in site


def test_nothing_else_is_kept() -> None:
    others = {path.name for path in RESULTS.iterdir()} - {
        f"{file.stem}{ending}" for file in FILES for ending in (".json", ".md")
    }
    assert all(name.endswith(".png") for name in others)
    pages = [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("docs/**/*.md")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert all(f"results/{name}" in shown for name in others)


def test_a_call_replaces_its_part(
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
    with pytest.raises(ValueError, match=r"Allowed: 20,000"):
        write("third", [float(n) for n in range(10_000)])
    assert json.loads((tmp_path / "results/some.json").read_text()) == found


def test_cells_are_written_as_their_columns_say(summary: ModuleType) -> None:
    values = [[0.12345, 0.2, 0.3], [None, 0.1], None, 0.5, True, "text"]
    shown = {"": "12% 20% 30%", "mean": "21% ± 9%", "median each": "20% (12% 20% 30%)"}
    for show, first in shown.items():
        column = summary.column("x", values, "{:.0%}", show)
        cells = [line.split("|")[1].strip() for line in summary.pages._table(column)[2:]]
        assert cells == [first, "n/a", "", "50%", "yes", "text"]
    assert summary.claim([1.0, None]) is None
    assert summary.reached({"value": 1.0, "target": 1.0, "better": "lower"})
    assert not summary.reached({"value": 0.9, "target": 1.0, "better": "higher"})


def result(program: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{program}.json").read_text(encoding="utf-8"))


def tables_of_limits(header: str) -> list[list[list[str]]]:
    """The cells of docs/limits.md's tables whose header begins so."""
    found = []
    for block in (ROOT / "docs" / "limits.md").read_text(encoding="utf-8").split("\n\n"):
        head, *lines = block.strip().splitlines() or [""]
        if head.startswith(header):
            found.append([[c.strip(" *") for c in line.split("|")[1:-1]] for line in lines[1:]])
    assert found, header
    return found


def test_limits_quote_the_speed() -> None:
    embedding, dlrm = (result(name)["claims"] for name in ("embedding_step", "dlrm_step"))
    (rows,) = tables_of_limits("| what | beside | times as fast |")
    for row, ending in zip((*rows[:7], *rows[7:14]), [""] * 7 + ["_d64"] * 7, strict=True):
        rule = next(r for r in ("SGD", "row-wise", "Adagrad") if r in row[0])
        peer = next(p for p in ("fbgemm", "tfra", "keras") if p in row[1].lower())
        claim = embedding[f"{rule.lower().replace('-', '')}_over_{peer}{ending}"]
        assert float(row[2]) == pytest.approx(claim["value"], abs=6e-3), row
        assert float(row[4]) == claim["target"], row
    names = [
        f"{dtype}_over_{w}" for dtype in ("float32", "bfloat16") for w in ("torch", "compiled")
    ]
    for row, name in zip(rows[14:], names, strict=False):
        assert row[2] == f"{dlrm[name]['value']:.2f}", row
        assert row[3] == f"{dlrm[f'fit_{name}']['value']:.2f}", row
        assert float(row[4]) == dlrm[name]["target"], row


def test_limits_quote_watching() -> None:
    claims = result("watching_cost")["claims"]
    (rows,) = tables_of_limits("| policy | metric | watched / plain |")
    assert len(rows) == 4
    for policy, metric, ratio, *_ in rows:
        name = policy if metric == "none" else f"{policy}_{metric}"
        assert float(ratio) == pytest.approx(claims[name]["value"], abs=6e-4)


def test_limits_quote_quality() -> None:
    tables = tables_of_limits("| run | test AUC |")
    streams = tables_of_limits("| run | AUC | AUC by seed |")
    parts = result("withholding")["parts"]
    data = [f"{name}, 3 seeds" for name in ("frappe_short", "generated", "globo")]
    of_stream = result("stream")["parts"].values()
    for part, rows in zip((*map(parts.get, data), *of_stream), (*tables, *streams), strict=True):
        columns = {column["name"]: column["values"] for column in part["tables"][""]}
        for run, auc, _, difference, *_ in rows:
            place = columns["run"].index(run)
            quoted = [float(auc.split()[0]), float(difference.split()[0] if difference else 0)]
            values = [columns[name][place] or [0] for name in ("AUC", "AUC - plain")]
            means = [sum(seeds) / len(seeds) for seeds in values]
            assert quoted == pytest.approx(means, abs=6e-5), (part["command"], run)


def test_limits_quote_skipping() -> None:
    parts = list(result("skipping")["parts"].values())
    tables = tables_of_limits("| run | AUC, skipping |")
    for part, rows in zip(parts, tables, strict=True):
        table = next(iter(part["tables"].values()))
        columns = {column["name"]: column["values"] for column in table}
        assert [run for run, *_ in rows] == columns["run"]
        for index, (run, *cells) in enumerate(rows):
            names = ("auc", "auc - plain, 95%", "log loss", "trained", "seconds", "seconds / plain")
            for name, cell in zip(names, cells, strict=True):
                value = columns[name][index]
                if name == "auc - plain, 95%":
                    wanted = [float(bound) for bound in (value or "").split(" to ") if bound]
                    found = [float(bound) for bound in cell.split(" to ") if bound]
                    assert found == pytest.approx(wanted, abs=6e-5), (run, name)
                    continue
                if name == "seconds":
                    value = float(value.split(" ")[0])
                mean = sum(value) / len(value) if isinstance(value, list) else value
                share = float(cell.rstrip("%")) / (100 if "%" in cell else 1)
                assert share == pytest.approx(mean, rel=0.02, abs=6e-5), (run, name)


def test_limits_quote_bytes_of_ranks() -> None:
    claims = result("network")["claims"]
    (rows,) = tables_of_limits("| ranks | rows | run of `network.py` |")
    assert len(rows) == sum(name.endswith("_bytes") for name in claims) == 12
    for ranks, placement, run, share, *_, mean in rows:
        name = f"globo_unshaped_{placement}_{ranks}_{run}"
        assert share == f"{claims[name + '_bytes']['value']:.1%}", name
        assert mean == f"{claims[name + '_auc']['value']:+.4f}".replace("0.", "."), name


def test_peers_import_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    peers = importlib.import_module("peers")
    program = tmp_path / "programs" / "peer.py"
    program.parent.mkdir()
    program.write_text(
        "import json, os, sys\ninput()\nanswers = os.fdopen(int(os.environ['ANSWERS']), 'w')\n"
        "print(json.dumps({'versions': {'path': sys.path}}), file=answers, flush=True)\n"
    )
    # Where sources without an op library would lie.
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with peers.Worker(peers.Peer("a peer", None, [str(program)]), tmp_path, 1) as worker:
        found = worker.make({})["path"]
    assert str(program.parent) in found and not {"", str(tmp_path)} & set(found)
