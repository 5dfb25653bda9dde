"""Draws the pictures of docs/concepts.md as SVG files in this folder.

    python docs/pictures/draw.py

The data is invented to explain the terms. Measurements are in the tables of the documentation.
"""

from __future__ import annotations

import pathlib
import random
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from drawing import (  # noqa: E402  (in the folder of this file)
    COLD,
    INK,
    LINE,
    MUTED,
    PAPER,
    PROBING,
    SATURATED,
    VARYING,
    WARMING,
    WIDTH,
    Picture,
)

PALE = {SATURATED: "#d9f0ec", VARYING: "#fbe8d8", COLD: "#eef2f4", WARMING: "#e2ebfd"}
THRESHOLD = 0.2
# State in each window and signed movement of the row, in the unit of the row values.
WINDOWS = (
    ("cold", 0.8), ("warming", 1.1), ("varying", 0.8), ("varying", -0.42), ("varying", 0.33),
    ("varying", 0.13), ("saturated", -0.09), ("saturated", 0.17), ("saturated", -0.06),
    ("saturated", -0.55), ("varying", -0.34), ("varying", 0.12),
)  # fmt: skip
COLORS = {"cold": COLD, "warming": WARMING, "varying": VARYING, "saturated": SATURATED}


def saturation() -> Picture:
    """Draws the value, drift and state of a row over twelve windows."""
    picture = Picture(470, "A row's value, its drift per window and its key's state, over time")
    left, right = 20.0, WIDTH - 90.0
    step = (right - left) / len(WINDOWS)
    for index, (state, _) in enumerate(WINDOWS):
        fill = PALE.get(COLORS[state], PAPER)
        picture.box(left + index * step, 50, step, 360, fill, fill, 0)
    picture.text(left, 34, "one value of the row", anchor="start", bold=True)
    picture.text(right, 34, "dots: snapshots", 14, MUTED, "end")
    source = random.Random(3)
    start, bottom, scale = 0.0, 198.0, 44.0
    path, dots = [], []
    for index, (state, movement) in enumerate(WINDOWS):
        x, count = left + index * step, 18
        if state != "cold":
            dots.append((x, bottom - start * scale))
        for tick in range(count + 1):
            part = tick / count
            noise = source.gauss(0, 0.05) * (4 * part * (1 - part)) ** 0.5
            path.append((x + part * step, bottom - (start + movement * part + noise) * scale))
        start += movement
    picture.line(path, INK, 1.8)
    for x, y in dots:
        picture.dot(x, y)
    floor, height = 384.0, 110.0
    picture.text(left, 246, "drift: distance from the snapshot", anchor="start", bold=True)
    for index, (state, movement) in enumerate(WINDOWS):
        if state == "cold":
            continue
        tall = min(abs(movement), 1.1) * height
        x = left + index * step + 6
        picture.box(x, floor - tall, step - 12, tall, COLORS[state], COLORS[state], 2)
    y = floor - THRESHOLD * height
    picture.line([(left, y), (right, y)], INK, 1.3, dashed=True)
    picture.text(right + 6, y + 5, "T", 14, INK, "start", bold=True)
    picture.line([(left, floor), (right, floor)], LINE)
    picture.text(left, 404, "windows", 13, MUTED, "start")
    picture.line([(left + 56, 400), (right, 400)], MUTED, 1, arrow=True)
    edges, index = [], 0
    while index < len(WINDOWS):
        end = index
        while end < len(WINDOWS) and WINDOWS[end][0] == WINDOWS[index][0]:
            end += 1
        edges.append((WINDOWS[index][0], index, end))
        index = end
    for number, (state, begin, end) in enumerate(edges):
        x, wide = left + begin * step, (end - begin) * step
        picture.box(x + 1, 418, wide - 2, 12, COLORS[state], COLORS[state], 3)
        # The label of a narrow state is one line lower, so that labels do not overlap.
        picture.text(x + wide / 2, 447 if number != 1 else 463, state, 14)
    return picture


def states() -> Picture:
    """Draws the states of a key and their transitions."""
    picture = Picture(436, "States of a key: cold, warming, varying, saturated, probing")
    cold, warming = (85, 60), (370, 60)
    varying, saturated, probing = (370, 195), (105, 195), (105, 335)

    def note(x: float, y: float, words: str, anchor: str = "middle") -> None:
        picture.text(x, y, words, 13.5, MUTED, anchor)

    picture.line([(142, 60), (312, 60)], arrow=True)
    note(227, 50, "enters the hot set")
    picture.line([(370, 81), (370, 173)], arrow=True)
    note(378, 130, "drift ≥ T", "start")
    picture.line([(318, 76), (160, 174)], arrow=True)
    note(222, 120, "drift < T", "end")
    picture.line([(312, 187), (164, 187)], arrow=True)
    note(238, 179, "drift < T")
    picture.line([(163, 204), (311, 204)], arrow=True)
    note(238, 222, "drift ≥ T")
    picture.line([(92, 216), (92, 313)], arrow=True)
    picture.line([(118, 314), (118, 218)], arrow=True)
    note(84, 258, "every N", "end")
    note(84, 275, "windows", "end")
    note(126, 258, "drift < T", "start")
    picture.line([(160, 322), (356, 218)], arrow=True)
    note(282, 282, "drift ≥ T", "start")
    picture.label(*cold, "cold", COLD)
    picture.label(*warming, "warming", WARMING)
    picture.label(*varying, "varying", VARYING)
    picture.label(*saturated, "saturated", SATURATED, 116)
    picture.label(*probing, "probing", PROBING)
    note(240, 384, "Warming: tracked for one window before a decision.")
    note(240, 403, "Probing: trained for one window like a varying key.")
    note(240, 422, "A key that leaves the hot set becomes cold.")
    return picture


