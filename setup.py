"""Builds slipstream_tf and its op library against the installed TensorFlow.

Environment variables:
    SLIPSTREAM_WITH_CUDA: "1" adds the CUDA kernels.
    PYTHON_BIN_PATH: Path of another Python interpreter with the TensorFlow to build for.
    SLIPSTREAM_PYTHONS: Paths of multiple interpreters, separated like PATH. The build then creates
        a library for the TensorFlow of each interpreter, see build_support/wheels.py.
    CXX: The C++ compiler. Defaults to g++.

The metadata of the package are in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools is too old for wheels, but can create source packages.
    bdist_wheel = None

ROOT = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(ROOT, "build_support"))

from native_build import BuildError, NativeBuild  # noqa: E402  (needs the path above)

PACKAGE = "slipstream_tf"


class BuildPython(build_py):
    """Removes old build results, so that deleted modules are not installed."""

    def run(self) -> None:
        stale = os.path.join(self.build_lib, PACKAGE)
        if not getattr(self, "editable_mode", False) and os.path.isdir(stale):
            shutil.rmtree(stale)
        super().run()


class BuildOps(build_ext):
    """Builds the op libraries and copies them into the package.

    The file names have no Python version, because the libraries do not use Python.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def build_extension(self, ext: Extension) -> None:
        only = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(only), exist_ok=True)
        pythons = os.environ.get("SLIPSTREAM_PYTHONS")
        try:
            if not pythons:
                self._build(NativeBuild(self.build_temp, self.parallel or None), only)
            for number, python in enumerate(pythons.split(os.pathsep) if pythons else ()):
                folder = os.path.join(self.build_temp, f"tensorflow_{number}")
                build = NativeBuild(folder, self.parallel or None, python)
                release = build.tensorflow.split(".")
                self._build(build, f"{only.removesuffix('.so')}_tf{release[0]}_{release[1]}.so")
        except BuildError as error:
            raise SystemExit(str(error)) from None

    def _build(self, build: NativeBuild, target: str) -> None:
        # Replace the file instead of overwriting it, because a running process may have the old
        # library mapped.
        shutil.copyfile(build.run(), target + ".new")
        os.replace(target + ".new", target)


COMMANDS = {"build_ext": BuildOps, "build_py": BuildPython}
if bdist_wheel is not None:

    class BuildWheel(bdist_wheel):
        """Tags the wheel for any Python 3 on this platform."""

        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    COMMANDS["bdist_wheel"] = BuildWheel

setup(
    ext_modules=[Extension(PACKAGE + "._slipstream_ops", sources=[])],
    cmdclass=COMMANDS,
)
