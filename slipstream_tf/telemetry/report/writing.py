"""Writes a report's folder. In: runs. Out: report.html, png/ and csv/, a file per plot."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slipstream_tf.telemetry.report import drawing, page, plots, windows
from slipstream_tf.telemetry.report.panels import Panel
from slipstream_tf.telemetry.report.runs import Run
from slipstream_tf.telemetry.report.summary import csv_rows, differing_settings

PAGE = "report.html"


def write_report(
    runs: Sequence[Run], folder: str, progress: Callable[[int, int], None] = lambda done, all: None
) -> str:
    """Writes the report; files of an earlier one are replaced.

    Args:
        runs: at least one, names all different.
        folder: made if need be.
        progress: called with the plots that are written, and how many there will be.

    Returns:
        The page's path.

    Raises:
        OSError: a file cannot be written.
        ImportError: matplotlib is missing.
    """
    drawing.require_matplotlib()
    pictures, tables = (os.path.join(folder, name) for name in ("png", "csv"))
    for path in (pictures, tables):
        os.makedirs(path, exist_ok=True)
    color_of = drawing.colors([run.name for run in runs])
    panels = [*plots.quality(runs), *windows.panels(runs), *plots.costs(runs)]
    drawings = {}
    for done, panel in enumerate(panels, 1):
        drawings[panel.name] = drawing.svg(panel, color_of)
        drawing.write_png(panel, color_of, os.path.join(pictures, f"{panel.name}.png"))
        _write_panel(os.path.join(tables, f"{panel.name}.csv"), panel)
        progress(done, len(panels))
    _write_table(os.path.join(tables, "summary.csv"), *csv_rows(runs))
    header = ["setting", *(run.name for run in runs)]
    rows = [[name, *values] for name, values in differing_settings(runs)]
    _write_table(os.path.join(tables, "settings_that_differ.csv"), header, rows)
    path = os.path.join(folder, PAGE)
    with open(path, "w", encoding="utf-8") as file:
        file.write(page.render(runs, panels, drawings, color_of))
    return path


def _write_table(path: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes a CSV file in UTF-8; None becomes an empty cell."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def _write_panel(path: str, panel: Panel) -> None:
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
    _write_table(path, header, rows)
