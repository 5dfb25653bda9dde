"""What the tests of several ranks share: how a program is run as a Horovod job on this machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
WARM = HERE / "warm.py"
# What every rank imports, and horovodrun, which asks a fork of itself how Horovod was built. Not
# this package, which is tested.
MODULES = ("tensorflow", "keras", "horovod.tensorflow", "horovod.runner.launch")


class Servers:
    """The servers of warm.py, which are started when a test first needs them."""

    def __init__(self, make_folder: Callable[[], Path]):
        """Takes what makes an empty folder for sockets."""
        self._make_folder = make_folder
        self._folders: dict[frozenset[tuple[str, str]], str] = {}
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> list[str]:
        """Has modules imported under an environment, unless they have been.

        Returns:
            Arguments of an interpreter; what would be its own follows them, beginning with a
            program's file.
        """
        key = frozenset({**environment, "": " ".join(modules)}.items())
        if key not in self._folders:
            self._folders[key] = folder = str(self._make_folder())
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


@pytest.fixture
def warm(servers: Servers) -> list[str]:
    """Gives arguments for an interpreter, before those that are a program's; see `Servers`."""
    return servers.start(_environment())


@pytest.fixture(scope="session")
def run_ranks(
    request: pytest.FixtureRequest,
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Gives `_run_ranks`; tests that use it are skipped, visibly, without Horovod."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("no Horovod: run `make horovod`")
    return functools.partial(_run_ranks, request.getfixturevalue("servers"))


@pytest.fixture(scope="session")
def hosts() -> ModuleType:
    """Gives the module hosts.py; tests that use it are skipped, visibly, where it cannot work."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("no Horovod: run `make horovod`")
    spec = importlib.util.spec_from_file_location("slipstream_hosts", HERE / "hosts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    reason = module.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return module


def _environment() -> dict[str, str]:
    paths = filter(None, [*sys.path, os.environ.get("PYTHONPATH")])
    inherited = {n: v for n, v in os.environ.items() if n != "PYTEST_CURRENT_TEST"}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(paths),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _run_ranks(
    servers: Servers,
    program: str,
    count: int,
    *arguments: str,
    controller: str = "gloo",
    is_cold: bool = False,
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a program of this folder under horovodrun or mpirun.

    Args:
        servers: of warm.py, of which ranks and horovodrun are forks.
        program: file name.
        count: number of ranks.
        *arguments: of the program.
        controller: "gloo" or "mpi".
        is_cold: ranks and horovodrun are what users start: interpreters that import for themselves.
        timeout: seconds after which the ranks are killed and the test fails.
    """
    environment = _environment()
    start = [] if is_cold else servers.start(environment)
    command = [sys.executable, *start, str(HERE / program), *arguments]
    if controller == "gloo":
        launcher = [] if is_cold else [sys.executable, *start]
        launch = [*launcher, str(Path(sys.executable).parent / "horovodrun")]
        launch += ["-np", str(count), "--gloo", "-H", f"localhost:{count}"]
    else:
        found = shutil.which("mpirun")
        if found is None:
            pytest.skip("no mpirun: install openmpi-bin")
        launch = [found, "--allow-run-as-root", "--oversubscribe", "-np", str(count)]
        launch += ["--bind-to", "none", "-x", "PYTHONPATH"]
    return subprocess.run(
        [*launch, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
