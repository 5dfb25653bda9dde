"""Says what the doctor's probes found. Pure: nothing is imported, run or looked for here.

In: outcomes of probes, versions, paths. Out: findings, each with the command that mends it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf.cli.probe import Outcome
from slipstream_tf.ops._loader import OVERRIDE, REBUILD, BuildInfo

OK, MISSING, BROKEN, UNCHECKED = "ok", "missing", "broken", "unchecked"

_IN_SOURCES = ", in the folder of slipstream_tf's sources"
INSTALL = "pip install ." + _IN_SOURCES
REBUILD_LIBRARY = REBUILD + _IN_SOURCES
WITH_CUDA = f"SLIPSTREAM_WITH_CUDA=1 {REBUILD}{_IN_SOURCES}"
INSTALL_TENSORFLOW = "pip install 'tensorflow-cpu==2.21.*' (or the TensorFlow that you use)"
INSTALL_GPU_TENSORFLOW = "pip install 'tensorflow[and-cuda]==2.21.*', then rebuild: " + WITH_CUDA
INSTALL_HOROVOD = f"make horovod, or python build_support/install_horovod.py{_IN_SOURCES}"
INSTALL_MPI = f"apt-get install libopenmpi-dev openmpi-bin, then {INSTALL_HOROVOD}"
INSTALL_REPORT = "pip install '.[report]'" + _IN_SOURCES
INSTALL_SOK = "pip install merlin-sok --no-build-isolation (on a machine with a GPU)"
_NEEDS_TENSORFLOW = "needs TensorFlow, which does not work"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the thing.
        state: OK, MISSING, BROKEN or UNCHECKED.
        detail: version and kind, or what is wrong.
        fix: the command that mends it; empty if there is nothing to mend.
        is_needed: whether training in one process needs it.
        facts: the same for programs, as JSON has it.
    """

    name: str
    state: str
    detail: str
    fix: str = ""
    is_needed: bool = False
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Section:
    """Findings that belong together. `key` names them in the JSON form, `title` in the text."""

    key: str
    title: str
    findings: tuple[Finding, ...]


def needed_but_not_ok(sections: Sequence[Section]) -> list[str]:
    """Returns the names of what one process needs and does not have in order."""
    everything = [finding for section in sections for finding in section.findings]
    return [finding.name for finding in everything if finding.is_needed and finding.state != OK]


def unchecked(name: str, is_needed: bool = True, why: str = _NEEDS_TENSORFLOW) -> Finding:
    """Returns the finding for what could not be looked at."""
    return Finding(name, UNCHECKED, why, is_needed=is_needed)


def check_python(version: str, is_supported: bool) -> Finding:
    """Checks Python itself."""
    error = "" if is_supported else f"{version}, but 3.10 or later is needed"
    fix = "make an environment with a later Python: python3.11 -m venv .venv"
    return check("Python", Outcome({"version": version}, error), version, fix)


def check(
    name: str,
    outcome: Outcome,
    detail: str,
    fix: str = REBUILD_LIBRARY,
    is_needed: bool = True,
    module: str | None = None,
) -> Finding:
    """Returns the finding about a thing, by a probe of it.

    Args:
        name: of the thing.
        outcome: of the probe.
        detail: version and kind, if the probe went well.
        fix: the command that mends it.
        is_needed: whether training in one process needs it.
        module: the thing is missing, not broken, where this module was not found.
    """
    if not outcome.error:
        return Finding(name, OK, detail, "", is_needed, outcome.facts)
    state = MISSING if module and outcome.missing == module else BROKEN
    return Finding(name, state, outcome.error, fix, is_needed, outcome.facts)


def check_packages(outcome: Outcome) -> Finding:
    """Checks the packages, TensorFlow apart, that the installation asks for."""
    detail = ", ".join(f"{name} {version}" for name, version in outcome.facts.items())
    return check("packages", outcome, detail, INSTALL, module=outcome.missing)


def check_tensorflow(outcome: Outcome, packages: Sequence[str]) -> Finding:
    """Checks TensorFlow.

    Args:
        outcome: of the probe that imports it.
        packages: the installed packages that bring it; more than one overwrite each other's files.
    """
    version = outcome.facts.get("version")
    facts = {"version": version, "packages": list(packages)}
    if version is None:
        if outcome.missing == "tensorflow" and not packages:
            fix = INSTALL_TENSORFLOW
            return Finding("TensorFlow", MISSING, "not installed", fix, True, facts)
        fix = "pip install --force-reinstall 'tensorflow-cpu==2.21.*'"
        return Finding("TensorFlow", BROKEN, outcome.error, fix, True, facts)
    detail = version
    if packages:
        detail += f" ({' and '.join(packages)})"
    if not outcome.facts.get("is_tested", True):
        detail += "; slipstream_tf is tested with 2.16 to 2.21"
    return Finding("TensorFlow", OK, detail, "", True, facts)


