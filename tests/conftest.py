"""What all tests share: programs that start at once, and how pytest-xdist shares out the tests.

A file's tests stay together, and so do all that start ranks: these must reach their collectives
soon after each other, so that one job runs at a time. `make test` has two processes.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

# What tests of several folders share lies beside this file; `importlib` mode does not find it.
sys.path.append(str(Path(__file__).parent))

# What starts ranks, or measures time.
JOBS = (
    "tests/parallel/",
    "tests/integration/test_benchmark",
    "tests/integration/test_demo.py",
)
WARM = Path(__file__).resolve().parent / "warm.py"
# What every rank imports, and horovodrun, which asks a fork of itself how Horovod was built. Not
# this package, which is tested.
MODULES = ["tensorflow", "keras"]
if importlib.util.find_spec("horovod") is not None:
    MODULES += ["horovod.tensorflow", "horovod.runner.launch"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives the scheduler; called by pytest-xdist where it is in use."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "jobs" if nodeid.startswith(JOBS) else nodeid.partition("::")[0]

    return Scheduler(config, log)


class Servers:
    """The servers of warm.py, which are started when a test first needs them."""

    def __init__(self, make_folder: Callable[[], Path]):
        """Takes what makes an empty folder for sockets."""
        self._make_folder = make_folder
        self._folders: dict[frozenset[tuple[str, str]], str] = {}
        self._processes: list[subprocess.Popen[str]] = []

    @staticmethod
    def environment() -> dict[str, str]:
        """Returns the variables of programs that import from the same folders as the tests."""
        paths = filter(None, [*sys.path, os.environ.get("PYTHONPATH")])
        inherited = {n: v for n, v in os.environ.items() if n != "PYTEST_CURRENT_TEST"}
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join(paths),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start(self, environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> list[str]:
        """Has modules imported under an environment, unless they have been.

        Returns:
            Arguments of an interpreter; what would be its own follows them: a program's file or
            "-c" and its text, then the program's arguments.
        """
        key = frozenset({**environment, "": " ".join(modules)}.items())
        if key not in self._folders:
            self._folders[key] = folder = str(self._make_folder())
            _write_programs(Path(folder))
            # Its threads would begin as NumPy is imported.
            alone = {**environment, "OPENBLAS_NUM_THREADS": "1"}
            started = [
                subprocess.Popen(
                    [sys.executable, str(WARM), "serve", f"{folder}/{number}", *modules],
                    env=alone, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                )
                for number in range(2)
            ]  # fmt: skip
            self._processes += started
            for process in started:
                assert process.stdout is not None and process.stdout.readline() == "ready\n"
        # Without site-packages: nothing of them is needed, and they take a while.
        return ["-S", str(WARM), "run", self._folders[key]]

    def stop(self) -> None:
        """Ends all of them. Programs that still run end by themselves."""
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Gives the servers of warm.py."""
    found = Servers(lambda: tmp_path_factory.mktemp("warm"))
    yield found
    found.stop()


@pytest.fixture(scope="session")
def warm(servers: Servers) -> list[str]:
    """Gives arguments for an interpreter, before those that are a program's; see `Servers`."""
    return servers.start(servers.environment())


def _write_programs(folder: Path) -> None:
    """Writes what stands for `python` and `horovodrun` where WARM_PYTHON is set; see warm.py."""
    run = f"-S {shlex.quote(str(WARM))} run {shlex.quote(str(folder))}"
    python = shlex.quote(sys.executable)
    launcher = shlex.quote(str(Path(sys.executable).parent / "horovodrun"))
    for name, command in {
        "python": f"{python} {run}",
        "horovodrun": f"env -u WARM_PYTHON {python} {run} {launcher}",
    }.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
