"""Tests that --help fits a screen and shows units and defaults."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

from slipstream_tf.cli.flag_set import Choice, Integer, Number, Text, Widths
from slipstream_tf.cli.program import run_program

PROJECT = pathlib.Path(__file__).parents[3] / "pyproject.toml"
# `slipstream-elastic` is absent, because it has no flags.
_SCRIPT = r'(slipstream-[a-z]+) = "(slipstream_tf\.cli\.\w+):entry_point"'
PROGRAMS = dict(re.findall(_SCRIPT, PROJECT.read_text(encoding="utf-8")))
LINES, COLUMNS = 50, 100
# A flag for an unbounded number or for a fraction must mention one of these units.
UNITS = re.compile(
    r"\b(inputs|examples|lines|rows|keys|values|units|layers|steps?|windows|passes|skips|ranks|"
    r"threads|processes|files|checkpoints|bytes|KiB|MiB|GiB|seconds|fraction|in (their|the) unit|"
    r"factor|AUC|log loss)\b"
)
ALL = sorted(PROGRAMS)


def flags_of(program):
    return importlib.import_module(PROGRAMS[program]).make_flags()


def test_all_programs_are_found():
    assert {"slipstream-train", "slipstream-demo", "slipstream-doctor", "slipstream-report"} <= set(
        PROGRAMS
    )


@pytest.mark.parametrize("program", ALL)
def test_help_fits_screen(program, capsys):
    assert run_program(flags_of(program), None, ["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize("program", ALL)
def test_full_help_contains_every_flag(program, capsys):
    flags = flags_of(program)
    assert flags.program == program
    assert run_program(flags, None, ["--helpfull"]) == 0
    full = capsys.readouterr().out
    assert max(map(len, full.splitlines())) <= COLUMNS
    short = flags.help_text()
    shown = [name for name in flags.names if re.search(rf"^  --{name}\b", short, re.M)]
    for name in flags.names:
        assert re.search(rf"^  --{name}\b", full, re.M), name
    if len(shown) < len(flags.names):
        assert f"{len(flags.names) - len(shown)} more flags: {program} --helpfull" in short


@pytest.mark.parametrize("program", ALL)
def test_every_flag_shows_default_and_allowed_values(program):
    flags = flags_of(program)
    for name in flags.names:
        text = flags.described(name)
        assert re.search(r"[(;] ?default: [^;)]", text), f"--{name}: {text}"
        if not isinstance(flags.parser_of(name), Text):
            assert flags.parser_of(name).flag_type() == "bool" or "(default" not in text, name


@pytest.mark.parametrize("program", ALL)
def test_every_number_shows_unit_or_range(program):
    flags = flags_of(program)
    for name in flags.names:
        parser = flags.parser_of(name)
        if isinstance(parser, (Integer, Number, Widths)):
            text = flags.described(name)
            has_range = re.search(r"\(\d+ to \d+;", text)
            assert UNITS.search(text.rpartition(" (")[0]) or has_range, f"--{name}: {text}"


@pytest.mark.parametrize(
    ("parser", "brief"),
    [
        (Integer(1), ">= 1"),
        (Integer(0, 64), "0 to 64"),
        (Number(0, 1), "0 to 1"),
        (Number(0, 1, True), "> 0 and <= 1"),
        (Number(0), ">= 0"),
        (Choice("ab"), "a|b"),
        (Text(), ""),
    ],
)
def test_parsers_have_brief_value_names(parser, brief):
    assert parser.brief == brief


def test_help_imports_no_tensorflow():
    """--help must print in less than a second."""
    program = (
        "import importlib, sys; "
        f"[importlib.import_module(name).make_flags() for name in {sorted(PROGRAMS.values())}]; "
        "sys.exit(str([name for name in ('tensorflow', 'keras') if name in sys.modules]))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stderr == "[]\n"


@pytest.mark.parametrize(
    "statement",
    [
        "sys.exit(run_program(doctor.make_flags(), None, ['--help']))",
        "sys.exit(run_program(doctor.make_flags(), lambda *_: print('text'), []))",
        "sys.exit(run_program(doctor.make_flags(), lambda *_: print('x' * 99999), []))",
        "sys.argv = ['slipstream-elastic', '--help']; agent.entry_point()",
    ],
)
def test_closed_pipe_prints_no_traceback(statement):
    imports = "import sys; from slipstream_tf._utils import agent; from slipstream_tf.cli import "
    program = f"{imports}doctor; from slipstream_tf.cli.program import run_program; {statement}"
    reading, writing = os.pipe()
    os.close(reading)
    found = subprocess.run(
        [sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert found.stderr == ""
    assert found.returncode == (0 if "elastic" in statement else 141)
