"""`slipstream-doctor`: what is there, what is missing, and the command that mends it.

In: flags and this environment. Out: a report, or with --json one JSON object; exit code 1 if
something that training in one process needs does not work.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from slipstream_tf._version import __version__
from slipstream_tf.cli import checks, findings
from slipstream_tf.cli.findings import Finding, Section
from slipstream_tf.cli.flag_set import FlagSet, Number, RunError
from slipstream_tf.cli.program import run_program

SCHEMA = 1
_WIDTH = 96
_INDENT = 28


def make_flags() -> FlagSet:
    """Returns the program's flags."""
    flags = FlagSet(
        "slipstream-doctor",
        "Says what is installed and works, what is missing or broken, and the command that mends "
        "it. Tests each store that is there on a few keys. Exit code 0: training in one process "
        "works. 1: something does not that it needs: Python and its packages, TensorFlow, Keras, "
        "the op library, the native or the variable store's self-test. Horovod, SOK, CUDA, "
        "matplotlib and the compiler may be missing. 2: a flag is wrong.",
        ("slipstream-doctor", "slipstream-doctor --json"),
    )
    flags.group("Report")
    flags.add_switch("json", "the same as one JSON object on stdout")
    text = "seconds that each check may take; each runs in a process of its own"
    flags.add("time_limit", Number(0, 3600, open_minimum=True), 60, text)
    return flags


def main(values: dict[str, Any], given: frozenset[str]) -> None:
    """Prints the report; raises RunError if something needed does not work."""
    del given
    if not values["json"]:
        print(f"slipstream_tf {__version__}", flush=True)
    sections = []
    for section in checks.examine(values["time_limit"]):
        sections.append(section)
        if not values["json"]:
            print(section_text(section), flush=True)
    if values["json"]:
        print(json.dumps(as_json(sections), indent=2, allow_nan=False))
    else:
        print(f"\n{conclusion(sections)}", flush=True)
    broken = findings.needed_but_not_ok(sections)
    if broken:
        raise RunError(f"training in one process does not work here: {', '.join(broken)}.")


def as_json(sections: Sequence[Section]) -> dict[str, Any]:
    """Returns the JSON form.

    Returns:
        `works`: whether training in one process works; `sections`: by key, lists of findings with
        the fields of `findings.Finding`.
    """
    return {
        "schema": SCHEMA,
        "slipstream_tf": __version__,
        "works": not findings.needed_but_not_ok(sections),
        "sections": {
            section.key: [dataclasses.asdict(finding) for finding in section.findings]
            for section in sections
        },
    }


def section_text(section: Section) -> str:
    """Returns the lines of a section."""
    return "\n".join([f"\n{section.title}", *map(_finding_text, section.findings)])


def conclusion(sections: Sequence[Section]) -> str:
    """Returns the last lines of the report."""
    everything = [finding for section in sections for finding in section.findings]
    if findings.needed_but_not_ok(sections):
        text = "Mend these first, from the top: what comes later may need what comes earlier. "
        names = [f.name for f in everything if f.is_needed and f.state in ("missing", "broken")]
        return _wrapped(f"{text}{', '.join(names)}.", "")
    optional = [f.name for f in everything if f.state != findings.OK]
    text = "All that training in one process needs works."
    if optional:
        text += f" Optional and not there or not in order: {', '.join(optional)}."
    return _wrapped(text, "")


def _finding_text(finding: Finding) -> str:
    head = f"  {finding.state:<10}{finding.name:<16}".ljust(_INDENT)
    text = _wrapped(finding.detail, head)
    if finding.fix:
        text += "\n" + _wrapped(f"-> {finding.fix}", " " * _INDENT)
    return text


def _wrapped(text: str, head: str) -> str:
    # Paths and options stay whole, so that a command can be copied.
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def entry_point(arguments: Sequence[str] | None = None) -> None:
    """Runs the program and ends the process with its exit code."""
    sys.exit(run_program(make_flags(), main, arguments))


if __name__ == "__main__":
    entry_point()
