"""What the tests of several ranks share: how a program is run as a Horovod job on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Gives `_run_ranks`; tests that use it are skipped, visibly, without Horovod."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("no Horovod: run `make horovod`")
    return _run_ranks


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


def _run_ranks(
    program: str, count: int, *arguments: str, controller: str = "gloo", timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Runs a program of this folder under horovodrun or mpirun.

    Args:
        program: file name.
        count: number of ranks.
        *arguments: of the program.
        controller: "gloo" or "mpi".
        timeout: seconds after which the ranks are killed and the test fails.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")])),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(HERE / program), *arguments]
    if controller == "gloo":
        launcher = Path(sys.executable).parent / "horovodrun"
        launch = [str(launcher), "-np", str(count), "--gloo", "-H", f"localhost:{count}"]
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
