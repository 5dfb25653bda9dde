"""Random search on the validation part, then one test evaluation.

    python benchmarks/tuning.py --search=frappe_dcn --trials=20
    python benchmarks/tuning.py --search=frappe_dcn --final

A trial is a run of slipstream-train with --evaluate_on=valid, which does not open the test part.
Finished trials are not repeated: the same command continues after an interruption, and a larger
--trials adds trials. --final trains the best trial's settings with three seeds and evaluates the
test part.

Note: --final closes the search, because its test part has been used. Later calls run no new trials.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
import summary
from absl import app, flags

from slipstream_tf.telemetry.run_record import write_json

MAX_TRIALS = 40
SEEDS = (0, 1, 2)
CHOSEN = "chosen.json"

_SEARCH = flags.DEFINE_string("search", None, "Name of the search, such as frappe_dcn.")
_TRIALS = flags.DEFINE_integer(
    "trials", 20, "Number of trials of the search.", lower_bound=1, upper_bound=MAX_TRIALS
)
_FINAL = flags.DEFINE_bool(
    "final", False, "Evaluate the settings of the best trial on the test part."
)
_RECORDS = flags.DEFINE_string("records", "runs/tuning", "Folder of the run records.")

Draw = Callable[[np.random.Generator], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Search:
    """A search space.

    Attributes:
        data: The name of the data set, which is prepared first.
        options: Options of the program that prepares the data.
        trial_options: Further options of that program for trials.
        fixed: Flags of every trial.
        draw: A function that draws the other flags of a trial.
        known: The other flags of the first trials, for comparison. They may have been chosen on the
            test part, so they are never selected.
        seed: The seed of the draws.
        targets: The target of the mean over seeds on the test part by measure: the value, and
            "lower" or "higher".
    """

    data: str
    options: Mapping[str, Any]
    trial_options: Mapping[str, Any]
    fixed: Mapping[str, Any]
    draw: Draw
    targets: Mapping[str, tuple[float, str]]
    seed: int
    known: Sequence[Mapping[str, Any]] = ()


def rounded(value: float) -> float:
    """Rounds to two digits, which suffice to distinguish rates."""
    return float(f"{value:.1e}")


def log_uniform(random: np.random.Generator, low: float, high: float) -> float:
    return rounded(float(np.exp(random.uniform(np.log(low), np.log(high)))))


def one_of(random: np.random.Generator, *choices: Any) -> Any:
    return choices[int(random.integers(len(choices)))]


def frappe(random: np.random.Generator) -> dict[str, Any]:
    """Draws settings like published models: Adam, penalty on all rows."""
    rate = log_uniform(random, 5e-4, 4e-3)
    return {
        "dim": one_of(random, 10, 16, 20),
        "mlp": one_of(random, "400,400,400", "400,400", "256,256,256"),
        "dropout": one_of(random, 0.0, 0.1, 0.2, 0.3),
        "batch_size": one_of(random, 2048, 4096, 8192),
        "learning_rate": rate,
        "rows_learning_rate": rate,
        "rows_l2": log_uniform(random, 5e-3, 1e-1),
        "rows_init": one_of(random, 1e-3, 1e-2, 5e-2),
    }


def frappe_dcn(random: np.random.Generator) -> dict[str, Any]:
    return {**frappe(random), "cross_layers": one_of(random, 2, 3, 4)}


def globo(random: np.random.Generator) -> dict[str, Any]:
    """Draws settings for a single pass."""
    rule = one_of(random, "adagrad", "rowwise_adagrad", "adam")
    low, high = (5e-4, 1e-2) if rule == "adam" else (0.03, 0.4)
    found = {
        "model": one_of(random, "dlrm", "dcn", "deepfm"),
        "mlp": one_of(random, "64", "128,64", "256,128"),
        "rows_optimizer": rule,
        "rows_learning_rate": log_uniform(random, low, high),
        "rows_init": one_of(random, 0.01, 0.05, 0.2),
        "learning_rate": log_uniform(random, 5e-4, 6e-3),
        "dim": one_of(random, 16, 32),
        "dropout": one_of(random, 0.0, 0.1),
    }
    if random.random() < 0.5:
        found["rows_l2"] = log_uniform(random, 1e-7, 1e-4)
    return found


_FRAPPE = {
    "rows_optimizer": "adam", "rows_decay": "all", "batch_norm": True, "epochs": 40,
    "early_stopping": 2, "plateau_factor": 0.1,
}  # fmt: skip
_FRAPPE_TARGETS = {"auc": (0.983, "higher"), "log_loss": (0.165, "lower")}


def _globo(negatives: int, targets: Mapping[str, tuple[float, str]], seed: int) -> Search:
    options = {"negatives": negatives}
    return Search(
        "globo", options, {"hold_out": True}, {}, globo, targets, seed, [common.GLOBO_BY_HAND]
    )


SEARCHES: Mapping[str, Search] = {
    "frappe_dcn": Search(
        "frappe", {}, {}, {"model": "dcn", **_FRAPPE}, frappe_dcn, _FRAPPE_TARGETS, 0
    ),
    "frappe_deepfm": Search(
        "frappe", {}, {}, {"model": "deepfm", **_FRAPPE}, frappe, _FRAPPE_TARGETS, 1
    ),
    "globo_1": _globo(1, {"auc": (0.7372, "higher")}, 2),
    "globo_9": _globo(9, {}, 4),
    "globo_49": _globo(49, {}, 3),
}


def trial_flags(name: str, trial: int) -> dict[str, Any]:
    """Returns the flags of a trial; deterministic."""
    search = SEARCHES[name]
    if trial < len(search.known):
        return {**search.fixed, **search.known[trial], "seed": 0}
    random = np.random.default_rng([search.seed, trial])
    return {**search.fixed, **search.draw(random), "seed": 0}


def run_trials(name: str, count: int, folder: Path) -> list[dict[str, Any]]:
    """Runs missing trials; returns flags and quality of each trial."""
    search, found = SEARCHES[name], []
    data = common.prepared(search.data, **search.options, **search.trial_options)
    for trial in range(count):
        chosen = trial_flags(name, trial)
        given = {**data, "evaluate_on": "valid", **chosen}
        record = common.train(given, folder / f"trial_{trial:02d}")
        found.append({"flags": chosen, **outcome(record)})
        best = max(found, key=lambda one: one["auc"])
        print(
            f"{name}, trial {trial}: AUC {found[-1]['auc']:.5f}, log loss "
            f"{found[-1]['log_loss']:.4f}; best {best['auc']:.5f}",
            flush=True,
        )
    return found


def outcome(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the relevant results of a run."""
    quality = {measure: record["test"][measure] for measure in ("auc", "log_loss")}
    trained = record["examples"]["trained"]
    return {**quality, "examples": trained, "seconds": record["seconds"]["training"]}


