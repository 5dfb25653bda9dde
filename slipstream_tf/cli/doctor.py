"""`slipstream-doctor`: what is there, what is missing, and the command that mends it.

In: flags and this environment. Out: a report, or with --json one JSON object; exit code 1 if
something that training in one process needs does not work. What may crash or hang is looked at in
child processes. TensorFlow is never imported here, so that its absence or a crash of its import is
a finding like any other.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from slipstream_tf._version import __version__
from slipstream_tf.cli import findings
from slipstream_tf.cli.findings import Finding, Section
from slipstream_tf.cli.flag_set import Flag, FlagSet, Number, RunError
from slipstream_tf.cli.probe import Outcome, run_command, run_python
from slipstream_tf.cli.program import run_program
from slipstream_tf.ops import _loader

SCHEMA = 1
_WIDTH = 96
_INDENT = 28
# Functions of cli.self_test by the store that they test.
SELF_TESTS = {"native store": "native_store", "variable store": "variable_store"}
SOK_SELF_TEST = {"SOK store": "sok_store"}
_MINIMUM_PYTHON = (3, 10)
# What brings the module `tensorflow`.
_TENSORFLOW_PACKAGES = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")
# A self-test uses the CPU only, and must not take the memory of a GPU that trains.
_WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
# TensorFlow and Horovod import Keras. A wrong KERAS_BACKEND is a finding of Keras, not of theirs.
_SETTLED = {**_QUIET, "KERAS_BACKEND": "tensorflow"}
_WORKERS = 2

_PACKAGES = """
import importlib.metadata
for module, package in [("absl", "absl-py"), ("numpy",) * 2, ("pyarrow",) * 2, ("tqdm",) * 2]:
    tell(step="import " + module)
    __import__(module)
    tell(**{package: importlib.metadata.version(package)})
"""
_TENSORFLOW = """
tell(step="import tensorflow")
import tensorflow as tf
from slipstream_tf import _compat
tell(version=tf.__version__, is_tested=_compat.is_tested_tensorflow(tf.__version__))
build = tf.sysconfig.get_build_info()
tell(cxx11_abi=bool(tf.sysconfig.CXX11_ABI_FLAG), cuda=build.get("cuda_version"))
tell(step="listing GPUs")
details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
tell(gpus=[detail.get("device_name", "GPU") for detail in details])
"""
_KERAS = """
tell(step="import keras")
from slipstream_tf import _compat
keras = _compat.require_keras()
tell(version=keras.__version__, backend=keras.backend.backend())
"""
_LIBRARY = """
tell(step="loading the op library")
import tensorflow as tf
from slipstream_tf import _compat
from slipstream_tf.ops import _loader
_loader.library()
tell(tensorflow=tf.__version__, kernels=_compat.registered_kernels("Slipstream"))
"""
_SELF_TEST = """
tell(step="import")
import time
from slipstream_tf.cli import self_test
tell(step="self-test of the {name}")
start = time.perf_counter()
self_test.{function}()
tell(seconds=time.perf_counter() - start)
"""
# Horovod writes down what it was built for. Importing `horovod.tensorflow` loads its library.
_HOROVOD = """
import json, os
tell(step="import horovod")
import horovod
tell(version=horovod.__version__)
tell(step="import horovod.tensorflow")
import tensorflow as tf
import horovod.tensorflow as hvd
from slipstream_tf import _compat
tell(gloo=bool(hvd.gloo_built()), mpi=bool(hvd.mpi_built()), nccl=bool(hvd.nccl_built()))
path = os.path.join(os.path.dirname(horovod.__file__), "metadata.json")
built_for = json.load(open(path)).get("tensorflow") if os.path.exists(path) else None
is_same = not built_for or (
    _compat.version_numbers(built_for) == _compat.version_numbers(tf.__version__)
)
tell(tensorflow=tf.__version__, built_for=built_for, is_built_for_this=is_same)
"""
_SOK = """
tell(step="import sparse_operation_kit")
import sparse_operation_kit as sok
tell(version=getattr(sok, "__version__", "of unknown version"))
from slipstream_tf.stores.sok import require_lookup_sparse
try:
    require_lookup_sparse()
    tell(limit="")
except RuntimeError as error:
    tell(limit=str(error))
"""
# What may be missing: finding -> the module that it is about, and its probe.
_OPTIONS = {"Horovod": ("horovod", _HOROVOD), "SOK": ("sparse_operation_kit", _SOK)}


def make_flags() -> FlagSet:
    """Returns the program's flags."""
    limit = Number(0, 3600, open_minimum=True)
    text = "seconds that each check may take; each runs in a process of its own"
    report = (
        Flag("json", None, "the same as one JSON object on stdout"),
        Flag("time_limit", limit, text, 60),
    )
    return FlagSet(
        "slipstream-doctor",
        "Says what is installed and works, what is missing or broken, and the command that mends "
        "it. Tests each store that is there on a few keys. Exit code 0: training in one process "
        "works. 1: something does not that it needs: Python and its packages, TensorFlow, Keras, "
        "the op library, the native or the variable store's self-test. Horovod, SOK, CUDA, "
        "matplotlib and the compiler may be missing. 2: a flag is wrong.",
        ("slipstream-doctor", "slipstream-doctor --json"),
        {"Report": report},
    )


