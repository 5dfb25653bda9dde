"""Prints the registers and spilled bytes of each CUDA kernel as a Markdown table.

    python3 benchmarks/gpu/registers.py --architecture=90

Compiles the launchers with the flags of the package. Needs nvcc and c++filt, but no GPU. Kernels of
CUB are not listed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "build_support")]

from gpu_build import find_toolkit, version_of  # noqa: E402
from native_build import read_sources  # noqa: E402

_KERNEL = re.compile(
    r"^ '(.*)' for .* (\d+) bytes spill stores, (\d+) bytes spill loads.*"
    r" Used (\d+) registers(?:.* (\d+) bytes smem)?"
)


def kernels_of(source: str, architecture: str) -> Iterator[tuple[str, ...]]:
    """Yields name, registers, stored and loaded bytes of spills, and bytes of shared memory."""
    lists = read_sources()
    flags = [flag for flag in lists["NVCC_COPTS"] if "-gencode" not in flag]
    command = [find_toolkit()["nvcc"], "-cubin", "-x", "cu", f"-I{ROOT}", *flags]
    command += [f"-arch=sm_{architecture}", "-Xptxas=-v", str(ROOT / "cc_ops" / source)]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        done = subprocess.run(
            [*command, "-o", cubin.name], stderr=subprocess.PIPE, check=True, text=True
        )
    reported = subprocess.run(
        ["c++filt"], input=done.stderr, stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    for one in reported.split("Compiling entry function")[1:]:
        found = _KERNEL.match(one.replace("\n", " "))
        assert found, one
        signature, stored, loaded, registers, shared = found.groups()
        if "cub::" not in signature:
            # Remove namespaces, the type of enumerated template arguments, and the arguments.
            name = re.sub(r"void |slipstream::|\(anonymous namespace\)::", "", signature)
            name = re.sub(r"\(\w+\)(?=\d)", "", name).partition("(")[0].replace("> >", ">>")
            yield f"`{name}`", registers, stored, loaded, shared or "0"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--architecture", default="90", help="compute capability; default: 90")
    given = parser.parse_args()
    print(f"    python3 benchmarks/gpu/registers.py --architecture={given.architecture}\n")
    print(f"{version_of(find_toolkit()['nvcc'])}.\n")
    print("| source | kernel | registers | spill stores | spill loads | shared memory |")
    print("|---|---|---|---|---|---|")
    for source in read_sources()["GPU_SRCS"]:
        for kernel in sorted(kernels_of(source, given.architecture)):
            print("|", " | ".join([source.removeprefix("core/"), *kernel]), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
