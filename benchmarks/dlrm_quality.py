"""What mixed_bfloat16 does to quality: runs of slipstream-train in both dtypes, seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common

from slipstream_tf.telemetry.run_record import machine, versions, write_json

MOST_DIFFERENCE = 0.0005
_DTYPES = ("float32", "mixed_bfloat16")


def compare(
    data: str | None, seeds: Sequence[int], shared: Mapping[str, Any], records: Path, output: Path
) -> None:
    """Trains, prints and writes dlrm_quality.json and .md.

    A run whose metrics.json is there is not run again.

    Args:
        data: of slipstream-train; None: globo in the data folder.
        seeds: of the runs.
        shared: flags of slipstream-train for all runs.
        records: folder of the runs.
        output: folder of the results.
    """
    data = data or common.in_data_folder("globo_clicks.npz")
    found: dict[str, dict[int, Mapping[str, Any]]] = {dtype: {} for dtype in _DTYPES}
    for seed in seeds:
        for dtype in _DTYPES:
            print(f"seed {seed}: {dtype}", flush=True)
            given = {"data": data, "epochs": 1, **shared, "seed": seed, "precision": dtype}
            record = common.train(given, records / f"seed{seed}" / dtype)
            found[dtype][seed] = record["test"]
    differences = [found["mixed_bfloat16"][s]["auc"] - found["float32"][s]["auc"] for s in seeds]
    mean = statistics.mean(differences)
    write_json(
        str(output / "dlrm_quality.json"),
        {"quality": found, "differences": differences, "difference": mean,
         "asked": MOST_DIFFERENCE, "reached": abs(mean) <= MOST_DIFFERENCE, "seeds": list(seeds),
         "flags": dict(shared), "machine": machine(), "versions": versions()},
    )  # fmt: skip
    table = markdown(found, differences)
    (output / "dlrm_quality.md").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}")


def markdown(
    found: Mapping[str, Mapping[int, Mapping[str, Any]]], differences: Sequence[float]
) -> str:
    """Returns the table."""
    lines = ["# AUC in float32 and mixed_bfloat16", ""]
    lines += ["| seed | float32 | mixed_bfloat16 | difference |", "|---|---|---|---|"]
    for seed, difference in zip(found["float32"], differences, strict=True):
        aucs = " | ".join(f"{found[dtype][seed]['auc']:.5f}" for dtype in _DTYPES)
        lines.append(f"| {seed} | {aucs} | {difference:+.5f} |")
    mean = statistics.mean(differences)
    word = "reached" if abs(mean) <= MOST_DIFFERENCE else "**not reached**"
    lines += ["", f"Difference: {common.mean(list(differences), '{:+.5f}')}. Asked: at most "
                  f"{MOST_DIFFERENCE} either way: {word}."]  # fmt: skip
    return "\n".join(lines)