def check_keras(outcome: Outcome, backend: str) -> Finding:
    """Checks Keras.

    Args:
        outcome: of the probe that imports it.
        backend: what the environment asks Keras to run on.
    """
    fix = "pip install --upgrade 'keras>=3'"
    if backend != "tensorflow":
        fix = "export KERAS_BACKEND=tensorflow"
    detail = f"{outcome.facts.get('version')} on {outcome.facts.get('backend')}"
    return check("Keras", outcome, detail, fix, module="keras")


def check_stamp(info: BuildInfo | None, error: str, override: str | None) -> Finding:
    """Checks the op library's file.

    Args:
        info: what its build stamp says; None if it cannot be read.
        error: why it cannot be read.
        override: the file that the environment names instead of the installed one, if it does.
    """
    name = "build stamp"
    if info is None:
        fix = f"unset {OVERRIDE}" if override else INSTALL
        return Finding(name, BROKEN, error, fix, True)
    detail = (
        f"built for TensorFlow {info.tensorflow}, C++11 ABI {int(info.cxx11_abi)}, "
        f"{'with' if info.cuda else 'without'} CUDA kernels"
    )
    if override:
        detail += f"; the file that {OVERRIDE} names"
    return Finding(name, OK, detail, "", True, dataclasses.asdict(info))


def check_loading(outcome: Outcome, override: str | None, has_compiler: bool) -> Finding:
    """Checks whether TensorFlow loads the op library."""
    fix = REBUILD_LIBRARY if has_compiler else f"apt-get install g++, then {REBUILD_LIBRARY}"
    if override:
        fix = f"unset {OVERRIDE}"
    ops = set().union(*outcome.facts.get("kernels", {}).values())
    detail = f"{len(ops)} ops with TensorFlow {outcome.facts.get('tensorflow')}"
    return check("loading", outcome, detail, fix)


def check_kernels(
    has_cuda: bool, kernels: Mapping[str, Sequence[str]] | None, gpus: Sequence[str]
) -> Finding:
    """Checks whether the op library has kernels for the GPUs that there are.

    Args:
        has_cuda: whether the build stamp says that CUDA kernels are in it.
        kernels: device -> ops that have a kernel for it; None if the library does not load.
        gpus: those that TensorFlow sees.
    """
    counted = ", ".join(f"{len(ops)} ops on {device}" for device, ops in (kernels or {}).items())
    facts = {"kernels": kernels}
    if has_cuda:
        return Finding("kernels", OK, counted or "for CPU and GPU", facts=facts)
    detail = f"{counted}; none on GPU" if counted else "none on GPU"
    if gpus:
        return Finding("kernels", MISSING, f"{detail}; there is a GPU", WITH_CUDA, facts=facts)
    return Finding("kernels", OK, f"{detail}, which needs a machine with one", facts=facts)


def check_self_test(name: str, outcome: Outcome) -> Finding:
    """Checks a store by its self-test."""
    return check(name, outcome, _of_self_test(outcome))


def check_sok_self_test(name: str, outcome: Outcome, gpus: Sequence[str]) -> Finding:
    """Checks SOK's tables by their self-test; nothing but store="sok" needs them."""
    if outcome.error and not gpus:
        error = f"{outcome.error} (TensorFlow sees no GPU)"
        outcome = dataclasses.replace(outcome, error=error)
    detail = _of_self_test(outcome)
    return check(name, outcome, detail, INSTALL_SOK if gpus else "", is_needed=False)


def _of_self_test(outcome: Outcome) -> str:
    return f"as computed by hand ({outcome.facts.get('seconds', 0.0):.2f} s)"


