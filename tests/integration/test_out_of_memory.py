"""A table that runs out of memory raises an error and survives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CC_OPS = Path(__file__).parents[2] / "cc_ops" / "tf"


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_table_stays_intact_when_memory_runs_out() -> None:
    program = Path(__file__).with_name("growing_until_memory_ends.py")
    # With a malloc arena for another thread no address space would be left.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, program],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kind"] == "ResourceExhaustedError", found
    assert re.search(
        r"out of memory while looking up a batch: table 'user' \(\d+ rows, \d+ bytes\) cannot grow",
        found["message"],
    ), found
    assert found["rows"] >= 65536
    assert found["is_intact"] and found["continues"] and found["grows"], found


def test_every_kernel_is_registered_with_memory_check() -> None:
    """Otherwise the kernel would end the process when memory runs out."""
    unchecked = []
    for path in sorted([*CC_OPS.glob("*_kernels.cc"), *CC_OPS.glob("*_kernels.cu.cc")]):
        text = path.read_text(encoding="utf-8")
        # Kernels of these classes check by themselves.
        counted = re.findall(r"class (\w+) : public CountedGpuKernel \{", text)
        for found in re.finditer(r"REGISTER_KERNEL_BUILDER\(.*?\);?\n(?=\S|$)", text, re.DOTALL):
            kernel = found.group()
            if "MemoryChecked<" not in kernel and not any(name in kernel for name in counted):
                unchecked.append(f"{path.name}: {found.group().split(chr(34))[1]}")
    assert unchecked == []
