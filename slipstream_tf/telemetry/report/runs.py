"""Reads the records of runs and compares them with the first run."""

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream_tf.telemetry.run_record import RECORD, SCHEMA

_NEEDED: Mapping[str, type] = {
    "settings": dict, "test": dict, "examples": dict, "seconds": dict, "windows": list,
}  # fmt: skip
_KINDS: Mapping[type, str] = {dict: "an object", list: "a list"}
_LONGEST_VALUE = 80
_NOT_SET = "(not set)"
NOT_RECORDED = "not recorded"
_ALLOWED = f"Expected the --output folder of a slipstream-train run, or its {RECORD}."


class RecordError(Exception):
    """A path has no readable record; the message contains path and remedy."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One recorded run.

    Attributes:
        name: Short printable name, distinct within the report.
        record: Contents of metrics.json. Only the top-level entries are validated.
    """

    name: str
    record: Mapping[str, Any]

    def value(self, *keys: str) -> Any:
        """Returns an entry of the record, or None if it is missing."""
        return entry(self.record, *keys)

    def number(self, *keys: str) -> float | None:
        """Returns a finite number of the record, or None."""
        return number(self.value(*keys))

    def entries(self, key: str) -> list[Mapping[str, Any]]:
        """Returns the objects in a list of the record, for example "windows".

        The list is empty if the record lacks it.
        """
        return entries(self.record, key)

    def points(self, key: str, x: str, y: str) -> list[tuple[float | None, float | None]]:
        """Returns two entries of each object in a list of the record.

        Args:
            key: Name of the list, as in `entries`.
            x: Name of the first entry.
            y: Name of the second entry.

        Returns:
            (x, y) pairs. A missing number is None.
        """
        return [(number(point.get(x)), number(point.get(y))) for point in self.entries(key)]

    @property
    def training_seconds(self) -> float | None:
        """Seconds of training including window ends, or None if not recorded."""
        return total([self.number("seconds", phase) for phase in ("training", "window_ends")])


def entry(values: Any, *keys: str) -> Any:
    """Returns the value at a path of keys, or None if missing."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def entries(values: Any, *keys: str) -> list[Mapping[str, Any]]:
    """Returns the objects of the list at a path of keys.

    The list is empty if the path is missing.
    """
    found = entry(values, *keys)
    return [e for e in found if isinstance(e, Mapping)] if isinstance(found, list) else []


def number(value: Any) -> float | None:
    """Returns a finite number as a float, and None for other values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def total(counts: Sequence[float | None]) -> float | None:
    """Returns the sum; None if empty or if a number is missing."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Reads runs from folders or metrics.json files.

    Args:
        paths: At least one path. The last component of a folder becomes the run's name. If names
            are equal, more components are added.

    Raises:
        RecordError: A path has no record of this schema version, or is given twice.
    """
    records = [_read(path) for path in paths]
    called = [_called(path) for path in paths]
    twice = [path for path, count in Counter(called).items() if count > 1]
    if twice:
        raise RecordError(f"{_printable(twice[0])}: passed twice. Expected each run at most once.")
    return [Run(name, record) for name, record in zip(_names(called), records, strict=True)]


def _called(path: str) -> str:
    """Returns the path from which a run's name is derived.

    It is the folder of a metrics.json, or the path of another file without ".json".
    """
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
        what = f"the folder has no {RECORD}" if os.path.isdir(path) else "the path does not exist"
        raise RecordError(f"{_printable(path)}: {what}. {_ALLOWED}") from None
    except OSError as error:
        raise RecordError(f"{shown}: {error.strerror}. {_ALLOWED}") from None
    except (ValueError, RecursionError):
        raise RecordError(f"{shown}: the file is not JSON. {_ALLOWED}") from None
    if not isinstance(record, dict) or "schema" not in record:
        raise RecordError(f"{shown}: the file has no entry `schema`. {_ALLOWED}")
    if record["schema"] != SCHEMA:
        version = record["schema"]
        age = "an older" if isinstance(version, int) and version < SCHEMA else "another"
        raise RecordError(
            f"{shown}: the record has schema {_printable(repr(version))[:40]} of {age} version of "
            f"slipstream_tf. Expected schema {SCHEMA}. Repeat the run, or use that version."
        )
    for name, kind in _NEEDED.items():
        if not isinstance(record.get(name), kind):
            raise RecordError(
                f"{shown}: the entry `{name}` is missing or not {_KINDS[kind]}. {_ALLOWED}"
            )
    return record


