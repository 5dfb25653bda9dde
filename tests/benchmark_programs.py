"""Runs and loads the benchmark programs and reads their results."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from absl.flags import FLAGS

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TINY = ("batch_size=32", "dim=4", "mlp=8", "bottom=8", "epochs=1")
needs_sources = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="no benchmarks/ beside tests/")


def run_benchmark(
    name: str, *flags: str, warm: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a benchmark program with the package that is under test.

    Args:
        name: File name of the program in benchmarks/.
        *flags: Command-line flags of the program.
        warm: The `warm` fixture. With it, the program and its children start without importing
            TensorFlow again. Leave it empty for a program that passes file descriptors other than
            standard output to its children.
    """
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    if warm:
        environment["WARM_PYTHON"] = str(Path(warm[-1]) / "python")
    command = [sys.executable, *warm, str(BENCHMARKS / name), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = BENCHMARKS / f"{name}.py"
    for folder in (BENCHMARKS, file.parent):
        monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    # The programs define flags with the same names.
    FLAGS.remove_flag_values([flag.name for flag in FLAGS.get_flags_for_module(name)])
    return module


def rows_of(folder: Path, program: str, heading: str = "") -> list[dict[str, Any]]:
    """Returns the rows of a table in a summary.

    The summary must have a single part. Also checks that the Markdown page next to the JSON file
    contains the part's heading.
    """
    summary = json.loads((folder / f"{program}.json").read_text())
    ((name, part),) = summary["parts"].items()
    assert f"## {name}" in (folder / f"{program}.md").read_text()
    columns = part["tables"][heading]
    rows = zip(*(column["values"] for column in columns), strict=True)
    return [dict(zip([column["name"] for column in columns], row, strict=True)) for row in rows]


def claims_of(folder: Path, program: str) -> dict[str, Any]:
    return json.loads((folder / f"{program}.json").read_text())["claims"]
