"""Prints the paths of the CUDA toolkit, one KEY=VALUE per line.

The search order is CUDA_HOME, /usr/local/cuda, nvcc on PATH, NVIDIA's packages from PyPI for this
interpreter. The output is empty without a toolkit.
third_party/bazel/cuda_configure.bzl and setup.py run this script.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig


def _home_of(nvcc: str) -> str:
    """Returns the root folder of the toolkit that contains an nvcc.

    The path comes from nvcc's dry run, because nvcc on PATH may be a wrapper script.
    """
    command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    dry_run = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in (dry_run.stdout + dry_run.stderr).splitlines():
        if line.startswith("#$ TOP="):
            return os.path.realpath(line[len("#$ TOP=") :].strip())
    return os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))


def _first_with(home: str, folders: tuple[str, ...], file: str) -> str | None:
    for folder in folders:
        if os.path.exists(os.path.join(home, folder, file)):
            return os.path.join(home, folder)
    return None


def _toolkit(home: str, nvcc: str) -> dict[str, str] | None:
    include = _first_with(home, ("include", "targets/x86_64-linux/include"), "cuda_runtime.h")
    library = _first_with(home, ("lib64", "lib", "targets/x86_64-linux/lib"), "libcudart_static.a")
    if not os.path.exists(nvcc) or include is None or library is None:
        return None
    return {"home": home, "nvcc": nvcc, "include_dir": include, "lib_dir": library}


def find_cuda() -> dict[str, str]:
    """Returns the paths of the CUDA toolkit, or an empty dictionary."""
    wanted = os.environ.get("CUDA_HOME")
    if wanted:  # Never fall back to another toolkit if the user has set CUDA_HOME.
        return _toolkit(wanted, os.path.join(wanted, "bin", "nvcc")) or {}
    found = _toolkit("/usr/local/cuda", "/usr/local/cuda/bin/nvcc")
    nvcc = shutil.which("nvcc")
    if found is None and nvcc is not None:
        found = _toolkit(_home_of(nvcc), nvcc)
    # Packages for CUDA 12 and earlier do not contain nvcc.
    installed = os.path.join(sysconfig.get_path("purelib"), "nvidia", "cu13")
    return found or _toolkit(installed, os.path.join(installed, "bin", "nvcc")) or {}


if __name__ == "__main__":
    for key, value in sorted(find_cuda().items()):
        sys.stdout.write(f"{key}={value}\n")
