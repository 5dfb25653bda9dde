"""Incremental parallel build of the op library for setup.py."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CC_OPS = os.path.join(ROOT, "cc_ops")


# nvcc adds the flags in these variables to its command line.
_NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")

# These headers are precompiled, because they take most of the compile time of their users.
_TF_HEADERS = ("op_kernel.h", "op.h", "shape_inference.h", "resource_mgr.h")


class BuildError(Exception):
    """The build failed; the message contains a remedy if one is known."""


def read_sources() -> dict:
    """Returns the lists of cc_ops/sources.bzl, which Bazel also loads."""
    lists: dict = {}
    exec(_read(os.path.join(CC_OPS, "sources.bzl")), lists)
    return lists


def _run_script(python: str, script: str, env: dict[str, str]) -> dict[str, str]:
    command = [python, os.path.join(ROOT, "build_support", script)]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise BuildError(answer.stderr[-2000:])
    return dict(line.split("=", 1) for line in answer.stdout.splitlines() if "=" in line)


def find_tensorflow(python: str | None = None) -> dict[str, str]:
    """Returns version, paths and flags of TensorFlow, see find_tf.py.

    pip runs the build with the interpreter of the target environment, but hides the installed
    packages with PYTHONPATH. Therefore the search runs in a child process without this variable.

    Args:
        python: Python interpreter to search. None means PYTHON_BIN_PATH, or the interpreter of the
            environment into which pip installs.

    Raises:
        BuildError: If there is no usable TensorFlow.
    """
    hiding = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME")
    env = {key: value for key, value in os.environ.items() if key not in hiding}
    python = python or os.environ.get("PYTHON_BIN_PATH", sys.executable)
    try:
        return _run_script(python, "find_tf.py", env)
    except BuildError as error:
        raise BuildError(
            f"slipstream_tf: TensorFlow cannot be imported in {python}. Install it there first: "
            "pip install 'tensorflow-cpu>=2.16,<2.22'. If your build front end creates "
            "an isolated environment (uv, python -m build), disable build isolation or set "
            f"PYTHON_BIN_PATH.\n{error}"
        ) from None


def find_cuda() -> dict[str, str]:
    """Returns the paths of the CUDA toolkit, see find_cuda.py.

    Raises:
        BuildError: If there is no toolkit.
    """
    cuda = _run_script(sys.executable, "find_cuda.py", dict(os.environ))
    if not cuda:
        named = os.environ.get("CUDA_HOME")
        raise BuildError(
            "slipstream_tf: SLIPSTREAM_WITH_CUDA=1, but no CUDA toolkit (nvcc, cuda_runtime.h, "
            f"libcudart_static.a) was found in {named or '/usr/local/cuda, on PATH or from PyPI'}. "
            "Set CUDA_HOME."
        )
    return cuda


class NativeBuild:
    """A build of the op library for an installed TensorFlow.

    Args:
        folder: Build folder. Objects and stamps remain there for incremental builds.
        jobs: Number of parallel compilers. Defaults to the number of available cores.
        python: Python interpreter with the TensorFlow to build for, see `find_tensorflow`.

    Raises:
        BuildError: If the compiler, TensorFlow or a requested CUDA toolkit is missing.
    """

    def __init__(self, folder: str, jobs: int | None = None, python: str | None = None):
        self._folder = folder
        self._jobs = jobs or len(os.sched_getaffinity(0))
        self._cxx = os.environ.get("CXX", "g++")
        if shutil.which(self._cxx) is None:
            raise BuildError(
                f"slipstream_tf: the C++ compiler {self._cxx!r} is not on PATH. Install g++."
            )
        self._lists = read_sources()
        self._tf = find_tensorflow(python)
        self._cuda = find_cuda() if os.environ.get("SLIPSTREAM_WITH_CUDA", "0") == "1" else None

    @property
    def tensorflow(self) -> str:
        """Version of TensorFlow that the library is built for."""
        return self._tf["version"]

    def run(self) -> str:
        """Builds the outdated parts, prints the progress and returns the library's path."""
        os.makedirs(self._folder, exist_ok=True)
        begun, (units, with_tf) = time.monotonic(), self._units()
        with ThreadPoolExecutor(self._jobs) as pool:
            # Start the precompiled headers first and submit the folders that wait for them last.
            headers = pool.submit(self._headers, with_tf)
            parts = [pool.submit(self._compile, *unit) for unit in units]
            for files in self._by_folder("TF_SRCS"):
                parts.append(
                    pool.submit(lambda f=files: self._compile_with_tf(f, headers.result()))
                )
            try:
                for number, part in enumerate(as_completed(parts), 1):
                    name, seconds = os.path.basename(part.result()), time.monotonic() - begun
                    print(f"[{number}/{len(parts)}] {seconds:.0f} s: {name}", flush=True)
            except BuildError:
                pool.shutdown(cancel_futures=True)
                raise
        return self._link([part.result() for part in parts])

    def _headers(self, command: list[str]) -> list[str]:
        """Precompiles TensorFlow's headers and returns a compile command that uses them."""
        header = Path(self._folder) / "tensorflow.h"
        lines = [f'#include "tensorflow/core/framework/{name}"\n' for name in _TF_HEADERS]
        header.write_text("".join(lines), encoding="utf-8")
        target = f"{header}.gch"
        self._make(
            target, [*command, "-x", "c++-header", str(header), "-o", target], lambda: [str(header)]
        )
        return [*command, "-include", str(header)]

    def _by_folder(self, sources: str) -> list[list[str]]:
        """Returns the files of a list in sources.bzl by folder. A folder is compiled as a unit."""
        return [list(files) for _, files in groupby(self._lists[sources], os.path.dirname)]

    def _units(self) -> tuple[list[tuple[Any, ...]], list[str]]:
        """Returns the units that do not use the precompiled headers, and a command for the others.

        Returns:
            A list of arguments of `_compile`, and the compile command for sources that include
            TensorFlow.
        """
        lists, tf = self._lists, self._tf
        own = [self._cxx, "-c", "-fPIC", "-I", ROOT, *lists["COPTS"]]
        with_tf = [*own, *tf["copts"].split(), "-isystem", tf["include_dir"]]
        on_gpu: list[str] = []
        gpu: list[tuple[Any, ...]] = []
        if self._cuda:
            on_gpu = ["-D" + lists["GPU_DEFINE"], "-isystem", self._cuda["include_dir"]]
            nvcc = [self._cuda["nvcc"], "-c", "-x", "cu", "-I", ROOT, *lists["NVCC_COPTS"]]
            gpu = [([s], [*nvcc, *on_gpu]) for s in lists["GPU_SRCS"]]
            # These files cannot use the precompiled headers, because they define EIGEN_USE_GPU
            # before they include TensorFlow, which changes its headers.
            gpu += [(files, [*with_tf, *on_gpu]) for files in self._by_folder("TF_GPU_SRCS")]
        core = [([s], [*own, *lists["CORE_COPTS"]]) for s in lists["CORE_SRCS"]]
        return [*gpu, *core, (lists["BUILD_INFO_SRCS"], [*with_tf, *on_gpu])], with_tf

    def _compile_with_tf(self, files: list[str], command: list[str]) -> str:
        """Compiles the files of a folder, which include TensorFlow; returns the object file."""
        return self._compile(files, command)

    def _compile(self, sources: list[str], command: list[str], subfolder: str = "") -> str:
        """Compiles source files as a unit; returns the object file.

        Args:
            sources: The files. The object has the name of the last one.
            command: The compile command, without files.
            subfolder: Where the object is, in the build folder.
        """
        *before, last = [os.path.join(CC_OPS, source) for source in sources]
        stem = os.path.join(self._folder, subfolder, sources[-1].replace("/", "_"))
        target, dependencies = stem + ".o", stem + ".d"
        included = [argument for source in before for argument in ("-include", source)]
        command = [*command, *included, "-MMD", "-MF", dependencies, last]
        self._make(target, [*command, "-o", target], lambda: _own_files_in(dependencies))
        return target

    def _link(self, objects: list[str], subfolder: str = "") -> str:
        target = os.path.join(self._folder, subfolder, "_slipstream_ops.so")
        command = [self._cxx, "-shared", "-o", target, *objects]
        command += ["-L" + self._tf["lib_dir"], "-l:" + self._tf["lib_name"]]
        command += self._lists["LINKOPTS"]
        if self._cuda:
            cudart = os.path.join(self._cuda["lib_dir"], "libcudart_static.a")
            command += [cudart, "-ldl", "-lrt"]
        self._make(target, command, lambda: objects)
        return target

    def _make(self, target: str, command: list[str], inputs) -> None:
        """Runs `command` unless it already built `target` from the same inputs."""
        stamp = target + ".stamp"
        is_nvcc = self._cuda is not None and command[0] == self._cuda["nvcc"]
        variables = [os.environ.get(name, "") for name in _NVCC_VARIABLES] if is_nvcc else []
        text = "\0".join([self._tf["version"], *command, *variables])
        if os.path.exists(target) and _read(stamp) == _digest(text, inputs()):
            return
        if os.path.exists(stamp):
            os.remove(stamp)
        if subprocess.run(command, check=False).returncode:
            print(" ".join(command), flush=True)
            name = os.path.basename(target)
            raise BuildError(
                f"slipstream_tf: {name} could not be built. The compiler output is above."
            )
        Path(stamp).write_text(_digest(text, inputs()), encoding="utf-8")


def _own_files_in(dependencies: str) -> list[str]:
    """Returns the files of cc_ops that a compiler's dependency file lists."""
    text = _read(dependencies).replace("\\\n", " ").replace("\\ ", "\0")
    names = [name.replace("\0", " ") for name in text.partition(": ")[2].split()]
    paths = {os.path.normpath(os.path.join(ROOT, name)) for name in names}
    return sorted(path for path in paths if path.startswith(CC_OPS + os.sep))


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if os.path.exists(path) else ""


def _digest(text: str, paths: list[str]) -> str:
    """Returns a digest of a text and of the contents of files.

    Modification times are ignored, because they are arbitrary after a checkout or in an unpacked
    archive.
    """
    digest = hashlib.sha256(text.encode())
    for path in map(Path, paths):
        content = path.read_bytes() if path.exists() else b"missing"
        digest.update(b"\0" + os.fsencode(path) + b"\0" + content)
    return digest.hexdigest()
