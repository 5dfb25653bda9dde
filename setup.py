"""Builds slipstream_tf and its op library against the TensorFlow that is installed.

SLIPSTREAM_WITH_CUDA=1 adds the CUDA kernels; PYTHON_BIN_PATH names another Python whose TensorFlow
is to be used; CXX another compiler.
"""

from __future__ import annotations

import os
import shutil
import sys

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(ROOT, "build_support"))

from native_build import BuildError, NativeBuild  # noqa: E402  (lies beside this file)

PACKAGE = "slipstream_tf"


def read(*parts: str) -> str:
    path = os.path.join(ROOT, *parts)
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read()


def version() -> str:
    scope: dict = {}
    exec(read(PACKAGE, "_version.py"), scope)
    return scope["__version__"]


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
    name="slipstream-tf",
    version=version(),
    description="TensorFlow plugin that stops paying for saturated embeddings",
    long_description=read("README.md"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=[PACKAGE, PACKAGE + ".*"]),
    package_data={PACKAGE: ["py.typed"]},
    python_requires=">=3.10",
    # TensorFlow is left to the user: which of its packages (tensorflow, tensorflow-cpu, a
    # vendor's build) and which version is theirs to choose, and the library is built for it.
    # TensorFlow 2.16 and 2.17 need NumPy 1, which later versions of pyarrow refuse when imported
    # without saying so to pip.
    install_requires=["absl-py", "numpy", "pyarrow>=16.1,<22", "tqdm"],
    extras_require={
        "cpu": ["tensorflow-cpu>=2.16,<2.22"],
        "cuda": ["tensorflow[and-cuda]>=2.16,<2.22"],
        "report": ["matplotlib>=3.8"],
        "test": ["hypothesis", "matplotlib>=3.8", "pytest", "pytest-xdist", "tensorboard"],
        "dev": [
            "clang-format",
            "hypothesis",
            "matplotlib>=3.8",
            "mypy",
            "pytest",
            "pytest-xdist",
            "ruff",
            "tensorboard",
        ],
    },
    entry_points={
        "console_scripts": [
            "slipstream-train = slipstream_tf.cli.train:entry_point",
            "slipstream-demo = slipstream_tf.cli.demo:entry_point",
            "slipstream-doctor = slipstream_tf.cli.doctor:entry_point",
            "slipstream-prepare = slipstream_tf.cli.prepare:entry_point",
            "slipstream-report = slipstream_tf.cli.report:entry_point",
        ]
    },
    ext_modules=[Extension(PACKAGE + "._slipstream_ops", sources=[])],
    cmdclass={"build_ext": BuildOps, "build_py": BuildPython},
    zip_safe=False,
)
