"""Computes figures, a table and a plot from the records of mask_and_defer.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import summary
from common import difference, pyplot, spread

Figures = Mapping[str, Mapping[int, Mapping[str, Any]]]
MAX_AUC_LOSS = 0.001  # The value of `max_auc_loss` in the runs named budget_*.
_CLAIMED = ("paper", "mask", "defer_0.0", "budget")
_MARKERS = {"stop": "v", "random": "x", "budget": "^", "mask": "s", "fae": "*"}
_NEAR = 0.003


def baseline(ranks: int) -> str:
    """Returns the plain run that counts rows for these ranks."""
    return "plain_rows" if ranks == 1 else f"plain_rows_{ranks}"


def collect(
    records: Mapping[str, Mapping[int, Any]],
    matches: Mapping[str, str],
    ranks: Mapping[str, int],
) -> dict[str, dict[int, dict[str, Any]]]:
    """Computes the figures of every run from its record.

    Rows are counted after the warm-up of the run. For a control, it is the warm-up of the run that
    it repeats. The rows of plain training are counted over the same examples with the same number
    of ranks.

    Args:
        records: run -> seed -> record. They must include "plain" and the baselines.
        matches: control -> the run that it repeats.
        ranks: run -> its number of simulated ranks.

    Returns:
        run -> seed -> figure -> value. Row figures are None for runs without windows.
    """
    figures: dict[str, dict[int, dict[str, Any]]] = {}
    for name, by_seed in records.items():
        figures[name] = {}
        for seed, record in by_seed.items():
            plain = records["plain"][seed]
            test, inputs, phases = record["test"], record["examples"], record["seconds"]
            timed_by = records[matches.get(name, name)][seed]
            offered_by = records.get(baseline(ranks[name]), {}).get(seed)
            figures[name][seed] = {
                "auc": test["auc"],
                "auc_difference": None
                if name == "plain"
                else difference(test["auc"], plain["test"]["auc"]),
                "log_loss": test["log_loss"],
                "calibration": test["calibration"],
                "examples_trained": inputs["trained"],
                "inputs_share": inputs["trained"] / plain["examples"]["trained"],
                "seconds": phases["training"] + phases["window_ends"],
                "ranks": ranks[name] if record["windows"] else None,
                **_rows(record, timed_by, offered_by),
            }
    return figures


def _rows(
    record: Mapping[str, Any],
    timed_by: Mapping[str, Any],
    plain: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Returns rows and bytes after the warm-up of `timed_by`.

    `plain` provides the row counts of all examples.
    """
    if not record["windows"]:
        names = ("rows_offered", "rows_sent", "bytes_offered", "bytes_sent", "rows_share")
        return dict.fromkeys(names)
    # No example is dropped during the warm-up, so these windows have the same examples in all runs.
    warming_up = sum(window["is_warming_up"] for window in timed_by["windows"])
    counts = _sums(record["windows"][warming_up:])
    for name, flushed in _last_flush(record).items():
        counts[name] += flushed
    offered = _sums(plain["windows"][warming_up:])["rows_offered"] if plain else 0
    fraction = counts["rows_sent"] / offered if offered else None
    return {**counts, "rows_share": fraction}


def _last_flush(record: Mapping[str, Any]) -> dict[str, int]:
    """Returns the deferred rows at the end of training.

    Evaluation flushes them, and no window counts them.
    """
    rows = nbytes = 0
    for table in record["windows"][-1]["tables"]:
        left = record["gradient_rows"][table["table"]]["sent"] - sum(
            before["rows"]["sent"]
            for window in record["windows"]
            for before in window["tables"]
            if before["table"] == table["table"]
        )
        rows += left
        nbytes += left * (8 + 4 * table["dim"])  # An int64 key and float32 values.
    return {"rows_sent": rows, "bytes_sent": nbytes}


def _sums(windows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    tables = [table for window in windows for table in window["tables"]]
    return {
        "rows_offered": sum(table["rows"]["offered"] for table in tables),
        "rows_sent": sum(table["rows"]["sent"] for table in tables),
        "bytes_offered": sum(table["bytes_offered"] for table in tables),
        "bytes_sent": sum(table["bytes_sent"] for table in tables),
    }


def table_of(figures: Figures) -> list[dict[str, Any]]:
    """Returns the columns with a row for each run."""

    def of(name: str, figure: str, form: str, show: str = "mean") -> Any:
        found = [[seed[figure] for seed in by_seed.values()] for by_seed in figures.values()]
        known = [None if None in values else values for values in found]
        return summary.column(name, known, form, show)

    return [
        summary.column("run", list(figures)),
        of("AUC", "auc", "{:.4f}"), of("AUC - plain", "auc_difference", "{:+.4f}", "mean each"),
        of("log loss", "log_loss", "{:.4f}"), of("calibration", "calibration", "{:.3f}"),
        of("examples", "inputs_share", "{:.1%}"), of("rows sent / plain", "rows_share", "{:.1%}"),
        of("seconds", "seconds", "{:.1f}"),
    ]  # fmt: skip


def claims_of(data: str, figures: Figures) -> dict[str, Any]:
    """Returns the claims on AUC; runs with `max_auc_loss` have a target."""
    return {
        f"{data}_{name}_auc_minus_plain": summary.claim(
            [figures[name][seed]["auc_difference"] for seed in figures[name]],
            -MAX_AUC_LOSS if name.startswith("budget") else None,
            "higher",
            statistics.fmean,
        )
        for name in figures
        if name.startswith(_CLAIMED)
    }


def plot(data: str, figures: Figures, path: Path) -> None:
    """Plots the change of AUC over the fraction of rows sent."""
    plots = pyplot(path.name)
    if plots is None:
        return
    figure, panels = plots.subplots(1, 2, figsize=(14, 6), layout="constrained")
    for axes in panels:
        axes.axhline(0.0, color="gray", linewidth=0.8)
        axes.set_prop_cycle(color=plots.get_cmap("tab20").colors)  # one color per run
        axes.set_xlabel("gradient rows sent after warm-up, as a share of plain training's")
        _draw(axes, figures)
    panels[0].set_ylabel("test AUC, difference to plain training")
    panels[0].set_title(f"{data}: mean and standard deviation over seeds")
    panels[1].set_title(f"the same, differences up to {_NEAR:g} only")
    panels[1].set_ylim(-_NEAR, _NEAR)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=110)
    plots.close(figure)
    print(f"Plot: {path}")


def _draw(axes: Any, figures: Figures) -> None:
    for name, by_seed in figures.items():
        points = [f for f in by_seed.values() if _is_point(f)]
        if name.startswith("plain") or not points:
            continue
        fraction, auc = ([p[k] for p in points] for k in ("rows_share", "auc_difference"))
        spreads = [spread(values) for values in (fraction, auc)]
        axes.errorbar(
            statistics.mean(fraction), statistics.mean(auc), xerr=spreads[0], yerr=spreads[1],
            marker=_MARKERS.get(name.split("_")[0], "o"), capsize=3, linestyle="none", label=name,
        )  # fmt: skip


def _is_point(figures: Mapping[str, Any]) -> bool:
    return figures["rows_share"] is not None and figures["auc_difference"] is not None
