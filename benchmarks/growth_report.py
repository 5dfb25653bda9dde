"""What growth.py has measured: targets, tables and the plot."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np

MOST_TIMES_AS_LONG = 4.0
MOST_BYTES = 24.0
MOST_TIMES_MEDIAN = 10.0
# Memory comes in huge pages: with few keys in 64 shards their unused parts are most of it.
_ENOUGH_KEYS = 1_000_000
# Edges of the histogram of steps, in medians.
EDGES = (0.0, 0.75, 1.25, 2.0, 3.0, 5.0, 10.0, np.inf)
OPS = {"lookup": "lookup (training)", "update": "update (Adagrad)", "evaluation": "evaluation"}


@dataclasses.dataclass(frozen=True)
class Size:
    """The table at one size.

    Attributes:
        keys: that it has.
        nanoseconds: by op, per key and turn.
        ratios: by op, per turn, to the small table's nanoseconds.
        load: keys per place of the index.
        resident_beyond_payload: bytes that the process has grown by for each row after the
            first batch of them, beyond values and slots; None: the system does not tell.
        allocated_beyond_payload: the same of what the table has asked for; pages that it has not
            touched yet are in.
    """

    keys: int
    nanoseconds: Mapping[str, Sequence[float]]
    ratios: Mapping[str, Sequence[float]]
    load: float
    resident_beyond_payload: float | None
    allocated_beyond_payload: float

    def median(self, op: str) -> float:
        """Returns the median nanoseconds per key."""
        return statistics.median(self.nanoseconds[op])

    def ratio(self, op: str) -> float:
        """Returns the median ratio to the small table."""
        return statistics.median(self.ratios[op])

    def record(self) -> dict[str, Any]:
        """Returns all of it for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Growth:
    """Growths of a table from empty, with the same keys in the same steps.

    Attributes:
        new: share of new keys in a step.
        keys: at the end.
        seconds: of each growth, of its steps.
    """

    new: float
    keys: int
    seconds: Sequence[Sequence[float]]

    def typical(self) -> np.ndarray:
        """Returns the median of each step over the growths: without what else the machine did."""
        return np.median(np.array(self.seconds), axis=0)

    def record(self) -> dict[str, Any]:
        """Returns all of it for JSON."""
        return {
            "new": self.new,
            "keys": self.keys,
            "milliseconds": [[round(1e3 * s, 4) for s in run] for run in self.seconds],
            "growths": [spread_of(run) for run in self.seconds],
            "of_medians": spread_of(self.typical()),
        }


