"""Opens data files as a source and detects their format."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream_tf._utils.errors import require_choice
from slipstream_tf.data.columns import columns_of, convert
from slipstream_tf.data.line_source import CsvSource, FormatSource, first_line
from slipstream_tf.data.readers.avazu import HEADER, AvazuFormat
from slipstream_tf.data.readers.criteo import CriteoFormat
from slipstream_tf.data.readers.parquet import ROWS_AT_ONCE, opening
from slipstream_tf.data.schema import Schema
from slipstream_tf.data.sources import Block, ParsedRows, Position, Source, train_and_test
from slipstream_tf.data.spec import require_columns

AUTO = "auto"
FORMATS = ("criteo", "avazu", "csv", "parquet")


class ParquetSource(Source):
    """Reads Parquet files in order, with a schema.

    The train and test parts are the same as in `ParquetReader`: they depend on the row number over
    all files.
    """

    name = "table"

    def __init__(self, schema: Schema, paths: Sequence[str]):
        """Reads the names and types of the columns.

        Args:
            schema: Meaning of the columns.
            paths: Paths of the files, in order. Each must contain the columns of the schema.

        Raises:
            OSError: If a file cannot be read.
            ValueError: If a file is not a Parquet file, a column is missing, the type of a column
                does not fit its use, or the files differ in the columns that are lists or text.
        """
        self._schema, self.paths = schema, tuple(paths)
        self._rows: list[int] = []
        for path in self.paths:
            with _opened(path) as file:
                found = file.schema_arrow
                require_columns(schema.names(), found.names, path)
                self._rows.append(file.metadata.num_rows)
            types = {name: found.field(name).type for name in schema.names()}
            try:
                columns = columns_of(schema, types)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            if len(self._rows) == 1:
                self.columns = columns
            else:
                for kind in ("lists", "texts"):
                    own, expected = getattr(columns, kind), getattr(self.columns, kind)
                    if own != expected:
                        raise ValueError(
                            f"{path}: the {kind[:-1]} columns are {list(own)}; expected "
                            f"{list(expected)}, as in {self.paths[0]}."
                        )
        self.size = sum(self._rows)

    def describe(self) -> Mapping[str, Any]:
        return {"format": "parquet", "schema": self._schema.to_dict()}

    def file_blocks(self, start: Position, piece_rows: int) -> Iterator[Block]:
        at, path, done = start, self.paths[start.file], sum(self._rows[: start.file])
        with _opened(path) as file:
            try:
                for batch in _batches(file, at.row, self._schema.names()):
                    for block in _blocks_of(batch, at, piece_rows, done):
                        at = block.end
                        yield block
            except (pa.ArrowException, OSError) as error:
                raise ValueError(
                    f"{path}: the file is damaged or unreadable after row {at.row}: {error}"
                ) from error

    def parse(self, block: Block) -> ParsedRows:
        columns = {name: block.content.column(name) for name in self._schema.names()}
        return convert(self._schema, columns)

    def parts(self, block: Block) -> Mapping[str, np.ndarray]:
        """Returns masks of the training and test rows.

        The masks depend on the row number over all files.
        """
        return train_and_test(block.start.id, block.num_rows, self.part_run)


def _blocks_of(rows: Any, at: Position, piece_rows: int, done: int) -> Iterator[Block]:
    """Splits rows into blocks of at most one piece.

    Args:
        rows: A table or record batch.
        at: Position of the first row.
        piece_rows: Number of rows in a piece; see `Source.blocks`.
        done: Number of rows in the files before.
    """
    while len(rows):
        count = min(len(rows), at.rows_left(piece_rows), ROWS_AT_ONCE)
        row = at.row + count
        end = Position(at.file, row, row, at.id + count)
        yield Block(at, end, rows.slice(0, count), done + row)
        at, rows = end, rows.slice(count)


def _opened(path: str) -> pq.ParquetFile:
    with opening(path):
        file = pq.ParquetFile(path)
        file.schema_arrow.names  # noqa: B018  Decodes the names, which may raise.
    return file


def _batches(file: pq.ParquetFile, first: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file from row `first` on.

    Row groups before this row are not read.
    """
    groups: list[int] = []
    skipped = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if not groups and skipped + rows <= first:
            skipped += rows
        else:
            groups.append(group)
    left_out = first - skipped
    for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=list(columns)):
        if left_out < len(batch):
            yield batch.slice(left_out)
        left_out = max(0, left_out - len(batch))


def open_source(
    paths: Sequence[str], kind: str = AUTO, schema: Schema | None = None
) -> tuple[Source, list[str]]:
    """Opens files as one source.

    Args:
        paths: Files in reading order. A folder is replaced by all its Parquet files, at any depth,
            in the order of their paths.
        kind: One of `FORMATS`, or `"auto"` to detect the format by the name or the first line of
            the first file.
        schema: Meaning of the columns. Required for `"csv"` and `"parquet"`, not allowed otherwise.

    Returns:
        (source, list of files).

    Raises:
        OSError: If a file cannot be read.
        ValueError: If the format is unknown, or a schema is missing or not allowed.
    """
    require_choice("format", kind, (AUTO, *FORMATS))
    files = list_files(paths)
    if kind == AUTO:
        kind = _recognised(files[0], schema is not None)
    if (schema is None) == (kind in ("csv", "parquet")):
        need = "requires a schema" if schema is None else "does not accept a schema"
        raise ValueError(
            f"{files[0]}: data in the format {kind!r} {need}. See --schema in "
            "slipstream-prepare --help."
        )
    if schema is not None:
        return (ParquetSource if kind == "parquet" else CsvSource)(schema, files), files
    return FormatSource(CriteoFormat() if kind == "criteo" else AvazuFormat(), files), files


def list_files(paths: Sequence[str]) -> list[str]:
    """Returns the files of `open_source`, in order: folders are replaced by their files.

    Raises:
        FileNotFoundError: If a path does not exist, or a folder has no data files.
    """
    return [file for path in paths for file in _files(path)]


def _files(path: str) -> list[str]:
    if not os.path.isdir(path):
        if not os.path.exists(path):
            raise FileNotFoundError(f"There is no data file or folder {path!r}.")
        return [path]
    files = sorted(str(file) for file in Path(path).rglob("*.parquet"))
    if not files:
        raise FileNotFoundError(f"The folder {path!r} contains no .parquet files.")
    return files


def _recognised(path: str, has_schema: bool) -> str:
    if path.endswith(".parquet"):
        return "parquet"
    if has_schema:
        return "csv"
    line = first_line(path)
    if not line:
        raise ValueError(
            f"{path}: the first line is empty. Expected Criteo TSV, Avazu CSV, or another format "
            "with a schema (--schema)."
        )
    if line == HEADER:
        return "avazu"
    if line.count(b"\t") == CriteoFormat.num_columns - 1:
        return "criteo"
    shown = line[:60].decode(errors="backslashreplace")
    raise ValueError(
        f"{path}: the format of the first line {shown!r} is unknown. Expected Criteo TSV, Avazu "
        "CSV, or CSV or Parquet with a schema (--schema)."
    )
