"""`slipstream-doctor`: checks the installation and prints repair commands.

The program prints a report, or a JSON object with --json. The exit code is 1 if training in a
single process does not work. Each check runs in a child process, because it may crash or hang.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from slipstream_tf._version import __version__
from slipstream_tf.cli import checks
from slipstream_tf.cli.checks import MISSING, OK, UNCHECKED
from slipstream_tf.cli.flag_set import Flag, FlagSet, Number, RunError
from slipstream_tf.cli.program import run_program

SCHEMA = 1
_LONGEST_ERROR = 600
_WORKERS = 2
# Matches TensorFlow's info and warning lines, because they do not explain a crash.
_LOG_LINE = re.compile(r"[IW]\d{4} |WARNING: All log messages before")
_CHILD = """\
import sys
sys.path[:] = {path!r}
from slipstream_tf.cli import checks
checks.call({function!r}, {answer!r})
"""
# TensorFlow and Horovod import Keras. Only the check of Keras reports a wrong KERAS_BACKEND.
_SETTLED = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        name: Name of the checked part.
        state: "ok", "missing", "broken" or "unchecked".
        detail: The version and details of a part that works, otherwise the problem.
        fix: The repair command, or an empty string.
        is_needed: Whether training in a single process needs the part.
    """

    name: str
    state: str
    detail: str
    fix: str = ""
    is_needed: bool = False


@dataclasses.dataclass(frozen=True)
class Check:
    """A check of a part of the installation.

    Attributes:
        name: Name of the checked part.
        function: The check, as "module:function".
        fix: The default repair command.
        module: Name of the main module. If it is not installed, the state is "missing" instead of
            "broken". "-" if the part has no main module.
        purpose: Purpose of an optional part. Empty if training in a single process needs the part.
        environment: Additional environment variables of the child process.
    """

    name: str
    function: str
    fix: str
    module: str = "-"
    purpose: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: _SETTLED)

    def run(self, limit: float) -> Finding:
        """Runs the check in a child process and returns the finding.

        Args:
            limit: Time limit in seconds. The child process is killed after it.
        """
        answer = _answer_of(self, limit)
        answer["detail"] = " ".join(answer["detail"].split())[:_LONGEST_ERROR]
        if answer.pop("missing", None) == self.module:
            use = f"; only {self.purpose}" if self.purpose else ""
            answer.update(state=MISSING, detail=f"not installed{use}")
        if answer["state"] != OK:
            answer.setdefault("fix", self.fix)
        return Finding(self.name, is_needed=not self.purpose, **answer)


_HERE = "slipstream_tf.cli.checks:"
_FIRST = (
    Check("packages", f"{_HERE}packages", checks.INSTALL),
    Check("TensorFlow", f"{_HERE}tensorflow", checks.INSTALL_TENSORFLOW, "tensorflow"),
)
_LATER = (
    Check("Keras", f"{_HERE}keras", "pip install --upgrade 'keras>=3'", "keras",
          environment={"TF_CPP_MIN_LOG_LEVEL": "3"}),
    # Hide GPUs, because TensorFlow would reserve the memory of a GPU that may be in use.
    Check("op library", f"{_HERE}op_library", checks.INSTALL,
          environment={**_SETTLED, "CUDA_VISIBLE_DEVICES": "-1"}),
    Check("Horovod", f"{_HERE}horovod", checks.INSTALL_HOROVOD, "horovod",
          "jobs with multiple ranks need it"),
    Check("SOK", f"{_HERE}sok", checks.INSTALL_SOK, "sparse_operation_kit",
          "tables of SOK on GPUs need it"),
    Check("matplotlib", f"{_HERE}matplotlib", checks.INSTALL_REPORT, "matplotlib",
          "slipstream-report and slipstream-demo need it"),
    # Takes only the memory that its kernel needs, because a GPU may be in use.
    Check("GPUs", f"{_HERE}gpus", "", purpose="training on GPUs needs them",
          environment={**_SETTLED, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}),
)  # fmt: skip


