"""Opens data files as a source and detects their format."""

import contextlib
import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging

from slipstream_tf._utils.errors import require_choice
from slipstream_tf.data.columns import columns_of, convert, id_type, times
from slipstream_tf.data.json_source import JsonSource
from slipstream_tf.data.line_source import CsvSource, FormatSource, first_line
from slipstream_tf.data.readers import text
from slipstream_tf.data.readers.avazu import HEADER, AvazuFormat
from slipstream_tf.data.readers.criteo import CriteoFormat
from slipstream_tf.data.readers.parquet import ROWS_AT_ONCE, opening
from slipstream_tf.data.schema import Schema
from slipstream_tf.data.sources import Block, ParsedRows, Position, Source
from slipstream_tf.data.spec import AUTO, FORMATS, require_columns

_SHOWN_FILES = 5
# Ends of the names of files, before the end of a compressed file, by format.
_ENDS = {
    "parquet": (".parquet", ".pq"),
    "json": (".json", ".jsonl", ".ndjson"),
    "csv": (".csv", ".tsv", ".txt", ".dat", ".data"),
}
_UNREAD = (
    "are not read, because their columns have no names. Prepare the original data, or write JSON "
    'lines or Parquet first. "Your own data" in the documentation has a program for it.'
)
# Ends of compressed files and archives that are not read.
_UNREAD_ENDS = (".zst", ".lz4", ".lzo", ".br", ".snappy", ".z", ".7z", ".rar", ".tar", ".tgz")
_LIBFFM = re.compile(rb"[-+]?[0-9.]+([ \t]+[0-9]+(:[0-9]+)?:[-+0-9.eE]+){2,}\s*")


class ParquetSource(Source):
    """Reads Parquet files in order, with a schema.

    A column that a file lacks may be in its path, as in `country=de/a.parquet`; its values are
    text. The train and test parts are the same as in `ParquetReader`.
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
                does not fit its use, or the files differ in the columns that are lists or text,
                or in the type of their ids.
        """
        self._schema, self.paths = schema, tuple(paths)
        self._rows: list[int] = []
        self._path_values: list[dict[str, str | None]] = []
        first_ids: dict[str, str] = {}
        for path in self.paths:
            with _opened(path) as file:
                found = file.schema_arrow
                of_path = _values_of_path(path, found.names)
                require_columns(schema.names(), [*found.names, *of_path], path)
                self._rows.append(file.metadata.num_rows)
            used = {name: of_path[name] for name in schema.names() if name in of_path}
            self._path_values.append(used)
            types = {
                name: pa.string() if name in of_path else found.field(name).type
                for name in schema.names()
            }
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
            for key in schema.keys:
                own_ids = id_type(key, types[key.column])
                ids = first_ids.setdefault(key.column, own_ids)
                if own_ids != ids:
                    raise ValueError(
                        f"{path}: the ids of the column {key.column!r} are {own_ids}; expected "
                        f"{ids}, as in {self.paths[0]}."
                    )
        self.size = sum(self._rows)

    def describe(self) -> Mapping[str, Any]:
        # The manifest contains the names of the files, but not their folders.
        of_paths = {"path_values": self._path_values} if any(self._path_values) else {}
        return {"format": "parquet", "schema": self._schema.to_dict(), **of_paths}

    def file_blocks(
        self, start: Position, piece_rows: int, only_time: bool = False
    ) -> Iterator[Block]:
        at, path, done = start, self.paths[start.file], sum(self._rows[: start.file])
        with _opened(path) as file:
            of_path = _values_of_path(path, file.schema_arrow.names)
            used = (self._schema.time,) if only_time else self._schema.names()
            in_file = [name for name in used if name is not None and name not in of_path]
            try:
                for batch in _batches(file, at.row, in_file):
                    for name, value in of_path.items():
                        column = pa.repeat(pa.scalar(value, pa.string()), len(batch))
                        batch = batch.append_column(name, column)
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

    def parse_times(self, block: Block) -> np.ndarray:
        assert self._schema.time is not None
        name = self._schema.time
        return times(self._schema, {name: block.content.column(name)})


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


def _values_of_path(path: str, columns: Sequence[str]) -> dict[str, str | None]:
    """Returns the partition columns in the path of a file, except columns of the file."""
    pairs = (part.partition("=") for part in Path(path).parts[:-1])
    values = {urllib.parse.unquote(name): value for name, sign, value in pairs if sign}
    return {
        name: None if value == "__HIVE_DEFAULT_PARTITION__" else urllib.parse.unquote(value)
        for name, value in values.items()
        if name not in columns
    }


