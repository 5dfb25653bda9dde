"""Writes the summary of a benchmark: results/PROGRAM.json and a Markdown page.

A summary has claims (a value and its target) and parts, one for each data set, shape or link. A
part contains tables, stored by column. Running a program replaces the parts that it measured and
keeps the others. Single steps and repeated calls are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pages
from absl import flags
from pages import CLAIM, LIMIT, MADE, Claim, Column, claim, column, draw, reached

from slipstream_tf.telemetry.run_record import machine, versions

__all__ = ["CLAIM", "LIMIT", "MADE", "claim", "column", "draw", "output", "reached", "write"]
_OUTPUT = flags.DEFINE_string(
    "output", "results", "Folder of the result files (JSON and Markdown)."
)


def output() -> Path:
    """Returns the folder of the results."""
    return Path(_OUTPUT.value)


def write(
    program: str,
    part: str,
    tables: Mapping[str, Sequence[Column]],
    claims: Mapping[str, Claim | None],
    libraries: Mapping[str, str] | None = None,
    made: Mapping[str, Any] | None = None,
) -> str:
    """Writes PROGRAM.json and PROGRAM.md; replaces a part with the same name.

    Args:
        program: The base name of the files.
        part: The heading of the part.
        tables: Columns by the heading of the table. "" means no heading.
        claims: Claims by name. Claims that are None are omitted.
        libraries: Versions of libraries that this process has not imported.
        made: Commit, command, machine, date and versions. None uses the values of this process.

    Returns:
        The page.

    Raises:
        ValueError: If the summary exceeds `LIMIT`. The page has then been printed.
    """
    on = machine()
    text = f"{on['processor']}, {on['cores']} cores, {on['memory_gib']} GiB"
    made = made or pages.made_by(text, {**versions(), **(libraries or {})})
    return pages.write(output(), program, part, tables, claims, made)
