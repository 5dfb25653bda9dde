"""Draws the operations of each rank during a step of a `slipstream-train --trace=FILE` trace.

    python docs/pictures/step.py TRACE PICTURE.svg [MILLISECONDS]

The picture shows the step of median length, from its lookup to the lookup of the next step.
MILLISECONDS is the duration that the width of the picture covers, by default the whole step.
"""

from __future__ import annotations

import gzip
import itertools
import json
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from drawing import (  # noqa: E402  (in the folder of this file)
    INK,
    LINE,
    MUTED,
    SATURATED,
    VARYING,
    WARMING,
    WIDTH,
    Picture,
)

_LOOKUP = "SlipstreamLookup"
_LEFT, _RIGHT, _TOP, _TRACK = 98.0, 14.0, 66.0, 34.0
# Prefix of thread names -> heading and color of the track.
_TRACKS = {"tf_Compute": ("computes", SATURATED), "tf_data": ("reads", WARMING)}
# Color of Horovod messages. Waiting for the next cycle is excluded.
_MESSAGES = VARYING
Span = tuple[float, float]


def read(path: str) -> list[dict[str, Any]]:
    """Returns the events of a trace."""
    opened: Any = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def median_step(events: Iterable[dict[str, Any]]) -> Span:
    """Returns the start and end of the step of median length on rank 0."""
    starts = sorted(e["ts"] for e in events if e.get("name") == _LOOKUP and e["pid"] == 0)
    steps = sorted(itertools.pairwise(starts), key=lambda step: step[1] - step[0])
    return steps[len(steps) // 2]


def spans_of(events: Sequence[dict[str, Any]], rank: int, thread: str) -> list[Span]:
    """Returns the spans of operations on the threads of a rank with a name prefix."""
    named = {e["tid"]: e["args"]["name"] for e in events
             if e["pid"] == rank and e.get("name") == "thread_name"}  # fmt: skip
    chosen = {tid for tid, name in named.items() if name.startswith(thread)}
    # Events that only contain and wait for other events are excluded.
    inner = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["tid"] in chosen
             and not e["name"].startswith(("Iterator", "Executor", "Instantiated"))]  # fmt: skip
    return [(e["ts"], e["ts"] + e["dur"]) for e in inner]


def messages(events: Sequence[dict[str, Any]]) -> list[Span]:
    """Returns the spans of the messages of Horovod on rank 0."""
    found, begun = [], {}
    for event in events:
        if event["pid"] < 1000 or "ts" not in event:
            continue
        stack = begun.setdefault(event["pid"], [])
        if event["ph"] == "B":
            stack.append((event["name"], event["ts"]))
        elif event["ph"] == "E" and stack:
            name, start = stack.pop()
            if not name.startswith("NEGOTIATE"):
                found.append((start, event["ts"]))
    return found


def draw(events: Sequence[dict[str, Any]], milliseconds: float | None) -> Picture:
    """Returns the picture.

    Args:
        events: Events of a trace.
        milliseconds: Duration that the width covers. None covers the whole step.
    """
    begin, end = median_step(events)
    width = (end - begin) if milliseconds is None else milliseconds * 1e3
    ranks = sorted({e["pid"] for e in events if e["pid"] < 1000})
    tracks = [(f"{rank} {heading}", spans_of(events, rank, thread), color)
              for rank in ranks for thread, (heading, color) in _TRACKS.items()]  # fmt: skip
    carried = messages(events)
    if carried:
        tracks.append(("messages", carried, _MESSAGES))
    length = (end - begin) / 1e3
    picture = Picture(
        int(_TOP + _TRACK * len(tracks) + 40), f"A step of {len(ranks)} ranks, {length:.1f} ms"
    )
    picture.text(14, 30, f"a step of {len(ranks)} ranks: {length:.1f} ms", 15, INK, "start", True)

    def x_of(time: float) -> float:
        return _LEFT + (time - begin) / width * (WIDTH - _LEFT - _RIGHT)

    bottom = _TOP + _TRACK * len(tracks)
    for tick in range(int(width / 1e3) + 1):
        x = x_of(begin + tick * 1e3)
        picture.line([(x, _TOP - 8), (x, bottom)], LINE, 1)
        picture.text(x, bottom + 20, f"{tick}", 13, MUTED)
    picture.text(WIDTH - _RIGHT, bottom + 34, "ms", 13, MUTED, "end")
    last = min(end, begin + width)
    picture.line([(x_of(last), _TOP - 14), (x_of(last), bottom)], INK, 1.5, dashed=True)
    for number, (heading, spans, color) in enumerate(tracks):
        y = _TOP + number * _TRACK
        picture.text(14, y + 18, heading, 14, INK, "start")
        for start, stop in merged(spans, width / 1000):
            if stop > begin and start < last:
                left, right = x_of(max(start, begin)), x_of(min(stop, last))
                picture.box(left, y, max(right - left, 0.6), 24, color, color, 0)
    return picture


def merged(spans: Iterable[Span], gap: float) -> list[Span]:
    """Merges spans with gaps shorter than `gap`."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start - found[-1][1] < gap:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def main() -> None:
    """Draws the trace of the command line."""
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    limit = float(sys.argv[3]) if len(sys.argv) == 4 else None
    pathlib.Path(sys.argv[2]).write_text(draw(read(sys.argv[1]), limit).svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
