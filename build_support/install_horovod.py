"""Builds and installs Horovod from PyPI's source package for the installed TensorFlow.

    python build_support/install_horovod.py

Horovod has no wheels, because it is compiled against the installed TensorFlow. Gloo is always
included, MPI if `mpicxx` is on PATH. Build tools (an older setuptools, CMake) are installed into a
temporary folder and not into the environment. The build takes about 90 seconds on two cores.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HOROVOD = "horovod==0.28.1"
# setuptools 75 removed an API that Horovod's setup.py uses. CMake 4 rejects the CMakeLists.txt of
# Horovod's bundled libraries.
BUILD_TOOLS = ("setuptools<75", "cmake==3.31.*", "wheel", "packaging")
RUNTIME = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi")
# File, line to remove or replace, and its replacement.
CHANGES = (
    # This file needs XLA headers that TensorFlow's wheels do not contain. It is only used on GPUs
    # with XLA.
    ("horovod/tensorflow/CMakeLists.txt", r"(?m)^.*xla_mpi_ops\.cc.*\n", ""),
    # Without debug information the build takes three quarters of the time.
    ("setup.py", "'RelWithDebInfo'", "'Release'"),
)


def change_sources(source: Path) -> None:
    """Applies CHANGES to the unpacked source package.

    Args:
        source: Folder of the unpacked source package.

    Raises:
        SystemExit: If a file does not contain its line exactly once, for example in another version
            of Horovod.
    """
    for name, pattern, replacement in CHANGES:
        path = source / name
        text, count = re.subn(pattern, replacement, path.read_text(encoding="utf-8"))
        if count != 1:
            raise SystemExit(
                f"{path} contains {pattern!r} {count} times. Expected once, as in {HOROVOD}."
            )
        path.write_text(text, encoding="utf-8")


def build_environment(tools: Path) -> dict[str, str]:
    """Returns the environment variables of the build.

    They enable TensorFlow and Gloo, and MPI if `mpicxx` is on PATH.

    Args:
        tools: Folder with the build tools.
    """
    with_mpi = shutil.which("mpicxx") is not None
    return {
        **os.environ,
        # With the flags of `make test`, setup.py would compile one file at a time.
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")])),
        "PATH": os.pathsep.join([str(tools / "bin"), os.environ.get("PATH", os.defpath)]),
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        f"HOROVOD_WITH{'' if with_mpi else 'OUT'}_MPI": "1",
    }


def main() -> None:
    """Downloads, patches, compiles and installs Horovod."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    try:
        import tensorflow as tf
    except ImportError:
        raise SystemExit("Install TensorFlow first: Horovod is compiled against it.") from None
    with tempfile.TemporaryDirectory(prefix="horovod-") as folder:
        tools, sdist, wheels = (Path(folder) / name for name in ("tools", "sdist", "wheels"))
        subprocess.run([*pip, "install", *RUNTIME], check=True)
        subprocess.run([*pip, "install", "--target", str(tools), *BUILD_TOOLS], check=True)
        environment = build_environment(tools)
        no_isolation = ["--no-deps", "--no-build-isolation"]
        subprocess.run(
            [*pip, "download", *no_isolation, "--no-binary=:all:", "--dest", str(sdist), HOROVOD],
            check=True, env=environment,
        )  # fmt: skip
        (archive,) = sdist.iterdir()
        with tarfile.open(archive) as packed:
            # Python versions before 3.11.4, for example in Debian 12, do not have tar filters.
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            packed.extractall(folder, **safe)
        source = Path(folder) / archive.name.removesuffix(".tar.gz")
        change_sources(source)
        print(f"Compiling {HOROVOD} for TensorFlow {tf.__version__}", flush=True)
        command = [*pip, "wheel", *no_isolation, "--wheel-dir", str(wheels), str(source)]
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{done.stderr}\nHorovod could not be compiled.")
        (wheel,) = wheels.iterdir()
        again = ["--force-reinstall", "--no-deps"]
        subprocess.run([*pip, "install", *again, str(wheel)], check=True)
    subprocess.run(
        [sys.executable, "-c", "import horovod.tensorflow as hvd; hvd.init(); hvd.shutdown()"],
        check=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    print(f"Installed {HOROVOD}")


if __name__ == "__main__":
    main()
