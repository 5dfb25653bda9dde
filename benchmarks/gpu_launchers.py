"""Builds, tests and measures GPU code with python3, nvcc and g++.

It compiles the CUDA launchers of cc_ops/core with their CPU references, the GPU tests and
benchmarks/gpu. It needs neither TensorFlow, Bazel, Python packages nor network access, so it runs
in any copy of the source tree. Then, on the current GPU:

1. --parts=cases: each launcher and a device-to-device copy of the same number of bytes take turns
(A B A B ...), timed by CUDA events. Every result is first compared with the CPU.
2. --parts=tests: runs the GPU tests.
3. --parts=sanitizers: runs the GPU tests under compute-sanitizer.

A wrong case does not stop the others. The results are written as JSON and as a page, unless --parts
selects only some parts. --results also appends every record to a file as soon as it is complete.
The exit code is 1 if a result is wrong, a test does not pass, or a tool reports an error, does not
finish or is not installed. Without a GPU, everything is compiled and no results are written.

    python benchmarks/gpu_launchers.py
    python benchmarks/gpu_launchers.py --compile_only --architectures=90
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Add this program's folder explicitly, because python -I excludes it.
sys.path[:0] = [str(HERE), str(HERE.parent / "build_support")]

import pages  # noqa: E402
from gpu_build import (  # noqa: E402
    PROGRAM,
    SMALL_GTEST,
    Build,
    ask_smi,
    emulated_toolkit,
    find_toolkit,
    version_of,
)

TARGET = 0.8  # Fraction of a copy's bytes per second.
PARTS = ("cases", "tests", "sanitizers")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_GOOGLETEST = "/usr/src/googletest"
_NO_GPU = 3  # See gpu/main.cc.
_ON_GPU_AT_ONCE = 4  # Number of concurrent test programs. One program leaves most of a GPU idle.


def parse_arguments() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM}.py", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--output", default="results", help="folder of the result files (JSON and Markdown)")
    add("--build", default=f"runs/{PROGRAM}", help="folder of the compiled files")
    add(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="number of concurrent compiler processes",
    )
    add("--runs", type=int, default=9, help="number of timed runs per case, at least 5")
    add(
        "--quick",
        action="store_true",
        help="trial run with small inputs and one sanitizer tool; its times are not valid",
    )
    add("--compile_only", action="store_true", help="compile the programs without running them")
    add(
        "--no_compile",
        action="store_true",
        help="run the programs in --build; a missing program counts as failed",
    )
    add(
        "--part_seconds",
        type=float,
        default=200,
        help="maximum number of seconds of each part, at least 1; default: %(default)s",
    )
    add(
        "--parts",
        default=",".join(PARTS),
        help="parts to run, separated by commas; default: %(default)s",
    )
    add(
        "--tools",
        default=",".join(TOOLS),
        help="tools of compute-sanitizer, separated by commas; default: %(default)s",
    )
    add("--results", type=Path, help="JSON Lines file to which every record is appended")
    add("--gtest", metavar="PATH", default=_GOOGLETEST if os.path.isdir(_GOOGLETEST) else "",
        help=f"folder of the GoogleTest sources; default: {_GOOGLETEST} if it exists; without it "
        f"or if empty, the header in {SMALL_GTEST} is used")  # fmt: skip
    add("--architectures", default="",
        help="GPU architectures, such as 80,90; default: this machine's GPUs; without a GPU, "
        "all architectures of the package")  # fmt: skip
    add(
        "--emulated",
        action="store_true",
        help="run on the emulation of CUDA on the CPU, as a rehearsal; its times are not valid",
    )
    found = parser.parse_args()
    for flag, minimum in (("jobs", 1), ("runs", 5), ("part_seconds", 1)):
        if getattr(found, flag) < minimum:
            parser.error(f"invalid --{flag}={getattr(found, flag)}; expected at least {minimum}")
    if found.compile_only and found.no_compile:
        parser.error("invalid --no_compile; expected it without --compile_only")
    for flag, allowed in (("parts", PARTS), ("tools", TOOLS)):
        names = getattr(found, flag).split(",")
        if not set(names) <= set(allowed):
            parser.error(
                f"invalid --{flag}={','.join(names)}; expected names of {','.join(allowed)}"
            )
        setattr(found, flag, names)
    for name in filter(None, found.architectures.split(",")):
        if not re.fullmatch(r"\d+[af]?", name):
            parser.error(f"invalid --architectures: {name!r}; expected numbers such as 80 or 90a")
    return found


@dataclasses.dataclass
class Cases:
    """The output of the cases program, and its errors."""

    device: dict[str, Any] = dataclasses.field(default_factory=dict)
    launchers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def append(results: Path | None, record: Mapping[str, Any]) -> None:
    """Appends a record to the JSON Lines file, if --results is set."""
    if results is not None:
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def run_cases(program: Path, given: argparse.Namespace) -> Cases:
    """Runs the measuring program and prints the name of each case.

    Args:
        program: Path of the program.
        given: The command line.

    Raises:
        SystemExit: If there is no GPU or no program.
    """
    if not program.exists():
        raise SystemExit(f"{program} was not compiled.")
    found, results = Cases(), given.results
    command = [str(program), str(given.runs), "quick" if given.quick else "full"]
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as ran:
            alarm = threading.Timer(given.part_seconds, ran.kill)
            alarm.daemon = True
            alarm.start()
            assert ran.stdout is not None
            for line in ran.stdout:
                if not line.startswith("{"):
                    print(line, end="")
                    continue
                record = json.loads(line)
                append(results, record)
                kind = record.pop("record")
                if kind == "device":
                    found.device = record
                else:
                    (found.launchers if kind == "launcher" else found.failures).append(record)
                print(record.get("name"), record.get("shape", ""), flush=True)
        alarm.cancel()
        errors.seek(0)
        reported = errors.read().strip()
    if ran.returncode == _NO_GPU:
        raise SystemExit(
            f"No GPU is available ({reported}). The programs were compiled, but not measured."
        )
    if ran.returncode:
        problem = reported or f"not finished after {given.part_seconds:.0f} s"
        print(f"{problem}\nexit code {ran.returncode}", flush=True)
        if not found.failures:
            found.failures.append({"name": program.name, "error": problem})
            append(results, {"record": "failure", **found.failures[-1]})
    return found


@dataclasses.dataclass
class Tested:
    """The results of a test program."""

    passed: int = 0
    skipped: int = 0
    failed: int = 0
    seconds: float = 0.0
    # By tool of compute-sanitizer. None if the tool is not installed or did not finish.
    errors: dict[str, int | None] = dataclasses.field(default_factory=dict)

    @property
    def not_passed(self) -> int:
        """Number of tests that did not pass.

        A program without tests counts as one.
        """
        return self.skipped + self.failed or int(self.passed == 0)


def run_tests(programs: Sequence[Path], given: argparse.Namespace) -> dict[str, Tested]:
    """Runs the test programs; prints the output of failed ones."""
    last = time.monotonic() + given.part_seconds

    def run_one(program: Path) -> Tested:
        start = time.monotonic()
        code, text = run_within([str(program)], last - start)
        ends = re.findall(r"^\[ +(OK|SKIPPED|FAILED) +\] .* \(\d+ ms\)$", text, re.MULTILINE)
        found = Tested(*map(ends.count, ("OK", "SKIPPED", "FAILED")), time.monotonic() - start)
        if code != 0 and not found.failed:  # The program ended before a test did.
            found.failed = 1
        if found.not_passed:
            print(f"{program.name}: exit code {code}\n{text}", flush=True)
        append(given.results, {"record": "test", "name": program.name, **dataclasses.asdict(found)})
        return found

    with ThreadPoolExecutor(_ON_GPU_AT_ONCE) as pool:
        return dict(zip([p.name for p in programs], pool.map(run_one, programs), strict=True))


def run_tools(
    sanitizer: str | None, programs: Sequence[Path], given: argparse.Namespace,
    tests: dict[str, Tested],
) -> None:  # fmt: skip
    """Runs the test programs under compute-sanitizer; adds error counts to `tests`."""
    last = time.monotonic() + given.part_seconds
    if sanitizer is None:
        print("compute-sanitizer is not next to nvcc or on PATH. Its runs count as failed.")

    def run_one(tool_and_program: tuple[str, Path]) -> int | None:
        tool, program = tool_and_program
        if sanitizer is None:
            return None
        command = [sanitizer, "--tool", tool, "--error-exitcode", "99", str(program)]
        code, text = run_within(command, last - time.monotonic())
        if code is None:
            print(f"{tool} {program.name}: {text}", flush=True)
            return None
        counts = re.findall(r"SUMMARY: (\d+)", text)
        errors = max([int(code != 0), *map(int, counts)])
        if errors:
            print(f"{tool} {program.name}: exit code {code}\n{text[-4000:]}", flush=True)
        return errors

    def run_and_append(tool_and_program: tuple[str, Path]) -> int | None:
        errors, (tool, program) = run_one(tool_and_program), tool_and_program
        name = f"{tool} {program.name}"
        append(given.results, {"record": "sanitizer", "name": name, "errors": errors})
        return errors

    tools = given.tools[:1] if given.quick else given.tools
    units = [(tool, program) for tool in tools for program in programs]
    with ThreadPoolExecutor(_ON_GPU_AT_ONCE) as pool:
        for (tool, program), errors in zip(units, pool.map(run_and_append, units), strict=True):
            tests.setdefault(program.name, Tested()).errors[tool] = errors


def run_within(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Returns exit code and output.

    The code is None if the program does not finish within the time or was not compiled.
    """
    if not Path(command[-1]).exists():
        return None, "not compiled"
    if seconds <= 0:
        return None, "not started, because no time was left"
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"not finished after {seconds:.0f} s"
    return done.returncode, done.stdout