def make_flags() -> FlagSet:
    """Returns the flags of `slipstream-doctor`."""
    limit = Number(0, 3600, open_minimum=True)
    text = "maximum seconds of each check, which runs in a separate process"
    report = (
        Flag("json", None, "print the report as a JSON object"),
        Flag("time_limit", limit, text, 60),
    )
    return FlagSet(
        "slipstream-doctor",
        "Checks each part of the installation and prints the command that repairs a missing or "
        "broken part. Also tests updates of a few rows in each kind of table, and a kernel on each "
        "GPU. The exit code is 0 "
        "if training in a single process works. It is 1 if the packages, TensorFlow, Keras or the "
        "op library do not work; Horovod, SOK, matplotlib and GPUs are optional. It is 2 if a flag "
        "is invalid.",
        ("slipstream-doctor", "slipstream-doctor --json"),
        {"Report": report},
    )


def main(values: dict[str, Any], given: frozenset[str]) -> None:
    """Prints the report.

    Raises:
        RunError: If a part that training in a single process needs does not work.
    """
    findings = []
    if not values["json"]:
        print(f"slipstream_tf {__version__}\n", flush=True)
    for finding in examine(values["time_limit"]):
        findings.append(finding)
        if not values["json"]:
            # Do not wrap lines, so that users can copy the command.
            fix = f"\n{'':28}-> {finding.fix}" if finding.fix else ""
            print(f"  {finding.state:<10}{finding.name:<16}{finding.detail}{fix}", flush=True)
    broken = [finding.name for finding in findings if finding.is_needed and finding.state != OK]
    if values["json"]:
        record = {
            "schema": SCHEMA,
            "slipstream_tf": __version__,
            "works": not broken,
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(record, indent=2))
    if broken:
        raise RunError(
            f"Training in a single process does not work here: {', '.join(broken)}. Repair the "
            "first part first, because the others may require it."
        )
    if not values["json"]:
        print("\nTraining in a single process works.", flush=True)


def examine(limit: float) -> Iterator[Finding]:
    """Yields the findings in report order, each when it is ready.

    Args:
        limit: Time limit of each check in seconds.
    """
    pool = ThreadPoolExecutor(_WORKERS)
    run = partial(Check.run, limit=limit)
    try:
        for finding in pool.map(run, _FIRST):
            yield finding
        if finding.state == OK:
            yield from pool.map(run, _LATER)
            return
        # Without TensorFlow every other check fails in the same way, or hangs.
        for check in _LATER:
            why = "requires TensorFlow, which does not work"
            yield Finding(check.name, UNCHECKED, why, is_needed=not check.purpose)
    finally:
        # Do not start the remaining checks after an interruption.
        pool.shutdown(cancel_futures=True)


def _answer_of(check: Check, limit: float) -> dict[str, Any]:
    """Returns the result of a check, or describes its failure."""
    with tempfile.TemporaryDirectory(prefix="slipstream-doctor-") as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log.txt")
        program = _CHILD.format(path=sys.path, function=check.function, answer=str(answer))
        code: int | None = None
        # Use a file for stderr, because a grandchild that outlives the child would keep a pipe
        # open.
        with open(log, "wb") as errors, contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                [sys.executable, "-c", program], env={**os.environ, **check.environment},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                timeout=limit, check=False,
            ).returncode  # fmt: skip
        if code == 0 and answer.exists():
            return json.loads(answer.read_text(encoding="utf-8"))
        lines = map(str.strip, log.read_text(encoding="utf-8", errors="replace").splitlines())
        last = [f": {line}" for line in lines if line and not _LOG_LINE.match(line)][-1:]
    if code is None:
        end = f"did not finish within {limit:g} seconds (a longer --time_limit may help)"
    elif code < 0:
        names = {int(value): value.name for value in signal.Signals}
        end = f"crashed with {names.get(-code, f'signal {-code}')}"
    else:
        end = f"ended with exit code {code}"
    return {"state": checks.BROKEN, "detail": "".join([end, *last])}


def entry_point(arguments: Sequence[str] | None = None) -> None:
    """Runs the program, then exits the process."""
    sys.exit(run_program(make_flags(), main, arguments))


if __name__ == "__main__":
    entry_point()
