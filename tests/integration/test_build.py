"""Source lists are complete and the library matches the installed TensorFlow."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import tensorflow as tf

from slipstream_tf.ops import _loader

ROOT = Path(__file__).resolve().parents[2]
CC_OPS = ROOT / "cc_ops"

needs_sources = pytest.mark.skipif(
    not (CC_OPS / "sources.bzl").exists(), reason=f"the source tree is not in {ROOT}"
)


@pytest.fixture(scope="module")
def lists() -> dict[str, list[str]]:
    values: dict = {}
    exec((CC_OPS / "sources.bzl").read_text(), values)
    return values


def files(*patterns: str, under: str = "") -> set[str]:
    """Returns the paths of matching files, relative to cc_ops/."""
    return {
        path.relative_to(CC_OPS).as_posix()
        for pattern in patterns
        for path in (CC_OPS / under).rglob(pattern)
    }


def listed(lists: dict, *names: str) -> set[str]:
    return {path for name in names for path in lists[name]}


def test_library_was_built_for_this_tensorflow():
    built = _loader.build_info().tensorflow
    assert built == re.match(r"\d+\.\d+\.\d+", tf.__version__).group()


@needs_sources
def test_every_file_is_listed_once(lists):
    everything = [
        path
        for name, paths in lists.items()
        if name.endswith(("_HDRS", "_SRCS", "_TESTS"))
        for path in paths
    ]
    assert sorted(everything) == sorted(set(everything)), "listed twice in cc_ops/sources.bzl"
    sources = files("*.h", "*.cc", "*.cuh")
    assert sources - set(everything) == set(), "not listed in cc_ops/sources.bzl"
    assert set(everything) - sources == set(), "listed, but there is no such file"


@needs_sources
def test_every_file_is_in_list_for_its_kind(lists):
    tests = files("*_test.cc", under="core")
    gpu_tests = files("*_gpu_test.cc", under="core")
    assert listed(lists, "GPU_TESTS") == gpu_tests
    emulation_tests = files("*_test.cc", under="core/testing/cuda_emulation")
    assert listed(lists, "EMULATION_TESTS") == emulation_tests
    assert listed(lists, "CORE_TESTS") == tests - gpu_tests - emulation_tests
    assert listed(lists, "GPU_SRCS") == files("*.cu.cc", under="core")
    assert listed(lists, "GPU_HDRS") == files("*.cu.h", under="core")
    assert listed(lists, "TF_GPU_SRCS") == files("*.cu.cc", under="tf")
    assert listed(lists, "CORE_SRCS", "CORE_HDRS", "CORE_TESTS") <= files("*", under="core")
    assert listed(lists, "TF_SRCS", "TF_HDRS") <= files("*", under="tf")


@needs_sources
def test_core_includes_no_framework():
    outside = re.compile(
        r'^\s*#\s*include\s*[<"](tensorflow|tsl|xla|absl|unsupported|Eigen|third_party|cc_ops/tf)/',
        re.MULTILINE,
    )
    for name in sorted(files("*.h", "*.cc", under="core")):
        found = outside.search((CC_OPS / name).read_text())
        assert found is None, f"cc_ops/{name}: {found.group()}..."


@needs_sources
def test_every_module_folder_is_package():
    """Setuptools ignores a folder without __init__.py."""
    folders = {path.parent for path in (ROOT / "slipstream_tf").rglob("*.py")}
    missing = {str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()}
    assert missing == set()


@needs_sources
def test_source_distribution_is_complete(tmp_path):
    """The distribution contains everything that building and testing need."""
    pytest.importorskip("setuptools", reason="setuptools is not installed here")
    subprocess.run(
        [
            *(sys.executable, "setup.py", "-q"),
            *("egg_info", "--egg-base", str(tmp_path)),
            *("sdist", "--formats=gztar", "--dist-dir", str(tmp_path)),
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for folder in ("cc_ops", "build_support", "third_party", "slipstream_tf", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so") and not _is_cache(path)
    }
    wanted |= {"setup.py", "pyproject.toml", "LICENSE", "Makefile", "WORKSPACE", "BUILD"}
    wanted |= {".bazelrc", ".bazelignore", ".ci/run"}
    assert wanted - inside == set()


def _is_cache(path: Path) -> bool:
    return any(
        part == "__pycache__" or part.startswith(".") for part in path.parts[len(ROOT.parts) :]
    )
