"""Skipping examples compared with tuned plain training and controls.

It compares quality, trained examples and seconds. Each run is a process of slipstream-train, one
after the other. A run with an existing metrics.json is not repeated. Settings were chosen on the
validation part. The test part is evaluated at intervals during a run for the curves, and seconds
exclude these evaluations.

    python benchmarks/skipping.py --task=globo_49 --seeds=0,1,2,3,4
    python benchmarks/skipping.py --task=frappe --seeds=0,1,2,3,4
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import curves
import summary
from absl import app, flags

from slipstream_tf.telemetry.curves import SECONDS, auc_at, curve

_TASK = flags.DEFINE_string("task", None, "Name of the task, such as globo_49.", required=True)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "Seeds of the runs.")
_RUNS = flags.DEFINE_list(
    "runs",
    [],
    "Names of the runs. Their reference runs are added. The default is all runs of the task.",
)
_RECORDS = flags.DEFINE_string(
    "records", "runs/skipping", "Folder of the run records (metrics.json)."
)
_DATA = flags.DEFINE_string(
    "data", None, "Value of --data of slipstream-train. The default is the data of the task."
)
_EXTRA = flags.DEFINE_multi_string(
    "train_flag", [], "Flag name=value of slipstream-train for all runs."
)

_POINTS = flags.DEFINE_integer(
    "points", 12, "Number of test evaluations during a run.", lower_bound=1
)
_THIN = flags.DEFINE_multi_string(
    "thin_flag", [], "Flag name=value of slipstream-train for the runs with a policy."
)

PLAIN = "plain"
# Fractions of plain training's AUC gain over chance to which runs are timed.
_GAINS = (0.95, 0.98, 0.99, 1.0)
_DRAWN = (PLAIN, "fm", "uniform", "random", "stop")


@dataclasses.dataclass(frozen=True)
class Run:
    """A row of the table.

    Attributes:
        flags: Flags of slipstream-train in addition to the task's flags.
        match: The run that a control repeats.
    """

    flags: Mapping[str, Any]
    match: str | None = None


@dataclasses.dataclass(frozen=True)
class Asked:
    """Targets for the run "fm", which drops examples by the pilot "fm".

    Attributes:
        fraction: Maximum number of trained examples, as a fraction of plain training, 0 to 1.
        tolerance: Maximum loss of AUC.
        seconds: Maximum training time, as a fraction of plain training.
        ahead: Minimum AUC advantage over random dropping and over stopping early.
    """

    fraction: float
    tolerance: float
    seconds: float
    ahead: float


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set and its runs.

    Attributes:
        data: The name of a data set to prepare, or of generated data.
        examples: The number of examples per run: the training examples in full batches. 0 means
            that the run stops by the validation part, which is then also evaluated instead of the
            test part, so there are no curves.
        flags: Flags of slipstream-train for all runs.
        runs: The runs by name. The others are compared with "plain".
        asked: The targets of "fm", or None.
        options: Options of the program that prepares the data.
    """

    data: str
    examples: int
    flags: Mapping[str, Any]
    runs: Mapping[str, Run]
    asked: Asked | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def runs_of(
    fraction: float, plain: Mapping[str, Any], kept: Mapping[str, Any], others: Sequence[Run]
) -> dict[str, Run]:
    """Returns all runs of a task.

    Args:
        fraction: The fraction of the examples to drop.
        plain: Flags of plain training.
        kept: Flags of runs that drop examples.
        others: Plain training with other batch sizes.
    """
    found = {PLAIN: Run(plain)}
    found.update({f"plain_{run.flags['batch_size']}": run for run in others})
    for name, pilot in (("fm", "fm"), ("uniform", "label"), ("linear", "linear")):
        found[name] = Run(common.subsampled(fraction, pilot=pilot, **kept))
    # This run does not refill batches. With this batch size, about as many examples of a batch are
    # trained as in the other runs.
    whole = 2 ** round(math.log2(kept["batch_size"] / (1 - fraction)))
    found["model"] = Run(
        common.subsampled(fraction, pilot="model", **{**kept, "batch_size": whole})
    )
    double = 2 * kept["batch_size"]
    found[f"fm_{double}"] = Run(
        common.subsampled(fraction, pilot="fm", **{**kept, "batch_size": double})
    )
    found["random"] = Run({"control": "random"}, "fm")
    found["stop"] = Run({"control": "stop"}, "fm")
    return found


