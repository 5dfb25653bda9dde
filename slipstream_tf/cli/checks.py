"""The checks of `slipstream-doctor`.

Each check runs in a separate child process, because an import may fail, crash or hang. A check
imports and tries a part of the installation. It returns a description if the part works, and
raises an exception otherwise.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pkgutil
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream_tf import _compat
from slipstream_tf.ops import _loader

OK, MISSING, BROKEN, UNCHECKED = "ok", "missing", "broken", "unchecked"
_SOURCES = " (in the source folder of slipstream_tf)"
INSTALL = f"pip install .{_SOURCES}"
INSTALL_REPORT = f"pip install '.[report]'{_SOURCES}"
INSTALL_HOROVOD = f"make horovod, or python build_support/install_horovod.py{_SOURCES}"
INSTALL_SOK = (
    "TensorFlow 2.17 and later need changes to SOK's source, see docs/sok.md#install in the source "
    "folder of slipstream_tf"
)
INSTALL_TENSORFLOW = "pip install --force-reinstall 'tensorflow-cpu==2.21.*'"
_WITH_CUDA = f"SLIPSTREAM_WITH_CUDA=1 {_loader.REBUILD}{_SOURCES}"
_RENEW_DRIVER = (
    "update the NVIDIA driver, or rebuild with a CUDA toolkit that the driver and the GPU support: "
    f"{_WITH_CUDA}"
)
_REPORT_BUG = "report a bug of slipstream_tf, with this line and the output of nvidia-smi"
_GPU_TENSORFLOW = f"pip install 'tensorflow[and-cuda]==2.21.*', then rebuild: {_WITH_CUDA}"
# Pairs of module name and package name.
_PACKAGES = (("absl", "absl-py"), *((name, name) for name in ("numpy", "pyarrow", "tqdm")))


class Problem(Exception):
    """A failed check that needs a specific repair command.

    Args:
        detail: Description of the problem.
        fix: The repair command, which replaces the default of the check.
        state: `MISSING` or `BROKEN`.
    """

    def __init__(self, detail: str, fix: str, state: str = BROKEN) -> None:
        super().__init__(detail)
        self.fix, self.state = fix, state


def call(function: str, path: str) -> None:
    """Runs a check and writes its result as JSON.

    The JSON object contains "state" and "detail", and optionally "fix" (see `doctor.Finding`) or
    "missing", the name of a module that was not found.

    Args:
        function: Name of the check, as "module:function".
        path: Path of the JSON file.
    """
    try:
        answer = {"state": OK, "detail": pkgutil.resolve_name(function)()}
    except Problem as problem:
        answer = {"state": problem.state, "detail": str(problem), "fix": problem.fix}
    except ModuleNotFoundError as error:
        answer = {"state": BROKEN, "detail": str(error), "missing": error.name}
    except (Exception, SystemExit) as error:
        answer = {"state": BROKEN, "detail": f"{type(error).__name__}: {error}"}
    Path(path).write_text(json.dumps(answer), encoding="utf-8")


def packages() -> str:
    """Imports the required packages except TensorFlow and returns their versions."""
    found = []
    for module, package in _PACKAGES:
        importlib.import_module(module)
        found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


def matplotlib() -> str:
    """Imports matplotlib, which reports need, and returns its version."""
    importlib.import_module("matplotlib.figure")
    return importlib.metadata.version("matplotlib")


def tensorflow() -> str:
    """Imports TensorFlow and returns its version and packages."""
    import tensorflow as tf

    # List all packages that provide the module, because two packages overwrite each other's
    # files, for example tensorflow and tensorflow-cpu.
    names = sorted(set(importlib.metadata.packages_distributions().get("tensorflow", [])))
    detail = f"{tf.__version__} ({' and '.join(names)})" if names else tf.__version__
    if not _compat.is_tested_tensorflow(tf.__version__):
        detail += "; slipstream_tf is tested with 2.16 to 2.21"
    return detail


def keras() -> str:
    """Imports Keras with the backend of KERAS_BACKEND."""
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    try:
        module = _compat.require_keras()
    except Exception as error:  # Keras raises a ValueError for an unknown backend.
        if backend == "tensorflow":
            raise
        raise Problem(str(error), "export KERAS_BACKEND=tensorflow") from error
    return f"{module.__version__} on {module.backend.backend()}"


def op_library() -> str:
    """Loads the op library and tests updates of native and variable tables."""
    try:
        built = _loader.build_info()
        _loader.library()
    except ImportError as error:
        fix = f"{_loader.REBUILD}{_SOURCES}"
        if os.environ.get(_loader.OVERRIDE):
            fix = f"unset {_loader.OVERRIDE}"
        elif shutil.which(os.environ.get("CXX") or "g++") is None:
            fix = f"apt-get install g++, then {fix}"
        raise Problem(str(error), fix) from error
    from slipstream_tf.cli import self_test

    self_test.native_store()
    self_test.variable_store()
    has_cuda = "with" if built.cuda else "without"
    detail = f"built for TensorFlow {built.tensorflow}, {has_cuda} CUDA kernels"
    return f"{detail}; updates of tables are correct"


def horovod() -> str:
    """Imports Horovod and checks its TensorFlow version and its controllers."""
    import horovod as package
    import horovod.tensorflow as hvd
    import tensorflow as tf

    record = Path(package.__file__).parent / "metadata.json"
    built_for = json.loads(record.read_text()).get("tensorflow") if record.exists() else None
    here = tf.__version__
    detail = f"{package.__version__}, built for TensorFlow {built_for or here}"
    if built_for and _compat.version_numbers(built_for) != _compat.version_numbers(here):
        raise Problem(f"{detail}, but TensorFlow {here} is installed", INSTALL_HOROVOD)
    controllers = [
        name for name, is_built in (("Gloo", hvd.gloo_built), ("MPI", hvd.mpi_built)) if is_built()
    ]
    detail += f"; controllers: {', '.join(controllers) or 'none'}"
    if not controllers:
        raise Problem(detail, INSTALL_HOROVOD)
    return f"{detail}; {'with' if hvd.nccl_built() else 'without'} NCCL"


def sok() -> str:
    """Imports NVIDIA's Sparse Operation Kit (SOK) and tests updates of its tables."""
    import sparse_operation_kit as kit

    from slipstream_tf.cli import self_test
    from slipstream_tf.tables.sok.table import require_lookup_sparse

    detail = f"{getattr(kit, '__version__', 'unknown version')}; updates of tables are correct"
    self_test.sok_store()
    try:
        require_lookup_sparse()
    except RuntimeError as error:
        detail += f"; {error}"
    return detail


