"""Speed of `slipstream-prepare`: generated Criteo lines per second.

The rate is given per second of wall time and per second of processor time (summed over threads),
for each phase from reading lines to statistics. Lines have Criteo's format: 13 counts and 26 keys
of eight hexadecimal digits. Fields have 10 to 1,000,000 keys with a Zipf exponent of 1.05. A tenth
of the values is missing.

    python benchmarks/prepare_rate.py --lines=2000000 --threads=2
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import summary
from absl import app, flags

from slipstream_tf.data.opening import open_source
from slipstream_tf.data.preparation import Options, prepare

_LINES = flags.DEFINE_integer("lines", 2_000_000, "Number of generated lines.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", 2, "Number of parser threads.", lower_bound=1)
_SHARD_ROWS = flags.DEFINE_integer(
    "shard_rows", 1_000_000, "Number of lines per shard.", lower_bound=1
)
_RUNS = flags.DEFINE_integer("runs", 1, "Number of measured runs.", lower_bound=1)
_FOLDER = flags.DEFINE_string(
    "folder", None, "Folder for the files. The default is a temporary folder."
)

_BLOCK = 100_000  # Number of drawn lines. The file repeats them with other keys.
_ZIPF, _MISSING = 1.05, 0.1
_CARDINALITIES = np.geomspace(10, 1_000_000, 26).astype(np.int64)


def write_lines(path: Path, count: int) -> None:
    """Writes `count` lines in Criteo's format."""
    rng = np.random.default_rng(0)
    with open(path, "w", encoding="ascii") as file:
        for first in range(0, count, _BLOCK):
            rows = min(_BLOCK, count - first)
            labels = (rng.random(rows) < 0.25).astype(int)
            counts = rng.geometric(0.02, (rows, 13)) - 1
            keys = np.empty((rows, 26), np.int64)
            for field, size in enumerate(_CARDINALITIES):
                weights = np.cumsum(1.0 / np.arange(1, size + 1) ** _ZIPF)
                drawn = np.searchsorted(weights, rng.random(rows) * weights[-1])
                keys[:, field] = (drawn + 1) * 2_654_435_761 % (1 << 32)
            is_missing = rng.random((rows, 39)) < _MISSING
            for row in range(rows):
                numbers = [str(v) for v in counts[row]]
                values = [*numbers, *(f"{v:08x}" for v in keys[row].tolist())]
                for place in np.flatnonzero(is_missing[row]):
                    values[place] = ""
                file.write("\t".join([str(labels[row]), *values]) + "\n")


def measure(folder: Path) -> dict[str, tuple[float, float]]:
    """Prepares generated lines once and prints the sizes of input and output.

    Returns:
        For each phase, lines per second of wall time and of processor time until the end of the
        phase.
    """
    path = folder / "lines.tsv"
    if not path.exists():
        write_lines(path, _LINES.value)
    options = Options(shard_rows=_SHARD_ROWS.value, threads=_THREADS.value, overwrite=True)
    source, files = open_source([str(path)])
    load = os.getloadavg()[0]
    ends: dict[str, tuple[float, float]] = {}
    begin, begin_cpu = time.perf_counter(), time.process_time()

    def note(phase: str, *_: int) -> None:
        ends[phase] = (time.perf_counter() - begin, time.process_time() - begin_cpu)

    with tempfile.TemporaryDirectory(dir=folder) as output:
        statistics = prepare(source, files, output, options, note)
        note("statistics")
        size = sum(file.stat().st_size for file in Path(output).rglob("*.parquet"))
    lines = sum(statistics["inputs"].values())
    print(
        f"{lines:,} lines, {path.stat().st_size >> 20:,} MiB to {size >> 20:,} MiB, "
        f"{_THREADS.value} threads; load {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    return {phase: (lines / wall, lines / cpu) for phase, (wall, cpu) in ends.items()}


def results_of(runs: Sequence[dict[str, tuple[float, float]]]) -> tuple[Any, Any]:
    """Returns the columns and the claims of the rates of all runs."""
    phases = list(runs[0])
    walls, processors = ([[run[phase][i] for run in runs] for phase in phases] for i in (0, 1))
    columns = [
        summary.column("up to the end of", phases),
        summary.column("lines/s", walls, "{:,.0f}", "median each"),
        summary.column("lines per second of a processor", processors, "{:,.0f}", "median each"),
    ]
    claims = {
        f"lines_per_second_to_{phase.replace(' ', '_')}": summary.claim(rates, None, "higher")
        for phase, rates in zip(phases, walls, strict=True)
    }
    return {"": columns}, claims


def main(arguments: list[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(_FOLDER.value or temporary)
        runs = [measure(folder) for _ in range(_RUNS.value)]
    part = f"{_LINES.value:,} lines, {_THREADS.value} threads"
    print(summary.write("prepare_rate", part, *results_of(runs)))


if __name__ == "__main__":
    app.run(main)