_GLOBO_9 = {
    "model": "dcn", "mlp": "64", "dim": 32, "rows_optimizer": "adagrad",
    "rows_init": 0.01, "dropout": 0.0,
}  # fmt: skip
_GLOBO_1 = {
    "model": "dcn", "mlp": "128,64", "dim": 32, "rows_optimizer": "adagrad",
    "rows_init": 0.2, "rows_l2": 2.9e-6, "dropout": 0.0,
}  # fmt: skip
# The schedule depends on the validation part, and more frequent evaluation makes it shorter.
_FRAPPE = {
    PLAIN: Run({"batch_size": 4096}),
    "plain_2_in_1": Run({"batch_size": 4096, "evaluate_every": 25}),
    "fm": Run(common.subsampled(0.5, pilot="fm", batch_size=4096, window_steps=25)),
    # This run does not refill batches. About as many examples of a batch are trained as in the
    # others.
    "model": Run(common.subsampled(0.5, pilot="model", batch_size=8192, window_steps=25)),
    "random": Run({"control": "random"}, "fm"),
}
_GLOBO_49_RUNS = runs_of(
    0.85,
    {"batch_size": 1024, **common.rates(0.0014)},
    {"batch_size": 1024, **common.rates(0.0028)},
    [
        Run({"batch_size": 2048, **common.rates(0.0028)}),
        Run({"batch_size": 4096, **common.rates(0.0056)}),
    ],
)
_RARE = Asked(fraction=0.22, tolerance=0.0, seconds=0.3, ahead=0.01)
TASKS: Mapping[str, Task] = {
    "globo_49": Task(
        "globo", 8_998_912, common.GLOBO_49, _GLOBO_49_RUNS, _RARE, common.EXAMPLES_49
    ),
    # Negatives from the hour of the click are harder.
    "globo_49_hour": Task(
        "globo",
        8_998_912,
        common.GLOBO_49,
        runs_of(
            0.85,
            {"batch_size": 1024, **common.rates(0.002)},
            {"batch_size": 1024, **common.rates(0.004)},
            [Run({"batch_size": 2048, **common.rates(0.0028)})],
        ),
        _RARE,
        {**common.EXAMPLES_49, "negatives_from": "hour"},
    ),
    # Few examples are easy here. Shows the effect of dropping examples in that case.
    "globo_1": Task(
        "globo",
        2_699_264,
        _GLOBO_1,
        runs_of(
            0.3,
            {"batch_size": 1024, **common.rates(0.0024, 0.16)},
            {"batch_size": 1024, **common.rates(0.0024, 0.16)},
            [Run({"batch_size": 2048, **common.rates(0.0047, 0.33)})],
        ),
    ),
    "globo_9": Task(
        "globo",
        2_699_264,
        _GLOBO_9,
        runs_of(
            0.5,
            {"batch_size": 1024, **common.rates(0.00061, 0.36)},
            {"batch_size": 1024, **common.rates(0.00061, 0.36)},
            [
                Run({"batch_size": 512, **common.rates(0.00061, 0.36)}),
                Run({"batch_size": 2048, **common.rates(0.00085, 0.5)}),
            ],
        ),
        Asked(fraction=0.55, tolerance=0.0015, seconds=0.6, ahead=0.006),
        {"negatives": 9},
    ),
    "generated_2": Task(
        "generated:2000000:100000:0.02",
        1_998_848,
        {},
        runs_of(
            0.85,
            {"batch_size": 4096, **common.rates(0.002, 0.012)},
            {"batch_size": 2048, "window_steps": 50, **common.rates(0.002, 0.0125)},
            [
                Run({"batch_size": 2048, **common.rates(0.0014, 0.0085)}),
                Run({"batch_size": 8192, **common.rates(0.0028, 0.012)}),
            ],
        ),
        _RARE,
    ),
    "generated_25": Task(
        "generated:2000000:100000:0.25",
        1_998_848,
        {},
        runs_of(
            0.3,
            {"batch_size": 4096, **common.rates(0.008, 0.05)},
            {"batch_size": 4096, "window_steps": 50, **common.rates(0.008, 0.05)},
            [Run({"batch_size": 2048, **common.rates(0.0056, 0.068)})],
        ),
    ),
    "frappe": Task("frappe", 0, {}, _FRAPPE),
}


