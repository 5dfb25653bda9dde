"""The CUDA launchers on a GPU: bytes per second beside a device copy, probes beside HierarchicalKV.

Compiles benchmarks/gpu and the launchers with nvcc and runs them on the current GPU. Each launcher
and a device-to-device copy that moves as many bytes take turns (A B A B ...), timed by CUDA events;
so do the key probes and the `find` of HierarchicalKV, NVIDIA's table under merlin-sok's variables,
whose source package pip downloads on first use. Every result is compared with the CPU's before it
is measured. Without a GPU everything is compiled, and nothing is written.

    python benchmarks/gpu_launchers.py
    python benchmarks/gpu_launchers.py --compile_only --architectures=90
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from absl import app, flags

from slipstream_tf.telemetry.run_record import machine, versions, write_json

_RUNS = flags.DEFINE_integer("runs", 9, "Measured runs of each.", lower_bound=5)
_HKV = flags.DEFINE_bool("hkv", True, "Measure the key probes beside HierarchicalKV.")
_ARCHITECTURES = flags.DEFINE_list(
    "architectures", [], "GPUs to compile for, e.g. 80,90; default: those of the package."
)
_COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "Compile, run nothing.")
_QUICK = flags.DEFINE_bool("quick", False, "Small inputs, for seconds: shows that it runs.")
_CACHE = flags.DEFINE_string("cache", "runs/peers", "Folder of what is downloaded.")
_BUILD = flags.DEFINE_string("build", "runs/gpu_launchers", "Folder of what is compiled.")
_OUTPUT = flags.DEFINE_string("output", "results", "Folder of the JSON and the table.")

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.8
HKV = "third_party/HierarchicalKV/include"  # In merlin-sok's source package.
# Of the CPU's references beside the sources that have a launcher's name.
_REFERENCES = (
    "core/saturation/drift_index.cc",
    "core/memory/page_memory.cc",
    "core/saturation/skip_score.cc",
)
_WITH_HKV = ("hierarchical_kv.cu.cc", "probe_turns.cc")
_NO_GPU = 3  # See gpu/main.cc.


def module_of(file: str) -> Any:
    """Loads a Python file of the source tree that is in no package."""
    path = ROOT / file
    spec = importlib.util.spec_from_file_location(f"slipstream_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_toolkit() -> dict[str, str]:
    """Returns where CUDA is; see build_support/find_cuda.py.

    Raises:
        SystemExit: there is none.
    """
    toolkit = module_of("build_support/find_cuda.py").find_cuda()
    if not toolkit:
        named = os.environ.get("CUDA_HOME")
        place = f"CUDA_HOME={named}" if named else "/usr/local/cuda, nor by an nvcc on PATH"
        raise SystemExit(
            f"No CUDA toolkit (nvcc, cuda_runtime.h, libcudart_static.a) in {place}. The launchers "
            "cannot be compiled without it: install CUDA 12 or 13, or set CUDA_HOME."
        )
    return toolkit


def download_hkv(folder: Path) -> Path:
    """Returns the folder of HierarchicalKV's headers; pip downloads the package if need be.

    Raises:
        SystemExit: it could not, or the package has no such headers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        source = module_of("tests/parallel/sok/install_sok.py").download(folder)
    except RuntimeError as error:
        raise SystemExit(
            f"{error}\nWithout it --nohkv measures all but the comparison with HierarchicalKV."
        ) from None
    if not (source / HKV / "merlin_hashtable.cuh").is_file():
        raise SystemExit(f"{source} has no {HKV}/merlin_hashtable.cuh: another version?")
    return source / HKV


def generated_code(architectures: Sequence[str]) -> list[str]:
    """Returns nvcc's flags for GPUs, each given as e.g. 90."""
    for name in architectures:
        if not name.rstrip("af").isdigit():
            raise app.UsageError(f"--architectures: {name!r}. Allowed: e.g. 80 or 90a.")
    return [f"-gencode=arch=compute_{name},code=sm_{name}" for name in architectures]


