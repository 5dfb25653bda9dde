"""Loads the op library on first use and checks its TensorFlow version.

A library that was built for another minor release of TensorFlow may load without an error and then
misbehave. Therefore the build stamp (cc_ops/tf/base/build_info.cc) is read from the file first.
"""

import glob
import mmap
import os
import re
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

OVERRIDE = "SLIPSTREAM_OPS_LIBRARY"
REBUILD = "pip install --force-reinstall --no-deps ."
_HOW = f"Rebuild it: run '{REBUILD}' in the source folder of slipstream_tf."

_INSTALLED = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_slipstream_ops.so"
)
_STAMP = re.compile(rb"slipstream-build:tf=(\d+\.\d+\.\d+);cuda=([01]);cxx11abi=([01]);")

_OP_NAMES = re.compile(r"^\{\{.*?\}\} | \[Op:\w+\].*$")

_lock = threading.Lock()
_library: ModuleType | None = None


def message_of(error: Any) -> str:
    """Returns the message of a `tf.errors.OpError` without the names of the op and its node."""
    return _OP_NAMES.sub("", error.message)


@dataclass(frozen=True)
class BuildInfo:
    """Describes the TensorFlow build that an op library requires.

    Attributes:
        path: Path of the library file.
        tensorflow: Version of TensorFlow, for example "2.21.0".
        cuda: Whether the library contains GPU kernels.
        cxx11_abi: Whether it uses the C++11 ABI of libstdc++ (_GLIBCXX_USE_CXX11_ABI).
    """

    path: str
    tensorflow: str
    cuda: bool
    cxx11_abi: bool


def library_path(tensorflow: str | None = None) -> str:
    """Returns the path of the library to load.

    The path is $SLIPSTREAM_OPS_LIBRARY if that variable is set, otherwise the installed library. A
    wheel contains one library for each supported minor release of TensorFlow. If none matches, the
    library for the newest release is returned, and loading it raises an error.

    Args:
        tensorflow: Version of TensorFlow, for example "2.21.0". Defaults to the installed version,
            for which TensorFlow may be imported.
    """
    named = os.environ.get(OVERRIDE)
    if named or os.path.exists(_INSTALLED):
        return named or _INSTALLED
    of_wheel = _of_wheel()
    if not of_wheel:
        return _INSTALLED
    if tensorflow is None:
        import tensorflow as tf

        tensorflow = tf.__version__
    return of_wheel.get(_minor(tensorflow), of_wheel[max(of_wheel)])


def _of_wheel() -> dict[tuple[int, ...], str]:
    """Returns the libraries of a wheel by minor release of TensorFlow."""
    start = _INSTALLED.removesuffix(".so") + "_tf"
    found = {}
    for path in glob.glob(glob.escape(start) + "*.so"):
        release = path.removeprefix(start).removesuffix(".so")
        found[tuple(map(int, release.split("_")))] = path
    return found


def build_info(path: str | None = None) -> BuildInfo:
    """Reads the build stamp from the library file without loading the library.

    Args:
        path: Path of the library. Defaults to the library that `library()` loads.

    Returns:
        The contents of the stamp.

    Raises:
        ImportError: The file does not exist or has no stamp. The message explains how to build it.
    """
    path = path or library_path()
    try:
        with open(path, "rb") as file:
            # `mmap` raises an error for an empty file.
            size = os.path.getsize(path)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            stamp = _STAMP.search(content)
            found = stamp and [part.decode() for part in stamp.groups()]
    except OSError as error:
        hint = (
            f"The environment variable {OVERRIDE} has this path. Correct or unset it."
            if os.environ.get(OVERRIDE) == path
            else "Build it: run 'pip install .' in the source folder of slipstream_tf, and start "
            "Python in another folder, because Python prefers the unbuilt package in the current "
            "folder. To change the sources, run 'pip install -e .' instead."
        )
        raise ImportError(
            f"The op library of slipstream_tf cannot be read: {path} ({error.strerror}). {hint}"
        ) from error
    if not found:
        raise ImportError(
            f"{path} is not an op library of this version of slipstream_tf: it has no build stamp, "
            f"or an older build stamp. {_HOW}"
        )
    tensorflow, cuda, cxx11_abi = found
    return BuildInfo(path, tensorflow, cuda == "1", cxx11_abi == "1")


def library() -> ModuleType:
    """Returns the module with the ops; loads it once.

    The function is thread-safe.

    Returns:
        The module, with one function per op, for example `slipstream_row_drift`.

    Raises:
        ImportError: The library is missing, was built for another minor release of TensorFlow, or
            cannot be loaded. The message contains the versions and the command to rebuild it.
    """
    global _library
    with _lock:
        if _library is None:
            _library = _load(library_path())
        return _library


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _load(path: str) -> ModuleType:
    import tensorflow as tf

    built = build_info(path)
    if _minor(built.tensorflow) != _minor(tf.__version__):
        of_wheel = _of_wheel()
        if path in of_wheel.values():
            releases = ", ".join(".".join(map(str, release)) for release in sorted(of_wheel))
            raise ImportError(
                f"This wheel of slipstream_tf supports TensorFlow {releases}, but "
                f"TensorFlow {tf.__version__} is installed. Install one of these releases, or run "
                "'pip install .' in the source folder of slipstream_tf."
            )
        raise ImportError(
            f"The op library of slipstream_tf was built for TensorFlow {built.tensorflow}, but "
            f"TensorFlow {tf.__version__} is installed ({path}). {_HOW}"
        )
    if built.cxx11_abi != bool(tf.sysconfig.CXX11_ABI_FLAG):
        raise ImportError(
            "The op library of slipstream_tf was built with _GLIBCXX_USE_CXX11_ABI="
            f"{int(built.cxx11_abi)}, but the installed TensorFlow was built with "
            f"{tf.sysconfig.CXX11_ABI_FLAG} ({path}). {_HOW}"
        )
    try:
        return tf.load_op_library(path)
    except tf.errors.OpError as error:
        raise ImportError(
            "The op library of slipstream_tf cannot be loaded with TensorFlow "
            f"{tf.__version__} ({path}): {error.message}. {_HOW}"
        ) from error
