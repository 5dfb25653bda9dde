"""Runs other libraries for comparison, each in its own environment and process.

An environment is created on first use with pip from PyPI. A process waits idle until it receives a
command to run steps. See embedding_peers/worker.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

_OTHER_BUILD = flags.DEFINE_string(
    "other_build", None, "Folder of another build of slipstream_tf to compare with this build."
)

_PROGRAMS = "embedding_peers"
# Packages for each call of pip. --no-deps is needed because TFRA's wheel requires a TensorFlow
# without a CPU build of the same version, and torchrec requires the GPU build of FBGEMM.
ENVIRONMENTS: Mapping[str, Sequence[Sequence[str]]] = {
    "torch": (
        ("torch==2.14.1", "fbgemm-gpu-cpu==1.9.0", "numpy"),
        ("--no-deps", "torchrec==1.9.2"),
    ),
    # The last release of Intel's extension.
    "ipex": (("torch==2.8.0", "intel-extension-for-pytorch==2.8.0", "numpy"),),
    # Keras 3 does not support parameter servers.
    "tf_keras": (("tensorflow-cpu==2.21.*", "tf-keras==2.21.*"),),
    "fuxictr": (("torch==2.13.0", "numpy"), ("fuxictr==2.3.10",)),
    "tfra": (
        ("tensorflow-cpu==2.16.2", "tf-keras==2.16.0", "setuptools<81", "typeguard<3"),
        ("--no-deps", "tensorflow-recommenders-addons==0.8.1"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library, or one way to use it.

    Attributes:
        label: The name in tables.
        environment: A name in `ENVIRONMENTS`, or None for the Python that runs the benchmark.
        program: A program in embedding_peers/ with its arguments.
        rules: The supported update rules of embedding_step.py.
        is_other_build: Whether it is the build of this library in --other_build.
    """

    label: str
    environment: str | None
    program: Sequence[str]
    rules: Sequence[str] = ()
    is_other_build: bool = False


def python_of(environment: str | None, folder: Path) -> str:
    """Returns the Python of an environment; creates an incomplete environment.

    Args:
        environment: A name in `ENVIRONMENTS`, or None.
        folder: The folder of the environments.
    """
    if environment is None:
        return sys.executable
    home = folder / environment
    python, done = home / "bin" / "python", home / "installed.json"
    wanted = [list(call) for call in ENVIRONMENTS[environment]]
    if done.exists() and json.loads(done.read_text(encoding="utf-8")) == wanted:
        return str(python)
    print(f"Creating the environment {home}: {wanted}", flush=True)
    venv.create(home, with_pip=True, clear=True)
    for call in wanted:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *call], check=True)
    done.write_text(json.dumps(wanted), encoding="utf-8")
    return str(python)


class Worker:
    """The process of a peer, as a context manager.

    The process is killed on exit.
    """

    def __init__(self, peer: Peer, folder: Path, threads: int):
        """Starts the process.

        Args:
            peer: The library to run.
            folder: The folder of the environments.
            threads: The number of threads that the peer can use.
        """
        programs = Path(__file__).resolve().parent / _PROGRAMS
        environment = {
            **os.environ,
            "ANSWERS": "1",  # Programs of older builds read this number.
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": str(threads),
        }
        if peer.environment is not None:
            environment.pop("PYTHONPATH", None)
        if peer.is_other_build:
            if _OTHER_BUILD.value is None:
                raise SystemExit(
                    f"{peer.label} requires --other_build. Set it to the folder of that build."
                )
            other = Path(_OTHER_BUILD.value).resolve()
            environment["PYTHONPATH"] = str(other)
            # A source tree contains programs that match its version.
            own = other / "benchmarks" / _PROGRAMS
            programs = own if own.is_dir() else programs
        command = [python_of(peer.environment, folder), str(programs / peer.program[0])]
        self._peer = peer
        self._process = subprocess.Popen(
            [*command, *peer.program[1:]],
            env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def make(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """Creates tables; returns the versions of the libraries in use."""
        return self._ask({"make": dict(settings)})["versions"]

    def run(self, steps: int) -> list[float]:
        """Runs steps; returns the milliseconds of each."""
        return self._ask({"run": steps})["ms"]

    def losses(self, steps: int) -> list[float]:
        """Runs steps; returns the loss of each."""
        return self._ask({"run": steps})["losses"]

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # The missing answer is handled below.
            print(json.dumps(command), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            raise SystemExit(
                f"{self._peer.label} ended with exit code {code} during {command}. Its output is "
                "above. If the code is -9, memory was probably exhausted, because all libraries "
                "hold their tables at the same time. Use fewer --peers."
            )
        return json.loads(answer)


def take_turns(
    peers: Mapping[str, Peer],
    settings: Mapping[str, Any],
    folder: Path,
    runs: int,
    steps: Mapping[str, int],
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Runs the steps of all libraries in turns.

    Args:
        peers: The libraries by name.
        settings: The settings of the tables. "threads" is the number of threads.
        folder: The folder of the environments.
        runs: The number of measured turns. One warm-up turn is not counted.
        steps: The number of steps per turn, by name.

    Returns:
        The milliseconds of each turn by name, and the versions.
    """
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        versions: dict[str, str] = {}
        for name, peer in peers.items():
            workers[name] = stack.enter_context(Worker(peer, folder, settings["threads"]))
            versions.update(workers[name].make(settings))
        for name, worker in workers.items():
            worker.run(steps[name])
        found: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(runs):
            for name, worker in workers.items():
                found[name].append(sum(worker.run(steps[name])))
    return found, versions
