"""Masked and deferred gradients, and the paper's rule, compared with plain training.

It compares quality, examples, rows, bytes and seconds. Each run is a process of slipstream-train,
one after the other. A run with an existing metrics.json is not repeated, so the program can be
interrupted and restarted.

    python benchmarks/mask_and_defer.py --data=globo --seeds=0,1,2
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import mask_and_defer_report
import summary
from absl import app, flags

from slipstream_tf.cli import data as train_data
from slipstream_tf.cli.flag_set import UsageError

_DATA = flags.DEFINE_string(
    "data",
    None,
    "globo or frappe_short, which are prepared first, or generated, or a value of "
    "slipstream-train --data that is one of these.",
    required=True,
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs.")
_RUNS = flags.DEFINE_list(
    "runs", [], "Names of the runs. Their reference runs are added. The default is all runs."
)
_RECORDS = flags.DEFINE_string(
    "records", "runs/mask_and_defer", "Folder of the run records (metrics.json)."
)
_EXTRA = flags.DEFINE_multi_string(
    "train_flag", [], "Flag name=value of slipstream-train for every run except controls."
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A row of the table.

    Attributes:
        name: The name of the run.
        flags: Flags of slipstream-train in addition to data and seed.
        match: The run that a control repeats.
        ranks: The number of simulated ranks.
    """

    name: str
    flags: Mapping[str, Any]
    match: str | None = None
    ranks: int = 1


def _controls(matched: str) -> tuple[Run, ...]:
    return (
        Run(f"random_{matched}", {"control": "random"}, matched),
        # The run is watched to count its rows.
        Run(f"stop_{matched}", {"control": "stop", "watch": True}, matched),
    )


_PLAIN = (
    Run("plain", {}),
    # The same training. It counts the rows that the other runs are compared with.
    Run("plain_rows", {"watch": True}),
    Run("plain_rows_4", {"watch": True}, ranks=4),
)
_BY_DRIFT = {"policies": "skip_examples", "skip_score": "row_drift"}
_PAPER = (
    # The paper has no probing.
    Run("paper", {**_BY_DRIFT, "revisit_every": 0}),
    *_controls("paper"),
    Run("states", _BY_DRIFT),
)
_MASK_FLAGS = {"policies": "mask_gradients"}
_MASK = (Run("mask_4", _MASK_FLAGS, ranks=4),)


def _fae(hot_set_memory: str) -> tuple[Run, ...]:
    """Returns a run with a memory that does not fit all keys.

    The default memory holds all rows of tables this small.
    """
    flag_values = {"schedule": "fae", "hot_set_memory": hot_set_memory, "watch": True}
    return (Run("fae", flag_values),)


_DEFER_FLAGS = {"policies": "defer_gradients", "warmup": 0.05}


def _defer(movement: float, ranks: int, max_age: int = 200) -> Run:
    parts = [f"defer_{movement:g}", *(["4"] if ranks == 4 else [])]
    parts += [] if max_age == 200 else [f"age{max_age}"]
    flag_values = {"defer_movement": movement, "defer_max_age": max_age}
    return Run("_".join(parts), {**_DEFER_FLAGS, **flag_values}, ranks=ranks)