def main(values: dict[str, Any], given: frozenset[str]) -> None:
    """Prints the report; raises RunError if something needed does not work."""
    if not values["json"]:
        print(f"slipstream_tf {__version__}", flush=True)
    sections = []
    for section in examine(values["time_limit"]):
        sections.append(section)
        if not values["json"]:
            print(
                "\n".join([f"\n{section.title}", *map(_finding_text, section.findings)]), flush=True
            )
    if values["json"]:
        print(json.dumps(as_json(sections), indent=2, allow_nan=False))
    else:
        print(f"\n{conclusion(sections)}", flush=True)
    broken = findings.needed_but_not_ok(sections)
    if broken:
        raise RunError(f"training in one process does not work here: {', '.join(broken)}.")


def as_json(sections: Sequence[Section]) -> dict[str, Any]:
    """Returns the JSON form.

    Returns:
        `works`: whether training in one process works; `sections`: by key, lists of findings with
        the fields of `findings.Finding`.
    """
    return {
        "schema": SCHEMA,
        "slipstream_tf": __version__,
        "works": not findings.needed_but_not_ok(sections),
        "sections": {
            section.key: [dataclasses.asdict(finding) for finding in section.findings]
            for section in sections
        },
    }


def conclusion(sections: Sequence[Section]) -> str:
    """Returns the last lines of the report."""
    everything = [finding for section in sections for finding in section.findings]
    if findings.needed_but_not_ok(sections):
        text = "Mend these first, from the top: what comes later may need what comes earlier. "
        names = [f.name for f in everything if f.is_needed and f.state in ("missing", "broken")]
        return _wrapped(f"{text}{', '.join(names)}.", "")
    optional = [f.name for f in everything if f.state != findings.OK]
    text = "All that training in one process needs works."
    if optional:
        text += f" Optional and not there or not in order: {', '.join(optional)}."
    return _wrapped(text, "")


def _finding_text(finding: Finding) -> str:
    head = f"  {finding.state:<10}{finding.name:<16}".ljust(_INDENT)
    text = _wrapped(finding.detail, head)
    if finding.fix:
        text += "\n" + _wrapped(f"-> {finding.fix}", " " * _INDENT)
    return text


def _wrapped(text: str, head: str) -> str:
    # Paths and options stay whole, so that a command can be copied.
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def examine(limit: float) -> Iterator[Section]:
    """Yields the sections in the order of the report, each when it is known.

    Args:
        limit: seconds that each child process may take.
    """
    pool = ThreadPoolExecutor(_WORKERS)

    def start(program: str, environment: Mapping[str, str] = _SETTLED) -> Future[Outcome]:
        return pool.submit(run_python, program, limit, environment)

    try:
        yield from _sections(start, limit)
    finally:
        # Interrupted: what has not started need not.
        pool.shutdown(cancel_futures=True)


