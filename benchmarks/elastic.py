"""Cost of elastic training, and recovery times after changes of ranks.

    python benchmarks/elastic.py --part=cost
    python benchmarks/elastic.py --part=events --sequences=20 --events=4

cost: Two ranks train with Gloo, `--elastic` and a checkpoint every 400 steps, written in the
background. The time of 200 steps with a checkpoint is compared with the 200 steps before and after
it, for replicated and sharded tables.

events: Hosts are network namespaces. At random, ranks and agents are killed, and hosts are
disconnected, leave or join. Jobs alternate between replicated and sharded tables. It measures the
seconds until training continues and the number of lost examples. The AUC is compared with
undisturbed jobs of two and of four ranks, because more ranks train fewer, larger steps. A job with
a record in --records is not repeated.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import awake
import common
import numpy as np
import summary
from absl import app, flags

from slipstream_tf.telemetry.run_record import write_json

_PART = flags.DEFINE_enum(
    "part",
    "cost",
    ["cost", "events"],
    "Measurement: cost of elastic training, or recovery after events.",
)
_REPEATS = flags.DEFINE_integer(
    "repeats", 3, "With --part=cost: number of runs per placement.", lower_bound=1
)
_COST_DATA = flags.DEFINE_string(
    "data",
    "generated:4800000:100000:0.25",
    "With --part=cost: value of --data of slipstream-train.",
)
_SEQUENCES = flags.DEFINE_integer(
    "sequences", 20, "With --part=events: number of jobs.", lower_bound=1
)
_EVENTS = flags.DEFINE_integer(
    "events", 4, "With --part=events: number of events per job.", lower_bound=1
)
_SEEDS = flags.DEFINE_list(
    "seeds", ["0", "1", "2"], "With --part=events: seeds of the undisturbed jobs."
)
_EXAMPLES = flags.DEFINE_integer(
    "examples_of_events", 2_600_000, "With --part=events: training examples per job.", lower_bound=1
)
_RECORDS = flags.DEFINE_string(
    "records", "runs/elastic", "Folder of the records of finished jobs, which are not repeated."
)
# Numbers of ranks of undisturbed jobs: the initial and the maximum number of a disturbed job.
_RANKS = (2, 4)
# Number of steps over which the cost of a checkpoint is measured.
_STEPS = 200
_ASKED = {"kill": 30.0, "kill agent": 30.0, "silence": 60.0}


def module(name: str) -> ModuleType:
    """Imports and returns a module of tests/parallel."""
    path = Path(__file__).resolve().parents[1] / "tests" / "parallel" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"slipstream_{name}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(
            f"{path} does not exist. Run this program in a copy of the sources with tests/."
        )
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def undisturbed(folder: Path, arguments: Sequence[str], ranks: int = 2) -> dict[str, Any]:
    """Runs a job without events and returns its record."""
    launch = [*common.horovodrun(ranks, "gloo"), sys.executable, *common.TRAIN]
    done = subprocess.run(
        [*launch, *arguments, f"--output={folder}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stdout[-2000:] + done.stderr[-2000:]
        raise SystemExit(f"{' '.join(arguments)} failed:\n{said}")
    return dict(json.loads((folder / common.RECORD).read_text(encoding="utf-8")))


def measure_cost() -> str:
    """Trains with checkpoints; writes the part "cost"."""
    shown: dict[str, list[list[float]]] = {"with": [], "without": []}
    claims, placements = {}, ("replicated", "sharded")
    for placement in placements:
        pairs: list[tuple[float, float]] = []
        for turn in range(_REPEATS.value):
            with tempfile.TemporaryDirectory() as folder:
                arguments = [
                    *(f"--data={_COST_DATA.value}", f"--seed={turn}", "--batch_size=1024"),
                    *(f"--placement={placement}", "--elastic", f"--checkpoint_every={2 * _STEPS}"),
                ]
                record = undisturbed(Path(folder) / "run", arguments)
            pairs += seconds_beside(record["progress"])
            print(f"{placement}, turn {turn}: {pairs}", flush=True)
        ratios = [with_one / without for with_one, without in pairs]
        claims[f"elastic_cost_{placement}"] = summary.claim(ratios, 1.03, "lower")
        shown["with"].append([with_one for with_one, _ in pairs])
        shown["without"].append([without for _, without in pairs])
    table = [
        summary.column("two ranks", placements),
        *(
            summary.column(f"s of {_STEPS} steps {way} a checkpoint", values, "{:.2f}", "median")
            for way, values in shown.items()
        ),
    ]
    return summary.write("elastic", f"cost, {_COST_DATA.value}", {"": table}, claims)


def seconds_beside(progress: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """Returns pairs: seconds of steps with a checkpoint and without.

    The time without a checkpoint is the mean of as many steps before and after.

    Args:
        progress: The progress of a run with a checkpoint every 2 * _STEPS.
    """
    steps, seconds = ([point[name] for point in progress] for name in ("step", "seconds"))

    def between(begin: float) -> float:
        return float(np.diff(np.interp([begin, begin + _STEPS], steps, seconds))[0])

    found = []
    for saved in range(2 * _STEPS, int(steps[-1]) - 2 * _STEPS, 2 * _STEPS):
        begin = saved - _STEPS / 4
        around = (between(begin - _STEPS) + between(begin + _STEPS)) / 2
        found.append((between(begin), around))
    return found


def measure_events() -> str:
    """Runs jobs with random events; writes the part "events"."""
    hosts, cluster = module("hosts"), module("elastic_cluster")
    if (reason := hosts.unavailable()) is not None:
        raise app.UsageError(f"Invalid --part=events for this machine: {reason}.")
    took: dict[str, list[float]] = {}
    ends: dict[str, list[dict[str, Any]]] = {way: [] for way in cluster.WAYS}
    data = [f"--data=generated:{_EXAMPLES.value}", *cluster.SMALL]
    for number in range(_SEQUENCES.value):
        way = list(cluster.WAYS)[number % 2]
        arguments = [*data, *cluster.WAYS[way]]
        job = functools.partial(disturbed, hosts, cluster, arguments, number)
        given = {"arguments": arguments, "events": _EVENTS.value}
        ended = once(f"sequence_{number}", given, job)
        for event in ended["events"]:
            took.setdefault(event["what"], []).append(event["seconds"])
        found = ended["examples"]
        if found["trained"] + found["skipped"] + found["lost"] != _EXAMPLES.value:
            raise SystemExit(f"The example counts of job {number} are inconsistent: {found}.")
        ends[way].append(ended)
    calm: dict[tuple[str, int], list[float]] = {}
    for seed in common.integers("seeds", _SEEDS.value):
        for way, more in cluster.WAYS.items():
            for ranks in _RANKS:
                arguments = [*data, *more, f"--seed={seed}"]
                job = functools.partial(calmly, arguments, ranks)
                name = f"undisturbed_{way}_{ranks}_{seed}"
                ended = once(name, {"arguments": arguments, "ranks": ranks}, job)
                calm.setdefault((way, ranks), []).append(ended["auc"])
    return summary.write("elastic", "events", tables_of(took, ends, calm), claims_of(took))


def disturbed(
    hosts: ModuleType, cluster: ModuleType, arguments: Sequence[str], seed: int
) -> dict[str, Any]:
    """Runs a job with random events and returns "events", "examples" and "auc"."""
    train = [sys.executable, *common.TRAIN, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        events, record = cluster.disturb(hosts, Path(folder), train, seed, _EVENTS.value)
    return {"events": list(map(dataclasses.asdict, events)), **_end_of(record)}


def calmly(arguments: Sequence[str], ranks: int) -> dict[str, Any]:
    """Runs an undisturbed job and returns "examples" and "auc"."""
    with tempfile.TemporaryDirectory() as folder:
        return _end_of(undisturbed(Path(folder) / "run", arguments, ranks))


def once(name: str, given: Mapping[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of a job; runs it unless finished.

    Raises:
        SystemExit: If a job with other settings has used the folder.
    """
    folder = Path(_RECORDS.value) / name
    ended = common.finished(folder, given)
    if ended is None:
        ended = run()
        write_json(str(folder / common.FLAGS), given)
        write_json(str(folder / common.RECORD), ended)
    print(f"{name}: {ended}", flush=True)
    return ended