def find_sanitizer(toolkit: Mapping[str, str]) -> str | None:
    """Returns the path of compute-sanitizer, or None.

    It can be next to nvcc, in the toolkit or on PATH.
    """
    home = Path(toolkit["home"])
    for folder in (Path(toolkit["nvcc"]).parent, home / "bin", home / "compute-sanitizer"):
        if (folder / "compute-sanitizer").is_file():
            return str(folder / "compute-sanitizer")
    return shutil.which("compute-sanitizer")


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Returns the ratio for each turn."""
    return [a / b for a, b in zip(over, under, strict=True)]


def launcher_table(records: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns the columns of the launchers compared with a copy."""
    shares = [ratios(record["copy_seconds"], record["seconds"]) for record in records]
    reached = [
        statistics.median(fraction) >= TARGET if record["has_target"] else None
        for record, fraction in zip(records, shares, strict=True)
    ]

    def rates(name: str) -> list[float]:
        return [record["bytes"] / statistics.median(record[name]) / 1e9 for record in records]

    return [
        pages.column("launcher", [record["name"] for record in records]),
        pages.column("input", [record["shape"] for record in records]),
        pages.column("MB counted", [record["bytes"] / 1e6 for record in records], "{:,.0f}"),
        pages.column("of", [record["counted"] for record in records]),
        pages.column("fraction of copy", shares, "{:.0%}", "median each"),
        pages.column(f"{TARGET:.0%}?", reached),
        pages.column("GB/s", rates("seconds"), "{:,.0f}"),
        pages.column("copy GB/s", rates("copy_seconds"), "{:,.0f}"),
    ]