def commands(toolkit: dict[str, str], hkv: Path | None) -> dict[str, list[str]]:
    """Returns the compiler's command for each source; `-o` is to be added.

    Args:
        toolkit: where CUDA is.
        hkv: headers of HierarchicalKV; None: without it.
    """
    lists = module_of("build_support/native_build.py").read_sources()
    chosen = generated_code(_ARCHITECTURES.value)
    device = [flag for flag in lists["NVCC_COPTS"] if not (chosen and "-gencode" in flag)] + chosen
    nvcc = [toolkit["nvcc"], "-c", "-x", "cu", f"-I{ROOT}", *device]
    host = [os.environ.get("CXX", "g++"), "-c", f"-I{ROOT}", *lists["COPTS"], *lists["CORE_COPTS"]]
    host += ["-isystem", toolkit["include_dir"]]
    if hkv is not None:
        host.append("-DWITH_HIERARCHICAL_KV")
        # As SOK compiles it. -fmad=false is ours: our sums are the CPU's bit for bit.
        flags_of_hkv = [flag for flag in device if flag != "-fmad=false"]
        flags_of_hkv += ["--expt-extended-lambda", "--expt-relaxed-constexpr", "-w"]
        with_hkv = [toolkit["nvcc"], "-c", "-x", "cu", f"-I{ROOT}", *flags_of_hkv]
        with_hkv += ["-isystem", str(hkv)]
    found: dict[str, list[str]] = {}
    launchers = set(lists["GPU_SRCS"])
    for source in lists["CORE_SRCS"]:
        if source in _REFERENCES or source.replace(".cc", ".cu.cc") in launchers:
            found[f"cc_ops/{source}"] = host
    found.update({f"cc_ops/{source}": nvcc for source in lists["GPU_SRCS"]})
    for path in sorted((ROOT / "benchmarks" / "gpu").glob("*.cc")):
        is_hkv = path.name in _WITH_HKV
        if is_hkv and hkv is None:
            continue
        on_gpu = path.name.endswith(".cu.cc")
        command = (with_hkv if is_hkv else nvcc) if on_gpu else host
        found[str(path.relative_to(ROOT))] = command
    return {source: [*command, str(ROOT / source)] for source, command in found.items()}


def digest_of(texts: Sequence[str]) -> str:
    """Digest of all that the program is made of: these texts and our sources and headers."""
    digest = hashlib.sha256("\0".join(texts).encode())
    for folder in ("cc_ops/core", "benchmarks/gpu"):
        for path in sorted((ROOT / folder).iterdir()):
            if path.suffix in (".cc", ".h"):
                digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compile_program(toolkit: dict[str, str], hkv: Path | None, folder: Path) -> Path:
    """Compiles and links; what is there already is not made again.

    Args:
        toolkit: where CUDA is.
        hkv: headers of HierarchicalKV; None: without it.
        folder: where to.

    Returns:
        The program.

    Raises:
        SystemExit: a compiler failed; with what it said.
    """
    nvcc = toolkit["nvcc"]
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    units = commands(toolkit, hkv)
    name = f"gpu_launchers-{digest_of([told.stdout, *(' '.join(unit) for unit in units.values())])}"
    program = folder / name
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Compiling {len(units)} files with {nvcc} ...", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:

        def compile_one(number_and_command: tuple[int, list[str]]) -> str:
            number, command = number_and_command
            target = os.path.join(scratch, f"{number}.o")
            _run([*command, "-o", target])
            return target

        # nvcc takes longest: those first.
        order = sorted(units, key=lambda source: not source.endswith(".cu.cc"))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_one, enumerate(units[source] for source in order)))
        made = os.path.join(scratch, name)
        _run([nvcc, *objects, "-o", made])
        os.replace(made, program)
    return program


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{done.stdout}{done.stderr}")


def records_of(program: Path) -> Iterator[dict[str, Any]]:
    """Runs the program; yields its records as they come.

    Raises:
        SystemExit: no GPU, a wrong result, or a CUDA call that failed.
    """
    command = [str(program), str(_RUNS.value), "quick" if _QUICK.value else "full"]
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as ran:
            assert ran.stdout is not None
            for line in ran.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
                else:  # HierarchicalKV prints warnings.
                    print(line, end="")
        errors.seek(0)
        problem = errors.read().strip()
    if ran.returncode == _NO_GPU:
        raise SystemExit(f"No GPU here ({problem}): compiled, but nothing measured or written.")
    if ran.returncode:
        raise SystemExit(f"{problem}\nNothing is written (exit code {ran.returncode}).")


