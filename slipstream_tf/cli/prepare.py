"""`slipstream-prepare`: converts click logs to Parquet shards and computes statistics.

The program writes the shards, statistics.json and counts.parquet to the output folder and prints a
table of the statistics.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream_tf.cli.flag_set import (
    Choice,
    Flag,
    FlagSet,
    Integer,
    Number,
    RunError,
    Size,
    Text,
    UsageError,
    does_nothing,
    raised_as,
)
from slipstream_tf.cli.program import import_tensorflow, make_output, run_program
from slipstream_tf.config import parse_bytes
from slipstream_tf.telemetry.progress import open_bar
from slipstream_tf.telemetry.table import format_table

if TYPE_CHECKING:
    from slipstream_tf.data.sources import Source

_DATA = "DATA"
# Flags that are passed to `Options` under the same name.
_OPTIONS = ("shard_rows", "compression", "dim", "strict", "max_bad_fraction", "overwrite")
_FORMATS = ("auto", "criteo", "avazu", "csv", "parquet")
WRITING_FLAGS = {
    "Output": (
        Flag("output", Text(), "folder for the shards, statistics.json and counts.parquet"),
        Flag("overwrite", None, "replace the data of another preparation in --output"),
        Flag("shard_rows", Integer(1, 1 << 40), "number of lines or rows of DATA per shard",
             1_000_000),
        Flag("compression", Choice(("snappy", "zstd", "none")), "compression of the shards",
             "snappy"),
        Flag("threads", Integer(1, 1024), "number of threads that parse DATA", None, "all cores"),
    ),
    "Statistics of the training part": (
        Flag("hot_set_memory", Size(), "maximum memory for the snapshots of the rows of hot keys, "
             "as in slipstream-train", "256MiB"),
        Flag("dim", Integer(1, 65536), "number of float32 values per embedding row, which "
             "determines the size of a snapshot", 16),
        Flag("count_mb", Integer(1, 1 << 30), "maximum memory for the counts of keys in MiB; if "
             "they need more, counts of rare keys are dropped and approximate results are marked "
             "with ~", 2048),
    ),
}  # fmt: skip
"""Flags that `write` needs."""
_FLAGS = {
    "Data": (
        Flag("format", Choice(_FORMATS), "format of DATA; auto detects it from the name or the "
             "first line of the first file", "auto"),
        Flag("schema", Text(), "JSON file that describes the columns of CSV or Parquet: "
             '{"label": "clicked", "keys": ["user", {"column": "tags", "separator": "|"}, '
             '{"column": "ad", "as": "integer"}], "dense": [{"column": "price", "transform": "log"}'
             '], "missing": ["", "NA"]}. '
             'Further entries: "delimiter" (default: ,), "quoting" ("none": quotes are ordinary '
             'characters), "escape" (for example a backslash) and "columns" (names, for files '
             'without a header). A label {"column": "stars", "positive_from": 4} is 1 from 4 stars '
             'on, and {"column": "action", "positive": ["buy"]} is 1 for the text "buy". Text keys '
             'are hashed to 64 bits, unless "as" is "integer" or "hex": then they are parsed'),
        Flag("strict", None, "stop with an error at the first malformed line, instead of skipping "
             "and counting malformed lines"),
        Flag("max_bad_fraction", Number(0, 1), "maximum fraction of malformed lines; more end the "
             "program with an error", 0.1),
    ),
    **WRITING_FLAGS,
}  # fmt: skip


def make_flags() -> FlagSet:
    """Returns the flags of `slipstream-prepare`."""
    return FlagSet(
        "slipstream-prepare",
        "Converts click logs to Parquet shards for slipstream-train --data=FOLDER, and reports the "
        "number of keys per field, their skew and the fraction of hot examples. DATA is Criteo TSV "
        "(of Kaggle, or days of the Terabyte logs) or Avazu CSV, or with a --schema other CSV or "
        "Parquet; text files may be compressed (.gz). Every tenth run of 100 lines is in the test "
        "part. After an interruption, the same command continues the preparation.",
        (
            "slipstream-prepare day_0.gz day_1.gz --output=criteo",
            "slipstream-prepare clicks.csv --schema=clicks.json --output=clicks",
        ),
        _FLAGS,
        arguments=_DATA,
    )


def main(values: dict[str, Any], given: frozenset[str]) -> None:
    """Converts the input files to Parquet shards and prints statistics.

    Args:
        values: Flag values by flag name, and the list of input files under "DATA".
        given: Names of the flags on the command line.

    Raises:
        UsageError: If a flag or a file is invalid.
        RunError: If a file cannot be read or written.
    """
    if not values[_DATA]:
        raise UsageError("Missing argument DATA. Expected one or more files of clicks; see --help.")
    if values["strict"] and "max_bad_fraction" in given:
        raise does_nothing("max_bad_fraction", "a run without --strict")
    import_tensorflow()
    from slipstream_tf.data.opening import open_source
    from slipstream_tf.data.schema import read_schema

    schema = None
    if values["schema"] is not None:
        problem = (
            f"Invalid flag --schema={values['schema']}. Expected a JSON file. Reading it failed: "
        )
        with raised_as(UsageError, problem):
            schema = read_schema(values["schema"])
    write(lambda: open_source(values[_DATA], values["format"], schema), values)


def write(open_source: Callable[[], tuple[Source, list[str]]], values: Mapping[str, Any]) -> None:
    """Writes the folder for `slipstream-train --data` and prints its statistics.

    Args:
        open_source: Function that returns the source of the examples and the paths of its files.
        values: Values of `WRITING_FLAGS`, and of "strict" if the program has that flag.

    Raises:
        UsageError: If a flag or a file is invalid.
        RunError: If a file cannot be read or written.
    """
    from slipstream_tf.data.preparation import (
        Options,
        OtherPreparation,
        TooManyBadLinesError,
        prepare,
    )
    from slipstream_tf.data.spec import BadLineError

    folder = values["output"]
    if folder is None:
        raise UsageError("Missing flag --output. Expected a folder that can be created or written.")
    budget = parse_bytes("hot_set_memory", values["hot_set_memory"])
    if budget < 4 * values["dim"]:
        raise UsageError(
            f"Invalid flag --hot_set_memory={values['hot_set_memory']}. Expected at least "
            f"{4 * values['dim']} bytes, the size of a row with --dim={values['dim']}."
        )
    options = Options(
        hot_budget_bytes=budget,
        count_bytes=values["count_mb"] << 20,
        threads=values["threads"] or len(os.sched_getaffinity(0)),
        **{name: values[name] for name in _OPTIONS if name in values},
    )
    with raised_as(UsageError, "Invalid argument DATA: "):
        source, files = open_source()
    make_output(folder)
    begin = time.monotonic()
    with contextlib.closing(_Bars()) as bars:
        try:
            statistics = prepare(source, files, folder, options, bars.show)
        except OtherPreparation as error:
            reason = str(error).removeprefix(f"{folder}: ")
            raise UsageError(
                f"Invalid flag --output={folder}: {reason}. Expected a new folder, or the files "
                "and flags of the earlier preparation. Pass --overwrite to replace an earlier "
                "preparation."
            ) from None
        except BadLineError as error:
            text = str(error).rstrip(".")
            raise RunError(f"{text}. Remove --strict to skip malformed lines.") from None
        except TooManyBadLinesError as error:
            raise RunError(
                f"{error}\nTo use the other lines nevertheless, pass --max_bad_fraction=1."
            ) from None
        except (OSError, ValueError) as error:
            raise RunError(str(error)) from None
    print(summary(statistics))
    seconds = time.monotonic() - begin
    print(
        f"{os.path.abspath(folder)} contains {statistics['shards']:,} shards; {bars.rows:,} lines "
        f"were read in {seconds:,.1f} s. To train, run: slipstream-train --data={folder}"
    )


def summary(statistics: Mapping[str, Any]) -> str:
    """Formats the content of statistics.json as a table and a few sentences."""
    from slipstream_tf.data.preparation import reason_lines

    def percent(fraction: float | None) -> str:
        return "n/a" if fraction is None else f"{fraction:.1%}"

    rows = []
    for name, field in statistics["fields"].items():
        about, missing = "" if field["is_exact"] else "~", percent(field["missing_share"])
        keys, top = f"{about}{field['keys']:,}", f"{about}{percent(field['top_share'])}"
        rows.append((name, f"{field['lookups']:,}", keys, top, missing))
    header = ("field", "lookups", "keys", "lookups of top 1% of keys", "missing")
    lines = [format_table(header, rows), ""]
    inputs, clicks, hot = statistics["inputs"], statistics["clicks"], statistics["hot"]
    for part, text in (("train", "training"), ("valid", "validation"), ("test", "test")):
        if part == "valid" and not inputs[part]:
            continue
        fraction = clicks[part] / inputs[part] if inputs[part] else None
        lines.append(f"{inputs[part]:,} {text} examples, {percent(fraction)} clicked")
    budget = f"{hot['budget_bytes'] / (1 << 20):g} MiB with {hot['dim']} values per row"
    lines.append(
        f"{percent(hot['input_share'])} of the training examples are hot: all their keys are among "
        f"the {hot['keys']:,} most frequent keys, which fit into {budget}. These keys receive "
        f"{percent(hot['lookup_share'])} of the lookups."
    )
    if statistics["bad_lines"]:
        bad = statistics["bad_lines"]
        fraction = percent(bad / (bad + sum(inputs.values())))
        lines.append(
            f"{bad:,} malformed lines ({fraction} of all lines) were skipped. The first: "
            f"{statistics['first_bad_line']}"
        )
        if len(statistics["bad_reasons"]) > 1:
            lines += reason_lines(statistics["bad_reasons"])
    return "\n".join(lines)


class _Bars:
    """Shows a progress bar with the reading speed for each phase.

    Attributes:
        rows: Number of lines read from the source.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._bar: Any = None
        self._phase = ""
        self._begin, self._first_rows = 0.0, 0

    def show(self, phase: str, done: int, total: int, rows: int) -> None:
        """Updates the bar of a phase and the reading speed.

        Args:
            phase: Title of the phase. Another title than in the last call opens a new bar.
            done: Amount of work done, in the unit of `total`.
            total: Total amount of work.
            rows: Number of lines read in this phase.
        """
        if phase != self._phase:
            self.close()
            self._phase, self._begin, self._first_rows = phase, time.monotonic(), rows
            form = "{desc} {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
            # Start at `done`, so that the remaining time ignores the work of an earlier,
            # interrupted preparation.
            self._bar = open_bar(total, phase, bar_format=form, initial=done)
        if phase == "preparing":
            self.rows = rows
        text = f"{phase}: {rows:,} lines"
        # Exclude the rows of the first call from the rate, because their start time is unknown.
        new_rows, seconds = rows - self._first_rows, time.monotonic() - self._begin
        if new_rows > 0 and seconds > 0:
            text += f", {new_rows / seconds:,.0f}/s"
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Closes the bar of the current phase."""
        if self._bar is not None:
            self._bar.close()


def entry_point(arguments: Sequence[str] | None = None) -> None:
    """Runs the program, then exits the process."""
    sys.exit(run_program(make_flags(), main, arguments))


if __name__ == "__main__":
    entry_point()
