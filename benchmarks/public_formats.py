"""Prepares and trains generated files in ten public formats; compares counts with pandas.

    python benchmarks/public_formats.py --formats=steam,avazu

The files have the columns, delimiters, quotes, encodings, times and missing values of the published
data sets. Their values are drawn by a law, whose probabilities have the highest possible AUC. Each
format is prepared by `slipstream-prepare` with a schema and trained by `slipstream-train
--data=FOLDER` without other flags. The positive examples, and the distinct and missing values of
each column, must be equal to those that pandas finds in the published files. Finished trainings are
not repeated.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import common
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import summary
from absl import app, flags
from public_formats_files import AVAZU, FORMATS, Law

from slipstream_tf.cli import prepare
from slipstream_tf.cli.program import run_program
from slipstream_tf.telemetry.metrics import exact_auc

_LINES = flags.DEFINE_integer("lines", 30_000, "Number of examples per format.", lower_bound=100)
_RECORDS = flags.DEFINE_string("folder", "runs/public_formats", "Folder of files and records.")
_FORMATS = flags.DEFINE_list("formats", list(FORMATS), "Names of formats.")

Counts = dict[str, int]


def prepared(name: str, lines: int, folder: Path) -> Law:
    """Writes the files of a format and prepares them in `folder`/prepared.

    Returns:
        The probability of a positive label and the time of each line.

    Raises:
        SystemExit: If slipstream-prepare fails.
    """
    one = FORMATS[name]
    folder.mkdir(parents=True, exist_ok=True)
    law = one.write(np.random.default_rng(0), lines, folder)
    arguments = [str(folder / one.data), f"--output={folder / 'prepared'}", "--overwrite"]
    if one.schema is not None:
        (folder / "schema.json").write_text(json.dumps(one.schema), encoding="utf-8")
        arguments.append(f"--schema={folder / 'schema.json'}")
    if one.split != "runs":
        arguments.append(f"--split={one.split}")
    print(json.dumps(one.schema), "\nslipstream-prepare", shlex.join(arguments), flush=True)
    if code := run_program(prepare.make_flags(), prepare.main, arguments):
        raise SystemExit(code)
    return law


def columns_of(name: str) -> tuple[str, list[str], dict[str, str]]:
    """Returns the label, the key and dense columns, and the separators of lists by column."""
    schema = FORMATS[name].schema
    if schema is None:
        return "click", list(AVAZU[3:]), {}
    label, *others = (
        one if isinstance(one, dict) else {"column": one}
        for one in (schema["label"], *schema["keys"], *schema.get("dense", ()))
    )
    separators = {one["column"]: one["separator"] for one in others if "separator" in one}
    return label["column"], [one["column"] for one in others], separators


def counts_of_prepared(name: str, folder: Path) -> Counts:
    """Counts the examples of a prepared folder.

    Returns:
        The number of examples, of positive ones, and for each column the number of distinct values
        and of missing values.
    """
    label, columns, _ = columns_of(name)
    files = sorted((folder / "prepared").glob("*/*.parquet"))
    table = pa.concat_tables([pq.read_table(file) for file in files])
    found = {"examples": len(table), "positive": int(pc.sum(table[label]).as_py())}
    for column in columns:
        values = table[column]
        found[f"{column}, missing"] = values.null_count
        if pa.types.is_list(values.type):
            lengths = pc.fill_null(pc.list_value_length(values), 0)
            found[f"{column}, missing"] = pc.sum(pc.equal(lengths, 0)).as_py()
            values = pc.list_flatten(values)
        found[f"{column}, distinct"] = len(pc.unique(values.drop_null()))
    return found


def counts_by_pandas(name: str, folder: Path) -> Counts:
    """Counts the same in the published files, with pandas."""
    import pandas

    label, columns, separators = columns_of(name)
    frame = FORMATS[name].read(pandas, folder)
    found = {"examples": len(frame), "positive": sum(map(is_positive(name), frame[label]))}
    for column in columns:
        values = frame[column]
        found[f"{column}, missing"] = int(values.isna().sum())
        if column in separators:
            values = values.str.split(separators[column], regex=False).explode()
        found[f"{column}, distinct"] = int(values.nunique())
    return found


def is_positive(name: str) -> Callable[[Any], bool]:
    """Returns the function of a label of a published file that returns whether it is positive."""
    schema = FORMATS[name].schema
    entry = schema["label"] if schema is not None else "click"
    if isinstance(entry, str):
        return lambda label: float(label) == 1
    if "positive" in entry:
        return lambda label: label in entry["positive"]
    return lambda label: float(label) >= entry["positive_from"]


def processor_seconds() -> float:
    """Returns the processor time of this process and its finished children."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)


