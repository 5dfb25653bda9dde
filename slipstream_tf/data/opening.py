"""Finds the source for files, by what the user says or by their names and first lines."""

import os
from collections.abc import Sequence
from pathlib import Path

from slipstream_tf._utils.errors import require_choice
from slipstream_tf.data.line_source import CsvSource, FormatSource, first_line
from slipstream_tf.data.readers.avazu import HEADER, AvazuFormat
from slipstream_tf.data.readers.criteo import NUM_DENSE, CriteoFormat
from slipstream_tf.data.row_source import ParquetSource
from slipstream_tf.data.schema import Schema
from slipstream_tf.data.sources import Source

AUTO = "auto"
FORMATS = ("criteo", "avazu", "csv", "parquet")


def open_source(
    paths: Sequence[str], kind: str = AUTO, schema: Schema | None = None
) -> tuple[Source, list[str]]:
    """Opens files as one source.

    Args:
        paths: files, read in this order; a folder stands for the Parquet files in it, at any depth,
            in the order of their paths.
        kind: one of FORMATS, or "auto": told by the first file's name, or its first line.
        schema: what the columns mean, of "csv" and "parquet" only.

    Returns:
        (the source, its files).

    Raises:
        OSError: a file cannot be read.
        ValueError: the files are of none of the formats, or a schema is missing or of no use.
    """
    require_choice("format", kind, (AUTO, *FORMATS))
    files = [file for path in paths for file in _files(path)]
    if kind == AUTO:
        kind = _recognised(files[0], schema is not None)
    if (schema is None) == (kind in ("csv", "parquet")):
        need = "needs a schema that says what its columns are" if schema is None else "has its own"
        raise ValueError(f"{files[0]}: {kind} data {need}; see slipstream-prepare --help.")
    if schema is not None:
        return (ParquetSource if kind == "parquet" else CsvSource)(schema, files), files
    if kind == "criteo":
        dense = tuple(f"I{i}" for i in range(1, NUM_DENSE + 1))
        return FormatSource(CriteoFormat(), files, "label", dense), files
    return FormatSource(AvazuFormat(), files, "click"), files


def _files(path: str) -> list[str]:
    if not os.path.isdir(path):
        if not os.path.exists(path):
            raise FileNotFoundError(f"No data file or folder {path!r}.")
        return [path]
    files = sorted(str(file) for file in Path(path).rglob("*.parquet"))
    if not files:
        raise FileNotFoundError(f"No Parquet files in {path!r}.")
    return files


def _recognised(path: str, has_schema: bool) -> str:
    if path.endswith(".parquet"):
        return "parquet"
    if has_schema:
        return "csv"
    line = first_line(path)
    if not line:
        raise ValueError(f"{path}: the file is empty, or its first line is.")
    if line == HEADER:
        return "avazu"
    if line.count(b"\t") == CriteoFormat.num_columns - 1:
        return "criteo"
    shown = line[:60].decode(errors="backslashreplace")
    raise ValueError(
        f"{path}: its first line {shown!r} is neither Criteo's nor Avazu's. Allowed: those, "
        "or CSV or Parquet with a schema (--schema)."
    )