_DEFER = (
    *(_defer(movement, 4) for movement in (0.005, 0.01, 0.015, 0.02)),
    *(_defer(movement, 4, 1000) for movement in (0.01, 0.015)),
    *(_defer(0.01, 1), _defer(0.015, 1, 1000)),
)
_BOTH_FLAGS = {**_BY_DRIFT, "policies": "skip_examples,defer_gradients", "defer_movement": 0.01}
_BOTH = (Run("both_4", _BOTH_FLAGS, ranks=4),)
# The paper's rule, masking and deferring with `max_auc_loss`.
_BOUND = {"max_auc_loss": mask_and_defer_report.MAX_AUC_LOSS}
_BUDGET = (
    Run("budget_paper", {**_BY_DRIFT, "skip_keep_rate": 0.5, **_BOUND}),
    Run("budget_mask_4", {**_MASK_FLAGS, **_BOUND}, ranks=4),
    Run("budget_defer_4", {**_DEFER_FLAGS, **_BOUND}, ranks=4),
)
_WITHHOLD = (*_MASK, _defer(0.005, 4), _defer(0.01, 4), *_BOTH)
RUNS: Mapping[str, tuple[Run, ...]] = {
    "globo": (*_PLAIN, *_PAPER, *_MASK, *_DEFER, *_BOTH, *_fae("0.5MiB"), *_BUDGET),
    "frappe_short": (*_PLAIN, *_PAPER, *_WITHHOLD, *_fae("0.15MiB"), *_BUDGET),
    # The default movement is a twentieth of the rows' learning rate, which differs for this data.
    "generated": (
        *_PLAIN,
        *_PAPER,
        _defer(0.00025, 4),
        *_WITHHOLD,
        *_fae("4.5MiB"),
        *_BUDGET,
    ),
}
# Settings of the stored results, chosen by hand.
_FRAPPE = {
    "model": "dcn", "dim": 20, "mlp": "400,400", "cross_layers": 3, "dropout": 0.5,
    "batch_norm": False, "batch_size": 512, "rows_optimizer": "adagrad",
    "rows_learning_rate": 0.05, "rows_init": 0.01, "learning_rate": 0.001, "rows_l2": 0,
    "early_stopping": 0, "window_steps": 200,
}  # fmt: skip
COMMON: Mapping[str, Mapping[str, Any]] = {
    "globo": {**common.GLOBO_BY_HAND, "rows_l2": 0, "window_steps": 100, "epochs": 1},
    "frappe_short": {**_FRAPPE, "epochs": 6},
    # With larger fields and a rate of 0.05, two epochs are worse than one for any model.
    "generated": {"epochs": 6, "rows_learning_rate": 0.005},
}
DATA = {"globo": "globo", "frappe_short": "frappe", "generated": "generated:200000:1000"}


def name_of(value: str) -> str:
    """Returns the name in RUNS for a value of --data."""
    if value in DATA:
        return value
    try:
        name = train_data.facts_of(value).name
    except UsageError as error:
        raise app.UsageError(str(error)) from None
    name = "frappe_short" if name == "frappe" else name
    if name not in RUNS:
        raise app.UsageError(f"Invalid --data={value} ({name} data). Expected {', '.join(RUNS)}.")
    return name


def choose(runs: Sequence[Run], names: Sequence[str]) -> list[Run]:
    """Returns the named runs and their dependencies, in the table's order.

    Without names, it returns all runs.
    """
    by_name = {run.name: run for run in runs}
    for name in names:
        if name not in by_name:
            raise app.UsageError(f"Invalid --runs: {name!r}. Expected {', '.join(by_name)}.")
    wanted = set(names or by_name) | {"plain"}
    for name in tuple(wanted):
        wanted.add(by_name[name].match or name)
    for name in tuple(wanted):
        wanted.add(mask_and_defer_report.baseline(by_name[name].ranks))
    return [run for run in runs if run.name in wanted]


def flags_of(
    run: Run, data: Mapping[str, str], seed: int, shared: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the flags of slipstream-train, without --output and --match."""
    if run.match is not None:
        return dict(run.flags)
    found = {**data, "seed": seed, **run.flags, **shared}
    if not run.flags:
        found.pop("window_steps", None)  # A plain run without --watch has no windows.
    return found


def main(arguments: Sequence[str]) -> None:
    """Runs missing runs; prints and writes the comparison."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    name = name_of(_DATA.value)
    runs = choose(RUNS[name], _RUNS.value)
    shared = {**COMMON[name], **common.extra_flags(_EXTRA.value)}
    seeds = common.integers("seeds", _SEEDS.value)
    records: dict[str, dict[int, Any]] = {run.name: {} for run in runs}
    # Complete one seed after the other, so that an interrupted program leaves full comparisons.
    for number, seed in enumerate(seeds):
        data = common.opened(DATA.get(_DATA.value, _DATA.value), seed)
        for place, run in enumerate(runs):
            done = number * len(runs) + place + 1
            print(f"[{done}/{len(runs) * len(seeds)}] {name}, seed {seed}: {run.name}", flush=True)
            folder = Path(_RECORDS.value) / name / f"seed{seed}"
            match = folder / run.match / common.RECORD if run.match else None
            given = flags_of(run, data, seed, shared)
            records[run.name][seed] = common.train(given, folder / run.name, match, run.ranks)
    matches = {run.name: run.match for run in runs if run.match is not None}
    ranks = {run.name: run.ranks for run in runs}
    figures = mask_and_defer_report.collect(records, matches, ranks)
    part, columns = f"{name}, {len(seeds)} seeds", mask_and_defer_report.table_of(figures)
    claims = mask_and_defer_report.claims_of(name, figures)
    print(summary.write("mask_and_defer", part, {"": columns}, claims))
    mask_and_defer_report.plot(name, figures, summary.output() / f"frontier_{name}.png")


if __name__ == "__main__":
    app.run(main)
