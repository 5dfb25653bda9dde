"""Computes figures, tables and claims from the records of network.py."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import summary
from common import difference

EMBEDDING = ("keys", "rows", "gradients", "deferred")
_KINDS = (*EMBEDDING, "dense", "control")
# Schedules of other systems, for sharded tables.
BASELINES = ("fae", "hotline")
# Targets: bytes of runs that defer in float32 and rounded, seconds of runs on shaped links, and
# loss of AUC.
SHARES, SECONDS, AUC_LOSS = (0.6, 0.3), 0.75, 0.0005

Figures = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of each seed.

    Attributes:
        run: The name of the run.
        placement: The placement of embedding rows; "alone" for a single process.
        ranks: The number of processes.
    """

    run: str
    placement: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.placement}_{self.ranks}/{self.run}"


ALONE = Case("plain", "alone", 1)


def collect(trials: Iterable[tuple[Case, int, int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Computes the figures of every run from its record.

    Bytes are summed over all ranks from the first step after the run's warm-up to the end of
    training, including the final exchange of deferred gradients. The bytes of plain training are
    counted over the same steps, using its windows (proportionally if the windows differ). Plain
    training has windows only for this purpose, therefore its seconds exclude window ends. For a run
    without windows, all bytes are counted.

    Args:
        trials: Tuples of case, seed, repeat and record. They must include `ALONE` and the plain
            runs.

    Returns:
        For each trial its case, seed, repeat and figures. A figure is None if it is not available.
    """
    trials = list(trials)
    records = {(case, seed, repeat): record for case, seed, repeat, record in trials}
    figures = []
    for case, seed, repeat, record in trials:
        alone = records[ALONE, seed, repeat]
        plain = records[dataclasses.replace(case, run="plain"), seed, repeat]
        auc, seconds = record["test"]["auc"], seconds_per_step(record)
        figures.append(
            {
                **dataclasses.asdict(case),
                "seed": seed,
                "repeat": repeat,
                "auc": auc,
                "auc_difference_alone": difference(auc, alone["test"]["auc"]),
                "auc_difference_plain": difference(auc, plain["test"]["auc"]),
                "seconds_per_step": seconds,
                "seconds_share": _ratio(seconds, seconds_per_step(plain)),
                "seconds_alone": _ratio(seconds, seconds_per_step(alone)),
                **_traffic(record, plain),
            }
        )
    return figures


def _traffic(record: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Returns bytes per step after the warm-up, also relative to plain."""
    names = ("bytes_per_step", "steps_after_warmup", "bytes_share", "bytes_share_with_control")
    start = _first_step(record) if record["windows"] else 0
    steps = _steps(record) - start
    if record["ranks"]["size"] == 1 or steps <= 0:
        return dict.fromkeys(names)
    own, others = ({k: b / steps for k, b in sent_after(r, start).items()} for r in (record, plain))
    shares = [
        _ratio(*(sum(sent[kind] for kind in kinds) for sent in (own, others)))
        for kinds in (EMBEDDING, (*EMBEDDING, "control"))
    ]
    return dict(zip(names, (own, steps, *shares), strict=True))


def seconds_per_step(record: Mapping[str, Any]) -> float | None:
    """Returns the mean time of a step after the warm-up.

    The ends of windows are excluded if the windows only count bytes.
    """
    seconds, windows = record["seconds_per_step_after_warmup"], record["windows"]
    # A policy requires its windows, so their ends are included.
    if seconds is None or not windows or record["settings"]["policies"]:
        return seconds
    # The timer starts after the warm-up. It does not include the end of an incomplete last window.
    before = max(1, _first_step(record))
    interval = record["settings"]["window_steps"]
    timed = [w["seconds"] for w in windows if w["step"] > before and not w["step"] % interval]
    return seconds - sum(timed) / (_steps(record) - before)


def _steps(record: Mapping[str, Any]) -> int:
    """Returns the number of training steps."""
    # Batches are read ahead. The examples in the record exclude a last window with batches that
    # were read before it.
    batch = record["settings"]["batch_size"] * record["ranks"]["size"]
    steps = math.ceil(record["examples"]["trained"] / batch)
    return max([steps, *(window["step"] for window in record["windows"][-1:])])


def _first_step(record: Mapping[str, Any]) -> int:
    """Returns the number of warm-up steps.

    With a policy, no gradient is masked or deferred in these steps.
    """
    if not record["settings"]["policies"]:
        return record["engine"]["window"]["config"]["warmup"]
    return max((w["step"] for w in record["windows"] if w["is_warming_up"]), default=0)


def sent_after(record: Mapping[str, Any], start: int) -> dict[str, float]:
    """Returns the bytes that all ranks sent after `start` steps, by kind.

    If a window contains `start`, the bytes of its later steps are estimated proportionally. Bytes
    outside of all windows were sent after the last window.
    """
    sent: dict[str, float] = dict(record["ranks"]["bytes"])
    begin = 0
    for window in record["windows"]:
        steps = window["step"] - begin
        before = min(max(start - begin, 0), steps) / steps if steps else 0.0
        for kind, count in window["traffic"].items():
            sent[kind] -= before * count
        begin = window["step"]
    return sent


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


def results_of(figures: Figures, label: str, is_shaped: bool) -> tuple[Any, Any]:
    """Returns table and claims of a placement and number of ranks.

    Args:
        figures: The figures from `collect` for one placement and number of ranks, and for a single
            process.
        label: The prefix of the claims' names.
        is_shaped: Whether links are shaped. Claims are then about seconds instead of bytes.
    """
    by_run: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for trial in figures:
        by_run["single process" if trial["ranks"] == 1 else trial["run"]].append(trial)
    rows = list(by_run.values())

    def of(name: str, figure: str, form: str, show: str, unit: float = 1.0) -> Any:
        found = [[trial[figure] for trial in trials] for trials in rows]
        known = [None if None in values else [v / unit for v in values] for values in found]
        return summary.column(name, list(map(_of_repeats, known)), form, show)

    def kilobytes(*kinds: str) -> list[float | None]:
        sent = [[trial["bytes_per_step"] for trial in trials] for trials in rows]
        totals = [[b and sum(b[kind] for kind in kinds) / 1e3 for b in trials] for trials in sent]
        return [None if None in values else statistics.fmean(values) for values in totals]

    columns = [
        summary.column("run", list(by_run)),
        of("bytes / plain", "bytes_share", "{:.1%}", "mean"),
        of("with control", "bytes_share_with_control", "{:.1%}", "mean"),
        of("seconds / plain", "seconds_share", "{:.2f}", "median each" if is_shaped else "median"),
        of("seconds / single process", "seconds_alone", "{:.2f}", "median"),
        of("ms per step", "seconds_per_step", "{:.1f}", "median", 1e-3),
        of("AUC - plain", "auc_difference_plain", "{:+.4f}", "mean each"),
        of("AUC - single process", "auc_difference_alone", "{:+.4f}", "mean"),
        summary.column("kB per step", kilobytes(*EMBEDDING), "{:,.1f}"),
        *(summary.column(kind, kilobytes(kind), "{:,.1f}") for kind in _KINDS),
    ]
    claims, mean = {}, statistics.fmean
    for run, trials in by_run.items():
        seconds, shares, losses = (
            [trial[name] for trial in trials]
            for name in ("seconds_share", "bytes_share", "auc_difference_plain")
        )
        if run in ("single process", "plain", "unwatched", *BASELINES):
            continue
        if is_shaped:
            claims[f"{label}_{run}_seconds"] = summary.claim(seconds, SECONDS)
        else:
            is_rounded = not {"bf16", "int8", "auto"}.isdisjoint(run.split("_"))
            maximum = SHARES[is_rounded] if "defer" in run else 1.0
            claims[f"{label}_{run}_bytes"] = summary.claim(shares, maximum, "lower", mean)
        claims[f"{label}_{run}_auc"] = summary.claim(losses, -AUC_LOSS, "higher", mean)
    return {"": columns}, claims


def _of_repeats(values: list[float] | None) -> list[float] | float | None:
    """Returns a single value if all values are equal.

    Bytes and AUC do not differ between repeats.
    """
    return values[0] if values and len(set(values)) == 1 else values
