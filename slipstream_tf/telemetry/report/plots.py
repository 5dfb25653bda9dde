"""The panels of a report: quality, costs and windows of runs."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from slipstream_tf.telemetry.report.runs import Run, entries, entry, number, total

Point = tuple[float | None, float | None]


@dataclasses.dataclass(frozen=True)
class Line:
    """The data of one run in one panel.

    Attributes:
        run: Name of the run.
        part: Name of the curve, if a run has more than one. Empty otherwise.
        points: (x, y) pairs. For bars, x is the index of the category.
    """

    run: str
    part: str
    points: tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        group: Heading of the section that contains the plot.
        name: Base name of the plot's files.
        title: Short title.
        caption: One sentence about the axes and their units.
        x_label, y_label: Labels of the axes.
        curves: The curves, in the order of the runs.
        missing: Names of the runs that did not record the data.
        notes: Sentences about single runs.
        categories: Categories of a bar plot, from top to bottom. Empty for a line plot.
        x_is_log, y_is_log: Whether the axis is logarithmic.
        best: The ideal y, drawn as a line. None for no line.
    """

    group: str
    name: str
    title: str
    caption: str
    x_label: str
    y_label: str
    curves: tuple[Line, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    x_is_log: bool = False
    y_is_log: bool = False
    best: float | None = None

    @property
    def parts(self) -> list[str]:
        """The distinct parts of the curves; empty with one curve per run."""
        return list(dict.fromkeys(curve.part for curve in self.curves if curve.part))

    def filled(
        self,
        runs: Iterable[Run],
        points_of: Callable[[Run], Mapping[str, Sequence[Point]]],
        note_of: Callable[[Run], str] = lambda run: "",
    ) -> "Panel":
        """Returns a panel of the same settings with the data of runs.

        Args:
            runs: The runs, in order.
            points_of: Returns the points of a run, by part. Points that contain None are dropped.
            note_of: Returns a sentence about a run, or an empty string. A run without curves and
                without a note is listed in `missing`.
        """
        curves, missing, notes = [], [], []
        for run in runs:
            found = []
            for part, points in points_of(run).items():
                known = tuple((x, y) for x, y in points if x is not None and y is not None)
                if known:
                    found.append(Line(run.name, part, known))
            note = note_of(run)
            if note:
                notes.append(note)
            elif not found:
                missing.append(run.name)
            curves += found
        return dataclasses.replace(
            self, curves=tuple(curves), missing=tuple(missing), notes=tuple(notes)
        )


QUALITY, BYTES, TIME = "Quality", "Bytes", "Time"
SATURATION, SKIPPING = "Saturation", "Skipped and deferred"
WindowMeasure = Callable[[Mapping[str, Any]], float | None]
# Key of an evaluation's entry, word in the title, label, meaning.
_AXES = (
    ("examples_trained", "examples", "examples trained", "examples trained"),
    ("seconds", "seconds", "seconds", "seconds of training without evaluations"),
)
# Key, title, label, meaning, best value.
_MEASURES = (
    ("auc", "Test AUC", "AUC",
     "area under the ROC curve of the test part (higher is better)", None),
    ("log_loss", "Test log loss", "log loss",
     "mean log loss of the test part, in nats per example (lower is better)", None),
    ("calibration", "Calibration", "calibration",
     "mean prediction / mean label of the test part (the gray line at 1 is best)", 1.0),
)  # fmt: skip
_TRAINING = (
    ("loss", "log loss", "mean log loss in nats per example"),
    ("auc", "AUC", "area under the ROC curve"),
)
_MEGA = 1e6
_KINDS = ("keys", "rows", "gradients", "deferred", "dense", "control")
_PHASES = ("reading", "training", "window_ends", "evaluation")
# The phases that are part of a step.
_STEP_PHASES = ("training", "window_ends")
_ACROSS = (
    "Horizontal: examples seen until the end of the window, including skipped examples (the last "
    "window may be shorter). Vertical: "
)
_ANY_DRIFT = 1e30  # Values of T above this mean that every key is saturated.


def quality(runs: Sequence[Run]) -> list[Panel]:
    """Returns the panels of test quality and training quality."""
    found = []
    for key, title, label, meaning, best in _MEASURES:
        for x_key, word, x_label, x_meaning in _AXES:
            caption = f"Horizontal: {x_meaning}. Vertical: {meaning}. Each point is an evaluation."
            names = f"{key}_by_{word}", f"{title} by {word}"
            panel = Panel(QUALITY, *names, caption, x_label, label, best=best)
            points_of = functools.partial(_along, entry="evaluations", x=x_key, y=key)
            found.append(panel.filled(runs, points_of))
    for key, label, meaning in _TRAINING:
        caption = (
            f"Horizontal: examples trained. Vertical: {meaning} of all examples trained so far, "
            "each predicted before its training step. Runs that skip examples are measured on "
            "different examples."
        )
        title = f"Training {label} so far"
        panel = Panel(QUALITY, f"training_{key}", title, caption, "examples trained", label)
        points_of = functools.partial(_along, entry="progress", x="examples_trained", y=key)
        found.append(panel.filled(runs, points_of))
    return found


def _along(run: Run, entry: str, x: str, y: str) -> dict[str, list[Point]]:
    return {"": run.points(entry, x, y)}


def costs(runs: Sequence[Run]) -> list[Panel]:
    """Returns the panels of bytes and time."""
    return [
        Panel(
            BYTES, "bytes_by_kind", "Bytes between ranks by kind",
            "Horizontal: megabytes (10^6) that all ranks sent in training. Vertical: kind of "
            "message.",
            "MB", "", categories=_KINDS,
        ).filled(
            runs,
            lambda run: {} if _is_alone(run) else {"": _bars(run, "ranks.bytes", _KINDS, _MEGA)},
            _note_of_one_process,
        ),
        Panel(
            BYTES, "bytes_by_window", "Bytes between ranks per step",
            "Horizontal: examples seen until the end of the window, including skipped examples. "
            "Vertical: kilobytes (10^3) that all ranks sent, per step of the window.",
            "examples seen", "kB per step",
        ).filled(runs, lambda run: {"": _bytes_per_step(run)}, _note_of_one_process),
        Panel(
            BYTES, "gradient_bytes", "Bytes of gradient rows",
            "Horizontal: megabytes (10^6) of gradient rows with their keys. Vertical: rows offered "
            "by training steps, and rows sent.",
            "MB", "", categories=("offered", "sent"),
        ).filled(runs, lambda run: {"": _gradient_bytes(run)}),
        Panel(
            TIME, "step_phases", "Phases of a step",
            "Horizontal: mean milliseconds per trained step, including the first step. Vertical: "
            "training (including reading of batches and exchange between ranks) and window ends.",
            "ms per step", "", categories=tuple(map(_words, _STEP_PHASES)),
        ).filled(runs, lambda run: {"": _step_phases(run)}),
        Panel(
            TIME, "step_milliseconds", "Milliseconds per step",
            "Horizontal: examples trained. Vertical: milliseconds per step since the previous "
            "point, including window ends.",
            "examples trained", "ms per step", y_is_log=True,
        ).filled(runs, lambda run: {"": _step_milliseconds(run)}),
        Panel(
            TIME, "phases", "Phases of the run", "Horizontal: seconds. Vertical: phase.",
            "seconds", "", categories=tuple(map(_words, _PHASES)),
        ).filled(runs, lambda run: {"": _bars(run, "seconds", _PHASES, 1.0)}),
    ]  # fmt: skip


def _words(name: str) -> str:
    return name.replace("_", " ")


def _bars(run: Run, path: str, names: Sequence[str], unit: float) -> list[Point]:
    values = [run.number(*path.split("."), name) for name in names]
    return [(float(i), None if v is None else v / unit) for i, v in enumerate(values)]


def _note_of_one_process(run: Run) -> str:
    return f"{run.name}: a single process sends no bytes between ranks." if _is_alone(run) else ""


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
        sent = sum(number(count) or 0.0 for count in traffic.values())
        return sent / 1e3 / (steps[-1] - before)

    return over_windows(run, per_step)


def _gradient_bytes(run: Run) -> list[Point]:
    tables = [table for window in run.entries("windows") for table in entries(window, "tables")]
    points: list[Point] = []
    for index, name in enumerate(("bytes_offered", "bytes_sent")):
        known = [count for table in tables if (count := number(table.get(name))) is not None]
        points.append((float(index), sum(known) / _MEGA if known else None))
    return points


def _step_phases(run: Run) -> list[Point]:
    points = run.entries("progress")
    steps = number(points[-1].get("step")) if points else None
    return _bars(run, "seconds", _STEP_PHASES, steps / 1e3) if steps else []


def _step_milliseconds(run: Run) -> list[Point]:
    points: list[Point] = []
    for before, point in itertools.pairwise(run.entries("progress")):
        steps, seconds = (_difference(point, before, name) for name in ("step", "seconds"))
        if steps and seconds is not None:
            points.append((number(point.get("examples_trained")), 1e3 * seconds / steps))
    return points


def _difference(point: Mapping[str, Any], before: Mapping[str, Any], name: str) -> float | None:
    value, other = number(point.get(name)), number(before.get(name))
    return None if value is None or other is None else value - other


def windows(runs: Sequence[Run]) -> list[Panel]:
    """Returns the panels of saturation, hot set, skipping and deferring."""
    found = []
    for group, name, title, y_label, meaning, measures in _WINDOW_PANELS:
        panel = Panel(group, name, title, _ACROSS + meaning, "examples seen", y_label)
        points_of = functools.partial(_over_all_windows, measures=measures)
        found.append(panel.filled(runs, points_of))
    found.insert(5, _HISTOGRAM.filled(runs, _histogram_points, _note_of_still_keys))
    return found


def _over_all_windows(run: Run, measures: Mapping[str, WindowMeasure]) -> dict[str, list[Point]]:
    return {part: over_windows(run, measure) for part, measure in measures.items()}


def over_windows(run: Run, measure: WindowMeasure) -> list[Point]:
    """Returns points (examples seen until the window's end, measure of the window)."""
    points: list[Point] = []
    seen = 0.0
    for window in run.entries("windows"):
        seen += number(window.get("examples_seen")) or 0.0
        points.append((seen, measure(window)))
    return points


def _field(*names: str) -> WindowMeasure:
    return lambda window: number(entry(window, *names))


def _where(name: str, measure: WindowMeasure) -> WindowMeasure:
    """Restricts a measure to windows in which the field `name` is nonzero."""
    return lambda window: measure(window) if number(window.get(name)) else None


def _threshold(window: Mapping[str, Any]) -> float | None:
    value = number(window.get("threshold"))
    # Without hot keys there are no drifts to derive a threshold from.
    if value is None or value > _ANY_DRIFT or not number(window.get("hot_keys")):
        return None
    return value


def _rows(window: Mapping[str, Any], flow: str) -> float | None:
    return total([number(entry(table, "rows", flow)) for table in entries(window, "tables")])


def _fraction(window: Mapping[str, Any], flow: str) -> float | None:
    rows, offered = _rows(window, flow), _rows(window, "offered")
    return None if rows is None or not offered else rows / offered


# Group, name, title, label, meaning, and the measures by part.
_WINDOW_PANELS: Sequence[tuple[str, str, str, str, str, Mapping[str, WindowMeasure]]] = (
    (SATURATION, "saturated_fraction", "Saturated fraction", "fraction of the hot keys",
     "saturated keys as a fraction of the hot keys, 0 to 1.",
     {"": _where("hot_keys", _field("saturated_fraction"))}),
    (SATURATION, "threshold", "Threshold T", "T, in the unit of drift",
     "T, in the unit of the rows. A key with a smaller drift is saturated in the next window. "
     "Windows in which every key is saturated have no point.", {"": _threshold}),
    (SATURATION, "hot_set_size", "Size of the hot set", "keys",
     "number of keys with a measured drift in the next window.", {"": _field("next_hot_keys")}),
    (SATURATION, "hot_set_overlap", "Hot set overlap", "fraction of the next hot set",
     "fraction of the next hot set that is also in the hot set of this window, 0 to 1.",
     {"": _where("next_hot_keys", _field("hot_set_overlap"))}),
    (SATURATION, "drift_quantiles", "Drift of the hot keys", "drift",
     "median and 90% quantile of the drifts of the hot keys in the window, in the unit of the "
     "rows.",
     {"90%": _field("drift_quantiles", "0.9"), "median": _field("drift_quantiles", "0.5")}),
    (SKIPPING, "examples_skipped", "Examples skipped", "fraction of the examples seen",
     "skipped examples as a fraction of the examples of the window, 0 to 1.",
     {"": _field("skipped_fraction")}),
    (SKIPPING, "rows_sent", "Gradient rows sent", "fraction of the rows offered",
     "gradient rows applied or exchanged between ranks, as a fraction of the rows offered by "
     "training steps, 0 to 1; above 1 if deferred gradients were applied.",
     {"": functools.partial(_fraction, flow="sent")}),
    (SKIPPING, "rows_masked", "Gradient rows masked", "fraction of the rows offered",
     "dropped gradient rows as a fraction of the rows offered by training steps, 0 to 1.",
     {"": functools.partial(_fraction, flow="masked")}),
    (SKIPPING, "rows_deferred", "Deferred gradients", "rows",
     "rows with a deferred gradient at the end of the window.",
     {"": functools.partial(_rows, flow="deferred_now")}),
)  # fmt: skip
_HISTOGRAM = Panel(
    SATURATION, "drift_histogram", "Drift histogram",
    "Horizontal: drift of a hot key over the longest window, in the unit of the rows, in buckets "
    "of a quarter of a decade. Vertical: fraction of the hot keys, 0 to 1. Dashed: threshold T.",
    "drift", "fraction of the hot keys", x_is_log=True,
)  # fmt: skip


def _last_buckets(run: Run) -> tuple[Mapping[str, Any], list[tuple[float, float, float]]] | None:
    """Returns the longest window with a drift histogram, and the histogram.

    If multiple windows are equally long, the last is returned.

    Returns:
        (window, buckets), or None if no window has a histogram. A bucket is (lower bound, upper
        bound, fraction of the hot keys).
    """
    for window in _longest_last(run.entries("windows")):
        found = window.get("drift_histogram")
        if not isinstance(found, list) or not found:
            continue
        buckets = []
        for bucket in found:
            values = [number(v) for v in bucket] if isinstance(bucket, list) else []
            if len(values) == 3 and None not in values:
                buckets.append(tuple(v for v in values if v is not None))
        total = sum(count for _, _, count in buckets)
        if total:
            return window, [(low, high, count / total) for low, high, count in buckets]
    return None


def _longest_last(windows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the windows by descending length, then from last to first."""
    steps = [number(window.get("step")) or 0.0 for window in windows]
    lengths = [step - before for before, step in zip([0.0, *steps], steps, strict=False)]
    order = sorted(range(len(windows)), key=lambda i: (-lengths[i], -i))
    return [windows[i] for i in order]


def _histogram_points(run: Run) -> dict[str, Sequence[Point]]:
    last = _last_buckets(run)
    if last is None:
        return {}
    window, buckets = last
    points: list[Point] = []
    before = None
    for low, high, fraction in buckets:
        if low <= 0.0:
            continue
        if before != low:
            points += [] if before is None else [(before, 0.0)]
            points.append((low, 0.0))
        points += [(low, fraction), (high, fraction)]
        before = high
    if before is not None:
        points.append((before, 0.0))
    threshold = _threshold(window)
    top = max((fraction for low, _, fraction in buckets if low > 0.0), default=0.0)
    line: list[Point] = [(threshold, 0.0), (threshold, top)] if threshold else []
    return {"drift": points, "T": line}


def _note_of_still_keys(run: Run) -> str:
    last = _last_buckets(run)
    if last is None:
        return ""
    still = sum(fraction for low, _, fraction in last[1] if low <= 0.0)
    return f"{run.name}: {still:.1%} of the hot keys did not move and are not drawn."