def test_table(tests: Mapping[str, Tested]) -> list[Any]:
    """Returns the columns of the tests and the compute-sanitizer results."""
    each = list(tests.values())
    tools = dict.fromkeys(tool for one in each for tool in one.errors)

    def shown(one: Tested, tool: str) -> int | str:
        errors = one.errors[tool]
        return "not finished" if errors is None else errors

    return [
        pages.column("program", list(tests)),
        pages.column("passed", [one.passed for one in each]),
        pages.column("skipped", [one.skipped for one in each]),
        pages.column("failed", [one.failed for one in each]),
        pages.column("seconds", [one.seconds for one in each], "{:.1f}"),
        *(pages.column(f"{tool} errors", [shown(one, tool) for one in each]) for tool in tools),
    ]


def claims_of(cases: Cases, tests: Mapping[str, Tested], is_quick: bool) -> dict[str, Any]:
    """Returns the claims; with multiple inputs, the worst median counts."""
    claims = {"tests_not_passed": pages.claim([one.not_passed for one in tests.values()], 0,
                                              middle=max)}  # fmt: skip
    errors = [
        1 if count is None else count for one in tests.values() for count in one.errors.values()
    ]
    claims["sanitizer_errors"] = pages.claim(errors, 0, middle=max)
    if cases.device or cases.failures:
        claims["failed_cases"] = pages.claim([len(cases.failures)], 0)
    if is_quick:
        return claims
    shares: dict[str, list[float]] = {}
    for record in cases.launchers:
        fraction = statistics.median(ratios(record["copy_seconds"], record["seconds"]))
        if record["has_target"]:
            shares.setdefault(f"{slug(record['name'])}_fraction_of_copy", []).append(fraction)
    for name, values in shares.items():
        claims[name] = pages.claim(values, TARGET, "higher", min)
    return claims


