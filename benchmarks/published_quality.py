"""Quality on Frappe_x1 compared with FuxiCTR, using settings of published models.

    python benchmarks/published_quality.py

FuxiCTR uses its layers, training loop and early stopping. Both programs read the same files and
train with three seeds. The test part is evaluated once per run, at the best epoch on the validation
part. Our settings are slipstream-train's settings for this data, chosen by tuning.py. Finished runs
are not repeated.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common
import peers
import summary
from absl import app, flags

from slipstream_tf.telemetry.run_record import write_json

MAX_BEHIND = 0.0005
MODELS = ("dcn", "deepfm")
# Settings of the leaderboard's models of this size: rows of 10, three layers of 400, Adam, a
# penalty on all rows. The rate is multiplied by 0.1 after an epoch without improvement, and
# training stops after two such epochs.
PUBLISHED = {
    "dim": 10, "mlp": [400, 400, 400], "cross_layers": 3, "dropout": 0.2, "batch_size": 10_000,
    "learning_rate": 1e-3, "embedding_regularizer": 0.05,
}  # fmt: skip

_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs.")
_RECORDS = flags.DEFINE_string("records", "runs/published_quality", "Folder of the run records.")
_ENVIRONMENTS = flags.DEFINE_string(
    "environments", "runs/peers", "Folder of the Python environments of the other libraries."
)


def by_fuxictr(data: str, model: str, seed: int, folder: Path) -> dict[str, Any]:
    """Trains with FuxiCTR unless finished; returns quality, examples and seconds."""
    given = {"data": data, "model": model, "seed": seed, **PUBLISHED}
    before = common.finished(folder, given)
    if before is not None:
        return before
    python = peers.python_of("fuxictr", Path(_ENVIRONMENTS.value))
    program = Path(__file__).resolve().parent / "embedding_peers" / "fuxictr_frappe.py"
    arguments = [data, model, str(seed), json.dumps(PUBLISHED)]
    done = subprocess.run([python, program, *arguments], stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    write_json(str(folder / common.FLAGS), given)
    write_json(str(folder / common.RECORD), found)
    return found


def by_us(data: Mapping[str, str], model: str, seed: int, folder: Path) -> dict[str, Any]:
    """Trains with slipstream-train and its settings for this data."""
    record = common.train({**data, "model": model, "seed": seed}, folder)
    quality = {measure: record["test"][measure] for measure in ("auc", "log_loss")}
    trained, seconds = record["examples"]["trained"], record["seconds"]["training"]
    return {**quality, "examples": trained, "seconds": seconds}


def main(_: Any) -> None:
    data = {
        "slipstream_tf": common.prepared("frappe"),
        "FuxiCTR": common.in_data_folder(common.DATASETS["frappe"]),
    }
    seeds = common.integers("seeds", _SEEDS.value)
    records = Path(_RECORDS.value)
    rows: dict[str, list[Any]] = {name: [] for name in ("model", "by", "auc", "log_loss")}
    costs: dict[str, list[Any]] = {"examples": [], "seconds": []}
    claims = {}
    for model in MODELS:
        aucs = {}
        for name, train in (("slipstream_tf", by_us), ("FuxiCTR", by_fuxictr)):
            found = [train(data[name], model, s, records / f"{model}-{name}-{s}") for s in seeds]
            aucs[name] = [one["auc"] for one in found]
            rows["model"].append(model)
            rows["by"].append(name)
            for measure in ("auc", "log_loss"):
                rows[measure].append([one[measure] for one in found])
            costs["examples"].append([one["examples"] / 1e6 for one in found])
            costs["seconds"].append([one["seconds"] for one in found])
        ours, theirs = aucs.values()
        differences = [statistics.fmean(ours) - statistics.fmean(theirs)]
        claims[f"{model}.auc_minus_fuxictr"] = summary.claim(differences, -MAX_BEHIND, "higher")
    columns = [
        summary.column("model", rows["model"]),
        summary.column("trained by", rows["by"]),
        summary.column("test AUC", rows["auc"], "{:.4f}", "mean each"),
        summary.column("test log loss", rows["log_loss"], "{:.4f}", "mean each"),
        summary.column("M examples", costs["examples"], "{:.2f}", "mean"),
        summary.column("seconds", costs["seconds"], "{:.0f}", "mean"),
    ]
    pinned = (text.split("==") for call in peers.ENVIRONMENTS["fuxictr"] for text in call)
    libraries = {pair[0]: pair[1] for pair in pinned if len(pair) == 2}
    print(summary.write("published_quality", "Frappe_x1", {"": columns}, claims, libraries))


if __name__ == "__main__":
    app.run(main)
