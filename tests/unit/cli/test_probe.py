"""cli.probe: what a child process tells, and every way in which it may end."""

from __future__ import annotations

import sys
import time

import pytest

from slipstream_tf.cli import probe

LIMIT = 30.0


def test_facts_come_back_in_spite_of_other_output():
    program = (
        'import sys\ntell(step="one", a=1)\nsys.stdout.write("noise without an end")\n'
        'tell(b=[True, None, "x"])'
    )
    outcome = probe.run_python(program, LIMIT)
    assert outcome == probe.Outcome({"a": 1, "b": [True, None, "x"]})


def test_the_child_imports_from_the_same_folders(monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("import os\nVALUE = os.environ['ONLY_THERE']")
    monkeypatch.syspath_prepend(str(tmp_path))
    program = "import only_here\ntell(value=only_here.VALUE)"
    outcome = probe.run_python(program, LIMIT, {"ONLY_THERE": "set"})
    assert outcome.facts == {"value": "set"} and not outcome.error


@pytest.mark.parametrize(
    ("program", "error", "missing"),
    [
        ("import no_such_module.part", "No module named 'no_such_module'", "no_such_module"),
        ("raise ImportError('two\\n  lines')", "ImportError: two lines", None),
        ("raise SystemExit('left')", "SystemExit: left", None),
        ("raise ValueError('x' * 2000)", "xxx...", None),
        ("import os; os._exit(0)", "ended with exit code 0 during 'working'", None),
        (
            "import os, sys; sys.stderr.write('F1 the reason\\nI0000 a log line\\n'); os._exit(3)",
            "ended with exit code 3 during 'working': F1 the reason",
            None,
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "crashed with SIGSEGV during 'working'",
            None,
        ),
    ],
)
def test_ends(program: str, error: str, missing: str | None):
    outcome = probe.run_python(f"tell(step='working', kept=1)\n{program}", LIMIT)
    assert error in outcome.error and len(outcome.error) <= 600
    assert outcome.missing == missing
    assert outcome.facts == {"kept": 1}


def test_a_child_that_hangs_is_killed_even_if_its_child_lives_on():
    program = (
        "import subprocess, sys, time\ntell(step='waiting')\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])\ntime.sleep(60)"
    )
    start = time.monotonic()
    outcome = probe.run_python(program, 1.5)
    assert time.monotonic() - start < 15
    assert outcome.error.startswith("no answer within 1.5 seconds")
    assert outcome.error.endswith("during 'waiting'")


def test_commands():
    say = [sys.executable, "-c", "print('version 1')"]
    assert probe.run_command(say, LIMIT) == "version 1\n"
    assert probe.run_command([sys.executable, "-c", "raise SystemExit(1)"], LIMIT) is None
    assert probe.run_command([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) is None
    assert probe.run_command(["no-such-program-anywhere"], LIMIT) is None
