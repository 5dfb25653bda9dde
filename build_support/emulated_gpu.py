"""Runs tests of the package with the GPU kernels of its ops, on the CPU.

    python build_support/emulated_gpu.py [--check_functions] tests/ops/test_drift.py

The op library of the tests has the GPU kernels instead of the CPU kernels of the same ops. They and
the CUDA kernels that they launch are compiled by the host compiler on an emulation of CUDA, see
cc_ops/core/testing/cuda_emulation. With --check_functions, functions of GPU sources that never ran
are an error after the tests: add a test that calls them. Other arguments are passed to pytest.

Environment variables:
    SLIPSTREAM_SANITIZER: "address" or "thread" compiles with this sanitizer and without the check
        of functions.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from native_build import CC_OPS, ROOT, BuildError, NativeBuild

EMULATION = os.path.join(CC_OPS, "core", "testing", "cuda_emulation")
# Flags by sanitizer. Without one, gcov counts the calls of each function.
FLAGS = {
    "": ["--coverage"],
    "address": ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-g1", "-fsanitize=thread"],
}
# Runs pytest without this folder in sys.path, so that the installed package is tested. Workers
# write counts of calls when they exit, and pytest-xdist kills workers that take longer than ten
# seconds.
PYTEST = """
import sys
del sys.path[0]
import pytest
import xdist.workermanage
xdist.workermanage.NodeManager.EXIT_TIMEOUT = 300
raise SystemExit(pytest.main())
"""
RUNTIMES = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
# Python and TensorFlow leak at exit, and allocate in signal handlers. pytest would hide reports on
# stderr, therefore they go to files.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:log_path={log}",
    "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0:ignore_interceptors_accesses=1"
    ":suppressions={ignored}:log_path={log}",
    "UBSAN_OPTIONS": "print_stacktrace=1:log_path={log}",
}


class EmulatedBuild(NativeBuild):
    """A build with GPU kernels in place of CPU kernels. Only units that see CUDA compile again.

    Args:
        folder: Folder of the normal build.
        sanitizer: A key of FLAGS.
    """

    def __init__(self, folder: str, sanitizer: str):
        super().__init__(folder)
        self._cuda = None
        self._sanitizer, self._flags = sanitizer, FLAGS[sanitizer]
        self._lists["LINKOPTS"] = [*self._lists["LINKOPTS"], *self._flags]
        self._on_cuda = ["-isystem", EMULATION, "-D" + self._lists["GPU_DEFINE"]]
        self._subfolder = f"emulated_gpu_{sanitizer}".rstrip("_")
        self.objects = Path(folder, self._subfolder).resolve()
        self.objects.mkdir(parents=True, exist_ok=True)

    def _units(self) -> tuple[list[tuple[Any, ...]], list[str]]:
        core, with_tf = super()._units()
        command = [*core[0][1], *self._on_cuda]
        kernels = [
            ([s], [*command, *self._flags], self._subfolder) for s in self._lists["GPU_SRCS"]
        ]
        # The emulation annotates its threads for ThreadSanitizer, so it must not be instrumented.
        flags = [] if self._sanitizer == "thread" else self._flags
        emulation = [
            ([s], [*command, *flags], self._subfolder) for s in self._lists["EMULATION_SRCS"]
        ]
        return [*core, *kernels, *emulation], with_tf

    def _compile_with_tf(self, files: list[str], command: list[str]) -> str:
        on_gpu = {s.replace(".cu.cc", ".cc"): s for s in self._lists["TF_GPU_SRCS"]}
        if on_gpu.keys().isdisjoint(files):
            return super()._compile_with_tf(files, command)
        device = os.path.join(CC_OPS, "tf", "base", "emulated_gpu.h")
        command = [*command, *self._on_cuda, "-include", device]
        if not self._sanitizer:  # TensorFlow's headers would declare other types than its library.
            command += self._flags
        return self._compile([on_gpu.get(s, s) for s in files], command, self._subfolder)

    def _link(self, objects: list[str], subfolder: str = "") -> str:
        return super()._link(objects, subfolder or self._subfolder)


def functions(objects: Path) -> Iterator[tuple[str, int, str, int]]:
    """Yields file, line, name and number of calls of each compiled function of a GPU source."""
    for unit in sorted(objects.glob("*.gcno")):
        printed = subprocess.run(
            ["gcov", "--json-format", "--stdout", str(unit)], capture_output=True, check=True
        )
        for line in printed.stdout.splitlines():
            for file in json.loads(line)["files"]:
                for one in file["functions"] if file["file"].endswith(".cu.cc") else ():
                    path = os.path.relpath(file["file"], ROOT)
                    yield path, one["start_line"], one["demangled_name"], one["execution_count"]


def report(objects: Path) -> int:
    """Prints counts, and the functions that never ran. Returns the exit code."""
    found = list(functions(objects))
    kernels = {(path, line) for path, line, name, _ in found if re.search(r"Kernel(<.*>)?\(", name)}
    created = {(path, line) for path, line, name, _ in found if "::register_kernel_" in name}
    missed = [one for one in found if one[3] == 0]
    for path, line, name, _ in missed:
        source = Path(ROOT, path).read_text(encoding="utf-8").splitlines()[line - 1].strip()
        name = "" if "::register_kernel_" in name else f", {name.removeprefix('slipstream::')[:99]}"
        print(f"{path}:{line}: no test runs this function: {source}{name}")
    print(
        f"GPU code on the CPU: {len(created)} registered and {len(kernels)} CUDA kernels, "
        f"{len(found) - len(missed)} of {len(found)} compiled functions ran"
    )
    return 1 if missed or not created or not kernels else 0


def main(arguments: list[str]) -> int:
    """Builds the library, runs pytest and returns the exit code."""
    os.chdir(ROOT)  # As setup.py, so that both builds have the same commands and share objects.
    checks_functions = arguments[:1] == ["--check_functions"]
    arguments = arguments[checks_functions:]
    sanitizer = os.environ.get("SLIPSTREAM_SANITIZER", "")
    folder = f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    progress = io.StringIO()
    try:
        with contextlib.redirect_stdout(progress):
            build = EmulatedBuild(os.path.join("build", folder), sanitizer)
            library = os.path.abspath(build.run())
    except BuildError as error:
        raise SystemExit(f"{progress.getvalue()}{error}") from None
    for old in (*build.objects.glob("*.gcda"), *build.objects.glob("report.*")):
        old.unlink()
    # ThreadSanitizer does not see how the threads of TensorFlow and of CPU kernels wait for each
    # other. Only accesses of CUDA kernels count.
    ignored = build.objects / "ignored.txt"
    ignored.write_text("race:operator new\nrace:operator delete\n", encoding="utf-8")
    log = build.objects / "report"
    runtimes = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in RUNTIMES.get(sanitizer, ())
    ]
    environment = {
        **os.environ,
        **{name: value.format(log=log, ignored=ignored) for name, value in OPTIONS.items()},
        "SLIPSTREAM_OPS_LIBRARY": library,
        "CUDA_VISIBLE_DEVICES": "",
        "LD_PRELOAD": " ".join(runtimes),
    }
    tested = subprocess.run(
        [sys.executable, "-c", PYTEST, *arguments], env=environment, check=False
    ).returncode
    for found in sorted(build.objects.glob("report.*")):
        print(found.read_text(encoding="utf-8", errors="replace"))
    return tested or (report(build.objects) if checks_functions and not sanitizer else 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
