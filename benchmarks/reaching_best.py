"""Progress of plain training towards the best possible AUC on generated data.

    python benchmarks/reaching_best.py

The generator defines the click probabilities, and no model can rank better than by these. The
result is the fraction of the way from 0.5 to that AUC after one pass, for different numbers of
examples. Finished runs are not repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
import summary
from absl import app, flags

ENOUGH = 0.99

_EXAMPLES = flags.DEFINE_list(
    "examples",
    ["100000", "400000", "1600000", "6400000", "25600000"],
    "Numbers of training examples.",
)
_KEYS = flags.DEFINE_integer("keys", 100, "Number of keys of the largest field.", lower_bound=10)
_RATE = flags.DEFINE_float(
    "rate", 0.25, "Click rate of the generated data.", lower_bound=0.0, upper_bound=1.0
)
_TRAIN_FLAGS = flags.DEFINE_multi_string(
    "train_flag", [], "Flag name=value of slipstream-train for all runs."
)
_SEEDS = flags.DEFINE_list(
    "seeds", ["0", "1", "2"], "Seeds of the models. All models train the same examples."
)
_RECORDS = flags.DEFINE_string("records", "runs/reaching_best", "Folder of the run records.")

# The generator uses weights and products of neighboring fields, which a cross layer can represent.
# Rates and widths were chosen on validation parts.
MODEL = {
    "model": "dcn", "dim": 4, "cross_layers": 1, "mlp": "16", "batch_size": 1024, "rows_init": 0.3,
    "rows_optimizer": "adagrad", "rows_learning_rate": 0.2, "learning_rate": 0.005,
}  # fmt: skip


def main(_: Any) -> None:
    counts = common.integers("examples", _EXAMPLES.value)
    seeds = common.integers("seeds", _SEEDS.value)
    extra = common.extra_flags(_TRAIN_FLAGS.value)
    aucs, bests, shares = [], [], []
    for count in counts:
        name = f"generated:{count}:{_KEYS.value}:{_RATE.value}"
        records = []
        for seed in seeds:
            given = {"data": name, "seed": seed, **MODEL, **extra}
            folder = Path(_RECORDS.value) / f"{name.replace(':', '_')}_{seed}"
            records.append(common.train(given, folder))
        aucs.append([record["test"]["auc"] for record in records])
        bests.append([record["best_auc"] for record in records])
        ways = [(auc - 0.5) / (best - 0.5) for auc, best in zip(aucs[-1], bests[-1], strict=True)]
        shares.append(ways)
        print(f"{count:,} examples: AUC {aucs[-1]} of {bests[-1]}", flush=True)
    columns = [
        summary.column("examples", counts, "{:,}"),
        summary.column("test AUC", aucs, "{:.4f}", "median each"),
        summary.column("best possible AUC", bests, "{:.4f}", "median"),
        summary.column("fraction of the best gain over 0.5", shares, "{:.1%}", "median each"),
    ]
    part = f"26 fields of 10 to {_KEYS.value} keys, click rate {_RATE.value}"
    claims = {"fraction_of_best": summary.claim(shares[-1], ENOUGH, "higher")}
    print(summary.write("reaching_best", part, {"": columns}, claims))


if __name__ == "__main__":
    app.run(main)
