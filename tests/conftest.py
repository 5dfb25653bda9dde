"""Fixtures for fast program starts, and the distribution of tests by pytest-xdist.

All tests of a file run in one pytest-xdist process. All tests that start ranks share one process as
well, because ranks must reach their collectives soon after each other and therefore only one job
may run at a time. `make test` uses two processes.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Helper modules of all test folders are in this folder. `importlib` mode does not add it to the
# path.
sys.path.append(str(Path(__file__).parent))

# Times of single examples depend on the load of the machine.
hypothesis.settings.register_profile(
    "any_speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any_speed")

# Tests that start ranks. They take longer than all others, which run in the second process.
JOBS = ("tests/parallel/", "tests/integration/test_benchmark_network.py")
WARM = Path(__file__).resolve().parent / "warm.py"
# Modules that every rank imports. horovodrun is included because it forks itself to check how
# Horovod was built. This package is not included because it is under test.
MODULES = ["tensorflow", "keras"]
if importlib.util.find_spec("horovod") is not None:
    MODULES += ["horovod.tensorflow", "horovod.runner.launch"]
# The program horovodrun as text. Horovod starts an interpreter for every rank, which would
# otherwise read the launcher's file again and import all that the launcher imports.
LAUNCHER = "import sys, horovod.runner.launch as h; sys.exit(h.run_commandline())"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns the scheduler. pytest-xdist calls this hook when it is in use."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "jobs" if nodeid.startswith(JOBS) else nodeid.partition("::")[0]

    return Scheduler(config, log)


@pytest.fixture(scope="module", autouse=True)
def _collect_and_freeze() -> None:
    """Excludes objects of earlier files from garbage collections.

    Models and graphs of finished tests remain in caches of Keras and TensorFlow. Otherwise each
    full collection would visit them, and some tests request many collections.
    """
    gc.collect()
    gc.freeze()


class Servers:
    """The servers of warm.py. Each starts when a test first needs it."""

    def __init__(self, make_folder: Callable[[], Path]):
        """Receives a function that creates an empty folder for the sockets."""
        self._make_folder = make_folder
        self._folders: dict[frozenset[tuple[str, str]], str] = {}
        self._processes: list[subprocess.Popen[str]] = []

    @staticmethod
    def environment() -> dict[str, str]:
        """Returns environment variables for programs that import from the tests' folders."""
        paths = filter(None, [*sys.path, os.environ.get("PYTHONPATH")])
        inherited = {n: v for n, v in os.environ.items() if n != "PYTEST_CURRENT_TEST"}
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join(paths),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start(self, environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> list[str]:
        """Starts servers once per environment and list of modules.

        Returns:
            Arguments for the Python interpreter. Append the path of a program, or "-c" and its
            text, and then the program's arguments.
        """
        key = frozenset({**environment, "": " ".join(modules)}.items())
        if key not in self._folders:
            self._folders[key] = folder = str(self._make_folder())
            _write_programs(Path(folder))
            # Otherwise OpenBLAS starts threads when NumPy is imported.
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
        # -S skips site-packages, which `run` does not need and which slows its start.
        return ["-S", str(WARM), "run", self._folders[key]]

    def stop(self) -> None:
        """Kills all servers. Programs that still run end on their own."""
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Provides the servers of warm.py."""
    found = Servers(lambda: tmp_path_factory.mktemp("warm"))
    yield found
    found.stop()


@pytest.fixture(scope="session")
def warm(servers: Servers) -> list[str]:
    """Returns interpreter arguments that start a program in a fork. See `Servers`."""
    return servers.start(servers.environment())


def _write_programs(folder: Path) -> None:
    """Writes replacements of `python` and `horovodrun`, for use with WARM_PYTHON (see warm.py)."""
    run = f"-S {shlex.quote(str(WARM))} run {shlex.quote(str(folder))}"
    python = shlex.quote(sys.executable)
    launcher = f"-c {shlex.quote(LAUNCHER)}"
    for name, command in {
        "python": f"{python} {run}",
        "horovodrun": f"env -u WARM_PYTHON {python} {run} {launcher}",
    }.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
