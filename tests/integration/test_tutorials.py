"""The tutorials' code blocks run in order, in an empty folder."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from slipstream_tf.cli import prepare, report, train
from slipstream_tf.cli.program import run_program

ROOT = pathlib.Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = sorted(path.name for path in TUTORIALS.glob("*.md") if path.name != "index.md")
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Trains on a tenth of the examples of the tutorials.
SIZES = {"generated:400000:": "generated:40000:"}
OWN = {"slipstream-prepare": prepare, "slipstream-report": report, "slipstream-train": train}


def run_line(line: str) -> None:
    """Runs a shell line. Programs of this package run in this process."""
    program, *arguments = shlex.split(line)
    if program in OWN:
        module = OWN[program]
        assert run_program(module.make_flags(), module.main, arguments) == 0, line
        return
    if program == "horovodrun":
        pytest.importorskip("horovod", reason="no Horovod: run `make horovod`")
        program = str(pathlib.Path(sys.executable).with_name(program))
    environment = {
        **os.environ,
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    done = subprocess.run(
        [program, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_tutorial_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    written = (TUTORIALS / page).read_text(encoding="utf-8")
    for size, small in SIZES.items():
        written = written.replace(size, small)
    found = BLOCK.findall(written)
    assert found
    names = {"__name__": "tutorial"}
    for kind, text in found:
        if kind == "python":
            exec(compile(text, page, "exec"), names)
            continue
        for line in text.replace("\\\n", " ").splitlines():
            run_line(line)
