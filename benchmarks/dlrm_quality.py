"""What mixed_bfloat16 does to quality: runs of slipstream-train in both dtypes, seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import summary

MOST_DIFFERENCE = 0.0005
_DTYPES = ("float32", "mixed_bfloat16")


def compare(
    data: str | None, seeds: Sequence[int], shared: Mapping[str, Any], records: Path
) -> None:
    """Trains, prints and writes.

    A run whose metrics.json is there is not run again.

    Args:
        data: of slipstream-train; None: globo, which is prepared first.
        seeds: of the runs.
        shared: flags of slipstream-train for all runs.
        records: folder of the runs.
    """
    opened = {"data": data} if data else common.prepared("globo")
    found: dict[str, dict[int, Mapping[str, Any]]] = {dtype: {} for dtype in _DTYPES}
    for seed in seeds:
        for dtype in _DTYPES:
            print(f"seed {seed}: {dtype}", flush=True)
            common_flags = {**opened, "epochs": 1, **common.by_hand(opened["data"]), **shared}
            given = {**common_flags, "seed": seed, "precision": dtype}
            record = common.train(given, records / f"seed{seed}" / dtype)
            found[dtype][seed] = record["test"]
    tables, claims = results_of(found)
    print(summary.write("dlrm_step", "AUC in both dtypes", tables, claims))


def results_of(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> tuple[Any, Any]:
    """Returns the table and the claim of the quality by dtype and seed."""
    aucs = [[quality["auc"] for quality in found[dtype].values()] for dtype in _DTYPES]
    differences = [ours - theirs for theirs, ours in zip(*aucs, strict=True)]
    columns = [
        summary.column("seed", [str(seed) for seed in found["float32"]]),
        *(summary.column(name, v, "{:.5f}") for name, v in zip(_DTYPES, aucs, strict=True)),
        summary.column("difference", differences, "{:+.5f}"),
    ]
    target = -MOST_DIFFERENCE
    claim = summary.claim(differences, target, "higher", statistics.fmean)
    return {"": columns}, {"bfloat16_auc_minus_float32": claim}
