"""The examples run, are short, and show that inputs were skipped."""

from __future__ import annotations

import pathlib
import runpy

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["quickstart.py", "own_training_loop.py"])
def test_example(name, capsys):
    assert len((EXAMPLES / name).read_text().splitlines()) < 100
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    totals = [line for line in capsys.readouterr().out.splitlines() if "inputs skipped (" in line]
    assert len(totals) == 1
    assert not totals[0].startswith("0 of")