def open_source(
    paths: Sequence[str], kind: str = AUTO, schema: Schema | None = None
) -> tuple[Source, list[str]]:
    """Opens files as one source.

    Args:
        paths: Files in reading order. A folder is replaced by its data files, at any depth, in the
            order of their paths.
        kind: One of `FORMATS`. `"auto"` means to detect the format by the name or the first line of
            the first file. All files must then have this format.
        schema: Meaning of the columns. Not allowed for `"criteo"` and `"avazu"`, else
            required.

    Returns:
        (source, list of files).

    Raises:
        OSError: If a file cannot be read.
        ValueError: If the format is unknown or differs between files, or a schema is missing or
            not allowed.
    """
    require_choice("format", kind, FORMATS)
    files = list_files(paths, kind)
    if kind == AUTO:
        _require_same_kind(files)
        kind = _recognised(files[0], schema is not None)
    if (schema is None) == (kind in _ENDS):
        need = "requires a schema" if schema is None else "does not accept a schema"
        raise ValueError(
            f"{files[0]}: data in the format {kind!r} {need}. See --schema in "
            "slipstream-prepare --help."
        )
    if schema is not None:
        made = {"csv": CsvSource, "json": JsonSource, "parquet": ParquetSource}[kind]
        return made(schema, files), files
    return FormatSource(CriteoFormat() if kind == "criteo" else AvazuFormat(), files), files


def list_files(paths: Sequence[str], kind: str = AUTO) -> list[str]:
    """Returns the files of `open_source`, in order: folders are replaced by their files.

    Raises:
        FileNotFoundError: If a path does not exist, or a folder has no data files.
        ValueError: If `kind` is `"auto"` and a folder has files of different formats.
    """
    return [file for path in paths for file in _files(path, kind)]


def _files(path: str, kind: str) -> list[str]:
    if not os.path.isdir(path):
        if not os.path.exists(path):
            raise FileNotFoundError(f"There is no data file or folder {path!r}.")
        _require_read(path)
        return [path]
    wanted = (kind,) if kind in _ENDS else ("csv",) if kind != AUTO else tuple(_ENDS)
    found: dict[str, list[str]] = {}
    for file in sorted(Path(path).rglob("*")):
        parts = file.relative_to(path).parts
        # Programs that write folders of data add hidden files, such as _SUCCESS.
        if file.is_file() and not any(part.startswith((".", "_")) for part in parts):
            _require_read(str(file))
            found.setdefault(_kind(file.name), []).append(str(file))
    several = [name for name in wanted if name in found]
    if len(several) > 1:
        raise ValueError(
            f"The folder {path!r} contains files of the formats {' and '.join(several)}. Choose "
            "one with --format, or pass files."
        )
    if not several:
        ends = ", ".join(end for name in wanted for end in _ENDS[name])
        others = _names([file for files in found.values() for file in files], path)
        raise FileNotFoundError(
            f"The folder {path!r} contains no data files{others and f', but {others}'}. Expected "
            f"names that end with {ends}, and for text also {', '.join(text.COMPRESSIONS)}. Pass "
            "files with other names as files, not as a folder."
        )
    if ignored := found.get(""):
        logging.warning(
            "%s: files are ignored (%d), because their names have no known end: %s. Pass them as "
            "files to read them.",
            path,
            len(ignored),
            _names(ignored, path),
        )
    return found[several[0]]


def _names(files: Sequence[str], folder: str) -> str:
    """Returns the first names of files in a folder, and the number of the others."""
    shown = [os.path.relpath(file, folder) for file in files[:_SHOWN_FILES]]
    rest = len(files) - len(shown)
    return ", ".join([*shown, f"and {rest:,} more"] if rest else shown)


def _require_read(path: str) -> None:
    """Raises ValueError if a file has a compression that is not read."""
    end = os.path.splitext(path.lower())[1]
    if end in _UNREAD_ENDS:
        raise ValueError(
            f"{path}: files that end with {end} are not read. Extract the file first, or compress "
            f"it with one of {', '.join(text.COMPRESSIONS)}."
        )


def _kind(name: str) -> str:
    """Returns the format by the name of a file; "" if the name is unknown."""
    stem, end = os.path.splitext(name.lower())
    name = stem if end in text.COMPRESSIONS else name.lower()
    return next((kind for kind, ends in _ENDS.items() if name.endswith(ends)), "")


def _require_same_kind(files: Sequence[str]) -> None:
    """Raises ValueError if the names of files have different formats."""
    kinds = [_kind(file) if _kind(file) in ("parquet", "json") else "text" for file in files]
    for file, kind in zip(files, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                f"{files[0]} is a {kinds[0]} file, but {file} is a {kind} file. Expected files of "
                "the same format. Convert one, or choose a format with --format."
            )


def _recognised(path: str, has_schema: bool) -> str:
    if (kind := _kind(path)) in ("parquet", "json"):
        return kind
    line = _line_of_known_format(path)
    if has_schema:
        return "csv"
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
        "CSV, or CSV, JSON lines or Parquet with a schema (--schema)."
    )


def _line_of_known_format(path: str) -> bytes:
    """Returns the first line of a text file.

    Raises:
        ValueError: If the file has a format that is not read.
    """
    with text.open_text(path) as (file, _), contextlib.suppress(*text.DAMAGES):
        # A TFRecord begins with its length as uint64, which is less than 2**32.
        if ".tfrecord" in os.path.basename(path) or file.read(8)[4:] == bytes(4):
            raise ValueError(f"{path}: TFRecord files {_UNREAD}")
    line = first_line(path)
    if _LIBFFM.fullmatch(line):
        raise ValueError(f"{path}: files of libffm and libsvm {_UNREAD}")
    return line
