"""Panels of quality against inputs and seconds, and of costs: bytes by kind, seconds by phase."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf.telemetry.report.panels import Panel, Point
from slipstream_tf.telemetry.report.runs import Run, entry, number
from slipstream_tf.telemetry.report.windows import over_windows

QUALITY, BYTES, TIME = "Quality", "Bytes", "Time"
# Key of a place on the curve, word for a title, label, meaning.
_AXES = (
    ("inputs_trained", "inputs", "inputs trained", "inputs trained"),
    ("seconds", "seconds", "seconds", "seconds of training, evaluations left out"),
)
# Key, title, label, meaning, best value.
_MEASURES = (
    ("auc", "Test AUC", "AUC",
     "area under the ROC curve of the test part (higher is better)", None),
    ("log_loss", "Test log loss", "log loss",
     "nats per input of the test part (lower is better)", None),
    ("calibration", "Calibration", "calibration",
     "mean prediction / mean label of the test part (1, the gray line, is best)", 1.0),
)  # fmt: skip
_TRAINING = (
    ("loss", "log loss", "mean log loss, nats per input,"),
    ("auc", "AUC", "area under the ROC curve"),
)
_MEGA = 1e6
_KINDS = ("keys", "rows", "gradients", "deferred", "dense", "control")
_PHASES = ("reading", "training", "window_ends", "evaluation")
# What a step is made of, of the phases of a run.
_STEP_PHASES = ("training", "window_ends")


def quality(runs: Sequence[Run]) -> list[Panel]:
    """Returns the panels of the test part and of the training inputs, filled."""
    found = []
    for key, title, label, meaning, best in _MEASURES:
        for x_key, word, x_label, x_meaning in _AXES:
            caption = f"Across: {x_meaning}; up: {meaning}; a point per evaluation."
            names = f"{key}_by_{word}", f"{title} by {word}"
            panel = Panel(QUALITY, *names, caption, x_label, label, best=best)
            found.append(panel.filled(runs, functools.partial(_tested, x=x_key, y=key)))
    for key, label, meaning in _TRAINING:
        caption = (
            f"Across: inputs trained; up: {meaning} of all inputs trained so far, each before the "
            "step that trained it; runs that skip inputs are measured on other ones."
        )
        title = f"Training {label} so far"
        panel = Panel(QUALITY, f"training_{key}", title, caption, "inputs trained", label)
        found.append(panel.filled(runs, functools.partial(_trained, y=key)))
    return found


def _trained(run: Run, y: str) -> dict[str, list[Point]]:
    return {"": run.points("progress", "inputs_trained", y)}


def _tested(run: Run, x: str, y: str) -> dict[str, list[Point]]:
    if run.entries("evaluations"):
        return {"": run.points("evaluations", x, y)}
    # A record from before there were evaluations on the way.
    end = run.number("inputs", "trained") if x == "inputs_trained" else run.training_seconds
    return {"": [(end, run.number("test", y))]}


def costs(runs: Sequence[Run]) -> list[Panel]:
    """Returns the panels of bytes and time, filled."""
    return [
        Panel(
            BYTES, "bytes_by_kind", "Bytes between ranks by kind",
            "Across: megabytes (10^6) that all ranks gave to the network in training; down: what "
            "for.",
            "MB", "", categories=_KINDS,
        ).filled(
            runs,
            lambda run: {} if _is_alone(run) else {"": _bars(run, "ranks.bytes", _KINDS, _MEGA)},
            _note_of_one_process,
        ),
        Panel(
            BYTES, "bytes_by_window", "Bytes between ranks per step",
            "Across: inputs seen, skipped ones included, at a window's end; up: kilobytes (10^3) "
            "of all kinds that all ranks gave to the network, per step of the window.",
            "inputs seen", "kB per step",
        ).filled(runs, lambda run: {"": _bytes_per_step(run)}, _note_of_one_process),
        Panel(
            BYTES, "gradient_bytes", "Bytes of gradient rows",
            "Across: megabytes (10^6) of gradient rows, keys included, as offered by training "
            "steps and as sent; down: which.",
            "MB", "", categories=("offered", "sent"),
        ).filled(runs, lambda run: {"": _gradient_bytes(run)}),
        Panel(
            TIME, "step_phases", "Phases of a step",
            "Across: mean milliseconds per trained step, the first included; down: training "
            "(reading of batches and exchange between ranks included) and window ends.",
            "ms per step", "", categories=tuple(map(_words, _STEP_PHASES)),
        ).filled(runs, lambda run: {"": _step_phases(run)}),
        Panel(
            TIME, "step_milliseconds", "Milliseconds per step",
            "Across: inputs trained; up: milliseconds per step, window ends included, of the steps "
            "since the point before.",
            "inputs trained", "ms per step", y_is_log=True,
        ).filled(runs, lambda run: {"": _step_milliseconds(run)}),
        Panel(
            TIME, "phases", "Phases of the run", "Across: seconds; down: what they were spent on.",
            "seconds", "", categories=tuple(map(_words, _PHASES)),
        ).filled(runs, lambda run: {"": _bars(run, "seconds", _PHASES, 1.0)}),
    ]  # fmt: skip


def _words(name: str) -> str:
    return name.replace("_", " ")


def _bars(run: Run, place: str, names: Sequence[str], unit: float) -> list[Point]:
    values = [run.number(*place.split("."), name) for name in names]
    return [(float(i), None if v is None else v / unit) for i, v in enumerate(values)]


def _note_of_one_process(run: Run) -> str:
    return f"{run.name}: one process, nothing goes between ranks." if _is_alone(run) else ""


def _is_alone(run: Run) -> bool:
    return run.number("ranks", "size") == 1


def _bytes_per_step(run: Run) -> list[Point]:
    steps: list[float] = [0.0]

    def per_step(window: Mapping[str, Any]) -> float | None:
        step, traffic = number(window.get("step")), window.get("traffic")
        before = steps[-1]
        steps.append(before if step is None else step)
        if not isinstance(traffic, Mapping) or not traffic or steps[-1] <= before:
            return None
        counts = [number(count) or 0.0 for count in traffic.values()]
        return sum(counts) / 1e3 / (steps[-1] - before)

    return over_windows(run, per_step)


def _gradient_bytes(run: Run) -> list[Point]:
    totals: list[float | None] = []
    for name in ("bytes_offered", "bytes_sent"):
        tables = [window.get("tables") for window in run.entries("windows")]
        found = [number(entry(t, name)) for of in tables if isinstance(of, list) for t in of]
        known = [count for count in found if count is not None]
        totals.append(sum(known) / _MEGA if known else None)
    return [(float(i), count) for i, count in enumerate(totals)]


def _step_phases(run: Run) -> list[Point]:
    places = run.entries("progress")
    steps = number(places[-1].get("step")) if places else None
    return _bars(run, "seconds", _STEP_PHASES, steps / 1e3) if steps else []


def _step_milliseconds(run: Run) -> list[Point]:
    points: list[Point] = []
    for before, place in itertools.pairwise(run.entries("progress")):
        steps, seconds = (
            _difference(place.get(name), before.get(name)) for name in ("step", "seconds")
        )
        if steps and seconds is not None:
            points.append((number(place.get("inputs_trained")), 1e3 * seconds / steps))
    return points


def _difference(value: Any, other: Any) -> float | None:
    value, other = number(value), number(other)
    return None if value is None or other is None else value - other
