"""`slipstream-prepare`: converts click logs to Parquet shards and computes statistics.

The program writes the shards, statistics.json and counts.parquet to the output folder and prints a
table of the statistics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
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
from slipstream_tf.data.spec import FORMATS, SHARD_COMPRESSIONS, SPLITS
from slipstream_tf.telemetry.progress import open_bar
from slipstream_tf.telemetry.table import format_table

if TYPE_CHECKING:
    from slipstream_tf.data.sources import Source
    from slipstream_tf.data.split import Split

_DATA = "DATA"
_WARNINGS = {
    "timestamp": "look like timestamps, which are larger in later data than in all training data. "
    "Remove the column from `dense`, or add columns such as the hour and the weekday to `keys`.",
    "id": "look like ids, because almost all are different whole numbers. Move the column from "
    "`dense` to `keys`, or remove it.",
}
# Flags that are passed to `Options` under the same name.
_OPTIONS = ("shard_rows", "compression", "dim", "strict", "max_bad_fraction", "overwrite")
WRITING_FLAGS = {
    "Output": (
        Flag("output", Text(), "folder for the shards, statistics.json and counts.parquet"),
        Flag("overwrite", None, "replace the data of another preparation in --output"),
        Flag("shard_rows", Integer(1, 1 << 40), "number of lines or rows of DATA per shard",
             1_000_000),
        Flag("compression", Choice(SHARD_COMPRESSIONS), "compression of the shards",
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
        Flag("format", Choice(FORMATS), "format of DATA; auto detects it from the name or the "
             "first line of the first file", "auto"),
        Flag("schema", Text(), "JSON file that describes the columns of CSV, JSON lines or "
             "Parquet: "
             '{"label": "clicked", "keys": ["user", {"column": "tags", "separator": "|"}, '
             '{"column": "ad", "as": "integer"}], "dense": [{"column": "price", "transform": "log"}'
             '], "missing": ["", "NA"]}. '
             'Further entries: "delimiter" (default: ,), "quoting" ("none": quotes are ordinary '
             'characters), "escape" (for example a backslash), "columns" (names, for files without '
             'a header) and "time" (the column of --split=time). A label {"column": "stars", '
             '"positive_from": 4} is 1 from 4 stars on, and {"column": "action", "positive": '
             '["buy"]} is 1 for the text "buy". Models standardize dense columns, unless '
             '"transform" is "log" or "none". Text keys are hashed to 64 bits, unless "as" is '
             '"integer" or "hex": then they are parsed'),
        Flag("strict", None, "stop with an error at the first malformed line, instead of skipping "
             "and counting malformed lines"),
        Flag("max_bad_fraction", Number(0, 1), "maximum fraction of malformed lines; more end the "
             "program with an error", 0.1),
    ),
    "Parts": (
        Flag("split", Choice(SPLITS), "division of DATA: runs puts every tenth "
             "run of 100 lines into the test part (every tenth line, if there are fewer than "
             "1,000), random draws the part of each line, and time puts the last lines by the "
             'column "time" of the schema into the test part', "runs"),
        Flag("test_fraction", Number(0, 1, open_maximum=True), "fraction of the test part", 0.1),
        Flag("valid_fraction", Number(0, 1, open_maximum=True), "fraction of the validation part; "
             "0 writes none, and slipstream-train takes it from the training part", 0.0),
        Flag("split_seed", Integer(0, (1 << 31) - 1), "seed of --split=random", 0),
        Flag("test", Text(), "files of the test part, separated by commas; DATA is not divided"),
        Flag("valid", Text(), "files of the validation part, separated by commas"),
    ),
    **WRITING_FLAGS,
}  # fmt: skip
# The flags that `--help` lists, chosen to fit on one screen. `--helpfull` lists all.
_BASIC = (
    *("format", "schema", "strict", "max_bad_fraction", "split", "test_fraction", "test", "valid"),
    *("output", "overwrite", "shard_rows"),
)


def make_flags() -> FlagSet:
    """Returns the flags of `slipstream-prepare`."""
    return FlagSet(
        "slipstream-prepare",
        "Converts click logs to Parquet shards for slipstream-train --data=FOLDER, and reports the "
        "number of keys per field, their skew and the fraction of hot examples. DATA is Criteo TSV "
        "(of Kaggle, or days of the Terabyte logs) or Avazu CSV, or with a --schema other CSV, "
        "JSON lines or Parquet; text files may be compressed (.gz, .bz2, .xz, .zip). After an "
        "interruption, the same command continues the preparation.",
        (
            "slipstream-prepare day_0.gz day_1.gz --output=criteo",
            "slipstream-prepare clicks.csv --schema=clicks.json --output=clicks",
            "slipstream-prepare train.csv --test=test.csv --schema=clicks.json --output=clicks",
        ),
        _FLAGS,
        arguments=_DATA,
        basic=_BASIC,
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
    _require_effects(values, given)
    import_tensorflow()
    from slipstream_tf.data.opening import open_source
    from slipstream_tf.data.schema import read_schema
    from slipstream_tf.data.split import Split

    schema = None
    if values["schema"] is not None:
        problem = (
            f"Invalid flag --schema={values['schema']}. Expected a JSON file. Reading it failed: "
        )
        with raised_as(UsageError, problem):
            schema = read_schema(values["schema"])
    if values["split"] != "time" and schema is not None:
        schema = dataclasses.replace(schema, time=None)
    elif values["split"] == "time" and (schema is None or schema.time is None):
        raise does_nothing("split=time", 'a --schema with "time", the name of a column')
    files, parts = _files_and_parts(values)
    split = Split(
        values["split"],
        values["test_fraction"],
        values["valid_fraction"],
        values["split_seed"],
        tuple(parts) if any(parts) else (),
    )
    write(lambda: open_source(files, values["format"], schema), values, split)


def _files_and_parts(values: Mapping[str, Any]) -> tuple[list[str], list[str | None]]:
    """Returns the files to read, and the part of each, None for a file that is divided.

    The folders of DATA are read without the files of --valid and --test.

    Raises:
        UsageError: If a file does not exist, or is named twice.
    """
    from slipstream_tf.data.opening import list_files

    found: dict[str, list[str]] = {_DATA: [], "valid": [], "test": []}
    owners: dict[str, str] = {}  # Real path -> the flag or argument that names the file.
    left_out = []
    for name in ("valid", "test", _DATA):
        if values[name] is None:
            continue
        is_data = name == _DATA
        shown = f"argument {name}" if is_data else f"flag --{name}"
        with raised_as(UsageError, f"Invalid {shown}: "):
            for path in values[name] if is_data else values[name].split(","):
                for file in list_files([path], values["format"]):
                    real = os.path.realpath(file)
                    if is_data and owners.get(real, shown) != shown and os.path.isdir(path):
                        left_out.append(file)
                    elif real in owners:
                        raise ValueError(
                            f"{file} is also in the {owners[real]}. Expected each file once."
                        )
                    else:
                        owners[real] = shown
                        found[name].append(file)
    if not found[_DATA]:
        raise UsageError(f"Invalid argument {_DATA}: --valid and --test name all of its files.")
    if left_out:
        print(
            f"{_DATA} is read without the files of --valid and --test in its folders (number: "
            f"{len(left_out):,}, first: {left_out[0]})."
        )
    part_of = {_DATA: None if values["test"] is None else "train", "valid": "valid", "test": "test"}
    files = [file for own in found.values() for file in own]
    return files, [part_of[name] for name, own in found.items() for _ in own]


def _require_effects(values: Mapping[str, Any], given: frozenset[str]) -> None:
    """Raises `UsageError` for a flag on the command line that has no effect."""
    divides = values["test"] is None
    of_kind = {
        "max_bad_fraction": (not values["strict"], "a run without --strict"),
        "split": (divides, "a run without --test, so that DATA is divided"),
        "split_seed": (values["split"] == "random", "--split=random"),
        "test_fraction": (values["split"] != "runs", "--split=random or --split=time"),
        "valid_fraction": (
            values["split"] != "runs" and values["valid"] is None,
            "--split=random or --split=time, and no --valid",
        ),
    }
    for name, (has_effect, needs) in of_kind.items():
        if name in given and not has_effect:
            raise does_nothing(name, needs)
    if values["test_fraction"] + values["valid_fraction"] >= 1.0:
        raise UsageError(
            f"Invalid flag --test_fraction={values['test_fraction']} with --valid_fraction="
            f"{values['valid_fraction']}. Expected a sum below 1."
        )


def write(
    open_source: Callable[[], tuple[Source, list[str]]],
    values: Mapping[str, Any],
    split: Split | None = None,
) -> None:
    """Writes the folder for `slipstream-train --data` and prints its statistics.

    Args:
        open_source: Function that returns the source of the examples and the paths of its files.
        values: Values of `WRITING_FLAGS`, and of "strict" and "max_bad_fraction" if the program has
            these flags.
        split: How the rows are divided into parts. Defaults to the parts of the source.

    Raises:
        UsageError: If a flag or a file is invalid.
        RunError: If a file cannot be read or written.
    """
    from slipstream_tf.data.line_counts import TooManyBadLinesError
    from slipstream_tf.data.preparation import Options, OtherPreparation, prepare
    from slipstream_tf.data.spec import BadLineError
    from slipstream_tf.data.split import Split

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
        split=split or Split(),
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
            advice = "\nTo use the other lines nevertheless, pass --max_bad_fraction=1."
            raise RunError(f"{error}{advice if error.may_accept else ''}") from None
        except (OSError, ValueError) as error:
            raise RunError(str(error)) from None
    print(summary(statistics))
    if split is not None:
        time_column = source.describe().get("schema", {}).get("time")
        is_per_file = source.columns.key_types == ()
        print(f"The test part is {test_part(split, statistics, is_per_file, time_column)}.")
    seconds = time.monotonic() - begin
    problem = why_untrainable(statistics)
    command = "To train and store the model in the folder 'model', run: slipstream-train "
    command += f"--data={folder} --export=model"
    shards = f"{statistics['shards']:,} shard{'s' if statistics['shards'] > 1 else ''}"
    print(
        f"{os.path.abspath(folder)} contains {shards}; {bars.rows:,} lines were read in "
        f"{seconds:,.1f} s. {problem or command}"
    )


def test_part(
    split: Split, statistics: Mapping[str, Any], is_per_file: bool, time_column: str | None = None
) -> str:
    """Describes which lines are in the test part.

    Args:
        split: How the rows were divided into parts.
        statistics: Content of statistics.json.
        is_per_file: Whether runs of lines are counted per file.
        time_column: Name of the column that orders the lines.
    """
    from slipstream_tf.data.split import shown_time

    if "test" in split.file_parts:
        return "the lines of --test"
    if not statistics["inputs"]["test"]:
        return "empty"
    if split.kind == "random":
        return f"drawn at random for each line, with --split_seed={split.seed}"
    if split.kind == "time":
        start = shown_time(statistics["limits"]["test_from"])
        return f"the last lines by the column {time_column!r}, from {start} on"
    if statistics["limits"]["is_small"]:
        return "line 10 of each 10 lines"
    where = "of a file" if is_per_file else "of all files"
    return f"lines 901 to 1,000 of each 1,000 lines {where}; choose others with --split or --test"


def why_untrainable(statistics: Mapping[str, Any]) -> str:
    """Returns why `slipstream-train` cannot train and evaluate on data, or an empty string.

    Args:
        statistics: Content of statistics.json.
    """
    inputs, clicks = statistics["inputs"], statistics["clicks"]
    for part in ("train", "test"):
        if not inputs[part]:
            return (
                f"Note: slipstream-train needs a {part} part, but it has no examples. Prepare at "
                "least ten lines, or choose the parts with --split, --valid or --test."
            )
    if clicks["train"] in (0, inputs["train"]):
        return (
            f"Note: all training examples have the label {int(clicks['train'] > 0)}, so a model "
            "cannot learn. Check `label` in the schema (the column, `positive_from` or `positive`) "
            "and the order of the lines: --split=random mixes them."
        )
    return ""


def summary(statistics: Mapping[str, Any]) -> str:
    """Formats the content of statistics.json as a table and a few sentences."""
    from slipstream_tf.data.line_counts import positive_advice, reason_lines, shown_counts

    def percent(fraction: float | None, none: str = "n/a") -> str:
        return none if fraction is None else f"{fraction:.1%}"

    rows = []
    for name, field in statistics["fields"].items():
        about = "" if field["is_exact"] else "~"
        keys, top = f"{about}{field['keys']:,}", f"{about}{percent(field['top_share'])}"
        of_examples = (percent(field[share], "-") for share in ("missing_share", "empty_share"))
        rows.append((name, f"{field['lookups']:,}", keys, top, *of_examples))
    header = (
        *("key column", "lookups", "keys", "lookups of the most frequent 1% of keys"),
        *("missing values", "empty bags"),
    )
    lines = [format_table(header, rows), ""]
    numbers = []
    for name, found in statistics["dense"].items():
        total = found["count"] + found["missing"]
        missing = percent(found["missing"] / total if total else None)
        moments = [found[moment] for moment in ("mean", "std", "min", "max")]
        numbers.append((name, missing, *map(_number, moments)))
    if numbers:
        titles = ("number", "missing", "mean", "std", "min", "max")
        lines += [format_table(titles, numbers), ""]
    if logs := [name for name, found in statistics["dense"].items() if found["is_log"]]:
        lines += [f"Statistics of the logarithms, sign(v) * log(1 + |v|): {', '.join(logs)}.", ""]
    for name, found in statistics["dense"].items():
        if found["suspected_kind"] is not None:
            lines += [f"Warning: the numbers of {name!r} {_WARNINGS[found['suspected_kind']]}", ""]
    if positive := statistics["positive_labels"]:
        labels = statistics["labels"]
        ones = {text: count for text, count in labels.items() if text in positive}
        zeros = {text: count for text, count in labels.items() if text not in positive}
        lines += [f"Labels that become 1: {shown_counts(ones)}."]
        lines += [f"Labels that become 0: {shown_counts(zeros) or 'none'}.", ""]
    if unused := statistics["unused_positive"]:
        lines += [
            f"Warning: no label is {' or '.join(map(repr, unused))}, of `positive` in the schema."
            f"{positive_advice(unused, statistics['labels'])}",
            "",
        ]
    inputs, clicks, hot = statistics["inputs"], statistics["clicks"], statistics["hot"]
    for part, text in (("train", "training"), ("valid", "validation"), ("test", "test")):
        if part == "valid" and not inputs[part]:
            continue
        fraction = clicks[part] / inputs[part] if inputs[part] else None
        lines.append(f"{inputs[part]:,} {text} examples, {percent(fraction)} clicked")
    # If all keys are hot, all examples are.
    if hot["input_share"] != 1.0:
        lines.append(
            f"{percent(hot['input_share'])} of the training examples are hot, so that policies can "
            f"skip them: they have only keys of the hot set, the {hot['keys']:,} most frequent "
            "(--hot_set_memory)."
        )
    if statistics["bad_lines"]:
        bad = statistics["bad_lines"]
        fraction = bad / (bad + sum(inputs.values()))
        share = percent(fraction) if fraction >= 0.001 else f"{100 * fraction:.1g}%"
        skipped = f"1 malformed line ({share} of all lines) was skipped."
        if bad > 1:
            skipped = f"{bad:,} malformed lines ({share} of all lines) were skipped."
        first, reasons = statistics["first_bad_line"], statistics["bad_reasons"]
        if len(reasons) > 1:  # The reasons follow, so that only the place of the first is needed.
            place = re.sub(r"(?s)^(.*?:[0-9]+): .*", r"\1", first)
            lines += [f"{skipped} The first is {place}. The reasons:", *reason_lines(reasons)]
        else:
            lines.append(f"{skipped} The first: {first}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


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