def window() -> Picture:
    """Draws the hot set, and the actions at the start and end of a window."""
    picture = Picture(430, "The hot set, and the actions at the start and end of a window")
    picture.text(20, 32, "access counts of a table's keys", anchor="start", bold=True)
    base, count, hot = 190.0, 40, 12
    wide = (WIDTH - 40) / count
    picture.box(16, 46, hot * wide + 5, base - 44, PALE[SATURATED], SATURATED, 6, True)
    for rank in range(count):
        tall = 132 / (rank + 1) ** 0.62
        color = SATURATED if rank < hot else COLD
        picture.box(20 + rank * wide, base - tall, wide - 3, tall, color, color, 1.5)
    picture.text(28 + hot * wide, 70, "hot set: the most accessed keys", 14, INK, "start")
    picture.text(28 + hot * wide, 89, "with snapshots within HotSet(memory)", 14, MUTED, "start")
    picture.text(WIDTH - 20, 136, "all other keys are cold", 14, MUTED, "end")
    picture.text(20, 236, "one window", anchor="start", bold=True)
    top, start, end = 262.0, 76.0, 404.0
    picture.line([(20, top), (WIDTH - 16, top)], INK, 1.6, arrow=True)
    picture.text(WIDTH - 16, top - 12, "steps", 14, MUTED, "end")
    for tick in range(1, 16):
        x = start + tick * (end - start) / 16
        picture.line([(x, top - 4), (x, top + 4)], MUTED, 1)
    for x, words in ((start, "start"), (end, "end")):
        picture.line([(x, top - 15), (x, top + 15)], INK, 2.2)
        picture.text(x, top + 32, words, 14, bold=True)
    picture.text((start + end) / 2, top - 12, "snapshot_interval steps", 14, MUTED)
    picture.box(20, 304, 190, 106, PALE[WARMING], WARMING)
    for line, words in enumerate(
        (
            "snapshot:",
            "a copy of the hot rows",
            "(the end of a window is",
            "the start of the next)",
        )
    ):
        picture.text(32, 327 + 21 * line, words, 14, INK if line < 2 else MUTED, "start", line == 0)
    picture.box(226, 304, 234, 106, PALE[VARYING], VARYING)
    texts = (
        "drift of each hot row",
        "threshold T from the sample",
        "state of each hot key",
        "hot set of the next window",
    )
    for line, words in enumerate(texts):
        picture.text(238, 327 + 21 * line, f"{line + 1}. {words}", 14, anchor="start")
    return picture


def threshold() -> Picture:
    """Draws scores of examples, and T as a quantile of the scores."""
    picture = Picture(480, "The score of an example, and T as a quantile of the scores")
    picture.text(20, 30, "sampled examples and the drifts of their keys", anchor="start", bold=True)
    left, right = 96.0, 380.0

    def place(drift: float) -> float:
        return left + drift * (right - left)

    inputs = (
        ("example 1", (0.04, 0.1, 0.17), True),
        ("example 2", (0.06, 0.25, 0.42), True),
        ("example 3", (0.12, 0.3, 0.82), True),
        ("example 4", (0.05, 0.2), False),
    )
    for row, (name, drifts, is_hot) in enumerate(inputs):
        y = 62.0 + 34 * row
        picture.text(20, y + 5, name, 14, anchor="start")
        picture.line([(left, y), (right, y)], LINE, 1.2)
        for drift in drifts:
            is_score = is_hot and drift == max(drifts)
            picture.dot(place(drift), y, VARYING if is_score else COLD, 7 if is_score else 5.5)
        if not is_hot:
            picture.dot(420, y, VARYING, 7)
            picture.text(434, y + 5, "∞", 17, INK, "start")
    picture.text(WIDTH - 20, 207, "untracked key", 13.5, MUTED, "end")
    picture.line([(left, 188), (right, 188)], MUTED, 1, arrow=True)
    picture.text(left, 207, "drift", 13.5, MUTED, "start")
    picture.dot(28, 232, VARYING, 7)
    picture.text(42, 237, "score: the largest drift of an example (alpha = 1)", 14, INK, "start")
    picture.text(20, 278, "scores, sorted", anchor="start", bold=True)
    floor, top, first, hot, last = 430.0, 300.0, 40.0, 350.0, 460.0
    cut = first + 0.4 * (hot - first)
    picture.box(first, top, cut - first, floor - top, PALE[SATURATED], PALE[SATURATED], 0)
    picture.box(hot, top, last - hot, floor - top, PALE[COLD], PALE[COLD], 0)
    points = []
    for tick in range(61):
        part = tick / 60
        score = 0.05 + 0.35 * part + 0.55 * part**4
        points.append((first + part * (hot - first), floor - score * (floor - top)))
    picture.line(points, INK, 2.2)
    y = floor - (0.05 + 0.35 * 0.4 + 0.55 * 0.4**4) * (floor - top)
    picture.line([(first, y), (cut, y), (cut, floor)], VARYING, 1.6, dashed=True)
    picture.text(first - 10, y + 5, "T", 16, INK, "end", True)
    picture.line([(first, floor), (last, floor)], MUTED, 1.2)
    picture.text((first + cut) / 2, 320, "skippable", 14, SATURATED, bold=True)
    picture.text((hot + last) / 2, 320, "not hot: ∞", 14, MUTED)
    picture.text((first + cut) / 2, floor + 20, "fraction", 14)
    picture.text((cut + hot) / 2, floor + 20, "the other hot examples", 14)
    picture.text((hot + last) / 2, floor + 20, "never skipped", 14, MUTED)
    picture.text(20, 472, "T is the smallest score above that fraction.", 13.5, MUTED, "start")
    return picture


