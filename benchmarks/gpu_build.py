"""Builds the programs of gpu_launchers.py with only nvcc and g++."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from find_cuda import find_cuda
from native_build import read_sources

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "gpu_launchers"
SMALL_GTEST = "benchmarks/gpu/small_gtest"
C_API = "libslipstream_gpu.so"  # The launchers for ctypes; see benchmarks/gpu/launchers.py.
CORE_THREADS = "core_threads"
_C_API_SOURCE, _CORE_THREADS_SOURCE = "benchmarks/gpu/c_api.cc", "benchmarks/gpu/core_threads.cc"
_RECORD_SOURCE = "benchmarks/gpu/record.cc"
_EMULATION = "cc_ops/core/testing/cuda_emulation"


def find_toolkit() -> dict[str, str]:
    """Returns the paths of the CUDA toolkit; see build_support/find_cuda.py.

    Raises:
        SystemExit: If there is no toolkit.
    """
    toolkit = find_cuda()
    if not toolkit:
        named = os.environ.get("CUDA_HOME")
        place = f"CUDA_HOME={named}" if named else "/usr/local/cuda, on PATH or from PyPI"
        raise SystemExit(
            f"No CUDA toolkit (nvcc, cuda_runtime.h, libcudart_static.a) in {place}. The launchers "
            "cannot be compiled. Install CUDA 13.0 (tested) or 12 (not tested), or set CUDA_HOME."
        )
    return toolkit


def emulated_toolkit() -> dict[str, str]:
    """Returns a toolkit that compiles kernels for the CPU.

    Its programs run on the CUDA emulation with their own order of threads.
    """
    cxx = shutil.which(os.environ.get("CXX", "g++")) or "g++"
    return {"nvcc": cxx, "home": str(ROOT / _EMULATION), "include_dir": str(ROOT / _EMULATION)}


def find_folder(flag: str, path: str, file: str, folders: Sequence[str]) -> Path:
    """Returns the first candidate folder below a path that contains a file.

    Raises:
        SystemExit: If no folder contains the file.
    """
    for folder in folders:
        if (Path(path) / folder / file).is_file():
            return (Path(path) / folder).resolve()
    allowed = ", ".join(str(Path(folder) / file) for folder in folders)
    raise SystemExit(f"Invalid {flag}={path}. Expected a folder that contains {allowed}.")


def ask_smi(what: str) -> list[str]:
    """Returns a property of each GPU from nvidia-smi; [] if nvidia-smi fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    reported = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        [line.strip() for line in reported.stdout.splitlines()] if reported.returncode == 0 else []
    )


def version_of(compiler: str) -> str:
    """Returns the line of `--version` with the version."""
    reported = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    lines = reported.stdout.strip().splitlines() or ["unknown"]
    return next((line for line in lines if re.search(r"\d\.\d", line)), lines[0])