def spread_of(seconds: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Returns median, 99th percentile and most in milliseconds, and where the slowest steps are."""
    milliseconds = 1e3 * np.asarray(seconds)
    median = float(np.median(milliseconds))
    counts, _ = np.histogram(milliseconds / median, EDGES)
    return {
        "steps": len(milliseconds),
        "median_ms": median,
        "p99_ms": float(np.percentile(milliseconds, 99)),
        "max_ms": float(milliseconds.max()),
        "max_to_median": float(milliseconds.max() / median),
        "slowest_steps": [int(step) for step in np.argsort(-milliseconds)[:5]],
        "histogram": [int(count) for count in counts],
    }


@dataclasses.dataclass(frozen=True)
class Target:
    """What is asked.

    Attributes:
        what: in words.
        most: the largest value that is allowed.
        value: measured; None: it could not be.
    """

    what: str
    most: float
    value: float | None

    def record(self) -> dict[str, Any]:
        """Returns it for JSON."""
        return {**dataclasses.asdict(self), "reached": self.reached}

    @property
    def reached(self) -> bool | None:
        """Returns whether the value is small enough; None where it is not known."""
        return None if self.value is None else self.value <= self.most


def targets(sizes: Sequence[Size], growths: Sequence[Growth]) -> list[Target]:
    """Returns what is asked beside what was measured."""
    last = sizes[-1]
    resident = [size.resident_beyond_payload for size in sizes if size.keys >= _ENOUGH_KEYS]
    known = [value for value in resident if value is not None]
    found = [
        Target(f"{OPS[op]} at {last.keys:,} keys, times as long as at {sizes[0].keys:,}",
               MOST_TIMES_AS_LONG, last.ratio(op))
        for op in OPS
    ]  # fmt: skip
    found += [
        Target(
            f"bytes a row beyond the payload, at {last.keys:,} keys",
            MOST_BYTES,
            last.resident_beyond_payload,
        ),
        Target(
            f"the same at the worst size of {_ENOUGH_KEYS:,} keys or more",
            MOST_BYTES,
            max(known) if known else None,
        ),
    ]
    for growth in growths:
        steps = f"steps with {growth.new:.0%} new keys"
        of_medians = spread_of(growth.typical())["max_to_median"]
        worst = max(spread_of(run)["max_to_median"] for run in growth.seconds)
        found += [
            Target(f"{steps}: slowest / median, each step's median over growths",
                   MOST_TIMES_MEDIAN, of_medians),
            Target(f"{steps}: slowest / median, in the worst growth", MOST_TIMES_MEDIAN, worst),
        ]  # fmt: skip
    return found


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def markdown(
    sizes: Sequence[Size], growths: Sequence[Growth], asked: Sequence[Target]
) -> str:  # fmt: skip
    """Returns the tables."""
    reached = {None: "not measured", True: "yes", False: "**no**"}
    lines = ["# One table growing", ""]
    lines += _table(
        ("what", "asked, at most", "measured", "reached"),
        [
            (target.what, f"{target.most:g}", common.text(target.value, "{:.2f}"),
             reached[target.reached])
            for target in asked
        ],
    )  # fmt: skip
    lines += ["", "## Nanoseconds per key, and bytes", ""]
    lines += _table(
        ("keys", "op", "times as long", "all turns", "median ns", "all turns' ns"),
        [
            (f"{size.keys:,}", OPS[op], f"{size.ratio(op):.2f}",
             " ".join(f"{ratio:.2f}" for ratio in size.ratios[op]), f"{size.median(op):.1f}",
             " ".join(f"{run:.1f}" for run in size.nanoseconds[op]))
            for size in sizes
            for op in OPS
        ],
    )  # fmt: skip
    lines += [""]
    lines += _table(
        ("keys", "bytes a row beyond the payload", "asked for, beyond the payload", "load"),
        [
            (f"{size.keys:,}", common.text(size.resident_beyond_payload, "{:.1f}"),
             f"{size.allocated_beyond_payload:.1f}", f"{size.load:.3f}")
            for size in sizes
        ],
    )  # fmt: skip
    lines += ["", "## Steps while the table grows from empty", ""]
    names = [f"to {high:g}" for high in EDGES[1:-1]] + [f"over {EDGES[-2]:g}"]
    rows = []
    for growth in growths:
        named = [(str(i + 1), run) for i, run in enumerate(growth.seconds)]
        for name, run in [*named, ("each step's median", growth.typical())]:
            spread = spread_of(run)
            rows.append(
                (f"{growth.new:.0%}", name, f"{spread['steps']:,}", f"{spread['median_ms']:.2f}",
                 f"{spread['p99_ms']:.2f}", f"{spread['max_ms']:.2f}",
                 f"{spread['max_to_median']:.1f}",
                 *(f"{count:,}" for count in spread["histogram"]))
            )  # fmt: skip
    header = ("new keys", "growth", "steps", "median ms", "p99", "max", "max / median", *names)
    lines += _table(header, rows)
    lines += ["", "The last columns count steps by their time in medians."]
    return "\n".join(lines)


def plot(sizes: Sequence[Size], growths: Sequence[Growth], file: Path) -> None:
    """Draws time per key over size, and histograms of the growing steps."""
    pyplot = common.pyplot(file.name)
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(1, 1 + len(growths), figsize=(5 * (1 + len(growths)), 4))
    first, *others = [axes] if not growths else list(axes)
    for op, label in OPS.items():
        first.plot([size.keys for size in sizes], [size.ratio(op) for size in sizes], "o-",
                   label=label)  # fmt: skip
    first.axhline(MOST_TIMES_AS_LONG, linestyle=":", color="gray", label="asked, at most")
    first.set(xscale="log", xlabel="keys", ylabel="time per key, to the smallest size")
    first.set_ylim(bottom=0)
    first.legend()
    for axis, growth in zip(others, growths, strict=True):
        typical = growth.typical()
        in_medians = typical / np.median(typical)
        axis.hist(in_medians, bins=np.linspace(0, max(12.0, float(in_medians.max())), 60))
        axis.axvline(MOST_TIMES_MEDIAN, linestyle=":", color="gray")
        axis.set(yscale="log", xlabel="a step's time, in medians", ylabel="steps")
        axis.set_title(f"growing to {growth.keys:,}, {growth.new:.0%} new keys a step")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
