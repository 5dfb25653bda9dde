"""The report in a browser: drawn plots, readable pages, no code injection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

matplotlib_image = pytest.importorskip("matplotlib.image")

from slipstream_tf.telemetry.report.drawing import colors  # noqa: E402
from slipstream_tf.telemetry.report.runs import read_runs  # noqa: E402
from slipstream_tf.telemetry.report.writing import write_report  # noqa: E402

WIDTHS = (1280, 390)
HOSTILE = "<img src=x onerror=alert(1)>$_{ &amp; \"'`"
# Returns the box of every plot and the texts that name the runs in the plot.
PLOTS = """
[...document.querySelectorAll('figure')].map(figure => {
  const box = figure.querySelector('svg').getBoundingClientRect();
  return {
    name: figure.id, x: box.x + scrollX, y: box.y + scrollY, width: box.width,
    height: box.height, words: figure.querySelector('figcaption').innerText,
    colors: [...figure.querySelectorAll('.chip')].map(chip => chip.style.background),
  };
})
"""
TOO_WIDE = """
[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll > table, svg'))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
  .map(e => e.tagName + ' ' + e.textContent.slice(0, 60))
"""


def has_color(image: np.ndarray, color: tuple[int, int, int]) -> bool:
    return bool((np.abs(image * 255 - np.array(color)).max(axis=-1) <= 6).sum() >= 8)


def test_report_draws_every_plot_within_page_width(
    browser: Any, make_record: Callable[..., Any], write_run: Any, tmp_path: Path
) -> None:
    names = ["plain", "paper", "a_name_without_a_blank_" * 4]
    paths = []
    for index, name in enumerate(names):
        record = make_record(1.0 - 0.06 * index)
        record["settings"]["data"] = f"/a/path/that/cannot/be/broken/into/lines/{index}" * 2
        paths.append(write_run(name, record))
    page = write_report(read_runs(paths), str(tmp_path / "report"))
    for width in WIDTHS:
        browser.open(page, width)
        assert browser.evaluate("innerWidth") == width
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(TOO_WIDE) == []
        tables = "[...document.querySelectorAll('table')].map(t => t.parentNode.className)"
        assert browser.evaluate(tables) == ["scroll", "scroll"]
        require_drawn(browser, len(names), tmp_path / "plot.png")
        urls = [url for url in browser.requests if not url.startswith("data:")]
        assert urls == [Path(page).as_uri()]
        assert browser.complaints == []


def require_drawn(browser: Any, num_runs: int, picture: Path) -> None:
    """Asserts that every plot is large and has every run's color."""
    plots = browser.evaluate(PLOTS)
    assert len(plots) == 24
    for plot in plots:
        assert plot["width"] >= 330 and plot["height"] >= 220, plot
        assert plot["words"].startswith("Horizontal: ") and plot["words"].endswith("."), plot
        browser.screenshot(picture, *(plot[name] for name in ("x", "y", "width", "height")))
        image = matplotlib_image.imread(picture)[..., :3]
        assert len(plot["colors"]) == num_runs, plot["name"]
        for color in plot["colors"]:
            red, green, blue = map(int, color.removeprefix("rgb(").removesuffix(")").split(","))
            assert has_color(image, (red, green, blue)), (plot["name"], color)
        assert not has_color(image, (255, 0, 255)), "no color that nobody has"


def test_html_in_record_is_escaped(
    browser: Any, make_record: Callable[..., Any], write_run: Any, tmp_path: Path
) -> None:
    record = make_record()
    script = (
        "</td></table></svg><script>alert(2)</script><img src=//example.com/x onerror=alert(3)>"
    )
    record["settings"] = {script: script, "engine": {script: script}}
    record["test"]["auc"] = script
    record["windows"][2]["drift_quantiles"] = script
    record["ranks"] = {"size": script, "bytes": {script: script}}
    paths = [write_run("plain", make_record()), write_run(HOSTILE, record)]
    page = write_report(read_runs(paths), str(tmp_path / "report"))
    browser.open(page, 1280)
    assert browser.evaluate("document.querySelectorAll('img, script, iframe, object').length") == 0
    assert browser.evaluate("document.querySelectorAll('[onerror], [onload]').length") == 0
    text = browser.evaluate("document.body.innerText")
    assert HOSTILE in text and script[:77] in text
    assert browser.requests and all(u.startswith(("file:", "data:")) for u in browser.requests)
    assert browser.complaints == []


def test_runs_have_stable_distinct_colors() -> None:
    for count in (1, 2, 8, 9, 40):
        found = colors([f"run {i}" for i in range(count)])
        assert len(set(found.values())) == count
        assert all(len(color) == 7 and color[0] == "#" for color in found.values())
