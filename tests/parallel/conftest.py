"""Fixtures that run a program as a Horovod job on this machine."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def run_ranks(
    request: pytest.FixtureRequest,
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Provides `_run_ranks`. Skips the test if Horovod is not installed."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("no Horovod: run `make horovod`")
    return functools.partial(_run_ranks, request.getfixturevalue("servers"))


@pytest.fixture(scope="session")
def hosts() -> ModuleType:
    """Provides the module hosts.py. Skips the test if network namespaces are unavailable."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("no Horovod: run `make horovod`")
    module = _load("hosts")
    reason = module.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return module


@pytest.fixture(scope="session")
def elastic_cluster() -> ModuleType:
    """Provides the module elastic_cluster.py."""
    return _load("elastic_cluster")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"slipstream_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run_ranks(
    servers: Any,
    program: str,
    count: int,
    *arguments: str,
    controller: str = "gloo",
    is_cold: bool = False,
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a program of this folder with horovodrun or mpirun.

    Args:
        servers: The servers of warm.py. The ranks and horovodrun are their forks.
        program: File name of the program.
        count: Number of ranks.
        *arguments: Arguments of the program.
        controller: "gloo" or "mpi".
        is_cold: Start new interpreters, as users do, instead of forks.
        timeout: Time in seconds after which the ranks are killed and the test fails.

    Returns:
        The finished launcher with its output.
    """
    environment = servers.environment()
    start = [] if is_cold else servers.start(environment)
    command = [sys.executable, *start, str(HERE / program), *arguments]
    if controller == "gloo":
        folder = Path(sys.executable).parent if is_cold else Path(start[-1])
        launch = [str(folder / "horovodrun"), "-np", str(count), "--gloo"]
        launch += ["-H", f"localhost:{count}"]
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