def savings() -> Picture:
    """Draws the steps that each policy saves for saturated keys."""
    picture = Picture(382, "Steps that each policy saves for saturated keys")
    columns = ("read row", "forward", "backward", "send", "update")
    left, wide = 124.0, 68.0
    for index, name in enumerate(columns):
        picture.text(left + wide * (index + 0.5), 34, name, 14, MUTED)
    full, out, later = SATURATED, None, VARYING
    rows = (
        ("plain", (full, full, full, full, full), ""),
        ("skip", (out, out, out, out, out), "the example is not trained"),
        ("mask", (full, full, full, out, out), "the gradient of the row is discarded"),
        (
            "defer",
            (full, full, full, later, later),
            "sums are applied once they would move the row",
        ),
    )
    for number, (name, cells, words) in enumerate(rows):
        y = 48.0 + 70 * number
        picture.text(16, y + 27, name, 15, anchor="start", bold=True)
        for index, color in enumerate(cells):
            x = left + wide * index + 4
            fill = PAPER if color is None else color
            picture.box(x, y + 6, wide - 8, 32, fill, color or LINE, 6, color is None)
        if words:
            picture.text(left + 4, y + 57, words, 14, MUTED, "start")
    y = 354.0
    legend = (
        (full, "in every step"),
        (later, "later, as a sum"),
        (None, "saved"),
    )
    x = 16.0
    for color, words in legend:
        picture.box(
            x, y - 12, 22, 16, PAPER if color is None else color, color or LINE, 4, color is None
        )
        picture.text(x + 28, y + 1, words, 13.5, anchor="start")
        x += 42 + 6.6 * len(words)
    return picture


def traffic() -> Picture:
    """Draws the messages between two ranks in a step, by placement."""
    picture = Picture(566, "Messages between two ranks in a step, replicated and sharded")

    def ranks(y: float, height: float, words: str) -> None:
        for x, name in ((16.0, "rank 0"), (354.0, "rank 1")):
            picture.box(x, y, 110, height, PALE[COLD], LINE)
            picture.text(x + 55, y + 24, name, 15, bold=True)
            for line, part in enumerate(words.split("|")):
                picture.text(x + 55, y + 46 + 18 * line, part, 13.5, MUTED)

    def between(y: float, words: str, color: str, both: bool = True, note: str = "") -> None:
        if both:
            picture.line([(240, y), (134, y)], color, 2.2, arrow=True)
            picture.line([(240, y), (346, y)], color, 2.2, arrow=True)
        picture.text(240, y - 8, words, 14)
        if note:
            picture.text(240, y + 19, note, 13, MUTED)

    picture.text(16, 28, "replicated: every rank has all rows", anchor="start", bold=True)
    ranks(42, 186, "all rows||window end:|counts, scores,|losses, digest|of keys and T")
    between(76, "dense gradients", MUTED)
    between(124, "gradient rows, one per key", VARYING, note="fewer if masked or deferred")
    between(186, "at the window end: control", WARMING, note="all ranks make equal decisions")
    picture.text(
        16, 266, "sharded: the hash of a key determines its owner", anchor="start", bold=True
    )
    ranks(
        280,
        272,
        "rows it owns||window end:|counts, scores,|losses, digest|of keys and T",
    )
    between(318, "dense gradients", MUTED)
    between(366, "keys to owners", PROBING)
    between(420, "rows from owners", SATURATED)
    between(474, "gradient rows to owners", VARYING, note="fewer if masked or deferred")
    between(530, "at the window end: control", WARMING)
    return picture


PICTURES = (saturation, states, window, threshold, savings, traffic)


def main() -> None:
    """Writes all pictures."""
    for draw in PICTURES:
        (HERE / f"{draw.__name__}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
