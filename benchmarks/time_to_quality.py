"""Seconds until different systems reach the same AUC.

All use the same processors and data.

    python benchmarks/time_to_quality.py --data=criteo --minutes=140
    python benchmarks/time_to_quality.py --data=criteo --report

First, the rates of each system are tuned on the validation part, with the same number of trials and
the same random draws, on a quarter of the examples. Then all systems train with three seeds, seed
by seed, and are evaluated on the test part during their runs. All read the same file of rows.
Finished runs are not repeated. The same command continues after an interruption or after --minutes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import awake
import common
import curves
import numpy as np
import peers
import summary
from absl import app, flags
from systems_data import DATA, files_of

from slipstream_tf.telemetry.curves import EXAMPLES, SECONDS, curve
from slipstream_tf.telemetry.run_record import write_json

_DATA = flags.DEFINE_enum("data", "criteo", list(DATA), "Name of the data set.")
_SYSTEMS = flags.DEFINE_list("systems", [], "Names of the systems. The default is all systems.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs.")
_TRIALS = flags.DEFINE_integer(
    "trials", 6, "Number of hyperparameter trials per system.", lower_bound=1
)
_TRIAL_SHARE = flags.DEFINE_float(
    "trial_share",
    0.25,
    "Fraction of the steps that a trial trains.",
    lower_bound=0.0,
    upper_bound=1.0,
)
_POINTS = flags.DEFINE_integer(
    "points", 16, "Number of test evaluations during a run.", lower_bound=1
)
_MINUTES = flags.DEFINE_float(
    "minutes", 150.0, "Maximum minutes. No run starts later.", lower_bound=0.0
)
_REPORT = flags.DEFINE_bool(
    "report", False, "Write the results of finished runs without starting runs."
)
_EXAMPLES = flags.DEFINE_integer(
    "examples", None, "Maximum number of training examples, for a trial run."
)
_RECORDS = flags.DEFINE_string(
    "records", "runs/time_to_quality", "Folder of the data and of the run records."
)
_ENVIRONMENTS = flags.DEFINE_string(
    "environments", "runs/peers", "Folder of the Python environments of the other systems."
)
_PROCESSORS = flags.DEFINE_string(
    "processors", "0,1", "Processors that all processes of a system may use."
)
_THREADS = 2
# Fractions of the AUC gain over chance. The reference is the lowest final AUC of the systems that
# train on all examples.
_LEVELS = (0.98, 0.995)


@dataclasses.dataclass(frozen=True)
class System:
    """A system to compare.

    Attributes:
        label: The name in tables.
        environment: A name in `peers.ENVIRONMENTS`, or None.
        program: A program in systems/ with its arguments.
        tuned: The system with the tuned rates to use. None means separate trials.
        trains_all: Whether it trains on all examples.
        ranks: The number of processes, started with Open MPI.
    """

    label: str
    environment: str | None
    program: Sequence[str]
    tuned: str | None = None
    trains_all: bool = True
    ranks: int = 1


_OURS, _TORCH = "slipstream_system.py", "torch_system.py"
SYSTEMS: Mapping[str, System] = {
    "slipstream": System("slipstream_tf", None, [_OURS]),
    "slipstream_bfloat16": System("ours, bfloat16", None, [_OURS, "bfloat16"], "slipstream"),
    "slipstream_skipping": System("ours, skipping", None, [_OURS, "skipping"], None, False),
    "slipstream_both": System(
        "ours, both", None, [_OURS, "bfloat16", "skipping"], "slipstream_skipping", False
    ),
    "slipstream_paper": System("the paper's rule", None, [_OURS, "paper"], "slipstream", False),
    "slipstream_normalised": System(
        "the paper's rule, normalized", None, [_OURS, "paper", "normalised"], "slipstream", False
    ),
    "slipstream_ranks": System(
        "ours, skipping, 2 ranks",
        None,
        [_OURS, "skipping", "ranks"],
        "slipstream_skipping",
        False,
        2,
    ),
    "fae": System("FAE's schedule", None, [_OURS, "fae"], "slipstream"),
    "fae_ranks": System(
        "FAE's schedule, 2 ranks", None, [_OURS, "fae", "ranks"], "slipstream", True, 2
    ),
    "hotline": System("Hotline's schedule", None, [_OURS, "hotline"], "slipstream"),
    "hotline_ranks": System(
        "Hotline's schedule, 2 ranks", None, [_OURS, "hotline", "ranks"], "slipstream", True, 2
    ),
    "torch": System("PyTorch + FBGEMM", "torch", [_TORCH]),
    "torch_compiled": System("PyTorch + FBGEMM, compiled", "torch", [_TORCH, "compiled"], "torch"),
    "torch_bfloat16": System(
        "PyTorch + FBGEMM, compiled, bfloat16", "torch", [_TORCH, "compiled", "bfloat16"], "torch"
    ),
    "ipex": System("PyTorch + Intel's extension", "ipex", [_TORCH, "ipex"], "torch"),
    "ipex_bfloat16": System(
        "PyTorch + Intel's extension, bfloat16", "ipex", [_TORCH, "ipex", "bfloat16"], "torch"
    ),
    "parameter_server": System(
        "TensorFlow's parameter servers", "tf_keras", ["parameter_server.py"]
    ),
    "tfra": System("TFRA", "tfra", ["tfra_system.py"]),
    "keras": System("Keras Embedding layers", None, ["keras_system.py"]),
}
# Claims: the systems to compare with (the fastest counts), and the minimum ratio of their time to
# ours.
ASKED: Mapping[str, tuple[Sequence[str], float | None]] = {
    "over_parameter_server": (("parameter_server",), 2.0),
    "over_intel_dlrm": (
        ("torch", "torch_compiled", "torch_bfloat16", "ipex", "ipex_bfloat16"), 2.4,
    ),
    "over_fae": (("fae", "fae_ranks"), 1.2),
    "over_hotline": (("hotline", "hotline_ranks"), 1.175),
    "over_tfra": (("tfra",), None),
    "over_keras": (("keras",), None),
}  # fmt: skip
OURS = (
    "slipstream", "slipstream_bfloat16", "slipstream_skipping", "slipstream_both",
    "slipstream_ranks",
)  # fmt: skip
_NEEDS_BFLOAT16 = ("avx512_bf16", "amx_bf16")


class OutOfTime(Exception):
    """Raised when there is no time for another run."""


class Runs:
    """Runs systems in separate folders; reads records of finished runs."""

    def __init__(self, folder: Path, ends: float) -> None:
        self._folder, self._ends = folder, ends

    def record(self, name: str, label: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the record of a run; runs it unless finished.

        Raises:
            OutOfTime: If the run is missing and no time is left.
            SystemExit: If the run failed or used other settings.
        """
        folder = self._folder / name / label
        before = common.finished(folder, settings)
        if before is not None:
            return before
        if time.monotonic() > self._ends:
            raise OutOfTime
        folder.mkdir(parents=True, exist_ok=True)
        reported, record = folder / common.FLAGS, folder / common.RECORD
        write_json(str(reported), settings)
        system = SYSTEMS[name]
        python = peers.python_of(system.environment, Path(_ENVIRONMENTS.value))
        program = Path(__file__).resolve().parent / "systems" / system.program[0]
        arguments = [str(reported), str(record), *system.program[1:]]
        rates = ", ".join(f"{settings[rate]:g}" for rate in ("rate", "rows_rate", "damping"))
        print(f"{name}, {label}: {rates}", flush=True)
        environment = {
            **os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": str(_THREADS),
            "CUDA_VISIBLE_DEVICES": "", **common.AS_ROOT,
        }  # fmt: skip
        if system.environment is not None:
            environment.pop("PYTHONPATH", None)
        bound = ["taskset", "-c", _PROCESSORS.value]
        with (folder / "log.txt").open("w", encoding="utf-8") as log:
            launch = common.horovodrun(system.ranks, "mpi") if system.ranks > 1 else []
            command = [*bound, *launch, python, str(program), *arguments]
            code = subprocess.run(
                command, env=environment, stdout=log, stderr=log, check=False
            ).returncode
        if code:
            last = (folder / "log.txt").read_text(encoding="utf-8").strip().splitlines()[-1:]
            raise SystemExit(
                f"{name} failed with exit code {code}: {' '.join(last)}. Log: {folder}/log.txt"
            )
        return json.loads(record.read_text(encoding="utf-8"))


