"""The numbers of a report as CSV files, one per table and panel."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from typing import Any

from slipstream_tf.telemetry.report.panels import Panel


def write_table(path: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes a CSV file in UTF-8; None becomes an empty cell."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def write_panel(path: str, panel: Panel) -> None:
    """Writes a panel's points: run, part (where a run has several curves), x, y.

    The columns of x and y are named as the axes; bars have the column "category" instead of x.
    """
    if panel.categories:
        header = ("run", "category", panel.x_label)
        rows: list[tuple[Any, ...]] = [
            (curve.run, panel.categories[int(x)], y)
            for curve in panel.curves
            for x, y in curve.points
        ]
    else:
        header = ("run", "part", panel.x_label, panel.y_label)  # type: ignore[assignment]
        rows = [(curve.run, curve.part, x, y) for curve in panel.curves for x, y in curve.points]
    write_table(path, header, rows)
