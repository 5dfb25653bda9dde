"""Fraction of communication time that is hidden behind computation, from traces.

Plain training and Hotline's schedule train sharded tables on two simulated hosts (Linux network
namespaces) with shaped links, in turns. 32 steps of each are traced with `slipstream-train
--trace`. A trace contains Horovod's operations in progress on rank 0 and the computation of that
rank.

    python benchmarks/overlap.py --rate=1gbit --turns=3
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import awake
import network
import summary
from absl import app, flags
from network_report import Case

from slipstream_tf.cli.tracing import STEPS

# `network` defines `--data`, `--global_batch` and `--rate`.
_TURNS = flags.DEFINE_integer("turns", 3, "Number of traces per schedule.", lower_bound=1)
_DIM = flags.DEFINE_integer("dim", 64, "Values per row.", lower_bound=1)
_HOT = flags.DEFINE_string(
    "hot_set_memory", "32MiB", "Memory of the hot rows of the Hotline schedule."
)
_RANKS, _SCHEDULES = 2, ("plain", "hotline")
# Words in the names of compute operations and of Horovod's activities.
_COMPUTES = ("MatMul", "Slipstream", "Relu", "Segment", "Gather", "Transpose")
_SENDS = "ALLTOALL"
# Track ids below this value are processes, the others are tensors.
_FIRST_TENSOR = 1000
Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Returns the union of spans as disjoint spans in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """Returns the total length of spans."""
    return sum(end - begin for begin, end in spans)


def common_length(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Returns the length of the intersection of two unions."""
    return length(one) + length(other) - length(union([*one, *other]))


def read(path: Path) -> tuple[list[Span], list[Span]]:
    """Returns spans of row exchanges and of computation on rank 0.

    Spans are in microseconds.
    """
    sent: list[Span] = []
    computed: list[Span] = []
    begun: dict[int, float] = {}
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        process, kind, name = event.get("pid", 0), event.get("ph"), event.get("name", "")
        if process >= _FIRST_TENSOR and kind == "B" and name.endswith(_SENDS):
            begun[process] = event["ts"]
        elif process >= _FIRST_TENSOR and kind == "E" and process in begun:
            sent.append((begun.pop(process), event["ts"]))
        elif process == 0 and kind == "X" and any(one in name for one in _COMPUTES):
            computed.append((event["ts"], event["ts"] + event.get("dur", 0.0)))
    return union(sent), union(computed)


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    network.check()
    awake.keep()
    name, data = network.locate(flags.FLAGS.data)
    launcher = network.Launcher(flags.FLAGS.rate, "gloo", flags.FLAGS.timeout)
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in _SCHEDULES}
    with tempfile.TemporaryDirectory() as scratch, network.ends_on_sigterm():
        for turn in range(_TURNS.value):
            for schedule in _SCHEDULES:
                print(f"[{turn + 1}/{_TURNS.value}] {schedule}", flush=True)
                folder = Path(scratch) / f"{schedule}_{turn}"
                trace = Path(scratch) / f"{schedule}_{turn}.json"
                extra = {"dim": _DIM.value, "trace": str(trace), "hot_set_memory": _HOT.value}
                case = Case(schedule, "sharded", _RANKS)
                given = network.all_flags(case, data, 0, flags.FLAGS.global_batch, extra)
                network.train(launcher, _RANKS, given, folder)
                sent, computed = read(trace)
                hidden = common_length(sent, computed)
                figures = (length(sent), hidden, length(computed))
                rows[schedule].append(tuple(1e-3 * figure / STEPS for figure in figures))
    each = [list(zip(*of_turns, strict=True)) for of_turns in rows.values()]
    waits = [[a - b for a, b in zip(sent, hidden, strict=True)] for sent, hidden, _ in each]
    shares = [[b / a for a, b in zip(sent, hidden, strict=True)] for sent, hidden, _ in each]
    columns = [
        summary.column("schedule", list(rows)),
        summary.column(
            "ms of communication", [list(sent) for sent, _, _ in each], "{:.1f}", "median"
        ),
        summary.column("hidden", shares, "{:.0%}", "median each"),
        summary.column("ms not hidden", waits, "{:.1f}", "median each"),
        summary.column("ms computed", [list(own) for _, _, own in each], "{:.1f}", "median"),
    ]
    part = f"{name}, {flags.FLAGS.rate or 'unshaped'}, rows of {_DIM.value}, a step"
    saved = [hotline / plain for plain, hotline in zip(*waits, strict=True)]
    claims = {"waits_of_hotline_over_plain": summary.claim(saved, 1.0, "lower")}
    print(summary.write("overlap", part, {"": columns}, claims))


if __name__ == "__main__":
    app.run(main)
