"""Makes NVIDIA's Sparse Operation Kit (SOK) importable without a GPU, for tests.

    python tests/parallel/sok/install_sok.py FOLDER

The script downloads SOK's source package from PyPI. It compiles SOK's op registrations together
with the CPU kernels in this folder, and uses SOK's Python code unchanged. It also adds tf_keras,
which contains SOK's legacy optimizers. It installs nothing. Add the printed path to PYTHONPATH.
Existing results are reused.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SOK = "merlin-sok==2.1.0"
HERE = Path(__file__).resolve().parent
KERNELS = ("variable_kernels.cc", "lookup_kernels.cc")
# No kernels exist here for these registrations, because SOK's function for grouped lookups is
# private.
LEFT_OUT = ("group_lookup.cc",)
# SOK loads these libraries by name before its own library. Its registrations do not use them.
COMPANIONS = ("libhugectr_core23.so", "libembedding.so")


def download(folder: Path) -> Path:
    """Downloads and unpacks SOK's source package.

    Args:
        folder: Destination. It is kept, so that the download happens only once.

    Returns:
        The folder of the sources.

    Raises:
        RuntimeError: pip could not download the package.
    """
    unpacked = folder / SOK.replace("==", "-")
    if unpacked.is_dir():
        return unpacked
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        command += ["--no-deps", "--no-binary=merlin-sok", "--dest", scratch, SOK]
        _run(command, f"{SOK} could not be downloaded")
        (archive,) = Path(scratch).iterdir()
        with tarfile.open(archive) as packed:
            # Python before 3.11.4, for example in Debian 12, has no filters.
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            packed.extractall(scratch, **safe)
        (Path(scratch) / archive.name.removesuffix(".tar.gz")).rename(unpacked)
    return unpacked


def compile_ops(source: Path, library: Path) -> None:
    """Compiles SOK's op registrations and the CPU kernels into one library.

    Args:
        source: Folder of SOK's sources.
        library: Path of the new library.

    Raises:
        RuntimeError: g++ failed.
    """
    import tensorflow as tf

    registrations = sorted((source / "kit_src").glob("*/ops/*.cc"))
    sources = [path for path in registrations if path.name not in LEFT_OUT]
    sources += [HERE / name for name in KERNELS]
    command = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-O1", "-w"]
    # The status class in SOK's registrations has different names in different TensorFlow versions.
    command += ["-DTF_GE_212", f"-I{source / 'kit_src'}", f"-I{HERE}"]
    # Compile all sources as one file, because TensorFlow's headers take most of the time.
    together = library.with_suffix(".cc")
    together.write_text("".join(f'#include "{path}"\n' for path in sources))
    command += [*tf.sysconfig.get_compile_flags(), str(together), "-o", str(library)]
    command += tf.sysconfig.get_link_flags()
    _run(command, "SOK's op registrations could not be compiled")


def install(folder: Path) -> Path:
    """Makes SOK importable.

    Args:
        folder: Folder for downloads and compiled files. See the module's docstring.

    Returns:
        The path to add to PYTHONPATH.
    """
    import tensorflow as tf

    folder.mkdir(parents=True, exist_ok=True)
    source = download(folder)
    digest = hashlib.sha256(tf.__version__.encode() + Path(__file__).read_bytes())
    for name in (*KERNELS, "hash_variable.h"):
        digest.update((HERE / name).read_bytes())
    site = folder / f"site-{digest.hexdigest()[:16]}"
    if site.is_dir():
        return site
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "site"
        shutil.copytree(source / "sparse_operation_kit", made / "sparse_operation_kit")
        (made / "lib").mkdir()
        compile_ops(source, made / "lib" / "libsparse_operation_kit.so")
        empty = Path(scratch) / "empty.cc"
        empty.touch()
        for name in COMPANIONS:
            command = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", str(empty)]
            _run([*command, "-o", str(made / "lib" / name)], f"{name} could not be compiled")
        version = ".".join(tf.__version__.split(".")[:2])
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
        command += ["--no-deps", "--target", str(made), f"tf-keras=={version}.*"]
        _run(command, "tf_keras could not be installed")
        made.rename(site)
    return site


def _run(command: list[str], problem: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{problem}:\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    print(install(Path(sys.argv[1])))
