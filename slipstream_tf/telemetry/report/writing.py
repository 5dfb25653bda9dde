"""Writes a report: report.html, and a PNG and CSV file per plot.

The page is a single HTML file without scripts and external resources, enforced by its content
security policy. All text from records and paths is escaped.
"""

import csv
import html
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from slipstream_tf._version import __version__
from slipstream_tf.telemetry.report import drawing, plots
from slipstream_tf.telemetry.report.drawing import absences, runs_of
from slipstream_tf.telemetry.report.plots import Panel
from slipstream_tf.telemetry.report.runs import MEASURES, Run, csv_rows, differing_settings

PAGE = "report.html"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1440px; padding: 16px; background: #fff; color: #1a1a1a;
  font: 15px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 28px 0 8px; border-bottom: 1px solid #ddd; padding-bottom: 4px; }
h3 { font-size: 1rem; margin: 0; }
p { margin: 4px 0; max-width: 80ch; }
.scroll { overflow-x: auto; max-width: 100%; border: 1px solid #ddd; border-radius: 4px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
th, td { padding: 6px 10px; text-align: right; vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; }
td:first-child { background: #fff; }
table.settings th, table.settings td { text-align: left; }
td.name, th.name, table.settings td + td { white-space: normal; overflow-wrap: break-word;
  min-width: 8em; max-width: 24em; }
thead th { background: #f4f4f4; font-weight: 600; }
tbody tr + tr > * { border-top: 1px solid #eee; }
td small { display: block; color: #555; }
.chip { display: inline-block; width: 0.85em; height: 0.85em; border-radius: 2px;
  margin-right: 0.4em; vertical-align: -0.08em; }
.plots { display: grid; gap: 24px 20px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 560px; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-size: 0.87rem; color: #333; }
ul.key { list-style: none; margin: 2px 0 4px; padding: 0; display: flex; flex-wrap: wrap;
  gap: 0 14px; font-size: 0.87rem; }
.absent { color: #555; font-size: 0.87rem; }
footer { margin-top: 32px; color: #555; font-size: 0.87rem; }
"""


def write_report(
    runs: Sequence[Run], folder: str, progress: Callable[[list[Panel]], Iterable[Panel]] = iter
) -> str:
    """Writes the report and replaces the files of an earlier report.

    Args:
        runs: At least one run. The names must be distinct.
        folder: Output folder, created if missing.
        progress: Wraps the list of plots in an iterator, for example to show progress.

    Returns:
        The path of the page.

    Raises:
        OSError: A file cannot be written.
        ImportError: matplotlib is not installed.
    """
    drawing.require_matplotlib()
    pictures, tables = (os.path.join(folder, name) for name in ("png", "csv"))
    for path in (pictures, tables):
        os.makedirs(path, exist_ok=True)
    color_of = drawing.colors([run.name for run in runs])
    all_panels = [*plots.quality(runs), *plots.windows(runs), *plots.costs(runs)]
    panels = [panel for panel in all_panels if panel.curves]
    empty = [panel.title for panel in all_panels if not panel.curves]
    drawings = {}
    for panel in progress(panels):
        drawings[panel.name] = drawing.svg(panel, color_of)
        drawing.write_png(panel, color_of, os.path.join(pictures, f"{panel.name}.png"))
        _write_panel(os.path.join(tables, f"{panel.name}.csv"), panel)
    _write_table(os.path.join(tables, "summary.csv"), *csv_rows(runs))
    header = ["setting", *(run.name for run in runs)]
    rows = [[name, *values] for name, values in differing_settings(runs)]
    _write_table(os.path.join(tables, "settings_that_differ.csv"), header, rows)
    path = os.path.join(folder, PAGE)
    with open(path, "w", encoding="utf-8") as file:
        file.write(_page(runs, panels, drawings, color_of, empty))
    return path


def _write_table(path: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes a CSV file in UTF-8; None becomes an empty cell."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def _write_panel(path: str, panel: Panel) -> None:
    """Writes the points of a panel: run, part, x, y.

    "part" distinguishes the curves of a run, if there is more than one. The columns of x and y have
    the names of the axes. Bar plots have a column "category" instead of "part" and x.
    """
    points = [(curve, x, y) for curve in panel.curves for x, y in curve.points]
    if panel.categories:
        rows = [(curve.run, panel.categories[int(x)], y) for curve, x, y in points]
        _write_table(path, ("run", "category", panel.x_label), rows)
    else:
        lines = [(curve.run, curve.part, x, y) for curve, x, y in points]
        _write_table(path, ("run", "part", panel.x_label, panel.y_label), lines)


def _page(
    runs: Sequence[Run],
    panels: Sequence[Panel],
    drawings: Mapping[str, str],
    color_of: Mapping[str, str],
    empty: Sequence[str],
) -> str:
    """Returns the HTML page.

    Args:
        runs: The runs, in order. The others are compared with the first.
        panels: The panels, in order. Panels of a group are shown side by side.
        drawings: The `<svg>` element of each panel, by panel name.
        color_of: The color of each run, #rrggbb, by run name.
        empty: Titles of the panels that are omitted because no run has data for them.
    """
    groups = [
        f"<section>\n<h2>{_escape(group)}</h2>\n"
        f'<div class="plots">\n{"".join(_figure(p, drawings[p.name], color_of) for p in of)}</div>'
        "\n</section>"
        for group, of in groupby(panels, key=lambda panel: panel.group)
    ]
    count = f"{len(runs)} run" + ("s" if len(runs) > 1 else "")
    omitted = f'<p class="absent">No run has data for: {", ".join(empty)}.</p>' if empty else ""
    body = "\n".join([_summary(runs, color_of), _settings(runs, color_of), *groups, omitted])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>slipstream_tf: {count}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>slipstream_tf: {count}</h1>
{body}
<footer>Written by slipstream-report {_escape(__version__)}. The folder of this page
also has the plots as images (png/) and their numbers (csv/).</footer>
</body>
</html>
"""


def _summary(runs: Sequence[Run], color_of: Mapping[str, str]) -> str:
    head = "".join(f"<th>{_escape(measure.title)}</th>" for measure in MEASURES)
    rows = []
    for run in runs:
        cells = ""
        for measure in MEASURES:
            difference = "" if run is runs[0] else measure.difference_text(run, runs[0])
            small = f"<small>{_escape(difference)}</small>" if difference else ""
            cells += f"<td>{_escape(measure.text(run))}{small}</td>"
        rows.append(f'<tr><td class="name">{_named(run.name, color_of)}</td>{cells}</tr>')
    words = "Small: difference from the first run, in percent for counts, bytes and seconds."
    return (
        "<section>\n<h2>Summary</h2>\n"
        + (f"<p>{words}</p>\n" if len(runs) > 1 else "")
        + f'<div class="scroll" tabindex="0"><table class="summary"><thead><tr>'
        f'<th class="name">run</th>{head}</tr>'
        f"</thead><tbody>\n{chr(10).join(rows)}\n</tbody></table></div>\n</section>"
    )


def _settings(runs: Sequence[Run], color_of: Mapping[str, str]) -> str:
    if len(runs) < 2:
        return ""
    differing = differing_settings(runs)
    head = "<section>\n<h2>Settings that differ</h2>\n"
    if not differing:
        return f"{head}<p>All runs have the same settings.</p>\n</section>"
    names = "".join(f'<th class="name">{_named(run.name, color_of)}</th>' for run in runs)
    rows = "\n".join(
        f"<tr><td>{_escape(name)}</td>{''.join(f'<td>{_escape(v)}</td>' for v in values)}</tr>"
        for name, values in differing
    )
    return (
        f'{head}<div class="scroll" tabindex="0"><table class="settings"><thead><tr>'
        f"<th>setting</th>{names}</tr></thead><tbody>\n{rows}\n</tbody></table></div>\n</section>"
    )


def _figure(panel: Panel, drawing: str, color_of: Mapping[str, str]) -> str:
    key = "".join(f"<li>{_named(run, color_of)}</li>" for run in runs_of(panel.curves))
    absent = "".join(f'<p class="absent">{_escape(text)}</p>' for text in absences(panel))
    return (
        f'<figure id="plot-{panel.name}">\n<h3>{_escape(panel.title)}</h3>\n{drawing}\n'
        f'<ul class="key">{key}</ul>\n{absent}\n'
        f"<figcaption>{_escape(panel.caption)}</figcaption>\n</figure>\n"
    )


def _named(run: str, color_of: Mapping[str, str]) -> str:
    return f'<span class="chip" style="background:{color_of[run]}"></span>{_escape(run)}'


def _escape(text: str) -> str:
    return html.escape(text, quote=True).encode("utf-8", "replace").decode()
