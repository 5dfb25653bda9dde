"""`slipstream-report`: compares runs in an HTML page, pictures and CSV files.

The program reads the metrics.json of each run. It writes report.html, which is self-contained, and
the folders png/ and csv/.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

import tqdm

from slipstream_tf.cli.flag_set import Flag, FlagSet, RunError, Text, UsageError, raised_as
from slipstream_tf.cli.program import make_output, run_program
from slipstream_tf.telemetry.report.drawing import require_matplotlib
from slipstream_tf.telemetry.report.runs import RecordError, read_runs
from slipstream_tf.telemetry.report.writing import write_report

_RUNS = "RUN"


def make_flags() -> FlagSet:
    """Returns the flags of `slipstream-report`."""
    output = Flag("output", Text(), "folder for the report; existing files are replaced", "report")
    return FlagSet(
        "slipstream-report",
        "Compares runs of slipstream-train in plots with one color per run: quality by examples "
        "and seconds, saturation, skipped examples, deferred and sent gradients, bytes and "
        "seconds. RUN is the output folder of a run, or its metrics.json. All runs are compared "
        "with the first. Writes the page report.html, which has no external resources, and the "
        "folders png/ and csv/. Requires matplotlib: pip install 'slipstream-tf[report]'.",
        (
            "slipstream-report runs/plain runs/paper",
            "slipstream-report runs/* --output=runs/report",
        ),
        {"Report": (output,)},
        arguments=_RUNS,
    )


def main(values: dict[str, Any], given: frozenset[str]) -> None:
    """Writes the report and prints its path.

    Raises:
        UsageError: If a run cannot be read or the output folder cannot be written.
        RunError: If matplotlib is not installed.
    """
    if not values[_RUNS]:
        raise UsageError(
            "Missing argument RUN. Expected one or more output folders of slipstream-train, for "
            "example runs/plain."
        )
    with raised_as(UsageError, "Invalid argument ", RecordError):
        runs = read_runs(values[_RUNS])
    # Importing matplotlib and drawing take seconds.
    print(f"Drawing the plots of {len(runs)} run{'s' if len(runs) > 1 else ''} ...", flush=True)
    with raised_as(RunError, "", ImportError):
        require_matplotlib()
    is_hidden = not sys.stderr.isatty()
    bar = functools.partial(tqdm.tqdm, desc="drawing", unit=" plots", disable=is_hidden)
    make_output(values["output"])
    allowed = "Expected a writable folder. Writing the report failed: "
    problem = f"Invalid flag --output={values['output']}. {allowed}"
    with raised_as(UsageError, problem, OSError):
        path = write_report(runs, values["output"], bar)
    print(f"Report: {os.path.abspath(path)}")


def entry_point(arguments: Sequence[str] | None = None) -> None:
    """Runs the program, then exits the process."""
    sys.exit(run_program(make_flags(), main, arguments))


if __name__ == "__main__":
    entry_point()
