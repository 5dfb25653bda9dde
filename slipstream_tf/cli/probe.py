"""Runs what may crash or hang in a process of its own, with a time limit.

In: a few lines of Python, or a command. Out: the facts told before the end, and how it ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

_PREFIX = "slipstream-probe:"
_LONGEST_ERROR = 600
# TensorFlow's lines of information and warning, which say nothing about a crash.
_LOG_LINE = re.compile(r"[IW]\d{4} |WARNING: All log messages before")
# `tell` starts a line of its own: a library may have left an unfinished one on stdout.
_FRAME = """\
import json, sys
sys.path[:] = {path!r}
def tell(**facts):
    sys.stdout.write("\\n" + {prefix!r} + json.dumps(facts) + "\\n")
    sys.stdout.flush()
try:
    exec({program!r}, {{"tell": tell}})
    tell(done=True)
except (Exception, SystemExit) as error:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    tell(error=f"{{type(error).__name__}}: {{error}}", missing=missing)
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a probe went.

    Attributes:
        facts: all that it told, `error` and `missing` (the module that was not found) apart.
        error: in one line, what went wrong; empty if nothing did.
        missing: the module that was not found, if that is what went wrong.
    """

    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""
    missing: str | None = None


def run_python(program: str, limit: float, environment: Mapping[str, str] = {}) -> Outcome:
    """Runs Python lines in a child process that imports from the same folders as this one.

    Args:
        program: it calls `tell(name=value)` with values that JSON has; `tell(step=...)` says what
            it is about to do, for the report of a crash.
        limit: seconds after which the child is killed.
        environment: variables beside those of this process.
    """
    text = _FRAME.format(path=sys.path, prefix=_PREFIX, program=program)
    code, output, errors = _run([sys.executable, "-c", text], limit, environment)
    facts: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(_PREFIX):
            facts.update(json.loads(line.removeprefix(_PREFIX)))
    step = facts.pop("step", None)
    error, missing = facts.pop("error", ""), facts.pop("missing", None)
    is_done = facts.pop("done", False)
    if code != 0 or not (is_done or error):
        doing = f" during '{step}'" if step else ""
        error = f"{_ending(code, limit)}{doing}{_last_line(errors)}"
    error = " ".join(error.split())
    if len(error) > _LONGEST_ERROR:
        error = error[: _LONGEST_ERROR - 3] + "..."
    return Outcome(facts, error, missing)


def run_command(command: Sequence[str], limit: float) -> str | None:
    """Runs a command and returns its output, or None if it fails or takes too long.

    Args:
        command: program and arguments.
        limit: seconds after which it is killed.
    """
    try:
        code, output, _ = _run(command, limit, {})
    except OSError:
        return None
    return output if code == 0 else None


def _run(
    command: Sequence[str], limit: float, environment: Mapping[str, str]
) -> tuple[int | None, str, str]:
    """Returns (exit code, or None after the limit; stdout; stderr)."""
    # Files, not pipes: a grandchild that outlives the child would keep a pipe open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
        options["env"] = {**os.environ, **environment}
        code = None
        # Not answered in time: the child is killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(command, timeout=limit, check=False, **options).returncode
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return code, texts[0], texts[1]


def _ending(code: int | None, limit: float) -> str:
    if code is None:
        return f"no answer within {limit:g} seconds (a longer --time_limit may help)"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"crashed with {name}"


def _last_line(errors: str) -> str:
    lines = [line for line in map(str.strip, errors.splitlines()) if line]
    lines = [line for line in lines if not _LOG_LINE.match(line)]
    return f": {lines[-1]}" if lines else ""
