"""GPU sources compile with a CUDA toolkit. No GPU is needed.

`make gpu-test` compiles all GPU sources for every architecture and runs the tests on a GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

ROOT = Path(__file__).resolve().parents[2]
CC_OPS = ROOT / "cc_ops"


@pytest.fixture(scope="module")
def lists() -> dict[str, Any]:
    """Returns the lists of cc_ops/sources.bzl by name."""
    if not CC_OPS.is_dir():
        pytest.skip(f"the source tree is not in {ROOT}")
    values: dict[str, Any] = {}
    exec((CC_OPS / "sources.bzl").read_text(encoding="utf-8"), values)
    return values


@pytest.fixture(scope="module")
def toolkit(lists: dict[str, Any]) -> dict[str, str]:
    """Returns the paths of nvcc and of CUDA's headers."""
    reported = subprocess.run(
        [sys.executable, str(ROOT / "build_support" / "find_cuda.py")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if not reported:
        pytest.skip("no CUDA toolkit (CUDA_HOME, /usr/local/cuda, nvcc on PATH)")
    return dict(line.split("=", 1) for line in reported.splitlines())


def compile_each(command: list[str], sources: list[str]) -> None:
    """Compiles files of cc_ops one after the other."""
    errors = ""
    for source in sources:
        done = subprocess.run(
            [*command, str(CC_OPS / source)],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            errors += f"{source}:\n{done.stderr[:3000]}\n"
    assert not errors, errors


def test_launchers_compile(lists: dict[str, Any], toolkit: dict[str, str], tmp_path: Path) -> None:
    # Compile to PTX for one architecture.
    command = [toolkit["nvcc"], "-x", "cu", "-std=c++17", "-I.", "-arch=compute_90", "-ptx"]
    compile_each([*command, "-o", str(tmp_path / "x.ptx")], lists["GPU_SRCS"])


def test_kernels_compile(lists: dict[str, Any], toolkit: dict[str, str]) -> None:
    command = ["g++", "-fsyntax-only", "-w", "-I.", *tf.sysconfig.get_compile_flags()]
    command += [f"-D{lists['GPU_DEFINE']}", f"-I{toolkit['include_dir']}"]
    compile_each(command, lists["TF_GPU_SRCS"])


# One test per kind of outcome. Also checks that an `else` after the macro belongs to the user's
# code.
SMALL_TESTS = """
#include <cmath>
#include <set>
#include <string>
#include "gtest/gtest.h"
TEST(Plain, Passes) {
  EXPECT_EQ((std::set<int>{1}), std::set<int>{1}) << "never printed";
  EXPECT_FLOAT_EQ(1.0f, 1.0000001f);
}
TEST(Plain, Differs) { EXPECT_EQ((std::set<int>{1}), (std::set<int>{2})) << "as told"; }
TEST(Plain, NanIsNotNear) { EXPECT_FLOAT_EQ(NAN, NAN); }
TEST(Plain, IsNotNear) { EXPECT_FLOAT_EQ(1.0f, 1.000001f); }
TEST(Plain, Leaves) { ASSERT_TRUE(false); EXPECT_TRUE(false) << "beyond an assertion"; }
TEST(Plain, Throws) { throw std::string("x").at(1); }
class Numbers : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { if (GetParam() == 2) GTEST_SKIP() << "no two"; }
};
TEST_P(Numbers, AreNotTwo) {
  if (GetParam() > 0) EXPECT_LE(GetParam(), 1); else EXPECT_GT(GetParam(), 0);
}
INSTANTIATE_TEST_SUITE_P(All, Numbers, testing::Values(0, 1, 2),
                         [](const auto& info) { return "N" + std::to_string(info.param); });
"""


@pytest.fixture
def small_gtest(tmp_path: Path) -> Callable[..., tuple[int, dict[str, str], str]]:
    """Returns a function that compiles a test with small_gtest and runs it.

    The function takes the sources and returns the exit code, the outcome of each test and the
    output.
    """
    folder = ROOT / "benchmarks/gpu/small_gtest"
    if not folder.is_dir():
        pytest.skip(f"no benchmarks/ in {ROOT}")

    def run(*sources: Path) -> tuple[int, dict[str, str], str]:
        program = tmp_path / "program"
        command = ["g++", "-std=c++17", "-Wall", "-Werror", f"-I{ROOT}", "-isystem", str(folder)]
        command += [*map(str, sources), str(folder / "main.cc"), "-lpthread", "-o", str(program)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
        ends = re.findall(r"^\[ +(OK|FAILED|SKIPPED) +\] (.*) \(\d+ ms\)$", done.stdout, re.M)
        return done.returncode, {name: end for end, name in ends}, done.stdout

    return run


def test_small_gtest_reports_failures(
    small_gtest: Callable[..., tuple[int, dict[str, str], str]], tmp_path: Path
) -> None:
    (tmp_path / "small.cc").write_text(SMALL_TESTS)
    code, ends, text = small_gtest(tmp_path / "small.cc")
    assert code == 1
    assert ends == {
        "Plain.Passes": "OK", "Plain.Differs": "FAILED", "Plain.NanIsNotNear": "FAILED",
        "Plain.IsNotNear": "FAILED", "Plain.Leaves": "FAILED", "Plain.Throws": "FAILED",
        "All/Numbers.AreNotTwo/N0": "FAILED", "All/Numbers.AreNotTwo/N1": "OK",
        "All/Numbers.AreNotTwo/N2": "SKIPPED",
    }  # fmt: skip
    assert "Actual: {1}\n     and: {2}\nas told" in text and "no two" in text
    assert "never printed" not in text and "beyond an assertion" not in text


def test_gpu_test_compiles_without_googletest(
    small_gtest: Callable[..., tuple[int, dict[str, str], str]],
) -> None:
    names = (
        *("hot_keys/access_sketch_gpu_test", "hot_keys/access_sketch"),
        *("memory/index_memory", "memory/page_memory", "base/work_crew"),
    )
    code, ends, text = small_gtest(*(CC_OPS / f"core/{name}.cc" for name in names))
    assert code == 0, text
    assert len(ends) == 14  # Without CUDA the CPU reference runs.
    assert all(end == ("OK" if name.endswith("/Cpu") else "SKIPPED") for name, end in ends.items())


@pytest.mark.parametrize("calls", ["AddKernel(); Launch();", "AddKernel();"])
def test_functions_that_never_ran_are_reported(
    calls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (ROOT / "build_support").is_dir():
        pytest.skip(f"the source tree is not in {ROOT}")
    monkeypatch.syspath_prepend(str(ROOT / "build_support"))
    import emulated_gpu

    # One kernel and one registration, as the report recognizes them by their names.
    (tmp_path / "small.cu.cc").write_text(
        "void AddKernel() {}\nvoid Launch() {}\nnamespace slipstream {\n"
        f"const auto register_kernel_1 = [] {{ {calls} }};\n}}\n"
        "int main() { slipstream::register_kernel_1(); }\n"
    )
    command = ["g++", "--coverage", str(tmp_path / "small.cu.cc"), "-o", "small"]
    subprocess.run(command, cwd=tmp_path, check=True)
    subprocess.run([str(tmp_path / "small")], cwd=tmp_path, check=True)
    misses = "Launch" not in calls
    assert emulated_gpu.report(tmp_path) == (1 if misses else 0)
    printed = capsys.readouterr().out
    missed = "small.cu.cc:2: no test runs this function: void Launch() {}"
    assert (missed in printed) == misses
    assert f"1 registered and 1 CUDA kernels, {3 if misses else 4} of 4" in printed
