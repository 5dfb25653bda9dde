"""What the seeds of a run took to a level of quality, and a picture of their curves."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import pyplot

from slipstream_tf.telemetry.curves import CHANCE, EXAMPLES, SECONDS, Curve, curve, standing

# Names of runs for which a plot has room.
_MOST_WITHIN = 8


def level(best: float, share: float) -> float:
    """Returns the AUC that is a share of the way from chance to `best`."""
    return CHANCE + share * (best - CHANCE)


def reaching(points: Curve, auc: float) -> float | None:
    """Returns where a curve first reaches an AUC, linear between its points; None: it does not."""
    for (before, low), (after, high) in itertools.pairwise(points):
        if high >= auc:
            return before + (after - before) * (auc - low) / (high - low)
    return None


def with_even_rest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record whose steps behind its last whole part take as long as the others.

    Of some programs these few steps took half a minute, of others none: what ends there is the
    reading of the data, or the program.
    """
    points, every = record["evaluations"], record["settings"]["every"]
    if len(points) < 2 or points[-1]["steps"] - points[-2]["steps"] >= every:
        return dict(record)
    last, whole = points[-1], points[-2]
    seconds = whole["seconds"] * last["steps"] / whole["steps"]
    return {**record, "evaluations": [*points[:-1], {**last, "seconds": seconds}]}


def reach_cell(records: Sequence[Mapping[str, Any]], levels: Sequence[float]) -> str | None:
    """Returns what the seeds of a run took to a level: mean of examples and of seconds.

    Args:
        records: of the seeds.
        levels: an AUC for each.

    Returns:
        E.g. "0.41 M, 3.2 s (4 of 5)"; None: no seed reached it.
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
    title: str, runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, least: float
) -> None:
    """Draws mean AUC against examples trained and against seconds.

    Args:
        title: of the picture.
        runs: records of the seeds by name of the run.
        path: of the picture.
        least: lowest AUC that is shown.
    """
    plots = pyplot(path.name)
    if plots is None:
        return
    has_room = len(runs) <= _MOST_WITHIN
    size = (10 if has_room else 13, 4)
    figure, sides = plots.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    units = {EXAMPLES: ("examples trained, millions", 1e-6), SECONDS: ("seconds", 1.0)}
    for side, (axis, (label, unit)) in zip(sides, units.items(), strict=True):
        for index, (name, records) in enumerate(runs.items()):
            at, means = mean_curve([curve(record, axis) for record in records])
            # There are ten colours: the next ten have the other kind of line.
            line = "-" if (index + index // 10) % 2 == 0 else "--"
            side.plot(at * unit, means, line, color=f"C{index}", label=name)
            side.plot(at[-1] * unit, means[-1], "o", color=f"C{index}", markersize=4)
        side.set_xlabel(label)
        side.grid(alpha=0.3)
    sides[0].set_ylabel("test AUC")
    sides[0].set_ylim(bottom=least)
    if has_room:
        sides[1].legend(loc="lower right")
    else:
        figure.legend(*sides[1].get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plots.close(figure)


def mean_curve(of_seeds: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns where, and the means there; each seed is stretched to the mean's length."""
    ends = [points[-1][0] for points in of_seeds]
    at = np.linspace(0.0, 1.0, 61)
    each = [
        [standing(points, share * end) for share in at]
        for points, end in zip(of_seeds, ends, strict=True)
    ]
    return at * statistics.fmean(ends), np.mean(each, axis=0)