class Build:
    """Compiles and links incrementally.

    An object is rebuilt only if its command or a source has changed.

    Args:
        given: The command line.
        toolkit: The paths of the CUDA toolkit.
    """

    def __init__(self, given: argparse.Namespace, toolkit: Mapping[str, str]):
        self._folder = Path(given.build).absolute()
        self._jobs = given.jobs
        self._nvcc = toolkit["nvcc"]
        self._lists = read_sources()
        cxx = os.environ.get("CXX", "g++")
        own = [*self._lists["COPTS"], *self._lists["CORE_COPTS"]]
        self._host = [cxx, "-c", "-fPIC", f"-I{ROOT}", *own, "-isystem", toolkit["include_dir"]]
        named = given.architectures.split(",") if given.architectures else sorted(
            {capability.replace(".", "") for capability in ask_smi("compute_cap")}
        )  # fmt: skip
        chosen = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in named]
        device = [f for f in self._lists["NVCC_COPTS"] if not (chosen and "-gencode" in f)]
        self._device = [self._nvcc, "-c", "-x", "cu", f"-I{ROOT}", *device, *chosen]
        self._more_core: list[str] = []
        if given.emulated:
            self._device = [*self._host, "-x", "c++", f"-D{self._lists['GPU_DEFINE']}"]
            self._more_core = [f"{_EMULATION}/cuda_emulation.cc"]
        self._gtest = given.gtest
        self._versions = f"{version_of(self._nvcc)}\0{version_of(cxx)}"
        digest = hashlib.sha256()
        for folder in ("cc_ops/core", "benchmarks/gpu"):
            for path in sorted((ROOT / folder).rglob("*.h")):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
        self._headers = digest.hexdigest()

    @property
    def programs(self) -> tuple[Path, list[Path]]:
        """The program of the cases, and the test programs."""
        tests = [self._folder / Path(test).stem for test in self._lists["GPU_TESTS"]]
        return self._folder / PROGRAM, tests

    def run(self) -> None:
        """Builds all programs. A source that does not compile stops only the programs with it.

        Raises:
            SystemExit: If a compiler or a linker fails. It contains the output of all failures.
        """
        core = {f"cc_ops/{source}": self._host for source in self._lists["CORE_SRCS"]}
        core.update({f"cc_ops/{source}": self._device for source in self._lists["GPU_SRCS"]})
        core.update({source: self._device for source in self._more_core})
        cases = self._cases()
        testing, main = self._testing()
        tests = {f"cc_ops/{source}": testing for source in self._lists["GPU_TESTS"]}
        programs = {PROGRAM: list(cases)}
        programs.update({Path(test).stem: [test, *main] for test in tests})
        for source in (_C_API_SOURCE, _CORE_THREADS_SOURCE):
            programs[PROGRAM].remove(source)
        programs[C_API] = [_C_API_SOURCE]
        programs[CORE_THREADS] = [_CORE_THREADS_SOURCE, _RECORD_SOURCE]
        for name in programs:  # Programs of earlier sources must not run if this build fails.
            (self._folder / name).unlink(missing_ok=True)
        objects, problems = self._compile({**core, **cases, **main, **tests})

        def link(name: str) -> str:
            own = [objects[source] for source in (*programs[name], *core)]
            if not all(path.exists() for path in own):
                return f"{name} was not linked."
            flags = ["-shared"] if name.endswith(".so") else []
            return self._make([self._nvcc, *flags, *map(str, own)], self._folder / name)

        problems += self._all(link, programs)
        if problems:
            raise SystemExit("\n".join(problems))

    def _cases(self) -> dict[str, list[str]]:
        """Returns the compile commands of benchmarks/gpu by source."""
        return {
            str(path.relative_to(ROOT)): (
                self._device if path.name.endswith(".cu.cc") else self._host
            )
            for path in sorted((ROOT / "benchmarks/gpu").glob("*.cc"))
        }

    def _testing(self) -> tuple[list[str], dict[str, list[str]]]:
        """Returns compile commands for tests and for their main function."""
        if self._gtest:
            home = find_folder("--gtest", self._gtest, "include/gtest/gtest.h", (".", "googletest"))
            headers, sources = home / "include", ["src/gtest-all.cc", "src/gtest_main.cc"]
        else:
            home = headers = ROOT / SMALL_GTEST
            sources = ["main.cc"]
        testing = [*self._host, f"-D{self._lists['GPU_DEFINE']}", "-isystem", str(headers)]
        return testing, {str(home / source): [*testing, f"-I{home}"] for source in sources}

    def _compile(self, units: Mapping[str, Sequence[str]]) -> tuple[dict[str, Path], list[str]]:
        """Returns the object file of each source, and the output of the failures."""
        objects = {}
        for source, command in units.items():
            text = "\0".join([self._versions, self._headers, *command, source])
            digest = hashlib.sha256(text.encode() + (ROOT / source).read_bytes()).hexdigest()
            objects[source] = self._folder / "objects" / f"{Path(source).name}-{digest[:16]}.o"
        missing = [source for source, path in objects.items() if not path.exists()]
        (self._folder / "objects").mkdir(parents=True, exist_ok=True)
        if missing:
            print(f"Compiling {len(missing)} file(s) with {self._nvcc} ...", flush=True)
        # Start with nvcc, because it takes longest.
        missing.sort(key=lambda source: not source.endswith(".cu.cc"))
        problems = self._all(
            lambda source: self._make([*units[source], str(ROOT / source)], objects[source]),
            missing,
        )
        return objects, problems

    def _all(
        self, make: Callable[[str], str], names: Sequence[str] | Mapping[str, Any]
    ) -> list[str]:
        """Makes all files and returns the output of the failures."""
        with ThreadPoolExecutor(self._jobs) as pool:
            return [problem for problem in pool.map(make, names) if problem]

    @staticmethod
    def _make(command: Sequence[str], target: Path) -> str:
        """Creates a file atomically; returns the error output."""
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch, target.name)
            command = [*command, "-o", str(made)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                return f"{' '.join(command)}\nfailed:\n{done.stdout}{done.stderr}"
            made.replace(target)
        return ""
