"""Writes docs/settings.md, a table of all settings with default, meaning and advice.

    python docs/settings_table.py

Defaults and meanings come from the code: dataclasses with their docstrings, and the flags of
slipstream-train. settings_when.py contains the texts on when to change a setting.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import settings_when as when  # noqa: E402  (in the same folder)

from slipstream_tf import initializers, optimizers  # noqa: E402
from slipstream_tf.baselines import RowDrift, SkipAtRandom  # noqa: E402
from slipstream_tf.cli import train  # noqa: E402
from slipstream_tf.config import (  # noqa: E402
    DryRun,
    HotSet,
    Retention,
    Saturation,
    Storage,
    Table,
    Window,
)
from slipstream_tf.ops.features import FeatureSpec  # noqa: E402
from slipstream_tf.policies import (  # noqa: E402
    DeferGradients,
    Interval,
    MaskGradients,
    Movement,
    PredictedLoss,
    SkipExamples,
)

# Classes of settings, as they are listed.
CLASSES: tuple[type, ...] = (
    *(
        SkipExamples,
        PredictedLoss,
        RowDrift,
        DeferGradients,
        Movement,
        Interval,
        MaskGradients,
    ),
    *(Window, HotSet, Saturation),
    *(DryRun, SkipAtRandom, Table, Storage, Retention, FeatureSpec),
)

PAGE = HERE / "settings.md"
INTRODUCTION = """\
<!-- Written by docs/settings_table.py; edit the docstrings, or docs/settings_when.py. -->

# Settings

This page lists every setting with its default and when to change it, for users who tune a run. A
value out of range is an error that names the allowed values. So is a setting without an effect.
Start with a policy and `dry_run=True`, and change other settings later. See also
[choosing a policy](using/choosing.md).
"""

_SECTION = re.compile(r"^(?:Args|Attributes):\n", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def attributes(cls: type) -> dict[str, str]:
    """Returns the descriptions of a class's arguments and attributes by name."""
    _, *sections = _SECTION.split(inspect.getdoc(cls) or "")
    found = _ENTRY.findall("".join(sections))
    return {name: " ".join(words.split()) for name, words in found}


def default(field: dataclasses.Field) -> str:
    """Returns the default of a field in Python's notation, or an empty string."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return ""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20:
        return f"{value >> 20} << 20"
    return repr(value)


def cell(text: str) -> str:
    """Returns text as a table cell, with Markdown's special characters escaped."""
    parts = text.replace("|", r"\|").split("`")
    parts[::2] = [part.replace("*", r"\*").replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def table(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """Returns a Markdown table of (name, default, meaning, when)."""
    lines = ["| setting | what it is | when to change it |", "|---|---|---|"]
    for name, value, meaning, advice in rows:
        shown = f"`{name}`" + (f"<br>default {value}" if value else "")
        lines.append(f"| {shown} | {cell(meaning)} | {advice} |")
    # On narrow screens, style.css shows the cells of a row below each other.
    return "\n".join(['<div class="settings" markdown>', "", *lines, "", "</div>"])


def advised(advice: Mapping[str, str], name: str) -> str:
    """Returns the advice for a setting; raises KeyError if it is missing."""
    if name not in advice:
        raise KeyError(f"docs/settings_when.py has no entry for {name}")
    return advice[name]


def of_class(cls: type, advice: Mapping[str, str]) -> str:
    """Returns the table of a dataclass."""
    meanings = attributes(cls)
    return table(
        (f.name, f"`{default(f)}`" if default(f) else "", meanings[f.name], advised(advice, f.name))
        for f in dataclasses.fields(cls)
    )


def of_rules() -> str:
    """Returns the table of the sparse optimizers' settings, each where it is defined."""
    rows = []
    own = (optimizers.SGD, optimizers.Adagrad, optimizers.Adam, optimizers.Ftrl)
    for cls in (optimizers.SparseOptimizer, *own):
        meanings = attributes(cls)
        for field in dataclasses.fields(cls):
            if field.name not in cls.__annotations__:
                continue
            name = f"{cls.__name__}.{field.name}"
            shown = field.name if cls is optimizers.SparseOptimizer else name
            value = f"`{default(field)}`"
            rows.append((shown, value, meanings[field.name], advised(when.OPTIMIZERS, name)))
    return table(rows)


def of_initializers() -> str:
    """Returns a list of the initializers with their settings."""
    kinds = initializers.RandomUniform, initializers.RandomNormal, initializers.TruncatedNormal
    lines = []
    for cls in (*kinds, initializers.Constant, initializers.Zeros):
        settings = ", ".join(f"{f.name}={default(f)}" for f in dataclasses.fields(cls))
        first = (cls.__doc__ or "").splitlines()[0]
        lines.append(f"- `{cls.__name__}({settings})`: {first[0].lower()}{first[1:]}")
    return "\n".join(lines)


def flag_groups() -> dict[str, list[tuple[str, str, str]]]:
    """Returns the flags of slipstream-train by group: (name, meaning, note in --help)."""
    flags: Any = train.make_flags()
    # Not from `help_text`, whose lines are wrapped.
    return {
        group: [(name, flags._values[name].help, flags._notes[name]) for name in names]
        for group, names in flags._groups.items()
    }


def flag_advice(name: str) -> str:
    """Returns when to change a flag."""
    if name in when.FLAGS_OF_SETTINGS:
        return f"As `{when.FLAGS_OF_SETTINGS[name]}`."
    return advised(when.FLAGS, name)


def of_flags() -> str:
    """Returns a table per group of flags."""
    parts = []
    for group, flags in flag_groups().items():
        rows = []
        for name, meaning, note in flags:
            allowed, value = note, ""
            if "default: " in note:
                allowed, value = note.rsplit("default: ", 1)
            allowed = allowed.rstrip("; ")
            text = f"{meaning}; {allowed}" if allowed else meaning
            rows.append((f"--{name}", value, text, flag_advice(name)))
        parts.append(f"### {group}\n\n{table(rows)}")
    return "\n\n".join(parts)


def page() -> str:
    """Returns the whole page."""
    rules = "`slip.optimizers` has the sparse optimizers `SGD`, `Adagrad`, `RowWiseAdagrad` (with "
    rules += "the settings of Adagrad), `Adam`, `AdamW` and `RowWiseAdam` (with the settings of "
    rules += "Adam), and `Ftrl`. To change the learning rate during training, set "
    rules += "`embeddings.learning_rate = 0.01`."
    sections = (
        *((cls.__name__, "", of_class(cls, when.CLASSES[cls.__name__])) for cls in CLASSES),
        ("Optimizers", rules, of_rules()),
        (
            "Initializers",
            "`slip.initializers` has the initial values of new rows:",
            of_initializers(),
        ),
        (
            "Flags of slipstream-train",
            "[Programs](using/programs.md#data-and-settings) explains 'by the data'. For "
            "the flags of other programs, run them with `--help`.",
            of_flags(),
        ),
    )
    parts = [INTRODUCTION.rstrip("\n")]
    for title, words, content in sections:
        parts += [part for part in (f"## {title}", words, content) if part]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
