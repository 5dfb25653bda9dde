"""Draws the README's figure: step times and AUC of a run.

    python benchmarks/overview.py

It reads results/embedding_step.json and the records of time_to_quality.py for Criteo's shape, and
writes results/overview.png.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import curves
import summary
from absl import app, flags

from slipstream_tf.telemetry.curves import SECONDS, curve

_STEPS = flags.DEFINE_string(
    "steps",
    "benchmarks/results/embedding_step.json",
    "Path of the JSON summary of embedding_step.py.",
)
_RUNS = flags.DEFINE_string(
    "runs", "runs/time_to_quality/criteo/runs", "Folder of the run records of time_to_quality.py."
)
_RULE, _FIRST = "adagrad", "slipstream_tf, ops"
_LIBRARIES = {
    _FIRST: "slipstream_tf",
    "FBGEMM, table-batched": "FBGEMM",
    "TFRA, dynamic embedding": "TFRA",
    "Keras 3, Embedding": "Keras",
}
# Systems in the records. The line style is combined with the library's color.
_SYSTEMS = {
    "slipstream_bfloat16": ("slipstream_tf, bfloat16", "C0", "--"),
    "slipstream": ("slipstream_tf", "C0", "-"),
    "torch_bfloat16": ("PyTorch and FBGEMM, bfloat16", "C1", "--"),
    "torch_compiled": ("PyTorch and FBGEMM", "C1", "-"),
    "tfra": ("TFRA", "C2", "-"),
    "keras": ("Keras", "C3", "-"),
    "parameter_server": ("TensorFlow's parameter servers", "C4", "-"),
}


def steps(path: Path) -> dict[str, float]:
    """Returns the median milliseconds of a step by library."""
    part = next(iter(json.loads(path.read_text(encoding="utf-8"))["parts"].values()))
    columns = {column["name"]: column["values"] for column in part["tables"][""]}
    rows = zip(columns["rule"], columns["library"], columns["ms a step"], strict=True)
    return {
        _LIBRARIES[library]: statistics.median(values)
        for rule, library, values in rows
        if rule == _RULE and library in _LIBRARIES
    }


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of all seeds by system.

    Raises:
        SystemExit: If a system has no records.
    """
    found = {}
    for name in _SYSTEMS:
        paths = sorted(folder.glob(f"{name}/seed_*/{common.RECORD}"))
        if not paths:
            raise SystemExit(f"{folder / name} contains no records. Run time_to_quality.py first.")
        each = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        found[name] = [curves.with_even_rest(record) for record in each]
    return found


def main(arguments: Sequence[str]) -> None:
    """Draws the figure."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    of_step, of_runs = steps(Path(_STEPS.value)), records(Path(_RUNS.value))
    path = summary.output() / "overview.png"
    plots = common.pyplot(path.name)
    if plots is None:
        return
    figure, (left, right) = plots.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    names, values = list(of_step), list(of_step.values())
    bars = left.barh(names, values, color=[f"C{i}" for i in range(len(names))])
    left.bar_label(bars, [f"{value:.1f} ms" for value in values], padding=3)
    left.set_xlim(right=1.2 * max(values))
    left.invert_yaxis()
    left.set_title("A step of 26 tables with Adagrad, batches of 2,048")
    left.set_xlabel("milliseconds")
    for name, (label, color, line) in _SYSTEMS.items():
        at, means = curves.mean_curve([curve(record, SECONDS) for record in of_runs[name]])
        right.plot(at, means, line, color=color, label=label)
    right.set_ylim(bottom=0.77)
    right.set_title("A DLRM on generated clicks of Criteo's shape")
    right.set_xlabel("seconds")
    right.set_ylabel("test AUC")
    right.grid(alpha=0.3)
    right.legend(loc="lower right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plots.close(figure)
    print(path)


if __name__ == "__main__":
    app.run(main)
