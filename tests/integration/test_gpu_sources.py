"""What is written for GPUs compiles, where a CUDA toolkit is; no GPU is needed.

`make gpu-test` makes all of it, for every architecture, and runs it where a GPU is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

ROOT = Path(__file__).resolve().parents[2]
CC_OPS = ROOT / "cc_ops"


@pytest.fixture(scope="module")
def lists() -> dict[str, Any]:
    """What cc_ops/sources.bzl names."""
    if not CC_OPS.is_dir():
        pytest.skip(f"the source tree is not in {ROOT}")
    values: dict[str, Any] = {}
    exec((CC_OPS / "sources.bzl").read_text(encoding="utf-8"), values)
    return values


@pytest.fixture(scope="module")
def toolkit(lists: dict[str, Any]) -> dict[str, str]:
    """Where nvcc and CUDA's headers are."""
    told = subprocess.run(
        [sys.executable, str(ROOT / "build_support" / "find_cuda.py")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if not told:
        pytest.skip("no CUDA toolkit (CUDA_HOME, /usr/local/cuda, nvcc on PATH)")
    return dict(line.split("=", 1) for line in told.splitlines())


def compile_each(command: list[str], sources: list[str]) -> None:
    """Compiles files of cc_ops, one after the other."""
    errors = ""
    for source in sources:
        done = subprocess.run(
            [*command, str(CC_OPS / source)],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            errors += f"{source}:\n{done.stderr[:3000]}\n"
    assert not errors, errors


def test_launchers(lists: dict[str, Any], toolkit: dict[str, str], tmp_path: Path) -> None:
    # To PTX of one architecture.
    command = [toolkit["nvcc"], "-x", "cu", "-std=c++17", "-I.", "-arch=compute_90", "-ptx"]
    compile_each([*command, "-o", str(tmp_path / "x.ptx")], lists["GPU_SRCS"])


def test_kernels(lists: dict[str, Any], toolkit: dict[str, str]) -> None:
    command = ["g++", "-fsyntax-only", "-w", "-I.", *tf.sysconfig.get_compile_flags()]
    command += [f"-D{lists['GPU_DEFINE']}", f"-I{toolkit['include_dir']}"]
    compile_each(command, lists["TF_GPU_SRCS"])