def _end_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"examples": record["examples"], "auc": record["test"]["auc"]}


def tables_of(
    took: Mapping[str, Sequence[float]],
    ends: Mapping[str, Sequence[Mapping[str, Any]]],
    calm: Mapping[tuple[str, int], Sequence[float]],
) -> dict[str, Any]:
    """Returns the tables of events and of the jobs' results."""
    kinds = sorted(took)
    ways = [way for way in ends if ends[way]]
    examples = [[ended["examples"] for ended in ends[way]] for way in ways]
    return {
        "Seconds until training continues": [
            summary.column("event", kinds),
            summary.column("events", [len(took[kind]) for kind in kinds], "{:d}"),
            summary.column("median", [statistics.median(took[kind]) for kind in kinds], "{:.1f}"),
            summary.column("longest", [max(took[kind]) for kind in kinds], "{:.1f}"),
        ],
        "Results of the jobs": [
            summary.column("tables", ways),
            summary.column("jobs", [len(ends[way]) for way in ways], "{:d}"),
            summary.column(
                "lost per million examples",
                [[1e6 * e["lost"] / e["seen"] for e in found] for found in examples],
                "{:.0f}",
                "median each",
            ),
            summary.column(
                "AUC",
                [[ended["auc"] for ended in ends[way]] for way in ways],
                "{:.4f}",
                "at the end",
            ),
            *(
                summary.column(
                    f"AUC undisturbed, {ranks} ranks",
                    [calm[way, ranks] for way in ways],
                    "{:.4f}",
                    "at the end",
                )
                for ranks in _RANKS
            ),
        ],
    }


def claims_of(took: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns the claims: the longest recovery from each kind of event."""
    return {
        f"longest_{kind.replace(' ', '_')}": summary.claim([max(took[kind])], target, "lower")
        for kind, target in _ASKED.items()
        if kind in took
    }


def main(arguments: Sequence[str]) -> None:
    """Measures one part."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    awake.keep()
    print(measure_cost() if _PART.value == "cost" else measure_events())


if __name__ == "__main__":
    app.run(main)
