"""Runs slipstream-train and slipstream-prepare in the test's process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream_tf.cli import prepare, train
from slipstream_tf.cli.defaults import DataFacts
from slipstream_tf.cli.program import run_program

# Properties of `--data=generated`.
GENERATED = DataFacts(name="generated", fields=26, num_dense=13, num_examples=400_000)
SMALL = (
    "--data=generated:18000", "--batch_size=256", "--dim=4", "--mlp=8", "--bottom=8", "--epochs=1",
    "--rows_learning_rate=0.05",
)  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 2) -> str:
    """Runs slipstream-train with invalid flags and returns its one-line error."""
    assert run_program(train.make_flags(), train.main, flags) == code
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("slipstream-train:")]
    assert len(lines) == 1 and "Traceback" not in captured.err
    return lines[0]


def prepared(folder: Path, columns: Mapping[str, Any], keys: list[Any], dense: list[str]) -> Path:
    """Prepares columns as data for slipstream-train, with "clicked" as the label.

    Args:
        folder: An empty folder for the files.
        columns: Column name -> values.
        keys: The key columns as in a schema.
        dense: Names of the numeric columns.

    Returns:
        The folder with the prepared data.
    """
    source, schema, output = (folder / name for name in ("a.parquet", "schema.json", "prepared"))
    pq.write_table(pa.table(dict(columns)), source)
    schema.write_text(json.dumps({"label": "clicked", "keys": keys, "dense": dense}))
    flags = [str(source), f"--schema={schema}", f"--output={output}"]
    assert run_program(prepare.make_flags(), prepare.main, flags) == 0
    return output
