"""Draws panels with matplotlib, as SVG elements and PNG files.

Both have the same size: about as wide as a phone screen, or a third of a desktop screen. The font
size therefore matches the page in both formats.
"""

import io
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf.telemetry.report.plots import Line, Panel

_WIDTH, _HEIGHT = 4.2, 2.9  # inches
_DPI = 150
_STYLES = ("-", "--", ":", "-.")
# Distinguishable for most people with red-green blindness (Okabe and Ito), and dark enough.
_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#56b4e9", "#111111", "#7a3b8f"),
)
_FEW_POINTS = 12
# Earlier runs have thicker lines, so that later lines do not hide them.
_THICKEST, _THINNEST = 2.8, 1.2
_LONGEST_NAME = 44
_RC = {
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "svg.fonttype": "path",
    "svg.hashsalt": "slipstream",
    "axes.formatter.useoffset": False,
}


def require_matplotlib() -> None:
    """Raises ImportError with install instructions if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Plots need matplotlib, but its import failed: {error}. Run: pip install "
            "'slipstream-tf[report]' (or: pip install matplotlib)."
        ) from None


def colors(names: Sequence[str]) -> dict[str, str]:
    """Returns a color (#rrggbb) for each run, the same in all panels."""
    if len(names) <= len(_COLORS):
        return dict(zip(names, _COLORS, strict=False))
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = colormaps["turbo"]
    count = len(names) - 1
    return {name: to_hex(shades(0.05 + 0.9 * i / count)) for i, name in enumerate(names)}


def svg(panel: Panel, color_of: Mapping[str, str]) -> str:
    """Returns an `<svg>` element that fills its container's width.

    It does not contain the names of the runs. The page lists them next to it.
    """
    file = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    _save(panel, color_of, file, is_alone=False, format="svg", metadata=metadata)
    # Remove parts that only a standalone file needs, and make ids unique within the page.
    text = file.getvalue()
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{panel.name}-", text)
    head, rest = text[text.index("<svg") :].split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, "matplotlib's SVG files have one"
    return f'<svg {box[0]} aria-hidden="true">{rest.strip()}'


def write_png(panel: Panel, color_of: Mapping[str, str], path: str) -> None:
    """Writes a PNG file with title and run names."""
    _save(panel, color_of, path, is_alone=True, format="png", dpi=_DPI)


def _save(
    panel: Panel, color_of: Mapping[str, str], target: Any, is_alone: bool, **options: Any
) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # The font may lack glyphs of a run's name. matplotlib then draws boxes.
    with rc_context(_RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*[Gg]lyph.*missing from")
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.subplots()
        if panel.categories:
            _draw_bars(axes, panel, color_of)
        else:
            _draw_lines(axes, panel, color_of)
        if is_alone:
            axes.set_title(panel.title, loc="left", fontsize=10.5)
            _name_runs(figure, panel, color_of)
            options["bbox_inches"] = "tight"
        figure.savefig(target, **options)


def _draw_lines(axes: Any, panel: Panel, color_of: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D

    parts = panel.parts
    styles = {part: _STYLES[i % len(_STYLES)] for i, part in enumerate(parts)}
    if panel.best is not None:
        axes.axhline(panel.best, color="#888888", linewidth=1.0, zorder=1)
    runs = runs_of(panel.curves)
    for curve in panel.curves:
        x, y = zip(*curve.points, strict=True)
        axes.plot(
            x, y, color=color_of[curve.run], linestyle=styles.get(curve.part, "-"),
            linewidth=_THICKEST - (_THICKEST - _THINNEST) * runs.index(curve.run) / len(runs),
            marker="o" if len(x) <= _FEW_POINTS and not parts else None, markersize=3.5,
        )  # fmt: skip
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    _set_ticks(axes, panel)
    if len(parts) > 1:
        handles = [Line2D([], [], color="#444444", linestyle=styles[part]) for part in parts]
        axes.legend(handles, parts, fontsize=8.5, frameon=True, framealpha=0.8, edgecolor="none")


def _set_ticks(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    if panel.x_is_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=6))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0.0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.y_is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    low, high = axes.get_ylim()
    if panel.y_is_log or high >= 1e4:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    values = [y for curve in panel.curves for _, y in curve.points]
    if low < 0.0 <= min(values):
        axes.set_ylim(bottom=0.0, top=None if any(values) else 1.0)


def _draw_bars(axes: Any, panel: Panel, color_of: Mapping[str, str]) -> None:
    from matplotlib.ticker import MaxNLocator

    width = 0.8 / len(panel.curves)
    for index, curve in enumerate(panel.curves):
        offset = (index - (len(panel.curves) - 1) / 2) * width
        x, lengths = zip(*curve.points, strict=True)
        middles = [category + offset for category in x]
        axes.barh(middles, lengths, height=0.9 * width, color=color_of[curve.run])
    axes.set_yticks(range(len(panel.categories)), panel.categories)
    axes.set_ylim(len(panel.categories) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(panel.x_label)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def absences(panel: Panel) -> list[str]:
    """Returns a sentence that names runs without data, and the panel's notes.

    Each note is about one run, for example that a single process sends no bytes.
    """
    missing = [f"Not recorded by {', '.join(panel.missing)}."] if panel.missing else []
    return [*missing, *panel.notes]


def runs_of(curves: Sequence[Line]) -> list[str]:
    """Returns the names of the runs that have curves, in order."""
    return list(dict.fromkeys(curve.run for curve in curves))


def _name_runs(figure: Any, panel: Panel, color_of: Mapping[str, str]) -> None:
    """Writes run names and the sentences of `absences` below a plot."""
    from matplotlib.lines import Line2D

    runs = runs_of(panel.curves)
    handles = [Line2D([], [], color=color_of[run], linewidth=3) for run in runs]
    labels = [run if len(run) <= _LONGEST_NAME else f"{run[:_LONGEST_NAME]}..." for run in runs]
    for line in (line for text in absences(panel) for line in textwrap.wrap(text, 58)):
        handles.append(Line2D([], [], linestyle="none"))
        labels.append(line)
    # matplotlib ignores labels that start with an underscore.
    legend = figure.legend(
        handles, [f" {label}" for label in labels], loc="upper left", bbox_to_anchor=(0.0, 0.0),
        fontsize=8.5, frameon=False, handlelength=1.2, labelspacing=0.25,
    )  # fmt: skip
    for written in legend.get_texts():
        written.set_parse_math(False)
