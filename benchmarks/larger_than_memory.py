"""Step time of tables that exceed their memory budget.

    python benchmarks/larger_than_memory.py --spill=/local/disk
    python benchmarks/larger_than_memory.py --spill=/local/disk --keys=160000000 --memory=4GB \\
        --steps=10000

Each step trains 2,048 examples with 26 keys of one table, with rows of 32 values, Adagrad and Zipf
1.05. Each case runs in its own process. A step is compared with a table in memory, and with the
limit of the disk: the number of rows that are not in memory, divided by the rate of 4-KiB random
reads that fio reaches with 32 concurrent reads, before and after. RocksDB with a cache of the same
size is measured for comparison.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import awake
import summary
from absl import app, flags

from slipstream_tf.config import Storage, parse_bytes

_SPILL = flags.DEFINE_string("spill", None, "Folder on the disk to measure.", required=True)
_KEYS = flags.DEFINE_integer("keys", 20_000_000, "Number of rows of the table.", lower_bound=1)
_SHARES = flags.DEFINE_list(
    "shares", ["5", "10", "25", "50"], "Percentages of the rows that are in memory."
)
_MEMORY = flags.DEFINE_string("memory", None, "Memory for rows, such as 4GB. It replaces --shares.")
_MEMORY_KEYS = flags.DEFINE_integer(
    "memory_keys",
    None,
    "Number of rows of the reference table in memory. The default is --keys.",
)
_STEPS = flags.DEFINE_integer("steps", 1000, "Number of timed steps.", lower_bound=10)
_WARMUP = flags.DEFINE_integer(
    "warmup", 300, "Number of steps before the timed steps.", lower_bound=0
)
_ROCKSDB_STEPS = flags.DEFINE_integer(
    "rocksdb_steps", 100, "Number of timed steps with RocksDB. 0 skips RocksDB."
)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 3, "Number of rounds in which slipstream_tf and RocksDB alternate.", lower_bound=1
)

_HERE = Path(__file__).resolve().parent
_DIM, _THREADS = 32, 2
ROW_BYTES = Storage().row_bytes(_DIM, _DIM)
# Maximum ratio to the larger of both bounds; maximum ratio to a step in memory if 98% of the rows
# are in memory; minimum ratio of RocksDB's time to ours.
MAX_OVER_BOUND, MAX_OVER_MEMORY, MIN_OVER_ROCKSDB = 1.3, 2.0, 5.0
_FIO_BYTES = "8G"


def reads_per_second() -> float:
    """Returns fio's rate of 4-KiB random reads, 32 at once."""
    command = [
        "fio", "--name=read", f"--filename={_SPILL.value}/fio", f"--size={_FIO_BYTES}",
        "--rw=randread", "--bs=4k", "--direct=1", "--ioengine=io_uring", "--iodepth=32",
        "--runtime=10", "--time_based", "--output-format=json",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    finally:
        (Path(_SPILL.value) / "fio").unlink(missing_ok=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["iops"])


def ours(keys: int, memory: int) -> dict[str, Any]:
    """Runs a case with our table.

    Args:
        keys: The number of keys.
        memory: The memory of the rows in bytes. 0 keeps all rows in memory.
    """
    case = {
        "keys": keys, "dim": _DIM, "memory": memory, "spill": _SPILL.value, "seed": 1,
        "warmup": _WARMUP.value, "steps": _STEPS.value, "prefetches": True,
    }  # fmt: skip
    command = [sys.executable, str(_HERE / "larger_than_memory_case.py"), json.dumps(case)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({**case, **found}), flush=True)
    return found


def rocksdb(keys: int, memory: int) -> dict[str, Any]:
    """Runs the case with RocksDB."""
    with tempfile.TemporaryDirectory(dir=_SPILL.value) as folder:
        program = f"{folder}/program"
        source = str(_HERE / "larger_than_memory_rocksdb.cc")
        subprocess.run(
            ["g++", "-std=c++17", "-O2", "-o", program, source, "-lrocksdb", "-lpthread"],
            check=True,
        )
        steps = [str(_WARMUP.value), str(_ROCKSDB_STEPS.value)]
        command = [program, str(keys), str(_DIM), str(memory), f"{folder}/rows", *steps, "1"]
        done = subprocess.run(
            [*command, str(_THREADS)], stdout=subprocess.PIPE, check=True, text=True
        )
    print(done.stdout, flush=True)
    return json.loads(done.stdout)


def table_of(
    names: Sequence[str], cases: Sequence[Mapping[str, Any]], reads: float
) -> list[dict[str, Any]]:
    """Returns the columns of the cases; the first case is in memory."""
    in_memory = cases[0]["median_ms"]

    def of(name: str, factor: float = 1.0) -> list[float | None]:
        return [None if name not in case else case[name] * factor for case in cases]

    disk = [case.get("misses", 0.0) / reads * 1e3 for case in cases]
    over = [
        case["median_ms"] / max(in_memory, bound) for case, bound in zip(cases, disk, strict=True)
    ]
    return [
        summary.column("rows in memory", names),
        summary.column("ms a step", of("median_ms"), "{:.1f}"),
        summary.column("ms of 99.9% of steps", of("p99_9_ms"), "{:.1f}"),
        summary.column("accesses on disk", of("missed_share", 100), "{:.2f}%"),
        summary.column("ms of disk reads", disk, "{:.1f}"),
        summary.column("step / larger bound", over, "{:.2f}"),
        summary.column("read ahead", of("read_ahead", 100), "{:.0f}%"),
        summary.column("GB on disk", of("disk_bytes", 1e-9), "{:.1f}"),
        summary.column("GB resident", of("resident_bytes", 1e-9), "{:.1f}"),
        summary.column("MB in the page cache", of("cached_bytes", 1e-6), "{:.0f}"),
    ]


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    if shutil.which("fio") is None:
        raise app.UsageError("fio is not installed. Install it: apt-get install fio.")
    awake.keep()
    keys = _KEYS.value
    budgets = {
        f"{fraction}%": int(fraction) * keys // 100 * ROW_BYTES for fraction in _SHARES.value
    }
    if _MEMORY.value is not None:
        memory = parse_bytes("memory", _MEMORY.value, "--memory")
        budgets = {f"{100 * memory / (keys * ROW_BYTES):.0f}%": memory}
    reads = [reads_per_second()]
    in_memory = _MEMORY_KEYS.value or keys
    cases = [ours(in_memory, 0), *(ours(keys, memory) for memory in budgets.values())]
    reads.append(reads_per_second())
    rate = sum(reads) / len(reads)
    names = [f"all of {in_memory:,}", *budgets]
    columns = table_of(names, cases, rate)
    over_bound = columns[5]["values"][1:]
    # With --memory, the claims cover one budget. Otherwise they cover the worst of all budgets.
    which = "" if _MEMORY.value is not None else "curve_"
    slowest = [max(case["p99_9_ms"] / case["median_ms"] for case in cases[1:])]
    claims = {
        f"{which}step_over_bound": summary.claim([max(over_bound)], MAX_OVER_BOUND),
        f"{which}p99_9_over_median": summary.claim(slowest, 10),
    }
    if _MEMORY.value is not None:
        claims["spilled_gb"] = summary.claim([keys * ROW_BYTES / 1e9], 40, "higher")
        claims["resident_gb"] = summary.claim([cases[1]["resident_bytes"] / 1e9], 8)
    served = [case for case in cases[1:] if case["missed_share"] <= 0.02]
    if served:
        ratios = [case["median_ms"] / cases[0]["median_ms"] for case in served]
        claims["step_over_memory"] = summary.claim([max(ratios)], MAX_OVER_MEMORY)
    if _ROCKSDB_STEPS.value:
        name, memory = next(iter(budgets.items()))
        turns = []
        for _ in range(_ROUNDS.value):
            other = rocksdb(keys, memory)["median_ms"]
            turns.append(other / ours(keys, memory)["median_ms"])
        claims["over_rocksdb"] = summary.claim(turns, MIN_OVER_ROCKSDB, "higher")
        print(f"RocksDB with a cache of {name} of the bytes: {other:.1f} ms per step.")
    part = f"{keys:,} rows, {rate:,.0f} reads a second"
    print(summary.write("larger_than_memory", part, {"": columns}, claims), flush=True)


if __name__ == "__main__":
    app.run(main)