def steps_between(examples: int, given: Mapping[str, Any]) -> int:
    """Returns --evaluate_every for about --points evaluations per run.

    It is a multiple of ten steps, which slipstream-train runs in one call.
    """
    kept = 1.0 - given.get("skip_fraction", 0.0) * (1.0 - given.get("warmup", 0.0))
    return 10 * max(1, round(examples * kept / given["batch_size"] / _POINTS.value / 10))


def choose(runs: Mapping[str, Run], names: Sequence[str]) -> dict[str, Run]:
    """Returns the named runs, plain training and the runs that controls repeat.

    Without names, it returns all runs.
    """
    for name in names:
        if name not in runs:
            raise app.UsageError(f"Invalid --runs: {name!r}. Expected {', '.join(runs)}.")
    wanted = {*(names or runs), PLAIN}
    wanted |= {match for name in wanted if (match := runs[name].match) is not None}
    return {name: run for name, run in runs.items() if name in wanted}


def figures_of(record: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, float]:
    """Returns results relative to plain training of the same seed."""
    trained, seconds = record["examples"]["trained"], seconds_of(record)
    return {
        "auc": record["test"]["auc"],
        "auc - plain": record["test"]["auc"] - plain["test"]["auc"],
        "log loss": record["test"]["log_loss"],
        "calibration / plain": record["test"]["calibration"] / plain["test"]["calibration"],
        "trained": trained / plain["examples"]["trained"],
        "seconds": seconds,
        "seconds / plain": seconds / seconds_of(plain),
    }


def seconds_of(record: Mapping[str, Any]) -> float:
    """Returns the seconds of training, including window ends and graph building."""
    return record["seconds"]["training"] + record["seconds"]["window_ends"]


def table_of(figures: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Any]:
    """Returns the columns of the table with a row for each run."""

    def of_seeds(name: str) -> list[list[float]]:
        return [[seed[name] for seed in seeds] for seeds in figures.values()]

    def of(name: str, form: str) -> Any:
        return summary.column(name, list(map(statistics.fmean, of_seeds(name))), form)

    bounds = [
        common.interval([seed["auc - plain"] for seed in seeds]) for seeds in figures.values()
    ]
    texts = [None if b is None else f"{b[0]:+.4f} to {b[1]:+.4f}" for b in bounds]
    texts[0] = None  # Plain training.
    seconds = [f"{statistics.fmean(s):.1f} ± {common.spread(s):.1f}" for s in of_seeds("seconds")]
    return [
        summary.column("run", list(figures)),
        summary.column("auc", of_seeds("auc"), "{:.4f}", "mean"),
        summary.column("auc - plain, 95%", texts),
        of("log loss", "{:.4f}"), of("calibration / plain", "{:.3f}"), of("trained", "{:.1%}"),
        summary.column("seconds", seconds), of("seconds / plain", "{:.2f}"),
    ]  # fmt: skip


Records = Mapping[str, Sequence[Mapping[str, Any]]]  # By run, then by seed.


def reaching_of(records: Records) -> list[Any]:
    """Returns the table of times to reach plain's AUC gain."""
    ends = [record["test"]["auc"] for record in records[PLAIN]]
    found = [summary.column("run", list(records))]
    for fraction in _GAINS:
        levels = [curves.level(end, fraction) for end in ends]
        cells = [curves.reach_cell(seeds, levels) for seeds in records.values()]
        found.append(summary.column(f"{fraction:.0%} of plain's gain", cells))
    return found


def ahead_at_equal_seconds(records: Records) -> list[float]:
    """Returns AUC of "fm" minus plain training at equal seconds.

    It compares the end of "fm" with the best plain run at that time.
    """
    return [
        fm["test"]["auc"]
        - max(
            auc_at(curve(seeds[index], SECONDS), fm["evaluations"][-1]["seconds"])
            for run, seeds in records.items()
            if run.startswith(PLAIN)
        )
        for index, fm in enumerate(records["fm"])
    ]


