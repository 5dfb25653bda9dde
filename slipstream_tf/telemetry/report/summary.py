"""The report's tables: what each run came to beside the first one, and what differs in settings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream_tf.telemetry.report.runs import Run, number, total

_LONGEST_VALUE = 80
_NOT_SET = "(not set)"
NOT_RECORDED = "not recorded"


@dataclasses.dataclass(frozen=True)
class Measure:
    """A column of the summary.

    Attributes:
        title: with its unit.
        of: gives a run's value; None where it has none.
        form: of the value, for str.format.
        is_relative: whether a difference is told in per cent of the first run's value.
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
        """Returns a run's value less that of the first run, or as a share of it less 1."""
        value, other = self.of(run), self.of(first)
        if value is None or other is None:
            return None
        if self.is_relative:
            return value / other - 1.0 if other else None
        return value - other

    def difference_text(self, run: Run, first: Run) -> str:
        """Returns the difference as text; empty where there is none."""
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
    Measure("test AUC", lambda run: run.number("test", "auc"), "{:.4f}", False),
    Measure("test log loss", lambda run: run.number("test", "log_loss"), "{:.4f}", False),
    Measure("calibration", lambda run: run.number("test", "calibration"), "{:.3f}", False),
    Measure("inputs trained", lambda run: run.number("inputs", "trained"), "{:,.0f}"),
    Measure("gradient rows sent", _rows_sent, "{:,.0f}"),
    Measure("MB between ranks", _megabytes, "{:,.1f}"),
    Measure("seconds of training", lambda run: run.training_seconds, "{:,.1f}"),
)


def csv_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[Any]]]:
    """Returns the summary's header and rows as numbers, differences behind the values."""
    header = ["run"]
    for measure in MEASURES:
        how = "share of the first run's" if measure.is_relative else "less the first run's"
        header += [measure.title, f"{measure.title}: difference, {how}"]
    rows = []
    for run in runs:
        row: list[Any] = [run.name]
        for measure in MEASURES:
            row += [measure.of(run), measure.difference(run, runs[0])]
        rows.append(row)
    return header, rows


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Returns the settings in which runs differ, in the order of the first run's.

    Returns:
        (name, text of each run's value); those of the engine are named "engine.NAME".
    """
    flat = [_settings(run) for run in runs]
    found = []
    for name in dict.fromkeys(name for settings in flat for name in settings):
        values = [settings.get(name, _NOT_SET) for settings in flat]
        if len(set(values)) > 1:
            found.append((name, [_short(value) for value in values]))
    return found


def _settings(run: Run) -> dict[str, str]:
    found = {"ranks": json.dumps(run.value("ranks", "size"))}
    for name, value in run.record["settings"].items():
        if isinstance(value, Mapping):
            found.update({f"{name}.{inner}": _text(v) for inner, v in value.items()})
        else:
            found[name] = _text(value)
    for place in ("versions", "machine"):
        values = run.value(place)
        if isinstance(values, Mapping):
            found.update({f"{place}.{name}": _text(v) for name, v in values.items()})
    return found


def _text(value: Any) -> str:
    if value is None:
        return _NOT_SET
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