def _sections(start: Callable[..., Future[Outcome]], limit: float) -> Iterator[Section]:
    tensorflow_probe, packages = start(_TENSORFLOW), start(_PACKAGES)
    is_supported = sys.version_info >= _MINIMUM_PYTHON
    python = findings.check_python(platform.python_version(), is_supported)
    missing, fix = "not installed; only slipstream-report needs it", findings.INSTALL_REPORT
    matplotlib = findings.check_tool("matplotlib", _version("matplotlib"), missing, fix)
    installed = findings.check_packages(packages.result())
    yield Section("python", "Python", (python, installed, matplotlib))

    outcome = tensorflow_probe.result()
    packages_found = [name for name in _TENSORFLOW_PACKAGES if _version(name) is not None]
    tensorflow = findings.check_tensorflow(outcome, packages_found)
    yield Section("tensorflow", "TensorFlow", (tensorflow,))
    gpus = outcome.facts.get("gpus") or []
    # All the rest imports TensorFlow: without it every probe would fail the same way, or hang.
    probes = _start_all(start) if tensorflow.state == findings.OK else {}

    def checked(name: str, check: Callable[[Outcome], Finding], is_needed: bool = True) -> Finding:
        if name in probes:
            return check(probes[name].result())
        return findings.unchecked(name, is_needed)

    def checked_option(name: str, check: Callable[[Outcome], Finding]) -> Finding:
        module, _ = _OPTIONS[name]
        if not _is_there(module):
            return check(Outcome(error="not installed", missing=module))
        return checked(name, check, is_needed=False)

    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    keras = checked("Keras", partial(findings.check_keras, backend=backend))
    yield Section("keras", "Keras", (keras,))

    override, compiler = os.environ.get(_loader.OVERRIDE), _compiler(limit)
    has_compiler = compiler.state == findings.OK
    info, error = None, ""
    try:
        # TensorFlow itself is imported by child processes alone: it may crash.
        version = outcome.facts.get("version", "0")
        info = _loader.build_info(_loader.library_path(version))
    except ImportError as raised:
        error = str(raised)
    library = [findings.check_stamp(info, error, override)]
    if info is None:
        loading = findings.unchecked("loading", why="needs a library that can be read")
        library.append(loading)
    else:
        check = partial(findings.check_loading, override=override, has_compiler=has_compiler)
        loading = checked("loading", check)
        kernels = loading.facts.get("kernels")
        library += [loading, findings.check_kernels(info.cuda, kernels, gpus)]
    yield Section("op_library", "Op library", (*library,))

    if loading.state == findings.OK:
        tests = [checked(name, partial(findings.check_self_test, name)) for name in SELF_TESTS]
        for name in SOK_SELF_TEST if "SOK" in probes else ():
            check = partial(findings.check_sok_self_test, name, gpus=gpus)
            tests.append(checked(name, check, is_needed=False))
    else:
        why = "needs TensorFlow and the op library"
        tests = [findings.unchecked(name, why=why) for name in SELF_TESTS]
    yield Section("self_tests", "Self-tests", (*tests,))

    horovod = checked_option("Horovod", findings.check_horovod)
    yield Section("horovod", "Horovod", (horovod, *_launchers(limit)))
    yield Section("sok", "SOK", (checked_option("SOK", partial(findings.check_sok, gpus=gpus)),))
    yield _cuda_section(outcome, limit)
    yield Section("compiler", "Compiler", (compiler,))


def _start_all(start: Callable[..., Future[Outcome]]) -> dict[str, Future[Outcome]]:
    """Starts the probes that need TensorFlow; returns them by the name of their finding."""
    hidden = {**_SETTLED, **_WITHOUT_GPU}
    probes = {"Keras": start(_KERAS, _QUIET), "loading": start(_LIBRARY, hidden)}
    for name, function in SELF_TESTS.items():
        probes[name] = start(_SELF_TEST.format(name=name, function=function), hidden)
    for name, (module, program) in _OPTIONS.items():
        if _is_there(module):
            probes[name] = start(program)
    # On the GPU, which is where SOK is at home.
    for name, function in SOK_SELF_TEST.items() if "SOK" in probes else ():
        probes[name] = start(_SELF_TEST.format(name=name, function=function))
    return probes


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _launchers(limit: float) -> tuple[Finding, Finding]:
    folder = Path(sys.executable).parent
    beside = str(folder) if (folder / "horovodrun").exists() else None
    command = ["mpirun", "--version"]
    mpirun = _tool("mpirun", command, limit, "not on PATH; MPI needs it", findings.INSTALL_MPI)
    return findings.check_horovodrun(shutil.which("horovodrun"), beside), mpirun


def _cuda_section(tensorflow: Outcome, limit: float) -> Section:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    compiler = os.path.join(home, "bin", "nvcc")
    command = [compiler if os.path.exists(compiler) else "nvcc", "--version"]
    missing, fix = "not found; only the CUDA kernels need it", "install NVIDIA's CUDA toolkit"
    nvcc = _tool("nvcc", command, limit, missing, f"{fix} 12 or 13", line="release")
    listed = run_command(["nvidia-smi", "-L"], limit) or ""
    gpus = [line for line in listed.splitlines() if line.startswith("GPU ")]
    built_with = findings.check_tensorflow_cuda(tensorflow, bool(gpus))
    return Section("cuda", "CUDA", (built_with, nvcc, findings.check_gpus(tensorflow, gpus)))


def _compiler(limit: float) -> Finding:
    command = os.environ.get("CXX") or "g++"
    missing = "not found; only building the op library and Horovod needs it"
    fix = "apt-get install g++" if command == "g++" else "unset CXX, or install what it names"
    return _tool(command, [*command.split(), "--version"], limit, missing, fix)


def _tool(
    name: str, command: list[str], limit: float, missing: str, fix: str, line: str = ""
) -> Finding:
    """Asks an optional program for its version.

    Args:
        name: of the program.
        command: prints the version.
        limit: seconds that it may take.
        missing: what its absence means.
        fix: the command that installs it.
        line: text in the line that has the version; default: the first line.
    """
    output = run_command(command, limit)
    lines = [text.strip() for text in (output or "").splitlines() if line in text]
    version = None if output is None else next(filter(None, lines), "of unknown version")
    return findings.check_tool(name, version, missing, fix)


def entry_point(arguments: Sequence[str] | None = None) -> None:
    """Runs the program and ends the process with its exit code."""
    sys.exit(run_program(make_flags(), main, arguments))


if __name__ == "__main__":
    entry_point()