def driver() -> str | None:
    """Version of the GPU's driver, as nvidia-smi says it; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return told.splitlines()[0].strip() if told.strip() else None


def launcher_line(record: dict[str, Any]) -> str:
    """The table's line for a launcher; adds `share_of_copy` and `reaches_target` to its record."""
    own, copy = record["seconds"], record["copy_seconds"]
    share = statistics.median(copy) / statistics.median(own)
    record["share_of_copy"] = share
    record["reaches_target"] = share >= TARGET if record["has_target"] else None
    verdict = {None: "", True: "yes", False: "**no**"}[record["reaches_target"]]
    rates = [record["bytes"] / seconds / 1e9 for seconds in own]
    copy_rates = [record["bytes"] / seconds / 1e9 for seconds in copy]
    cells = (
        record["name"],
        record["shape"],
        f"{record['bytes'] / 1e6:,.0f}: {record['counted']}",
        f"{100 * share:.0f}%",
        verdict,
        f"{statistics.median(rates):,.0f}",
        f"{statistics.median(copy_rates):,.0f}",
        " ".join(f"{rate:.0f}" for rate in rates),
        " ".join(f"{rate:.0f}" for rate in copy_rates),
    )
    return "| " + " | ".join(cells) + " |"


def probe_lines(records: Sequence[dict[str, Any]]) -> list[str]:
    """The table's lines for the probes; adds `keys_per_second` to their records."""
    medians: dict[tuple[int, int, int], dict[str, float]] = {}
    for record in records:
        keys = record["batch"] * record["calls"]
        record["keys_per_second"] = [keys / seconds for seconds in record["seconds"]]
        case = (record["keys_in_table"], record["hits_percent"], record["batch"])
        medians.setdefault(case, {})[record["name"]] = statistics.median(record["keys_per_second"])
    lines = []
    for record in records:
        case = (record["keys_in_table"], record["hits_percent"], record["batch"])
        own = medians[case][record["name"]]
        times = [
            f"{own / medians[case][f'HierarchicalKV find, {what}']:.2f}"
            for what in ("addresses", "rows")
        ]
        cells = (
            f"{record['keys_in_table']:,}",
            f"{record['hits_percent']}%",
            f"{record['batch']:,}",
            record["name"],
            f"{own / 1e9:.2f}",
            *times,
            " ".join(f"{rate / 1e9:.2f}" for rate in record["keys_per_second"]),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def header(*cells: str) -> str:
    """A table's first two lines."""
    return "| " + " | ".join(cells) + " |\n|" + "---|" * len(cells)


LAUNCHER_HEADER = header(
    *("launcher", "input", "MB counted", "of the copy", "80%?"),
    *("GB/s", "copy GB/s", "all runs", "copy's runs"),
)
PROBE_HEADER = header(
    *("keys in table", "hits", "batch", "what", "1e9 keys/s"),
    *("times find of addresses", "times find of rows", "all runs"),
)


def main(arguments: Sequence[str]) -> None:
    """Compiles, measures, prints and writes."""
    if len(arguments) > 1:
        raise app.UsageError(f"{arguments[1]!r} is no flag. Allowed: --flag=value.")
    toolkit = find_toolkit()
    hkv = download_hkv(Path(_CACHE.value)) if _HKV.value else None
    program = compile_program(toolkit, hkv, Path(_BUILD.value))
    if _COMPILE_ONLY.value:
        print(f"Compiled {program}; not run.")
        return
    device: dict[str, Any] = {}
    launchers: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []
    lines = []
    for record in records_of(program):
        kind = record.pop("record")
        if kind == "device":
            device = {**record, "driver": driver()}
            print(f"{device['name']}, driver {device['driver']}\n{LAUNCHER_HEADER}", flush=True)
        elif kind == "launcher":
            launchers.append(record)
            lines.append(launcher_line(record))
            print(lines[-1], flush=True)
        else:
            probes.append(record)
    table = "\n".join([LAUNCHER_HEADER, *lines])
    if probes:
        compared = "\n".join([PROBE_HEADER, *probe_lines(probes)])
        print(f"\n{compared}")
        table = f"{table}\n\n{compared}"
    output = Path(_OUTPUT.value)
    write_json(
        str(output / "gpu_launchers.json"),
        {
            "device": device,
            "launchers": launchers,
            "probes": probes,
            "settings": {"runs": _RUNS.value, "quick": _QUICK.value, "target": TARGET,
                         "architectures": _ARCHITECTURES.value or "the package's"},
            "nvcc": _version_of(toolkit["nvcc"]),
            "machine": machine(),
            "versions": versions(),
        },
    )  # fmt: skip
    title = (
        f"# CUDA launchers on {device['name']}, driver {device['driver']}, CUDA "
        f"{device['cuda_runtime']}{' (--quick: means nothing)' if _QUICK.value else ''}"
    )
    (output / "gpu_launchers.md").write_text(f"{title}\n\n{table}\n", encoding="utf-8")


def _version_of(nvcc: str) -> str:
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    return told.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    app.run(main)
