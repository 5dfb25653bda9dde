"""Fixtures that run programs with SOK, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def sok_site() -> Path:
    """Returns the folder from which SOK can be imported. See install_sok.py.

    The folder is kept in SLIPSTREAM_SOK_CACHE, by default below the user's cache folder. The first
    installation needs the network and fails without it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("SLIPSTREAM_SOK_CACHE") or cache / "slipstream_tf" / "sok")
    spec = importlib.util.spec_from_file_location("slipstream_install_sok", HERE / "install_sok.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.install(folder)


@pytest.fixture
def run_sok(
    run_ranks: Callable[..., subprocess.CompletedProcess[str]],
    sok_site: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., str]:
    """Returns a function that runs a program of this folder on ranks.

    Every rank must print "all checks passed". With `is_keras_2`, `tf.keras` is Keras 2, which SOK's
    legacy optimizers need.
    """
    paths = [str(sok_site), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))

    def run(program: str, count: int, *arguments: str, is_keras_2: bool = False) -> str:
        monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
        if is_keras_2:
            monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
        done = run_ranks(f"sok/{program}", count, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("all checks passed") == count, done.stdout + done.stderr
        return done.stdout

    return run