def trial_rates(trial: int) -> dict[str, float]:
    """Returns the rates of a trial, the same for all systems."""
    random = np.random.default_rng([11, trial])

    def log_uniform(low: float, high: float) -> float:
        return float(f"{np.exp(random.uniform(np.log(low), np.log(high))):.1e}")

    rates = {"rate": log_uniform(5e-4, 8e-3), "rows_rate": log_uniform(0.01, 0.3)}
    return {**rates, "damping": log_uniform(1e-9, 1e-5)}


def rates_of(name: str, shared: Mapping[str, Any], runs: Runs) -> dict[str, float]:
    """Returns a system's rates with the highest AUC on validation data."""
    name = SYSTEMS[name].tuned or name
    found = []
    for trial in range(_TRIALS.value):
        rates = trial_rates(trial)
        steps = max(1, round(shared["steps"] * _TRIAL_SHARE.value) // 16 * 16)
        settings = {**shared, **rates, "seed": 0, "steps": steps, "every": steps}
        record = runs.record(name, f"trial_{trial}", settings)
        found.append((record["evaluations"][-1]["auc"], rates))
    return max(found, key=lambda one: one[0])[1]


def run_all(
    names: Sequence[str], seeds: Sequence[int], folder: Path
) -> dict[str, dict[int, dict[str, Any]]]:
    """Tunes and trains while time is left; returns the records."""
    minutes = 0.0 if _REPORT.value else _MINUTES.value
    runs = Runs(folder / "runs", time.monotonic() + 60 * minutes)
    kept: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in names}
    files = files_of(_DATA.value, folder, {0, *seeds}, _EXAMPLES.value)
    try:
        tuned = {}
        for name in names:
            files_of_trials = {**files[0], "measured": files[0]["valid"]}
            tuned[name] = rates_of(name, _settings(files_of_trials), runs)
        for seed in seeds:
            for name in names:
                settings = _settings({**files[seed], "measured": files[seed]["test"]})
                settings |= {**tuned[name], "seed": seed}
                fraction = settings["skip_fraction"] if "skipping" in SYSTEMS[name].program else 0.0
                trained = round(settings["steps"] * (1.0 - fraction))
                settings["every"] = max(1, trained // _POINTS.value // 16) * 16
                record = runs.record(name, f"seed_{seed}", settings)
                kept[name][seed] = curves.with_even_rest(record)
    except OutOfTime:
        print("--minutes have passed. Repeat the command to continue.", flush=True)
    return {name: records for name, records in kept.items() if records}


def _settings(of_data: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("valid", "test")
    return {**{n: v for n, v in of_data.items() if n not in left_out}, "threads": _THREADS}


def has_bfloat16() -> bool:
    """Returns whether the processors support bfloat16 multiplication."""
    reported = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return any(flag in reported for flag in _NEEDS_BFLOAT16)


def choose(names: Sequence[str]) -> list[str]:
    """Returns the systems to run.

    Raises:
        app.UsageError: If a name is unknown.
    """
    for name in names:
        if name not in SYSTEMS:
            raise app.UsageError(f"Invalid --systems: {name!r}. Expected {', '.join(SYSTEMS)}.")
    chosen = list(names or SYSTEMS)
    if not has_bfloat16():
        print(
            "bfloat16 systems are skipped, because this processor has no bfloat16 multiplication."
        )
        chosen = [name for name in chosen if "bfloat16" not in SYSTEMS[name].program]
    return chosen


Kept = Mapping[str, Mapping[int, Mapping[str, Any]]]


def levels_of(kept: Kept) -> list[float]:
    """Returns the AUCs to which systems are timed."""
    ends = [
        statistics.median(record["evaluations"][-1]["auc"] for record in kept[name].values())
        for name in kept
        if SYSTEMS[name].trains_all
    ]
    return [round(curves.level(min(ends), fraction), 4) for fraction in _LEVELS]


def seconds_to(record: Mapping[str, Any], level: float) -> float | None:
    """Returns the seconds until a run reaches an AUC, or None."""
    return curves.reaching(curve(record, SECONDS), level)


def ratios(kept: Kept, theirs: Sequence[str], ours: str, level: float) -> list[float] | None:
    """Returns the fastest other system's time relative to ours, by seed.

    None if the level was not reached.
    """
    found = []
    for seed, own in kept.get(ours, {}).items():
        others = [seconds_to(kept[n][seed], level) for n in theirs if seed in kept.get(n, {})]
        there, mine = [other for other in others if other is not None], seconds_to(own, level)
        if there and mine:
            found.append(min(there) / mine)
    return found or None


def tables_of(kept: Kept, levels: Sequence[float]) -> dict[str, Any]:
    """Returns the tables of times and of ratios to our systems."""
    records = [list(of_seeds.values()) for of_seeds in kept.values()]
    taken = [summary.column("system", [SYSTEMS[name].label for name in kept])]
    for level in levels:
        for axis, form, title in ((SECONDS, "{:.1f}", "s"), (EXAMPLES, "{:.2f}", "M examples")):
            scale = 1.0 if axis == SECONDS else 1e-6
            cells = []
            for of_seeds in records:
                found = [curves.reaching(curve(record, axis), level) for record in of_seeds]
                there = [value * scale for value in found if value is not None]
                cells.append(there if len(there) == len(found) else None)
            taken.append(summary.column(f"{title} to {level:.4f}", cells, form, "median each"))
    for measure, form in (("auc", "{:.4f}"), ("log_loss", "{:.4f}")):
        ends = [[r["evaluations"][-1][measure] for r in of_seeds] for of_seeds in records]
        taken.append(summary.column(measure.replace("_", " "), ends, form, "at the end"))
    all_seconds = [[r["evaluations"][-1]["seconds"] for r in of_seeds] for of_seeds in records]
    taken.append(summary.column("total s", all_seconds, "{:.1f}", "median each"))
    ran = {n: theirs for n, (theirs, _) in ASKED.items() if any(one in kept for one in theirs)}
    times = [
        summary.column("compared with", list(ran)),
        *(
            summary.column(
                SYSTEMS[ours].label,
                [ratios(kept, theirs, ours, levels[-1]) for theirs in ran.values()],
                "{:.2f}",
                "median each",
            )
            for ours in OURS
            if ours in kept
        ),
    ]
    return {"": taken, f"Ratio of seconds to AUC {levels[-1]:.4f}": times}


def claims_of(kept: Kept, level: float) -> dict[str, Any]:
    """Returns the claims for our fastest system that reaches the level.

    Systems that reach the level with more seeds are preferred.
    """
    found = {}
    for claim, (theirs, target) in ASKED.items():
        of_ours = [ratios(kept, theirs, ours, level) for ours in OURS if ours in kept]
        known = [values for values in of_ours if values]
        if known:
            best = max(known, key=lambda values: (len(values), statistics.median(values)))
            found[f"{_DATA.value.lower()}_{claim}"] = summary.claim(best, target, "higher")
    return found


def main(arguments: Sequence[str]) -> None:
    """Runs missing runs; prints and writes the comparison."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    names, seeds = choose(_SYSTEMS.value), common.integers("seeds", _SEEDS.value)
    few = "" if _EXAMPLES.value is None else f"-{_EXAMPLES.value}"
    folder = Path(_RECORDS.value) / f"{_DATA.value}{few}"
    if not _REPORT.value:
        awake.keep()
    kept = run_all(names, seeds, folder)
    if not any(SYSTEMS[name].trains_all for name in kept):
        return
    levels = levels_of(kept)
    versions: dict[str, str] = {}
    for of_seeds in kept.values():
        for record in of_seeds.values():
            versions.update(record["versions"])
    tables, claims = tables_of(kept, levels), claims_of(kept, levels[-1])
    name = f"time_to_quality_{_DATA.value}"
    print(summary.write(name, DATA[_DATA.value].reported, tables, claims, versions))
    shown = {SYSTEMS[of].label: list(of_seeds.values()) for of, of_seeds in kept.items()}
    picture = summary.output() / f"{name}.png"
    curves.plot(DATA[_DATA.value].reported, shown, picture, levels[0] - 0.02)


if __name__ == "__main__":
    app.run(main)