def _names(paths: Sequence[str]) -> list[str]:
    """Returns the shortest distinct suffixes of the paths."""
    parts = [[part for part in path.split(os.sep) if part] or [os.sep] for path in paths]
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
    # Number the names of paths that differ only in characters that cannot be printed.
    return [f"{n} ({i + 1})" if counts[n] > 1 else n for i, n in enumerate(names)]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


@dataclasses.dataclass(frozen=True)
class RunMeasure:
    """A column of the summary table.

    Attributes:
        title: Title with unit.
        of: Returns a run's value, or None if it is missing.
        form: Format of the value for `str.format`.
        is_relative: Whether differences are shown as percentages of the first run's value.
    """

    title: str
    of: Callable[[Run], float | None]
    form: str
    is_relative: bool = True

    def text(self, run: Run) -> str:
        """Returns a run's value as text."""
        value = self.of(run)
        return NOT_RECORDED if value is None else self.form.format(value)

    def difference(self, run: Run, first: Run) -> float | None:
        """Returns the difference of a run's value to the first run's value.

        If `is_relative`, it is a fraction of the first run's value. None if a value is missing, or
        if the first value is 0 and the difference is relative.
        """
        value, other = self.of(run), self.of(first)
        if value is None or other is None:
            return None
        if self.is_relative:
            return value / other - 1.0 if other else None
        return value - other

    def difference_text(self, run: Run, first: Run) -> str:
        """Returns the difference as text, or an empty string if undefined."""
        found = self.difference(run, first)
        if found is None:
            return ""
        return f"{found:+.1%}" if self.is_relative else f"{found:+.4f}"


def _rows_sent(run: Run) -> float | None:
    tables = run.value("gradient_rows")
    if not isinstance(tables, Mapping):
        return None
    return total([number(t.get("sent")) for t in tables.values() if isinstance(t, Mapping)])


def _megabytes(run: Run) -> float | None:
    kinds = run.value("ranks", "bytes")
    if not isinstance(kinds, Mapping):
        return None
    sent = total([number(count) for count in kinds.values()] or [0.0])
    return None if sent is None else sent / 1e6


MEASURES = (
    RunMeasure("test AUC", lambda run: run.number("test", "auc"), "{:.4f}", False),
    RunMeasure("test log loss", lambda run: run.number("test", "log_loss"), "{:.4f}", False),
    RunMeasure("calibration", lambda run: run.number("test", "calibration"), "{:.3f}", False),
    RunMeasure("examples trained", lambda run: run.number("examples", "trained"), "{:,.0f}"),
    RunMeasure("gradient rows sent", _rows_sent, "{:,.0f}"),
    RunMeasure("MB between ranks", _megabytes, "{:,.1f}"),
    RunMeasure("seconds of training", lambda run: run.training_seconds, "{:,.1f}"),
)


def csv_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[Any]]]:
    """Returns the header and rows of the summary, as numbers.

    Each value is followed by its difference to the first run.
    """
    header = ["run"]
    rows: list[list[Any]] = [[run.name] for run in runs]
    for measure in MEASURES:
        how = ", as a fraction" if measure.is_relative else ""
        header += [measure.title, f"{measure.title}: difference from the first run{how}"]
        for run, row in zip(runs, rows, strict=True):
            row += [measure.of(run), measure.difference(run, runs[0])]
    return header, rows


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Returns the settings that differ between runs.

    They are in the order of the first run's settings.

    Returns:
        (name, text of each run's value) pairs. Nested settings are named with a dot, for example
        "engine.NAME".
    """
    flat = [_settings(run) for run in runs]
    found = []
    for name in dict.fromkeys(name for settings in flat for name in settings):
        values = [settings.get(name, _NOT_SET) for settings in flat]
        if len(set(values)) > 1:
            found.append((name, [_short(value) for value in values]))
    return found


def _settings(run: Run) -> dict[str, str]:
    parts = {name: run.value(name) for name in ("versions", "machine")}
    found = {"ranks": json.dumps(run.value("ranks", "size"))}
    for name, value in {**run.record["settings"], **parts}.items():
        if isinstance(value, Mapping):
            found.update({f"{name}.{inner}": _text(v) for inner, v in value.items()})
        elif name not in parts:
            found[name] = _text(value)
    return found


def _text(value: Any) -> str:
    if value is None or value == []:
        return _NOT_SET
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return ",".join(value)  # Same format as the command-line flag, for example of `policies`.
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