def check_horovod(outcome: Outcome) -> Finding:
    """Checks Horovod: there, built for this TensorFlow, and with which controllers."""
    facts = outcome.facts
    if outcome.missing == "horovod":
        detail = "not installed; only jobs of several processes need it"
        return Finding("Horovod", MISSING, detail, INSTALL_HOROVOD)
    version = facts.get("version", "of unknown version")
    if outcome.error:
        detail = f"{version}, does not work: {outcome.error}"
        return Finding("Horovod", BROKEN, detail, INSTALL_HOROVOD, facts=facts)
    built_for, here = facts["built_for"], facts["tensorflow"]
    if not facts["is_built_for_this"]:
        detail = f"{version}, built for TensorFlow {built_for}, but {here} is installed"
        return Finding("Horovod", BROKEN, detail, INSTALL_HOROVOD, facts=facts)
    names = {"gloo": "Gloo", "mpi": "MPI"}
    controllers = ", ".join(names[key] for key in names if facts[key]) or "none"
    detail = f"{version}, built for TensorFlow {built_for or here}; controllers: {controllers}"
    detail += "; with NCCL" if facts["nccl"] else "; without NCCL"
    if controllers == "none":
        return Finding("Horovod", BROKEN, detail, INSTALL_HOROVOD, facts=facts)
    return Finding("Horovod", OK, detail, facts=facts)


def check_horovodrun(path: str | None, folder: str | None) -> Finding:
    """Checks Horovod's launcher.

    Args:
        path: of the one on PATH.
        folder: where one lies beside Python, if none is on PATH.
    """
    if path:
        return Finding("horovodrun", OK, path, facts={"path": path})
    if folder:
        detail = f"in {folder}, which is not on PATH"
        return Finding("horovodrun", MISSING, detail, f'export PATH="{folder}:$PATH"')
    return Finding("horovodrun", MISSING, "not on PATH; comes with Horovod", INSTALL_HOROVOD)


def check_tool(name: str, version: str | None, missing: str, fix: str) -> Finding:
    """Checks an optional program.

    Args:
        name: of the program.
        version: as it tells it; None if it is not there or does not run.
        missing: what its absence means.
        fix: the command that installs it.
    """
    if version is None:
        return Finding(name, MISSING, missing, fix)
    return Finding(name, OK, version, facts={"version": version})


def check_sok(outcome: Outcome, gpus: Sequence[str]) -> Finding:
    """Checks NVIDIA's Sparse Operation Kit, which `store="sok"` and `SokStore` need."""
    without_gpu = "" if gpus else "; it needs a GPU, and TensorFlow sees none"
    fix = INSTALL_SOK if gpus else ""
    if outcome.missing == "sparse_operation_kit":
        return Finding("SOK", MISSING, f"not installed{without_gpu or '; it needs a GPU'}", fix)
    if outcome.error:
        outcome = dataclasses.replace(outcome, error=f"{outcome.error}{without_gpu}")
    limit = outcome.facts.get("limit")
    detail = f"{outcome.facts.get('version')}{without_gpu}{'; ' + limit if limit else ''}"
    return check("SOK", outcome, detail, fix, is_needed=False)


def check_tensorflow_cuda(outcome: Outcome, has_gpu: bool) -> Finding:
    """Checks which CUDA this TensorFlow was built with.

    Args:
        outcome: of the probe that imports TensorFlow.
        has_gpu: whether NVIDIA's driver lists a GPU.
    """
    name = "CUDA build"
    if not outcome.facts.get("version"):
        return Finding(name, UNCHECKED, _NEEDS_TENSORFLOW)
    version = outcome.facts.get("cuda")
    facts = {"cuda": version}
    if version:
        return Finding(name, OK, f"TensorFlow is built with CUDA {version}", facts=facts)
    fix = INSTALL_GPU_TENSORFLOW if has_gpu else ""
    return Finding(
        name, MISSING, "TensorFlow is built without CUDA; it runs on the CPU", fix, facts=facts
    )


def check_gpus(outcome: Outcome, driver_gpus: Sequence[str]) -> Finding:
    """Checks the GPUs.

    Args:
        outcome: of the probe that imports TensorFlow and lists its GPUs.
        driver_gpus: those that NVIDIA's driver lists.
    """
    gpus = outcome.facts.get("gpus")
    facts = {"tensorflow": gpus, "driver": list(driver_gpus)}
    if gpus is None:
        detail = outcome.error if outcome.facts.get("version") else _NEEDS_TENSORFLOW
        return Finding("GPUs", UNCHECKED, detail, facts=facts)
    if gpus:
        return Finding("GPUs", OK, f"{len(gpus)}: {', '.join(gpus)}", facts=facts)
    if driver_gpus:
        detail = f"TensorFlow sees none; the driver lists {len(driver_gpus)}"
        return Finding("GPUs", MISSING, detail, INSTALL_GPU_TENSORFLOW, facts=facts)
    return Finding("GPUs", MISSING, "none; everything runs on the CPU", facts=facts)
