"""Quality curves: examples and seconds until a quality, and plots."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import pyplot

from slipstream_tf.telemetry.curves import CHANCE, EXAMPLES, SECONDS, Curve, auc_at, curve

# Maximum number of runs in a legend inside the plot.
_MAX_WITHIN = 8


def level(best: float, fraction: float) -> float:
    """Returns the AUC at a fraction of the gain over chance."""
    return CHANCE + fraction * (best - CHANCE)


def reaching(points: Curve, auc: float) -> float | None:
    """Returns the position where a curve first reaches an AUC, or None.

    Between its points, the curve is linear.
    """
    for (before, low), (after, high) in itertools.pairwise(points):
        if high >= auc:
            return before + (after - before) * (auc - low) / (high - low)
    return None


def with_even_rest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with the time of its incomplete last interval extrapolated.

    The steps after the last complete interval get the mean time of all earlier steps. Their
    measured time is not comparable: for some programs it includes the end of reading the data or of
    the program, which took up to half a minute.
    """
    points, every = record["evaluations"], record["settings"]["every"]
    if len(points) < 2 or points[-1]["steps"] - points[-2]["steps"] >= every:
        return dict(record)
    last, whole = points[-1], points[-2]
    seconds = whole["seconds"] * last["steps"] / whole["steps"]
    return {**record, "evaluations": [*points[:-1], {**last, "seconds": seconds}]}


def reach_cell(records: Sequence[Mapping[str, Any]], levels: Sequence[float]) -> str | None:
    """Returns the mean examples and seconds until a level, as text.

    Args:
        records: The records of the seeds.
        levels: The AUC to reach for each seed.

    Returns:
        A text, for example "0.41 M, 3.2 s (4 of 5)". None if no seed reaches its level.
    """
    found = []
    for record, auc in zip(records, levels, strict=True):
        both = [reaching(curve(record, axis), auc) for axis in (EXAMPLES, SECONDS)]
        if None not in both:
            found.append(both)
    if not found:
        return None
    examples, seconds = map(statistics.fmean, zip(*found, strict=True))
    some = f" ({len(found)} of {len(levels)})" if len(found) < len(levels) else ""
    return f"{examples / 1e6:.2f} M, {seconds:.1f} s{some}"


def plot(
    title: str, runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, minimum: float
) -> None:
    """Plots mean AUC against trained examples and against seconds.

    Args:
        title: The title of the plot.
        runs: The records of the seeds by name of the run.
        path: The path of the image.
        minimum: The lowest AUC on the axis.
    """
    plots = pyplot(path.name)
    if plots is None:
        return
    has_room = len(runs) <= _MAX_WITHIN
    size = (10 if has_room else 13, 4)
    figure, sides = plots.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    units = {EXAMPLES: ("examples trained, millions", 1e-6), SECONDS: ("seconds", 1.0)}
    for side, (axis, (label, unit)) in zip(sides, units.items(), strict=True):
        for index, (name, records) in enumerate(runs.items()):
            at, means = mean_curve([curve(record, axis) for record in records])
            # Matplotlib's cycle has ten colors. The next ten runs use dashed lines.
            line = "-" if (index + index // 10) % 2 == 0 else "--"
            side.plot(at * unit, means, line, color=f"C{index}", label=name)
            side.plot(at[-1] * unit, means[-1], "o", color=f"C{index}", markersize=4)
        side.set_xlabel(label)
        side.grid(alpha=0.3)
    sides[0].set_ylabel("test AUC")
    sides[0].set_ylim(bottom=minimum)
    if has_room:
        sides[1].legend(loc="lower right")
    else:
        figure.legend(*sides[1].get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plots.close(figure)


def mean_curve(of_seeds: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions and mean AUCs; seeds are scaled to the mean length."""
    ends = [points[-1][0] for points in of_seeds]
    at = np.linspace(0.0, 1.0, 61)
    each = [
        [auc_at(points, fraction * end) for fraction in at]
        for points, end in zip(of_seeds, ends, strict=True)
    ]
    return at * statistics.fmean(ends), np.mean(each, axis=0)
