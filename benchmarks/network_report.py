"""What the runs of network.py come to. In: their metrics.json. Out: figures, tables and a plot."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import difference, mean, pyplot, spread, text

EMBEDDING = ("keys", "rows", "gradients", "deferred")
_KINDS = (*EMBEDDING, "dense", "control")
# What is asked of bytes (float32, bfloat16) and of AUC.
_SHARES, _AUC_LOSS = (0.6, 0.3), 0.0005
_HEADER = (
    *("placement", "ranks", "run", "bytes / plain", "with control", "seconds / plain"),
    *("AUC - alone", "AUC - plain", "AUC", "kB per step"),
    *_KINDS,
    *("ms per step", "frozen keys"),
)
_EACH = (
    *("placement", "ranks", "run", "seed", "repeat", "bytes / plain", "with control"),
    *("seconds / plain", "AUC - alone", "AUC - plain", "AUC", "kB per step", "ms per step"),
)

Figures = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run for each seed.

    Attributes:
        run: its name.
        placement: of embedding rows; "alone" for one process.
        ranks: number of processes.
    """

    run: str
    placement: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.placement}_{self.ranks}/{self.run}"


ALONE = Case("plain", "alone", 1)


def collect(trials: Iterable[tuple[Case, int, int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Draws the figures of every run from its record.

    Bytes are those of all ranks from the first step after the run's warm-up to the end of training,
    the exchange of what was held until then included. What plain training sends is counted over the
    same steps, by its windows (in parts, where its windows are others). Plain training has windows
    for nothing else: the time of their ends is not in its seconds.

    Args:
        trials: case, seed, repeat, metrics.json; `ALONE` and the plain runs are among them, repeat
            0 of `ALONE` stands for all.

    Returns:
        For each trial its case, seed, repeat and figures; None where there is none.
    """
    trials = list(trials)
    records = {(case, seed, repeat): record for case, seed, repeat, record in trials}
    figures = []
    for case, seed, repeat, record in trials:
        alone = records[ALONE, seed, 0]
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
                "log_loss": record["test"]["log_loss"],
                "seconds_per_step": seconds,
                "seconds_share": _ratio(seconds, seconds_per_step(plain)),
                **_traffic(record, plain),
                "bytes_in_training": record["ranks"]["bytes"],
                "bytes_on_wire_by_rank": record.get("sent_bytes"),
            }
        )
    return figures


def joined(results: Iterable[Figures]) -> list[dict[str, Any]]:
    """Returns the runs of several results, by placement, ranks and seed; of a run the last one."""
    found = {}
    for trial in itertools.chain.from_iterable(results):
        case = trial["placement"], trial["ranks"], trial["run"], trial["seed"], trial["repeat"]
        found[case] = dict(trial)
    # The cases in the order in which they came first, each with its seeds.
    places = {case: place for place, case in enumerate(dict.fromkeys(c[:3] for c in found))}
    return [found[case] for case in sorted(found, key=lambda c: (places[c[:3]], *c[3:]))]


def _traffic(record: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes per step after the warm-up, and as a share of plain training's."""
    windows = record["windows"]
    names = ("bytes_per_step", "embedding_bytes_per_step", "embedding_and_control_bytes_per_step")
    none = (*names, "steps_after_warmup", "bytes_share", "bytes_share_with_control", "frozen_keys")
    start = _first_step(record) if windows else 0
    steps = _steps(record) - start
    if not windows or record["ranks"]["size"] == 1 or steps <= 0:
        return dict.fromkeys(none)
    own, others = ({k: b / steps for k, b in sent_after(r, start).items()} for r in (record, plain))
    embedding, plain_embedding = (sum(sent[kind] for kind in EMBEDDING) for sent in (own, others))
    with_control, plain_with_control = (
        embedding + own["control"],
        plain_embedding + others["control"],
    )
    frozen = [window["frozen_keys"] for window in windows if not window["is_warming_up"]]
    values = (
        *(own, embedding, with_control, steps, _ratio(embedding, plain_embedding)),
        *(_ratio(with_control, plain_with_control), statistics.mean(frozen or [0])),
    )
    return dict(zip(none, values, strict=True))


def seconds_per_step(record: Mapping[str, Any]) -> float | None:
    """Returns the mean after the warm-up; without ends of windows that are there to count bytes."""
    seconds, windows = record["seconds_per_step_after_warmup"], record["windows"]
    if seconds is None or not windows or record["engine"]["skip"] != "none":
        return seconds
    if record["settings"].get("copy_movement") is not None:  # Copies are of the windows' hot rows.
        return seconds
    # The timer begins after the warm-up. A last window that is not whole is ended outside of it.
    before = max(1, _first_step(record))
    interval = record["settings"]["snapshot_interval"]
    timed = [w["seconds"] for w in windows if w["step"] > before and not w["step"] % interval]
    return seconds - sum(timed) / (_steps(record) - before)


def _steps(record: Mapping[str, Any]) -> int:
    """Returns the steps of training."""
    # Inputs are read ahead: the record leaves out a last window whose inputs came before it.
    batch = record["settings"]["batch_size"] * record["ranks"]["size"]
    steps = math.ceil(record["inputs"]["trained"] / batch)
    return max([steps, *(window["step"] for window in record["windows"][-1:])])


def _first_step(record: Mapping[str, Any]) -> int:
    """Steps before anything is kept back; in a plain run, those of the warm-up."""
    if record["engine"]["skip"] == "none":
        return record["engine"]["warmup_steps"]
    return max((w["step"] for w in record["windows"] if w["is_warming_up"]), default=0)


def sent_after(record: Mapping[str, Any], start: int) -> dict[str, float]:
    """Returns the bytes by kind that all ranks sent in training after so many steps.

    Of a window that began before, the part of its steps that came after is counted; what no window
    has, came after the last one.
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


def _by_case(figures: Figures) -> dict[Case, Figures]:
    found: dict[Case, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for trial in figures:
        found[Case(trial["run"], trial["placement"], trial["ranks"])].append(trial)
    return dict(found)


def _by_seed(trials: Figures, figure: str, kind: str | None = None) -> list[float | None]:
    """A figure of each seed: the mean over its repeats."""
    found: dict[int, list[float | None]] = collections.defaultdict(list)
    for trial in trials:
        value = trial[figure]
        found[trial["seed"]].append(value if kind is None or value is None else value[kind])
    return [
        None if any(value is None for value in values) else statistics.mean(values)
        for values in found.values()
    ]


def _median(trials: Figures, figure: str) -> float | None:
    values = [trial[figure] for trial in trials]
    return None if any(value is None for value in values) else statistics.median(values)


def markdown(title: str, figures: Figures) -> str:
    """Returns a table of means and medians, and one of every run."""
    seeds = sorted({trial["seed"] for trial in figures})
    repeats = 1 + max(trial["repeat"] for trial in figures)
    counts = f"seeds {', '.join(map(str, seeds))}" + (f" x {repeats}" if repeats > 1 else "")
    lines = [f"# Network, {title}, {counts}", "", *_head(_HEADER)]
    for case, trials in _by_case(figures).items():
        kinds = [_by_seed(trials, "bytes_per_step", kind) for kind in _KINDS]
        lines.append(
            _row(
                case.placement,
                str(case.ranks),
                case.run,
                mean(_by_seed(trials, "bytes_share"), "{:.1%}"),
                mean(_by_seed(trials, "bytes_share_with_control"), "{:.1%}"),
                text(_median(trials, "seconds_share"), "{:.2f}"),
                mean(_by_seed(trials, "auc_difference_alone"), "{:+.4f}"),
                mean(_by_seed(trials, "auc_difference_plain"), "{:+.4f}"),
                mean(_by_seed(trials, "auc"), "{:.4f}"),
                text(_mean_kilobytes(_by_seed(trials, "embedding_bytes_per_step")), "{:,.1f}"),
                *(text(_mean_kilobytes(values), "{:,.1f}") for values in kinds),
                text(_milliseconds(_median(trials, "seconds_per_step")), "{:.1f}"),
                mean(_by_seed(trials, "frozen_keys"), "{:,.0f}"),
            )
        )
    lines += ["", "## Every run", "", *_head(_EACH)]
    for trial in figures:
        lines.append(
            _row(
                *(str(trial[name]) for name in ("placement", "ranks", "run", "seed", "repeat")),
                *(text(trial[f"bytes_share{end}"], "{:.1%}") for end in ("", "_with_control")),
                text(trial["seconds_share"], "{:.2f}"),
                text(trial["auc_difference_alone"], "{:+.4f}"),
                text(trial["auc_difference_plain"], "{:+.4f}"),
                text(trial["auc"], "{:.4f}"),
                text(_mean_kilobytes([trial["embedding_bytes_per_step"]]), "{:,.1f}"),
                text(_milliseconds(trial["seconds_per_step"]), "{:.1f}"),
            )
        )
    return "\n".join(lines)


def _mean_kilobytes(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) / 1e3 if known else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _head(names: Sequence[str]) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def plot(title: str, figures: Figures, path: Path) -> None:
    """Draws the change of AUC over the share of embedding bytes, both against plain training."""
    cases = {
        case: trials
        for case, trials in _by_case(figures).items()
        if case.run != "plain" and None not in _by_seed(trials, "bytes_share")
        and None not in _by_seed(trials, "auc_difference_plain")
    }  # fmt: skip
    plots = pyplot(path.name) if cases else None
    if plots is None:
        return
    placements = list(dict.fromkeys(case.placement for case in cases))
    ranks = sorted({case.ranks for case in cases})
    runs = list(dict.fromkeys(case.run for case in cases))
    figure, panels = plots.subplots(
        1, len(placements), figsize=(4 + 5 * len(placements), 6), layout="constrained",
        squeeze=False, sharey=True,
    )  # fmt: skip
    colors = plots.get_cmap("tab20").colors
    for axes, placement in zip(panels[0], placements, strict=True):
        axes.axhline(0.0, color="gray", linewidth=0.8)
        axes.axhline(-_AUC_LOSS, color="gray", linewidth=0.8, linestyle=":")
        for share in _SHARES:
            axes.axvline(share, color="gray", linewidth=0.8, linestyle=":")
        axes.set_xlabel("embedding bytes after warm-up, as a share of plain float32's")
        axes.set_title(f"{title}: {placement}")
    panels[0][0].set_ylabel("test AUC, difference to plain training of as many ranks")
    for case, trials in cases.items():
        share, auc = (_by_seed(trials, name) for name in ("bytes_share", "auc_difference_plain"))
        panels[0][placements.index(case.placement)].errorbar(
            statistics.mean(share), statistics.mean(auc), xerr=spread(share), yerr=spread(auc),
            marker="osD^v"[ranks.index(case.ranks) % 5], capsize=3, linestyle="none",
            color=colors[runs.index(case.run) % len(colors)], label=f"{case.run}, {case.ranks}",
        )  # fmt: skip
    handles: dict[str, Any] = {}
    for axes in panels[0]:
        axes.set_xlim(0.0, max(1.05, axes.get_xlim()[1]))
        handles.update(
            {label: h for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        )
    figure.legend(handles.values(), handles, loc="outside right upper", title="run, ranks")
    figure.savefig(path, dpi=110)
    plots.close(figure)
    print(f"Plot: {path}")