def table_of(rows: list[dict[str, Any]]) -> list[Any]:
    """Returns the columns of a table of trials or seeds."""
    names = dict.fromkeys(name for row in rows for name in row["flags"])
    columns = [
        summary.column(name, [_text(row["flags"].get(name)) for row in rows])
        for name in names
        if len({str(row["flags"].get(name)) for row in rows}) > 1
    ]
    return [
        *columns,
        summary.column("AUC", [row["auc"] for row in rows], "{:.5f}"),
        summary.column("log loss", [row["log_loss"] for row in rows], "{:.4f}"),
        summary.column("M examples", [row["examples"] / 1e6 for row in rows], "{:.2f}"),
        summary.column("seconds", [row["seconds"] for row in rows], "{:.0f}"),
    ]


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def finish(name: str, trials: list[dict[str, Any]], folder: Path) -> None:
    """Evaluates the best settings on the test part; closes the search."""
    search = SEARCHES[name]
    drawn = trials[len(search.known) :]
    best = max(drawn, key=lambda one: one["auc"])["flags"]
    write_json(str(folder / CHOSEN), best)
    rows = []
    for seed in SEEDS:
        data, chosen = common.opened(search.data, seed, **search.options), {**best, "seed": seed}
        record = common.train({**data, **chosen}, folder / f"final_{seed}")
        rows.append({"flags": chosen, **outcome(record)})
    claims = {}
    for measure, (target, better) in search.targets.items():
        values = [row[measure] for row in rows]
        claims[f"{name}.{measure}"] = summary.claim(values, target, better, statistics.fmean)
    print(summary.write("tuning", f"{name}, test", {"": table_of(rows)}, claims))


def main(_: Any) -> None:
    name = _SEARCH.value
    if name not in SEARCHES:
        raise app.UsageError(f"Invalid --search={name}. Expected {', '.join(SEARCHES)}.")
    folder = Path(_RECORDS.value) / name
    count = _TRIALS.value
    chosen = folder / CHOSEN
    if chosen.exists():
        # Selecting from more trials after an evaluation on the test part would overfit to it.
        count = len(list(folder.glob("trial_*/metrics.json")))
        print(f"The search is closed, because the test part was evaluated: {chosen}.")
    trials = run_trials(name, count, folder)
    print(summary.write("tuning", f"{name}, validation", {"": table_of(trials)}, {}))
    if _FINAL.value:
        finish(name, trials, folder)
    elif chosen.exists():
        print(json.loads(chosen.read_text(encoding="utf-8")))


if __name__ == "__main__":
    flags.mark_flag_as_required("search")  # Not of programs that import this module.
    app.run(main)