def trained(folder: Path) -> tuple[dict[str, Any], float]:
    """Trains on `folder`/prepared, unless the run is finished.

    Returns:
        The record of the run, and its processor seconds.
    """
    begin, kept = processor_seconds(), folder / "seconds.json"
    record = common.train({"data": str(folder / "prepared")}, folder / "run", chooses=True)
    if not kept.exists():
        kept.write_text(json.dumps(processor_seconds() - begin), encoding="utf-8")
    return record, json.loads(kept.read_text(encoding="utf-8"))


def best_auc(name: str, law: Law, folder: Path) -> float:
    """Returns the AUC of the law's probabilities in the test part."""
    chance, at = law
    position = np.arange(len(at))
    if FORMATS[name].split == "time":
        is_test = at >= np.sort(at)[round(0.9 * len(at))]
    else:
        is_test = position // (100 if len(at) >= 1000 else 1) % 10 == 9
    files = sorted((folder / "prepared" / "test").glob("*.parquet"))
    labels = pa.concat_tables([pq.read_table(file) for file in files])[columns_of(name)[0]]
    return exact_auc(labels.to_numpy(), chance[is_test])


def main(arguments: list[str]) -> None:
    """Runs the benchmark; prints and writes its results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    import slipstream_tf.data.preparation  # noqa: F401  Its time is no part of the first format's.

    rows: list[tuple[Any, ...]] = []
    for name in _FORMATS.value:
        if name not in FORMATS:
            raise app.UsageError(f"Invalid --formats: {name!r}. Expected {', '.join(FORMATS)}.")
        folder = Path(_RECORDS.value, name)
        begin = processor_seconds()
        law = prepared(name, _LINES.value, folder)
        seconds = processor_seconds() - begin
        found, expected = counts_of_prepared(name, folder), counts_by_pandas(name, folder)
        for count in found.keys() - {one for one, n in found.items() if n == expected[one]}:
            print(f"{name}: {count} is {found[count]:,}, but {expected[count]:,} with pandas.")
        record, of_training = trained(folder)
        distinct, missing = (
            sum(n for one, n in found.items() if one.endswith(end))
            for end in ("distinct", "missing")
        )
        rows.append(
            (
                *(name, found["examples"], found["positive"], distinct, missing, len(found)),
                *(sum(found[one] == expected[one] for one in found), record["test"]["auc"]),
                *(best_auc(name, law, folder), seconds, of_training),
            )
        )
    print(summary.write("public_formats", f"{_LINES.value:,} examples", *results_of(rows)))


def results_of(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, Any]:
    """Returns the columns and the claims of the rows of all formats."""
    titles = (
        ("format", "{}"), ("examples", "{:,}"), ("positive", "{:,}"), ("distinct values", "{:,}"),
        ("missing values", "{:,}"), ("counts", "{}"), ("equal to pandas", "{}"),
        ("test AUC", "{:.4f}"), ("AUC of the law", "{:.4f}"),
        ("processor seconds, preparing", "{:.1f}"), ("processor seconds, training", "{:.1f}"),
    )  # fmt: skip
    columns = [
        summary.column(title, values, form)
        for (title, form), values in zip(titles, zip(*rows, strict=True), strict=True)
    ]
    claims = {
        "counts_that_differ_from_pandas": summary.claim([float(sum(r[5] - r[6] for r in rows))], 0),
        "auc_behind_the_law": summary.claim([row[8] - row[7] for row in rows]),
    }
    return {"": columns}, claims


if __name__ == "__main__":
    app.run(main)
