"""Panels of the windows: saturation, hot set, drift, what is skipped, held and sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream_tf.telemetry.report.panels import Panel, Point
from slipstream_tf.telemetry.report.runs import Run, entry, number, total

SATURATION, SKIPPING = "Saturation", "Skipped and deferred"
_ACROSS = (
    "Across: inputs seen, skipped ones included, at a window's end (the last window may be short); "
    "up: "
)
_ANY_DRIFT = 1e30  # T where every drift is below it.
Measure = Callable[[Mapping[str, Any]], float | None]


def panels(runs: Sequence[Run]) -> list[Panel]:
    """Returns the panels, filled."""
    return [
        _panel(
            runs, SATURATION, "saturated_share", "Saturated share", "share of the hot keys",
            "saturated keys as a share of the hot keys, 0 to 1.",
            {"": _where("hot_keys", _field("saturated_share"))},
        ),
        _panel(
            runs, SATURATION, "threshold", "Threshold T", "T, in the unit of drift",
            "T, the drift below which a key is saturated in the next window, in the rows' unit; "
            "left out where any drift is.",
            {"": _threshold},
        ),
        _panel(
            runs, SATURATION, "hot_set_size", "Size of the hot set", "keys",
            "keys whose rows are followed in the next window.",
            {"": _field("next_hot_keys")},
        ),
        _panel(
            runs, SATURATION, "hot_set_overlap", "Hot set overlap", "share of the next hot set",
            "share of the next window's hot set that was in this one's, 0 to 1.",
            {"": _where("next_hot_keys", _field("hot_set_overlap"))},
        ),
        _panel(
            runs, SATURATION, "drift_quantiles", "Drift of the hot keys", "drift",
            "drift over the window, in the rows' unit, of the median key and of the key that 90% "
            "of the hot keys stay below.",
            {
                "90%": lambda w: number(entry(w, "drift_quantiles", "0.9")),
                "median": lambda w: number(entry(w, "drift_quantiles", "0.5")),
            },
        ),
        _histogram(runs),
        _panel(
            runs, SKIPPING, "inputs_skipped", "Inputs skipped", "share of the inputs seen",
            "inputs left out of training as a share of the window's inputs, 0 to 1.",
            {"": _field("skipped_share")},
        ),
        _panel(
            runs, SKIPPING, "rows_sent", "Gradient rows sent", "share of the rows offered",
            "gradient rows applied, or exchanged between ranks, as a share of those that training "
            "steps gave, 0 to 1; more where held ones left.",
            {"": lambda w: _share(w, "sent")},
        ),
        _panel(
            runs, SKIPPING, "rows_masked", "Gradient rows masked", "share of the rows offered",
            "gradient rows thrown away as a share of those that training steps gave, 0 to 1.",
            {"": lambda w: _share(w, "masked")},
        ),
        _panel(
            runs, SKIPPING, "rows_held", "Gradient sums held", "rows",
            "rows whose gradients are held back, deferred, at the window's end.",
            {"": lambda w: _rows(w, "pending")},
        ),
    ]  # fmt: skip


def _panel(
    runs: Sequence[Run], group: str, name: str, title: str, y_label: str, meaning: str,
    measures: Mapping[str, Measure],
) -> Panel:  # fmt: skip
    empty = Panel(group, name, title, _ACROSS + meaning, "inputs seen", y_label)
    return empty.filled(
        runs, lambda run: {part: over_windows(run, of) for part, of in measures.items()}
    )


def over_windows(run: Run, measure: Measure) -> list[Point]:
    """Returns a measure of each window at the inputs seen by its end."""
    points: list[Point] = []
    seen = 0.0
    for window in run.entries("windows"):
        seen += number(window.get("inputs_seen")) or 0.0
        points.append((seen, measure(window)))
    return points


def _field(name: str) -> Measure:
    return lambda window: number(window.get(name))


def _where(name: str, measure: Measure) -> Measure:
    """The measure of windows that have some of what it is a share of."""
    return lambda window: measure(window) if number(window.get(name)) else None


def _threshold(window: Mapping[str, Any]) -> float | None:
    value = number(window.get("threshold"))
    # Without drifts there was nothing to find one by.
    if value is None or value > _ANY_DRIFT or not number(window.get("hot_keys")):
        return None
    return value


def _rows(window: Mapping[str, Any], fate: str) -> float | None:
    tables = window.get("tables")
    if not isinstance(tables, list):
        return None
    return total([number(entry(table, "rows", fate)) for table in tables])


def _share(window: Mapping[str, Any], fate: str) -> float | None:
    rows, offered = _rows(window, fate), _rows(window, "offered")
    return None if rows is None or not offered else rows / offered


def _histogram(runs: Sequence[Run]) -> Panel:
    empty = Panel(
        SATURATION,
        "drift_histogram",
        "Drift histogram",
        "Across: drift of a hot key over the last full window, in the rows' unit, in buckets "
        " of a quarter of a decade; up: share of the hot keys, 0 to 1; dashed: the T found.",
        "drift",
        "share of the hot keys",
        x_is_log=True,
    )
    return empty.filled(runs, _histogram_points, _note_of_still_keys)


def _last_buckets(run: Run) -> tuple[Mapping[str, Any], list[tuple[float, float, float]]] | None:
    """The last window that has a histogram, and (lower, upper, share) of its buckets."""
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
    """The windows as they should be looked through: full ones first, later ones first."""
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
    for low, high, share in buckets:
        if low <= 0.0:
            continue
        if before != low:
            points += [] if before is None else [(before, 0.0)]
            points.append((low, 0.0))
        points += [(low, share), (high, share)]
        before = high
    if before is not None:
        points.append((before, 0.0))
    threshold = _threshold(window)
    top = max((share for low, _, share in buckets if low > 0.0), default=0.0)
    line: list[Point] = [(threshold, 0.0), (threshold, top)] if threshold else []
    return {"drift": points, "T": line}


def _note_of_still_keys(run: Run) -> str:
    last = _last_buckets(run)
    if last is None:
        return ""
    still = sum(share for low, _, share in last[1] if low <= 0.0)
    return f"{run.name}: {still:.1%} of the hot keys did not move and are not drawn."
