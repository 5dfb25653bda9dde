"""The library with GPU kernels, and programs for GPU machines. No GPU is needed.

`make test` builds the library. `make gpu-test` runs the tests of the launchers on a GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CC_OPS = ROOT / "cc_ops"
WITH_CUDA = Path(sys.prefix) / "with_cuda"

PRINT_GPU_KERNELS = """
from tensorflow.python.framework import kernels, op_def_registry
from slipstream_tf.ops import _loader

assert _loader.build_info().cuda
for name in dir(_loader.library()):
    if op_def_registry.get(name) is not None:
        registered = kernels.get_registered_kernels_for_op(name).kernel
        print(*{name for one in registered if one.device_type == "GPU"}, sep="\\n")
"""


@pytest.mark.skipif(not WITH_CUDA.is_dir(), reason=f"no library in {WITH_CUDA}, see `make test`")
def test_library_with_cuda_loads_without_gpu_and_has_all_kernels() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINT_GPU_KERNELS],
        cwd=WITH_CUDA, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    registration = r'(?:GPU_KERNEL\(|ON_GPU\(|REGISTER_KERNEL_BUILDER\(Name\()\s*"(\w+)"'
    sources = [path.read_text() for path in (CC_OPS / "tf").rglob("*.cu.cc")]
    registered = [set(re.findall(registration, text)) for text in sources]
    assert registered and all(registered)
    assert set(done.stdout.split()) == set.union(*registered)


# Output of ptxas for two kernels of this project and one of CUB.
FAKE_NVCC = """#!/bin/sh
cat >&2 <<'END'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN10slipstream12_GLOBAL__N_114RowDriftKernelILNS_11DriftMetricE1EEEvPKfS4_llPf' for 'sm_90'
ptxas info    : Function properties for x
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 34 registers, used 0 barriers
ptxas info    : Compiling entry function '_ZN10slipstream12_GLOBAL__N_113CountUpKernelElPi' for 'sm_90'
ptxas info    : Function properties for x
    16 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 16 bytes cumulative stack size, 1184 bytes smem
ptxas info    : Compiling entry function '_ZN3cub11EmptyKernelIvEEvv' for 'sm_90'
ptxas info    : Function properties for x
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 4 registers, used 0 barriers
END
"""  # noqa: E501


def test_registers_prints_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart_static.a"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(FAKE_NVCC)
        (tmp_path / file).chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu/registers.py")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    kernels = [line for line in done.stdout.splitlines() if "saturation/drift.cu.cc" in line]
    assert kernels == [
        "| saturation/drift.cu.cc | `CountUpKernel` | 24 | 16 | 20 | 1184 |",
        "| saturation/drift.cu.cc | `RowDriftKernel<1>` | 34 | 0 | 0 | 0 |",
    ]


def test_build_runs_nvcc_again_if_its_variables_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (ROOT / "build_support").is_dir():
        pytest.skip(f"the source tree is not in {ROOT}")
    monkeypatch.syspath_prepend(str(ROOT / "build_support"))
    import native_build

    monkeypatch.setattr(native_build, "find_tensorflow", lambda python: {"version": "2.21"})
    monkeypatch.setattr(native_build, "find_cuda", lambda: {"nvcc": str(tmp_path / "nvcc")})
    for name in ("nvcc", "g++"):
        (tmp_path / name).write_text('#!/bin/sh\necho run >> "$1"\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("SLIPSTREAM_WITH_CUDA", "1")
    build = native_build.NativeBuild(str(tmp_path))

    def runs(compiler: str) -> int:
        target = tmp_path / f"{compiler}.o"
        build._make(str(target), [str(tmp_path / compiler), str(target)], list)
        return target.read_text().count("run")

    found = []
    for flags in ("", "", "-Xptxas=-Werror", "-Xptxas=-Werror", ""):
        monkeypatch.setenv("NVCC_APPEND_FLAGS", flags)
        found.append((runs("nvcc"), runs("g++")))
    assert found == [(1, 1), (1, 1), (2, 1), (2, 1), (3, 1)]


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
