"""How much of the wait for other ranks a trace of training hides behind computing.

    python benchmarks/overlap.py plain.json hotline.json

In: traces of `slipstream-train --trace=FILE`. Out: for each, how long messages of rows were under
way, and in which share of that time rank 0 multiplied matrices.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_SENDS = ("ALLTOALL",)
_COMPUTES = ("MatMul", "FusedMatMul", "BiasAdd", "Einsum", "Relu")
Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Returns the same time as spans that do not touch."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """Returns how long they are together."""
    return sum(end - begin for begin, end in spans)


def common_time(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Returns how long both last at once."""
    return length(one) + length(other) - length(union([*one, *other]))


def told(path: Path) -> tuple[float, float, float]:
    """Returns ms under way, ms of them in which rank 0 computes, and ms of the whole trace."""
    sent: list[Span] = []
    computed: list[Span] = []
    opened: dict[tuple[int, str], float] = {}
    ends = [0.0]
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        if "ts" not in event:
            continue
        begin = event["ts"]
        end = begin + event.get("dur", 0.0)
        name = event.get("name", "")
        of_tensor = event["pid"] >= 1000
        if of_tensor and event["ph"] == "B" and name.endswith(_SENDS):
            opened[event["pid"], "sent"] = begin
        elif of_tensor and event["ph"] == "E" and (event["pid"], "sent") in opened:
            sent.append((opened.pop((event["pid"], "sent")), begin))
        elif event["pid"] == 0 and event["ph"] == "X" and name.startswith(_COMPUTES):
            computed.append((begin, end))
            ends.append(end)
    sent, computed = union(sent), union(computed)
    return length(sent) / 1e3, common_time(sent, computed) / 1e3, max(ends) / 1e3


def main(paths: Sequence[str]) -> None:
    """Prints a table."""
    print("| trace | ms under way | hidden behind computing | ms of the trace |")
    print("| --- | --- | --- | --- |")
    for path in map(Path, paths):
        under_way, hidden, whole = told(path)
        share = hidden / under_way if under_way else 0.0
        print(f"| {path.stem} | {under_way:.1f} | {share:.0%} | {whole:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
