"""Programs started by warm.py behave like normal processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WARM = Path(__file__).resolve().parents[1] / "warm.py"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(name="start")
def fixture_start(servers: Any, tmp_path: Path) -> Start:
    """Returns a function that runs a program's text in a fork."""
    # Servers that import only NumPy start fast.
    command = [sys.executable, *servers.start({"X": "of the server"}, ["numpy"])]

    def start(text: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        program = tmp_path / "program.py"
        program.write_text(text)
        return subprocess.Popen(
            [*command, str(program), *arguments], env={**os.environ, **variables}, cwd=tmp_path,
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


def is_running(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 30.0
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_program_inherits_directory_and_environment_of_caller(start: Start, tmp_path: Path) -> None:
    text = (
        "import os, sys\n"
        "print(__name__, sys.argv, os.getcwd(), sys.path[0], os.environ['Y'], 'X' in os.environ)\n"
        "print(input(), os.getsid(0) == os.getpid(), sys.modules['__main__'].__file__)\n"
        "print('problem', file=sys.stderr)\n"
    )
    out, errors = start(text, "a", "b c", Y="mine").communicate("typed\n")
    program, here = str(tmp_path / "program.py"), str(tmp_path)
    assert out.splitlines() == [
        f"__main__ {[program, 'a', 'b c']} {here} {here} mine False",
        f"typed True {program}",
    ]
    assert errors == "problem\n"


@pytest.mark.parametrize(
    ("text", "code", "last"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("raise ValueError('bad')", 1, "ValueError: bad"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.abort()", -6, ""),
    ],
)
def test_caller_exits_with_status_of_program(start: Start, text: str, code: int, last: str) -> None:
    process = start(text)
    _, errors = process.communicate()
    assert process.returncode == code
    assert [*errors.splitlines(), ""][-2 if errors else -1] == last


def test_killing_caller_kills_program(start: Start) -> None:
    process = start("import os, time; print(os.getpid(), flush=True); time.sleep(1e6)")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert is_running(pid) and pid != process.pid
    process.kill()
    wait_for_end(pid)
    process.communicate()


def test_program_receives_signals_of_caller(start: Start) -> None:
    ready = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "time.sleep(1e6)\n"
    )
    for text, code in ((ready, 5), (ready.replace("SIGTERM", "SIGHUP"), -signal.SIGTERM)):
        process = start(text)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.terminate()
        process.communicate()
        assert process.returncode == code


def test_forked_ranks_have_distinct_random_seeds(start: Start) -> None:
    text = (
        "import os, random, numpy\n"
        "print(os.getpid(), os.getppid(), random.random(), numpy.random.random(), hash('key'))\n"
    )
    reported = [start(text, HOROVOD_RANK=str(rank)).communicate()[0].split() for rank in range(3)]
    for of_ranks in list(zip(*reported, strict=True))[:-1]:
        assert len(set(of_ranks)) == 3
    hashes = [found[-1] for found in reported]
    assert hashes[0] == hashes[2] != hashes[1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True)"
         ".start()", r"RuntimeError: 2 threads before a fork \(.*\). Expected 1."),
        ("import sys, types; sys.modules['tensorflow.python.eager.context'] = "
         "types.SimpleNamespace(context_safe=dict)",
         "RuntimeError: TensorFlow has an eager context"),
    ],
)  # fmt: skip
def test_server_with_threads_or_tensors_does_not_fork(
    tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "busy.py").write_text(text)
    # A single server, because two would mix the lines of their tracebacks.
    ended = subprocess.run(
        [sys.executable, str(WARM), "serve", str(tmp_path / "0"), "busy"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=60,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 1 and ended.stdout == ""
    assert re.search(problem, ended.stderr)


def test_server_that_is_not_ready_is_detected(servers: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise SystemExit(1)")
    with pytest.raises(AssertionError):
        servers.start({**os.environ, "PYTHONPATH": str(tmp_path)}, ["bad"])


def test_child_programs_fork_on_request(start: Start, servers: Any) -> None:
    folder = servers.start({"X": "of the server"}, ["numpy"])[-1]
    text = "import os, sys; print('numpy' in sys.modules, sys.argv, [sys.path[0]], os.getpid())"
    parent = (
        "import subprocess, sys\n"
        "print('started', sys.executable, flush=True)\n"
        f'subprocess.run([sys.executable, "-c", {text!r}, "a b"], check=True)\n'
    )
    for variables, is_fork in (({"WARM_PYTHON": f"{folder}/python"}, True), ({}, False)):
        out, errors = start(parent, **variables).communicate()
        executable, reported = out.splitlines()
        assert executable.endswith(f"{folder}/python") == is_fork, errors
        assert reported.startswith(f"{is_fork} ['-c', 'a b'] [''] ")
