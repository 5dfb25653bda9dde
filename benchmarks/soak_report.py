"""Evaluates the logs of `soak.py`: summary, verdicts and plot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import summary

MIB = 2**20
# Maximum relative difference of the loss of a repeated step.
TOLERANCE = 1e-5


def read_notes(folder: Path) -> list[dict[str, Any]]:
    """Reads the step logs of all processes, ordered by start.

    Args:
        folder: The folder of the logs.

    Returns:
        For each process: rank, pid, time (of its start, in seconds) and steps, a list of step,
        time, loss, auc and trained. Incomplete lines of killed processes are skipped.
    """
    processes = []
    for path in folder.rglob("rank-*.jsonl"):
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        if lines:
            processes.append({**lines[0], "steps": lines[1:]})
    return sorted(processes, key=lambda process: process["time"])


def slope_of(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float | None:
    """Returns the least-squares slope of lines with separate intercepts.

    Args:
        groups: (times in seconds, bytes) for each process.

    Returns:
        The slope in MiB per hour. None if no group has two times.
    """
    above = below = 0.0
    for times, sizes in groups:
        if len(times) < 2:
            continue
        centred = np.asarray(times) - np.mean(times)
        above += float(centred @ (np.asarray(sizes) - np.mean(sizes)))
        below += float(centred @ centred)
    return above / below * 3600 / MIB if below else None


def continuity(parts: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Compares the steps that a part repeats with the original steps.

    Args:
        parts: The steps of each part of one rank, in order.

    Returns:
        For each part with steps, except the first: its first step, the number of repeated steps,
        the maximum relative difference of their losses, and whether no step is missing.
    """
    known: dict[int, float] = {}
    found = []
    for steps in parts:
        if not steps:
            continue
        if known:
            repeated = [s for s in steps if s["step"] in known]
            differences = [
                abs(s["loss"] - known[s["step"]]) / max(abs(known[s["step"]]), 1e-9)
                for s in repeated
            ]
            first = int(steps[0]["step"])
            found.append(
                {
                    "first_step": first,
                    "repeated": len(repeated),
                    "largest_difference": max(differences, default=0.0),
                    "is_complete": first <= max(known) + 1,
                }
            )
        known.update({int(s["step"]): s["loss"] for s in steps})
    return found


def summarise(
    notes: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    memory: Sequence[Mapping[str, Any]],
    warm_up_seconds: float,
    flat_mib_per_hour: float,
) -> dict[str, Any]:
    """Computes the summary.

    Args:
        notes: The logs from `read_notes`.
        events: The parts of the run, see `soak.Part`.
        memory: Samples of pid, rank, time and bytes (resident).
        warm_up_seconds: The time after the first step of a process in which memory can grow.
        flat_mib_per_hour: The maximum slope that counts as flat.
    """
    first_steps = {p["pid"]: p["steps"][0]["time"] for p in notes if p["steps"]}
    groups = []
    for pid, begun in first_steps.items():
        warm = [m for m in memory if m["pid"] == pid and m["time"] >= begun + warm_up_seconds]
        groups.append(([m["time"] for m in warm], [m["bytes"] for m in warm]))
    slope = slope_of(groups)
    # A leak in the saved state would increase memory from process to process.
    means = [
        (float(np.mean(times)), float(np.mean(sizes))) for times, sizes in groups if len(times) > 1
    ]
    between = slope_of([([m[0] for m in means], [m[1] for m in means])]) if means else None
    ranks = {p["rank"] for p in notes}
    every = [
        entry
        for rank in ranks
        for entry in continuity([p["steps"] for p in notes if p["rank"] == rank])
    ]
    kills = [event for event in events if event["killed_rank"] is not None]
    starts = [event["seconds_to_first_step"] for event in events if event["number"] > 0]
    starts = [seconds for seconds in starts if seconds is not None]
    ends = [event["seconds_to_exit"] for event in kills if event["seconds_to_exit"] is not None]
    found = {
        "minutes": (max(e["ended"] for e in events) - events[0]["started"]) / 60 if events else 0,
        "kills": len(kills),
        "kills_without_named_peer": sum(not event["names_peer"] for event in kills),
        "unexpected_ends": sum(event["is_unexpected"] for event in events),
        "hangs": sum(event["is_hang"] for event in events),
        "seconds_from_kill_to_exit": _spread(ends),
        "seconds_from_start_to_first_step": _spread(starts),
        "last_step": max((s["step"] for p in notes for s in p["steps"]), default=0),
        "steps_repeated": _spread([entry["repeated"] for entry in every]),
        "largest_difference_of_repeated_losses": max(
            (entry["largest_difference"] for entry in every), default=0.0
        ),
        "steps_missing": sum(not entry["is_complete"] for entry in every),
        "rss_mib": _spread([size / MIB for _, sizes in groups for size in sizes]),
        "rss_slope_within_processes_mib_per_hour": slope,
        "rss_slope_between_processes_mib_per_hour": between,
    }
    found["verdicts"] = {
        "no hang": found["hangs"] == 0,
        "every kill ended the job, which named the lost rank": (
            found["kills_without_named_peer"] == 0 and len(ends) == len(kills)
        ),
        "no other end": found["unexpected_ends"] == 0,
        "loss curve unbroken": (
            found["steps_missing"] == 0
            and found["largest_difference_of_repeated_losses"] <= TOLERANCE
        ),
        "memory flat": slope is not None and slope <= flat_mib_per_hour,
    }
    return found


def results_of(found: Mapping[str, Any], flat_mib_per_hour: float) -> tuple[Any, Any]:
    """Returns the columns and the claims.

    Args:
        found: The result of `summarise`.
        flat_mib_per_hour: See `summarise`.
    """
    targets = {
        "hangs": 0, "kills_without_named_peer": 0, "unexpected_ends": 0, "steps_missing": 0,
        "largest_difference_of_repeated_losses": TOLERANCE,
        "rss_slope_within_processes_mib_per_hour": flat_mib_per_hour,
    }  # fmt: skip
    names = [name for name in found if name not in targets and name != "verdicts"]
    columns = [
        summary.column("measurement", [name.replace("_", " ") for name in names]),
        summary.column(
            "value, or minimum, mean and maximum", [found[name] for name in names], "{:,.4g}"
        ),
    ]
    return {"": columns}, {name: summary.claim([found[name]], t) for name, t in targets.items()}


def plot(
    notes: Sequence[Mapping[str, Any]], memory: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Plots loss by step and memory by time.

    There is a line per part and a line per process.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 7))
    for process in notes:
        if process["rank"] == 0 and process["steps"]:
            steps = process["steps"]
            above.plot([s["step"] for s in steps], [s["loss"] for s in steps], linewidth=1)
    above.set(xlabel="step", ylabel="mean loss so far, rank 0", title="A line per part of the run")
    start = min((m["time"] for m in memory), default=0.0)
    for pid in dict.fromkeys(m["pid"] for m in memory):
        own = [m for m in memory if m["pid"] == pid]
        color = f"C{own[0]['rank']}"
        minutes = [(m["time"] - start) / 60 for m in own]
        below.plot(minutes, [m["bytes"] / MIB for m in own], color=color, linewidth=1)
    below.set(
        xlabel="minutes", ylabel="resident MiB", title="A line per process, a colour per rank"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _spread(values: Sequence[float]) -> list[float] | None:
    return [min(values), math.fsum(values) / len(values), max(values)] if values else None