def slug(text: str) -> str:
    """Returns a text as part of a claim's name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def describe_machine(gpu: str) -> str:
    """Returns a general description of the machine."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*: (.*)$", cpu, re.MULTILINE)
    processor = model[1] if model else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{gpu}, {processor}, {len(os.sched_getaffinity(0))} cores, {memory:.1f} GiB"


def write(given: argparse.Namespace, cases: Cases, tests: Mapping[str, Tested], nvcc: str) -> str:
    """Writes the JSON file and the page, and returns the page."""
    device = cases.device
    tables = {"GPU tests": test_table(tests)} if tests else {}
    if cases.failures:
        tables["Failed cases"] = [
            pages.column("case", [record["name"] for record in cases.failures]),
            pages.column("error", [record["error"] for record in cases.failures]),
        ]
    if cases.launchers:
        tables["Launchers compared with a copy"] = launcher_table(cases.launchers)
    if device:
        values = [str(value) for value in device.values()]
        tables["GPU"] = [pages.column("property", list(device)), pages.column("value", values)]
    gpu = device.get("name", "unknown GPU")
    versions = {"CUDA": device.get("cuda_runtime", "unknown"), "nvcc": version_of(nvcc),
                "driver": (ask_smi("driver_version") or ["unknown"])[0],
                "python": platform.python_version()}  # fmt: skip
    made = pages.made_by(describe_machine(gpu), versions)
    part = f"{gpu}, --quick: the times are not valid" if given.quick else gpu
    claims = claims_of(cases, tests, given.quick)
    return pages.write(Path(given.output), PROGRAM, part, tables, claims, made)


def main() -> int:
    """Runs all selected parts; returns the exit code."""
    given = parse_arguments()
    toolkit = emulated_toolkit() if given.emulated else find_toolkit()
    start = time.monotonic()
    build = Build(given, toolkit)
    program, test_programs = build.programs
    if not given.no_compile:
        build.run()
        made = f"Compiled {program} and {len(test_programs)} tests"
        print(f"{made} in {time.monotonic() - start:.0f} s.", flush=True)
    if given.compile_only:
        print("The programs were not run.")
        return 0
    cases, tests = Cases(), dict[str, Tested]()
    if "cases" in given.parts:  # First, while the GPU is otherwise idle.
        cases = run_cases(program, given)
    if "tests" in given.parts:
        tests = run_tests(test_programs, given)
    if "sanitizers" in given.parts and given.emulated:
        print("compute-sanitizer needs a GPU. Its runs are skipped.")
    elif "sanitizers" in given.parts:
        run_tools(find_sanitizer(toolkit), test_programs, given, tests)
    if set(given.parts) == set(PARTS):
        print(write(given, cases, tests, toolkit["nvcc"]))
    print(f"The total time was {time.monotonic() - start:.0f} s.")
    has_errors = any(count != 0 for one in tests.values() for count in one.errors.values())
    if "tests" in given.parts and any(one.not_passed for one in tests.values()):
        has_errors = True
    return 1 if cases.failures or has_errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
