"""Writes a report's folder. In: runs. Out: report.html, png/ and csv/, a file per plot."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from slipstream_tf.telemetry.report import costs, csv_files, drawing, page, quality, windows
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
    panels = [*quality.panels(runs), *windows.panels(runs), *costs.panels(runs)]
    drawings = {}
    for done, panel in enumerate(panels, 1):
        drawings[panel.name] = drawing.svg(panel, color_of)
        drawing.write_png(panel, color_of, os.path.join(pictures, f"{panel.name}.png"))
        csv_files.write_panel(os.path.join(tables, f"{panel.name}.csv"), panel)
        progress(done, len(panels))
    csv_files.write_table(os.path.join(tables, "summary.csv"), *csv_rows(runs))
    header = ["setting", *(run.name for run in runs)]
    rows = [[name, *values] for name, values in differing_settings(runs)]
    csv_files.write_table(os.path.join(tables, "settings_that_differ.csv"), header, rows)
    path = os.path.join(folder, PAGE)
    with open(path, "w", encoding="utf-8") as file:
        file.write(page.render(runs, panels, drawings, color_of))
    return path
