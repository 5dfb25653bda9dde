"""Writes summaries as JSON and Markdown, with the standard library only."""

from __future__ import annotations

import datetime
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT = 20_000  # Maximum size of a summary in bytes.
CLAIM = ("value", "target", "n", "interval", "better", "part")
MADE = ("commit", "command", "machine", "date")
_DIGITS = 6
# Flags with paths. They are omitted from the recorded command.
_PLACES = ("--output=", "--records=", "--environments=", "--folder=", "--build=")
# Replaces the path of the disk in the recorded command.
_DISK = "--spill=/local/disk"

Column = Mapping[str, Any]
Claim = Mapping[str, Any]


def column(name: str, values: Sequence[Any], form: str = "{}", show: str = "") -> dict[str, Any]:
    """Returns a column of a table.

    Args:
        name: The heading of the column.
        values: A value for each row: a text, a bool, a number, a list of numbers (of seeds, turns
            or runs), or None.
        form: The format of a number.
        show: For lists, any of "mean" (± standard deviation), "median" and "each". "" shows each
            number.
    """
    said = {key: text for key, text in (("form", form), ("show", show)) if text not in ("{}", "")}
    return {"name": name, **said, "values": _rounded(values, form)}


def claim(
    values: Sequence[float | None],
    target: float | None = None,
    better: str = "lower",
    middle: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, Any] | None:
    """Returns a claim, or None if a value is None.

    Args:
        values: The values of the turns, runs or seeds.
        target: The value to reach. None means that the value is only shown.
        better: "lower" or "higher".
        middle: The function that aggregates the values.
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    interval = [min(known), max(known)] if len(known) > 1 else None
    found = (middle(known), target, len(known), interval, better)
    return dict(zip(CLAIM, _rounded(found), strict=False))


def reached(found: Claim) -> bool | None:
    """Returns whether a claim reaches its target; None without a target."""
    if found["target"] is None:
        return None
    ahead = found["target"] - found["value"]
    return bool(ahead >= 0 if found["better"] == "lower" else ahead <= 0)


def write(
    folder: Path,
    program: str,
    part: str,
    tables: Mapping[str, Sequence[Column]],
    claims: Mapping[str, Claim | None],
    made: Mapping[str, Any],
) -> str:
    """Writes PROGRAM.json and PROGRAM.md; replaces a part with the same name.

    Args:
        folder: The output folder.
        program: The base name of the files.
        part: The heading of the part.
        tables: Columns by the heading of the table. "" means no heading.
        claims: Claims by name. Claims that are None are omitted.
        made: Commit, command, machine, date and versions, from `made_by`.

    Returns:
        The Markdown page.

    Raises:
        ValueError: If the summary exceeds `LIMIT`. The page has then been printed.
    """
    path = folder / f"{program}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known = {name: one for name, one in before.get("claims", {}).items() if one["part"] != part}
    known.update({name: {**one, "part": part} for name, one in claims.items() if one is not None})
    parts = {**before.get("parts", {}), part: {**made, "tables": tables}}
    found = {"program": program, **{name: made[name] for name in MADE}, "claims": known}
    text = _dump({**found, "parts": parts}) + "\n"
    page = draw(json.loads(text))
    if len(text.encode()) > LIMIT:
        print(page)
        raise ValueError(
            f"The summary {path} has {len(text.encode()):,} bytes. Expected <= {LIMIT:,}."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.with_suffix(".md").write_text(page, encoding="utf-8")
    return page


def draw(summary: Mapping[str, Any]) -> str:
    """Returns the Markdown page of a summary."""
    lines = [f"# {summary['program']}", ""]
    claims = summary["claims"]
    if claims:
        each = list(claims.values())
        lines += _table(
            column("claim", list(claims)), column("value", [_short(c["value"]) for c in each]),
            column("target", [_short(c["target"], c["better"]) for c in each]),
            column("reached", [reached(c) for c in each]), column("n", [c["n"] for c in each]),
            column("range", [_range(c["interval"]) for c in each]),
        )  # fmt: skip
    for name, part in summary["parts"].items():
        made = [f"Commit {part['commit']}", part["date"], part["machine"]]
        made += [f"{package} {version}" for package, version in part["versions"].items()]
        lines += ["", f"## {name}", "", f"    {part['command']}", "", ", ".join(made) + "."]
        for heading, columns in part["tables"].items():
            lines += ["", *([f"### {heading}", ""] if heading else []), *_table(*columns)]
    return "\n".join(lines) + "\n"


def _table(*columns: Column) -> list[str]:
    rows = zip(*([_cell(v, c) for v in c["values"]] for c in columns), strict=True)
    cells = [[column["name"] for column in columns], ["---"] * len(columns), *rows]
    return ["| " + " | ".join(row) + " |" for row in cells]


def _cell(value: Any, of: Column) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, str):
        return value
    shape, show = of.get("form", "{}"), of.get("show", "")
    form: Callable[[float], str] = shape.format
    if not isinstance(value, list):
        return form(value)
    if None in value:
        return "n/a"
    each = " ".join(map(form, value))
    if "median" in show:
        cell = form(statistics.median(value))
    elif "mean" in show:
        cell = form(statistics.fmean(value))
        if len(value) > 1:
            cell += " ± " + shape.replace("+", "").format(statistics.stdev(value))
    else:
        return each
    return f"{cell} ({each})" if "each" in show and len(value) > 1 else cell


def _short(value: float | None, better: str = "") -> str:
    if value is None:
        return ""
    word = {"": "", "lower": "at most ", "higher": "at least "}[better]
    return word + (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")


def _range(interval: Sequence[float] | None) -> str:
    return "" if interval is None else " to ".join(map(_short, interval))


def _rounded(value: Any, form: str = "") -> Any:
    """Returns a JSON value with rounded numbers.

    Numbers keep two decimals more than their format shows.
    """
    if isinstance(value, (list, tuple)):
        return [_rounded(one, form) for one in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if not math.isfinite(value):
        return None
    decimals = re.search(r"\.(\d+)([f%])", form)
    if decimals is None:
        short = float(f"{float(value):.{_DIGITS}g}")
    else:
        short = round(float(value), int(decimals[1]) + (4 if decimals[2] == "%" else 2))
    return int(short) if short.is_integer() else short


def _dump(value: Any) -> str:
    """Returns JSON with short values on one line.

    This keeps diffs small.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(text) <= 160 or not isinstance(value, (dict, list)):
        return text
    if isinstance(value, list):
        return "[" + ",\n".join(map(_dump, value)) + "]"
    items = (f"{json.dumps(name, ensure_ascii=False)}: {_dump(v)}" for name, v in value.items())
    return "{" + ",\n".join(items) + "}"


def made_by(machine: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """Returns commit, command, machine, date and versions of this process.

    Args:
        machine: A general description of the machine.
        versions: The versions of the libraries that determine the results.
    """
    place = Path(__file__).resolve().parent
    describe = ["git", "-C", str(place), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:  # Git is not installed.
        commit = ""
    arguments = [text for text in sys.argv[1:] if not text.startswith(_PLACES)]
    arguments = [_DISK if text.startswith("--spill=") else text for text in arguments]
    return {
        "commit": commit.strip() or "unknown",
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "machine": machine,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": dict(versions),
    }
