"""What a program has measured, in few numbers: results/PROGRAM.json and the page drawn from it.

A summary has claims (a number beside its target) and parts: one for each data set, shape or link.
A call of a program replaces the parts that it has measured and keeps the others. A part has tables,
by column. Single steps, and repeated calls, are not kept.
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
_OUTPUT = flags.DEFINE_string("output", "results", "Folder of the summary and its page.")


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
    """Writes PROGRAM.json, with this part instead of an earlier one of its name, and PROGRAM.md.

    Args:
        program: the name of its file, without an ending.
        part: its heading.
        tables: columns by the table's heading ("": none).
        claims: by name; those that are None are left out.
        libraries: versions of what this process has not imported.
        made: commit, command, machine, date and versions; None: those of this process.

    Returns:
        The page.

    Raises:
        ValueError: the summary is larger than `LIMIT`. The page has been printed then.
    """
    on = machine()
    text = f"{on['processor']}, {on['cores']} cores, {on['memory_gib']} GiB"
    made = made or pages.made_by(text, {**versions(), **(libraries or {})})
    return pages.write(output(), program, part, tables, claims, made)
