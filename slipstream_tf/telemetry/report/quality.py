"""Panels of quality: the test part and the training inputs, against inputs and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream_tf.telemetry.report.panels import Panel, Point
from slipstream_tf.telemetry.report.runs import Run, number

GROUP = "Quality"


class _Axis(NamedTuple):
    key: str
    word: str
    label: str
    meaning: str


class _Measure(NamedTuple):
    key: str
    title: str
    label: str
    meaning: str
    best: float | None = None


_AXES = (
    _Axis("inputs_trained", "inputs", "inputs trained", "inputs trained"),
    _Axis("seconds", "seconds", "seconds", "seconds of training, evaluations left out"),
)
_MEASURES = (
    _Measure(
        "auc", "Test AUC", "AUC", "area under the ROC curve of the test part (higher is better)"
    ),
    _Measure(
        "log_loss", "Test log loss", "log loss", "nats per input of the test part (lower is better)"
    ),
    _Measure(
        "calibration",
        "Calibration",
        "calibration",
        "mean prediction / mean label of the test part (1, the gray line, is best)",
        1.0,
    ),
)


def panels(runs: Sequence[Run]) -> list[Panel]:
    """Returns the panels, filled."""
    found = []
    for measure in _MEASURES:
        for axis in _AXES:
            found.append(_tested_panel(runs, measure, axis))
    found.append(_training_panel(runs, "loss", "log loss", "mean log loss, nats per input,"))
    found.append(_training_panel(runs, "auc", "AUC", "area under the ROC curve"))
    return found


def _tested_panel(runs: Sequence[Run], measure: _Measure, axis: _Axis) -> Panel:
    panel = Panel(
        GROUP,
        f"{measure.key}_by_{axis.word}",
        f"{measure.title} by {axis.word}",
        f"Across: {axis.meaning}; up: {measure.meaning}; a point per evaluation.",
        axis.label,
        measure.label,
        best=measure.best,
    )
    return panel.filled(runs, lambda run: {"": _tested(run, axis.key, measure.key)})


def _training_panel(runs: Sequence[Run], key: str, label: str, meaning: str) -> Panel:
    caption = (
        f"Across: inputs trained; up: {meaning} of all inputs trained so far, each before the step "
        "that trained it; runs that skip inputs are measured on other ones."
    )
    title = f"Training {label} so far"
    panel = Panel(GROUP, f"training_{key}", title, caption, "inputs trained", label)
    return panel.filled(
        runs,
        lambda run: {
            "": [
                (number(place.get("inputs_trained")), number(place.get(key)))
                for place in run.entries("progress")
            ]
        },
    )


def _tested(run: Run, x: str, y: str) -> list[Point]:
    evaluations = run.entries("evaluations")
    if evaluations:
        return [(number(place.get(x)), number(place.get(y))) for place in evaluations]
    # A record from before there were evaluations on the way.
    end = run.number("inputs", "trained") if x == "inputs_trained" else training_seconds(run)
    return [(end, run.number("test", y))]


def training_seconds(run: Run) -> float | None:
    """Seconds of training, window ends included."""
    parts = [run.number("seconds", phase) for phase in ("training", "window_ends")]
    return None if None in parts else sum(part for part in parts if part is not None)