def claims_of(
    name: str,
    task: Task,
    figures: Mapping[str, Sequence[Mapping[str, float]]],
    records: Records,
) -> dict[str, Any]:
    """Returns the claims for "fm".

    Seconds are relative to the fastest plain run.
    """
    asked = task.asked
    if asked is None or "fm" not in figures:
        return {}
    fm = figures["fm"]
    plain = [seeds for run, seeds in figures.items() if run.startswith(PLAIN)]
    fastest = [min(one["seconds"] for one in of_seed) for of_seed in zip(*plain, strict=True)]
    ratios = [one["seconds"] / minimum for one, minimum in zip(fm, fastest, strict=True)]
    found = {
        "auc_minus_plain": ([one["auc - plain"] for one in fm], -asked.tolerance, "higher"),
        "trained": ([one["trained"] for one in fm], asked.fraction, "lower"),
        "seconds_over_fastest_plain": (ratios, asked.seconds, "lower"),
    }
    found["auc_minus_plain_at_equal_seconds"] = (ahead_at_equal_seconds(records), 0.0, "higher")
    for control, minimum in (("uniform", 0.0), ("random", asked.ahead), ("stop", asked.ahead)):
        if control in figures:
            ahead = zip(fm, figures[control], strict=True)
            values = [one["auc"] - other["auc"] for one, other in ahead]
            found[f"auc_minus_{control}"] = (values, minimum, "higher")
    return {
        f"{name}_{what}": summary.claim(values, target, better, statistics.fmean)
        for what, (values, target, better) in found.items()
    }


def main(arguments: Sequence[str]) -> None:
    """Runs missing runs; prints and writes the comparison."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    name = _TASK.value
    if name not in TASKS:
        raise app.UsageError(f"Invalid --task={name}. Expected {', '.join(TASKS)}.")
    task = TASKS[name]
    runs = choose(task.runs, _RUNS.value)
    seeds = common.integers("seeds", _SEEDS.value)
    kept: dict[str, list[dict[str, Any]]] = {run: [] for run in runs}
    # Complete one seed after the other, so that an interrupted program leaves full comparisons.
    for number, seed in enumerate(seeds):
        records: dict[str, Any] = {}
        data = common.opened(_DATA.value or task.data, seed, **task.options)
        for index, (label, run) in enumerate(runs.items()):
            done = number * len(runs) + index + 1
            print(f"[{done}/{len(runs) * len(seeds)}] {name}, seed {seed}: {label}", flush=True)
            folder = Path(_RECORDS.value) / name / f"seed{seed}"
            # A control takes the flags of the run that it repeats from the record.
            shared = {**data, "seed": seed, **task.flags}
            if run.match is None and task.examples:
                shared["max_examples"] = task.examples
                shared["evaluate_every"] = steps_between(task.examples, run.flags)
            extra = common.extra_flags(_EXTRA.value)
            if "policies" in run.flags:
                extra.update(common.extra_flags(_THIN.value))
            given = {**run.flags} if run.match else {**shared, **run.flags, **extra}
            match = folder / run.match / common.RECORD if run.match else None
            records[label] = common.train(given, folder / label, match)
        for label, record in records.items():
            kept[label].append(record)
    figures = {
        label: [
            figures_of(record, plain) for record, plain in zip(of_run, kept[PLAIN], strict=True)
        ]
        for label, of_run in kept.items()
    }
    claims = claims_of(name, task, figures, kept)
    of_seeds = f"{len(seeds)} seeds"
    tables = {of_seeds: table_of(figures)}
    if claims:
        tables["Examples and seconds to reach"] = reaching_of(kept)
    print(summary.write("skipping", name, tables, claims))
    if not task.examples:
        return
    shown = {label: kept[label] for label in _DRAWN if label in kept}
    ends = [record["test"]["auc"] for seeds in shown.values() for record in seeds]
    curves.plot(
        f"{name}, {of_seeds}", shown, summary.output() / f"skipping_{name}.png", min(ends) - 0.03
    )


if __name__ == "__main__":
    app.run(main)
