"""Compares the settings that slipstream-train chooses with a random search per model.

    python benchmarks/default_settings.py --tasks=law_pairs,ratings --trials_per_model=20

A task is a prepared folder. For each model, trials draw settings, and the trial with the highest
validation AUC is trained again with several seeds and evaluated on the test part. It is compared
with `slipstream-train --data=FOLDER` without other flags. Finished runs are not repeated, so that
the same command resumes. A larger --trials_per_model adds trials. The results of other tasks stay
in the summary.

The data is generated, except for Frappe and globo, see `datasets/`. A test part has at least 20,000
examples. A run takes seconds, and forks this process instead of importing TensorFlow again.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import summary
import tuning
from absl import app, flags

MODELS = ("dlrm", "dcn", "deepfm")
ALLOWED = 0.01  # Maximum difference in test AUC from the best model.
# Settings in the table, unless they are 0.
_SHOWN = (
    "model", "dim", "mlp", "batch_size", "rows_optimizer", "rows_learning_rate", "rows_init",
    "learning_rate", "dropout", "rows_l2", "early_stopping",
)  # fmt: skip

_TRIALS = flags.DEFINE_integer(
    "trials_per_model", 20, "Number of trials per model; 0 for no comparison.", lower_bound=0
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the evaluated runs.")
_RECORDS = flags.DEFINE_string("folder", "runs/default_settings", "Folder of data and records.")

Columns = dict[str, Any]
COUNT = 100_000  # Number of generated examples.
_DIVISION = ("--split=random", "--test_fraction=0.25", "--valid_fraction=0.1")


def law_pairs(random: np.random.Generator) -> tuple[Columns, dict[str, Any]]:
    """Returns users and items; a click is likely if both are of the right kind."""
    user, item = random.integers(0, 600, (2, COUNT))
    chance = 0.1 + 0.6 * (user % 2) * (item % 2)
    return {"user": user, "item": item, "clicked": _drawn(random, chance)}, {
        "keys": ["user", "item"]
    }


def law_wide(random: np.random.Generator) -> tuple[Columns, dict[str, Any]]:
    """Returns twenty skewed key columns with pairwise effects and rare clicks."""
    sizes = np.geomspace(10, 10_000, 20).astype(int)
    keys = common_keys(random, sizes, COUNT)
    logit = np.zeros(len(keys))
    factors = []
    for column, size in zip(keys.T, sizes, strict=True):
        logit += random.normal(0, 0.25, size)[column]
        factors.append(random.normal(0, 0.4, (size, 4))[column])
    logit += sum((a * b).sum(1) for a, b in itertools.pairwise(factors))
    columns = {f"f{i}": column for i, column in enumerate(keys.T)}
    columns["clicked"] = _drawn(random, _sigmoid(logit - 3.6))
    return columns, {"keys": [f"f{i}" for i in range(len(sizes))]}


def law_numbers(random: np.random.Generator) -> tuple[Columns, dict[str, Any]]:
    """Returns three key columns, a bag and two numbers, all with effects."""
    count, sizes = COUNT, np.array([200, 800, 2_000])
    keys = common_keys(random, sizes, count)
    logit = np.zeros(count)
    for column, size in zip(keys.T, sizes, strict=True):
        logit += random.normal(0, 0.6, size)[column]
    numbers = random.normal(size=(count, 2))
    logit += 0.8 * np.abs(numbers[:, 0]) + 0.5 * numbers[:, 1] * np.where(keys[:, 0] % 2, 1, -1)
    tags = random.integers(0, 50, (count, 3))
    lengths = random.integers(0, 4, count)
    weights = random.normal(0, 0.5, 50)
    logit += np.where(np.arange(3) < lengths[:, None], weights[tags], 0).sum(1)
    columns: Columns = {f"f{i}": column for i, column in enumerate(keys.T)}
    columns["tags"] = [row[:n].tolist() for row, n in zip(tags, lengths, strict=True)]
    columns |= {f"x{i}": column for i, column in enumerate(numbers.T.astype(np.float32))}
    columns["clicked"] = _drawn(random, _sigmoid(logit - 1.8))
    return columns, {"keys": ["f0", "f1", "f2", "tags"], "dense": ["x0", "x1"]}


def ratings(random: np.random.Generator) -> tuple[Columns, dict[str, Any]]:
    """Returns ratings like MovieLens: a user's and a movie's features; four stars are a click."""
    count, users, movies = COUNT, 1_000, 1_000
    user, movie = common_keys(random, np.array([users, movies]), count, 0.7).T
    genres = [random.choice(18, random.integers(1, 4), replace=False) for _ in range(movies)]
    age, gender = random.integers(0, 7, users), random.integers(0, 2, users)
    taste, style = random.normal(0, 0.6, (users, 5)), random.normal(0, 0.6, (movies, 5))
    logit = random.normal(0, 0.8, users)[user] + random.normal(0, 1.0, movies)[movie]
    logit += (taste[user] * style[movie]).sum(1)
    logit += 0.3 * np.where(gender[user] == movie % 2, 1, -1) + random.normal(0, 0.3, 7)[age[user]]
    columns = {
        "user": user, "movie": movie, "genres": [genres[i].tolist() for i in movie],
        "age": age[user], "gender": gender[user], "clicked": _drawn(random, _sigmoid(logit + 0.3)),
    }  # fmt: skip
    return columns, {"keys": ["user", "movie", "genres", "age", "gender"]}


def common_keys(
    random: np.random.Generator, sizes: np.ndarray, count: int, exponent: float = 1.05
) -> np.ndarray:
    """Draws skewed keys, int64 [count, len(sizes)], each below its size."""
    return np.stack([common.zipf_keys(random, size, [count], exponent) for size in sizes], axis=1)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def _drawn(random: np.random.Generator, chance: np.ndarray) -> np.ndarray:
    return random.random(len(chance)) < chance


LAWS: Mapping[str, Callable[[np.random.Generator], tuple[Columns, dict[str, Any]]]] = {
    law.__name__: law for law in (law_pairs, law_wide, law_numbers, ratings)
}
# Data set and options of its program in datasets/.
PREPARED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "frappe": ("frappe", {}),
    "globo_1": ("globo", {"negatives": 1, "clicks": 100_000, "hold_out": True}),
    "globo_9": ("globo", {"negatives": 9, "clicks": 20_000, "hold_out": True}),
    "globo_49": ("globo", {"negatives": 49, "clicks": 4_000, "hold_out": True}),
}
TASKS = (*LAWS, *PREPARED)
_TASKS = flags.DEFINE_list("tasks", list(TASKS), "Names of tasks.")


def folder_of(task: str, folder: Path) -> str:
    """Returns the prepared folder of a task; prepares it on first use."""
    if task in PREPARED:
        name, options = PREPARED[task]
        return common.prepared(name, **options)["data"]
    own = folder / "data" / task
    if not (own / "prepared" / "statistics.json").exists():
        own.mkdir(parents=True, exist_ok=True)
        columns, schema = LAWS[task](np.random.default_rng(0))
        pq.write_table(pa.table(columns), own / "examples.parquet")
        (own / "schema.json").write_text(json.dumps({"label": "clicked", **schema}))
        program = "from slipstream_tf.cli.prepare import entry_point; entry_point()"
        subprocess.run(
            [sys.executable, "-c", common.IMPORTS + program, str(own / "examples.parquet"),
             f"--schema={own / 'schema.json'}", f"--output={own / 'prepared'}", *_DIVISION],
            check=True,
        )  # fmt: skip
    return str(own / "prepared")


def draw(random: np.random.Generator, model: str) -> dict[str, Any]:
    """Draws the settings of a trial."""
    one_of, log_uniform = tuning.one_of, tuning.log_uniform
    optimizer = one_of(random, "adagrad", "adagrad", "adam")
    low, high = (3e-4, 1e-2) if optimizer == "adam" else (0.01, 0.5)
    found = {
        "model": model, "dim": one_of(random, 8, 16, 32), "mlp": one_of(random, "64", "128-64"),
        "batch_size": one_of(random, 256, 512, 1024, 2048), "rows_optimizer": optimizer,
        "rows_learning_rate": log_uniform(random, low, high),
        "rows_init": one_of(random, 0.01, 0.05, 0.2),
        "learning_rate": log_uniform(random, 3e-4, 1e-2),
        "dropout": one_of(random, 0.0, 0.2),
    }  # fmt: skip
    if random.random() < 0.5:
        found["rows_l2"] = log_uniform(random, 1e-6, 1e-3)
    passes = {"epochs": 10, "early_stopping": 1} if random.random() < 0.7 else {"epochs": 1}
    return found | passes


def best_trial(task: str, model: str, data: str, count: int, folder: Path) -> dict[str, Any]:
    """Runs missing trials; returns the settings with the highest validation AUC."""
    best, best_auc = {}, 0.0
    for trial in range(count):
        random = np.random.default_rng([TASKS.index(task), MODELS.index(model), trial])
        chosen = draw(random, model)
        given = {"data": data, "evaluate_on": "valid", "seed": 0, **chosen}
        record = common.train(given, folder / f"{model}_{trial:02d}", chooses=True, forks=True)
        auc = record["test"]["auc"]
        if auc > best_auc:
            best, best_auc = chosen, auc
        print(f"{task}, {model}, trial {trial}: {auc:.4f}; best {best_auc:.4f}", flush=True)
    return best


def compare(task: str, trials: int, seeds: Sequence[int], root: Path) -> str:
    """Compares the chosen settings of a task with the best trials; writes a part of the summary."""
    data, folder = folder_of(task, root), root / task
    ways: dict[str, Mapping[str, Any]] = {"chosen": {}}
    models = MODELS if trials else ()
    for model in models:
        ways[model] = best_trial(task, model, data, trials, folder)
    aucs: dict[str, list[float]] = {}
    settings, examples = [], []
    for way, chosen in ways.items():
        # The options come from the trials, so that more trials do not reuse a former best.
        records = []
        for seed in seeds:
            given, own = {"data": data, "seed": seed, **chosen}, folder / _name(way, chosen, seed)
            records.append(common.train(given, own, chooses=True, forks=True))
        aucs[way] = [record["test"]["auc"] for record in records]
        examples.append([record["examples"]["trained"] / 1e6 for record in records])
        used = records[0]["settings"]
        settings.append(", ".join(f"{name} {_text(used[name])}" for name in _SHOWN if used[name]))
    names = ["chosen by the data", *(f"best of {trials}, {model}" for model in models)]
    table = [
        summary.column("settings", names),
        summary.column("test AUC", list(aucs.values()), "{:.4f}", "mean"),
        summary.column("M examples", examples, "{:.2f}", "mean"),
        summary.column("of seed 0", settings),
    ]
    claims = {}
    if trials:
        best = max(models, key=lambda way: statistics.fmean(aucs[way]))
        behind = [b - a for a, b in zip(aucs["chosen"], aucs[best], strict=True)]
        claim = summary.claim(behind, ALLOWED, "lower", statistics.fmean)
        claims[f"{task}.auc_behind_best"] = claim
    return summary.write("default_settings", task, {"": table}, claims)


def _text(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else f"{value}"


def main(_: Any) -> None:
    seeds = common.integers("seeds", _SEEDS.value)
    for task in _TASKS.value:
        if task not in TASKS:
            raise app.UsageError(f"Invalid --tasks: {task!r}. Expected {', '.join(TASKS)}.")
    for task in _TASKS.value:
        page = compare(task, _TRIALS.value, seeds, Path(_RECORDS.value))
    print(page)


def _name(way: str, chosen: Mapping[str, Any], seed: int) -> str:
    return f"{way}_{zlib.crc32(json.dumps(chosen).encode()):08x}_seed_{seed}"


if __name__ == "__main__":
    app.run(main)
