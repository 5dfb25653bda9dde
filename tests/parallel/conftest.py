"""What the tests of several ranks share: how a program is run as a Horovod job on this machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def run_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Gives `_run_ranks`; tests that use it are skipped, visibly, without Horovod."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("no Horovod: run `make horovod`")
    address = str(tmp_path_factory.mktemp("warm") / "socket")
    server = subprocess.Popen(
        [sys.executable, str(HERE / "warm.py"), "serve", address],
        env=_environment(), text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    yield functools.partial(_run_ranks, address)
    server.kill()
    server.communicate()


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
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _run_ranks(
    address: str,
    program: str,
    count: int,
    *arguments: str,
    controller: str = "gloo",
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a program of this folder under horovodrun or mpirun.

    Args:
        address: of the server of warm.py, which runs the ranks of Gloo.
        program: file name.
        count: number of ranks.
        *arguments: of the program.
        controller: "gloo" or "mpi".
        timeout: seconds after which the ranks are killed and the test fails.
    """
    command = [sys.executable, str(HERE / program), *arguments]
    if controller == "gloo":
        launcher = Path(sys.executable).parent / "horovodrun"
        launch = [str(launcher), "-np", str(count), "--gloo", "-H", f"localhost:{count}"]
        # Without site-packages: nothing of them is needed, and they take half a second.
        command[1:1] = ["-S", str(HERE / "warm.py"), "run", address]
    else:
        found = shutil.which("mpirun")
        if found is None:
            pytest.skip("no mpirun: install openmpi-bin")
        launch = [found, "--allow-run-as-root", "--oversubscribe", "-np", str(count)]
        launch += ["--bind-to", "none", "-x", "PYTHONPATH"]
    return subprocess.run(
        [*launch, *command],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