def gpus() -> str:
    """Checks that TensorFlow and the op library can use the GPUs, and runs a kernel on each."""
    import tensorflow as tf

    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    names = [detail.get("device_name", "GPU") for detail in details]
    detail = gpus_in_order(names, driver_gpus(), _loader.build_info().cuda)
    for number in range(len(names)):
        run_kernel(f"GPU:{number}")
    return f"{detail}; a kernel returned correct results on each" if names else detail


def run_kernel(device: str) -> None:
    """Runs a small kernel of the op library on a device.

    Args:
        device: The device, for example "GPU:0".

    Raises:
        Problem: If the kernel cannot be launched, for example because the driver is too old for
            the CUDA version of the op library, or if its result is wrong.
    """
    from slipstream_tf.cli import self_test
    from slipstream_tf.cli.flag_set import RunError

    try:
        self_test.kernel(device)
    except RunError as error:
        raise Problem(str(error), _REPORT_BUG) from error
    except Exception as error:  # TensorFlow raises errors of CUDA as different classes.
        raise Problem(f"{type(error).__name__} on {device}: {error}", _RENEW_DRIVER) from error


def driver_gpus() -> list[str]:
    """Returns one line per GPU that `nvidia-smi` lists; empty without a driver."""
    try:
        command = ["nvidia-smi", "-L"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line for line in output.splitlines() if line.startswith("GPU ")]


def gpus_in_order(seen: Sequence[str], driver: Sequence[Any], has_kernels: bool) -> str:
    """Describes the GPUs, or raises `Problem` if training cannot use them.

    No GPU at all is not a problem, because training then uses the CPU.

    Args:
        seen: Names of the GPUs that TensorFlow sees.
        driver: GPUs that the driver lists.
        has_kernels: Whether the op library contains CUDA kernels.

    Raises:
        Problem: If TensorFlow does not see the GPUs, or the op library has no CUDA kernels.
    """
    if not seen and driver:
        detail = f"TensorFlow detects no GPU, but the driver lists {len(driver)}"
        raise Problem(detail, _GPU_TENSORFLOW, MISSING)
    if not seen:
        kernels = "the CUDA kernels of the op library were not run" if has_kernels else ""
        return "; ".join(filter(None, ["none", "training uses the CPU", kernels]))
    detail = f"{len(seen)}: {', '.join(seen)}"
    if not has_kernels:
        raise Problem(f"{detail}; the op library has no CUDA kernels", _WITH_CUDA, MISSING)
    return detail
