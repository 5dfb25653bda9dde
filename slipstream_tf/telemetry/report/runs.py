"""Reads the records of runs. In: paths. Out: runs with names that differ, checked to be records."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf.telemetry.run_record import RECORD, SCHEMA

_NEEDED: Mapping[str, type] = {
    "settings": dict, "test": dict, "inputs": dict, "seconds": dict, "windows": list,
}  # fmt: skip
_KINDS: Mapping[type, str] = {dict: "an object", list: "a list"}
_ALLOWED = f"Allowed: a folder that slipstream-train wrote as --output, or its {RECORD}."


class RecordError(Exception):
    """A path leads to no record that can be read; the message names it and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: short, printable, and of no other run of the report.
        record: the content of its metrics.json. What a value is made of is not checked.
    """

    name: str
    record: Mapping[str, Any]

    def value(self, *keys: str) -> Any:
        """Returns an entry of the record; None where it has none."""
        return entry(self.record, *keys)

    def number(self, *keys: str) -> float | None:
        """Returns a finite number of the record; None where it has none."""
        return number(self.value(*keys))

    def entries(self, key: str) -> list[Mapping[str, Any]]:
        """Returns a list of objects, e.g. the windows; empty where the record has none."""
        found = self.value(key)
        return [e for e in found if isinstance(e, Mapping)] if isinstance(found, list) else []

    def points(self, key: str, x: str, y: str) -> list[tuple[float | None, float | None]]:
        """Returns two numbers of each of the objects of a list, None where one is missing."""
        return [(number(place.get(x)), number(place.get(y))) for place in self.entries(key)]

    @property
    def training_seconds(self) -> float | None:
        """Seconds of training, window ends included; None where the record has none."""
        return total([self.number("seconds", phase) for phase in ("training", "window_ends")])


def entry(values: Any, *keys: str) -> Any:
    """Returns what lies in nested objects under these keys; None where nothing does."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def number(value: Any) -> float | None:
    """Returns a finite number as float; None for all else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def total(counts: Sequence[float | None]) -> float | None:
    """Returns the sum; None if a number is missing, or all are."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Reads runs, each from its folder or its metrics.json.

    Args:
        paths: at least one. The last part of a folder's path becomes the run's name; more parts
            where others end alike.

    Raises:
        RecordError: a path leads to no record of this version, or is given twice.
    """
    records = [_read(path) for path in paths]
    places = [_place(path) for path in paths]
    twice = [place for place, count in Counter(places).items() if count > 1]
    if twice:
        raise RecordError(f"{_printable(twice[0])}: given twice. Allowed: each run once.")
    return [Run(name, record) for name, record in zip(_names(places), records, strict=True)]


def _place(path: str) -> str:
    """What a run is called by: the folder of a metrics.json, or the path of a record elsewhere."""
    path = os.path.realpath(path)
    folder, file = os.path.split(path)
    return folder if file == RECORD and not os.path.isdir(path) else path.removesuffix(".json")


def _read(path: str) -> dict[str, Any]:
    file = os.path.join(path, RECORD) if os.path.isdir(path) else path
    shown = _printable(file)
    try:
        with open(file, encoding="utf-8") as opened:
            record = json.load(opened)
    except FileNotFoundError:
        what = f"no {RECORD} in this folder" if os.path.isdir(path) else "no such file or folder"
        raise RecordError(f"{_printable(path)}: {what}. {_ALLOWED}") from None
    except OSError as error:
        raise RecordError(f"{shown}: {error.strerror}. {_ALLOWED}") from None
    except (ValueError, RecursionError):
        raise RecordError(f"{shown}: not JSON. {_ALLOWED}") from None
    if not isinstance(record, dict) or "schema" not in record:
        raise RecordError(f"{shown}: no record of slipstream-train: no `schema`. {_ALLOWED}")
    if record["schema"] != SCHEMA:
        version = record["schema"]
        age = "an older" if isinstance(version, int) and version < SCHEMA else "another"
        raise RecordError(
            f"{shown}: a record of {age} version, schema {_printable(repr(version))[:40]}. "
            f"Allowed: schema {SCHEMA}. Repeat the run, or use the slipstream_tf that wrote it."
        )
    for name, kind in _NEEDED.items():
        if not isinstance(record.get(name), kind):
            raise RecordError(
                f"{shown}: its entry `{name}` is not {_KINDS[kind]}, as in every record of "
                f"slipstream-train. {_ALLOWED}"
            )
    return record


def _names(places: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [[part for part in place.split(os.sep) if part] or [os.sep] for place in places]
    lengths = [1] * len(parts)
    while True:
        names = [_printable("/".join(p[-n:])) for p, n in zip(parts, lengths, strict=True)]
        counts = Counter(names)
        longer = [
            min(n + (counts[name] > 1), len(p))
            for name, p, n in zip(names, parts, lengths, strict=True)
        ]
        if longer == lengths:
            break
        lengths = longer
    # Paths that differ in nothing that can be printed.
    return [f"{n} ({i + 1})" if counts[n] > 1 else n for i, n in enumerate(names)]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
