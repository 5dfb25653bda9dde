"""Builds slipstream_tf and its op library against the TensorFlow that is installed.

SLIPSTREAM_WITH_CUDA=1 adds the CUDA kernels; PYTHON_BIN_PATH names another Python whose TensorFlow
is to be used; CXX another compiler. The metadata are in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(ROOT, "build_support"))

from native_build import BuildError, NativeBuild  # noqa: E402  (lies beside this file)

PACKAGE = "slipstream_tf"


class BuildPython(build_py):
    """Starts from an empty folder: modules removed from the sources must not be installed."""

    def run(self) -> None:
        stale = os.path.join(self.build_lib, PACKAGE)
        if not getattr(self, "editable_mode", False) and os.path.isdir(stale):
            shutil.rmtree(stale)
        super().run()


class BuildOps(build_ext):
    """Puts one library, named without a Python version (it uses no Python), into the package."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            built = NativeBuild(self.build_temp, self.parallel or None).run()
        except BuildError as error:
            raise SystemExit(str(error)) from None
        target = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        # Replaced, not overwritten: a running process may have the old library mapped.
        shutil.copyfile(built, target + ".new")
        os.replace(target + ".new", target)


setup(
    ext_modules=[Extension(PACKAGE + "._slipstream_ops", sources=[])],
    cmdclass={"build_ext": BuildOps, "build_py": BuildPython},
)
