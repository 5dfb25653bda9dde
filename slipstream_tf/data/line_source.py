"""Reads text files as sources: Criteo TSV, Avazu CSV, other CSV.

Blocks end at line ends, therefore a value must not contain a line break.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from absl import logging

from slipstream_tf.data.columns import TO_UTF_8, columns_of, times
from slipstream_tf.data.csv_format import CsvFormat, ParsedValues
from slipstream_tf.data.readers import text
from slipstream_tf.data.readers.base import PART_RUN
from slipstream_tf.data.schema import NONE, Schema
from slipstream_tf.data.sources import (
    Block,
    Columns,
    ParsedRows,
    Position,
    Source,
    table_of,
    train_and_test,
)
from slipstream_tf.data.spec import require_columns

# First bytes of other kinds of files: the kind and the end of the names of such files.
_OTHER_KINDS = {
    b"PK\x03\x04": ("a .zip archive", ".zip"),
    b"\x1f\x8b": ("compressed with gzip", ".gz"),
    b"BZh91AY&SY": ("compressed with bzip2", ".bz2"),
    b"\xfd7zXZ\0": ("compressed with xz", ".xz"),
    b"PAR1\x15": ("a Parquet file", ".parquet"),
}


class LineSource(Source):
    """Reads text files of any size, also compressed ones (`text.open_text`). Base class.

    The train and test parts are the same as in `TextReader`: every tenth run of 100 data lines of a
    file belongs to the test part.
    """

    def __init__(self, paths: Sequence[str]):
        """Reads the first line of each file.

        Args:
            paths: Paths of the files, in order.

        Raises:
            OSError: If a file cannot be read.
            ValueError: If a file has an unexpected header.
        """
        self.paths = tuple(paths)
        self._bytes = [os.path.getsize(path) for path in self.paths]
        self.size = sum(self._bytes)
        self._headers = [self.read_header(path, first_line(path)) for path in self.paths]

    def read_header(self, path: str, first_line: bytes) -> Any:
        """Checks the header of a file; returns the `header` for `parse_lines`.

        Args:
            path: Path of the file.
            first_line: First line of the file, without its line end.

        Raises:
            ValueError: If the header is unexpected.
        """
        raise NotImplementedError

    def parse_lines(self, header: Any, lines: bytes) -> ParsedRows:
        """Parses complete lines of a file.

        Args:
            header: Result of `read_header` for the file.
            lines: The lines. The last one may lack its line end.
        """
        raise NotImplementedError

    def parse(self, block: Block) -> ParsedRows:
        return self.parse_lines(self._headers[block.start.file], block.content)

    def file_blocks(
        self, start: Position, piece_rows: int, only_time: bool = False
    ) -> Iterator[Block]:
        path, at = self.paths[start.file], start
        done = sum(self._bytes[: start.file])
        place = lambda: f"after line {at.row + self.header_lines}"  # noqa: E731
        with text.open_text(path) as (file, stored), text.naming_damage(path, place):
            # Note: seeking in a compressed file decompresses all data before the offset again.
            if at.offset:
                file.seek(at.offset)
            elif self.header_lines:
                file.readline(text.MAX_LINE_BYTES)
            at = Position(at.file, file.tell(), at.row, at.id)
            for lines, num_bytes in text.whole_lines(file):
                end = at.offset + num_bytes
                first_rows = at.rows_left(piece_rows)
                for first, last, rows in _cut(lines, first_rows, piece_rows):
                    offset = end - (len(lines) - last)
                    after = Position(at.file, offset, at.row + rows, at.id + rows)
                    # Progress in compressed bytes, the unit of the file size.
                    read = offset if file is stored else stored.tell()
                    content = lines[first:last]
                    yield Block(at, after, content, done + min(read, self._bytes[at.file]))
                    at = after


def first_line(path: str) -> bytes:
    """Returns the first line of a file.

    The line end is removed.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, in UTF-16, compressed unlike its name, or Parquet.
    """
    with text.open_text(path) as (file, _), text.naming_damage(path, lambda: "at its beginning"):
        line = file.readline(text.MAX_LINE_BYTES)
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(
            f"{path}: the file is in UTF-16. Expected UTF-8 or another encoding that contains "
            "ASCII. Convert it, for example with iconv --from-code=UTF-16 --to-code=UTF-8."
        )
    for begin, (kind, end) in _OTHER_KINDS.items():
        if line.startswith(begin):
            raise ValueError(
                f"{path}: the content is {kind}, not text. Expected a name that ends with {end}. "
                "Rename or extract the file."
            )
    return line.removesuffix(b"\n").removesuffix(b"\r")


def _decoded(name: bytes) -> str:
    """Decodes the name of a column, which may be in UTF-8 or Latin-1."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode("latin-1")


def _cut(lines: bytes, first_rows: int, piece_rows: int) -> Iterator[tuple[int, int, int]]:
    """Splits lines at the ends of pieces.

    The first piece has `first_rows` lines, the following pieces have `piece_rows` lines. Pieces are
    described in `Source.blocks`.

    Yields:
        (first byte, end byte, number of lines) of ranges with at most `text.BLOCK_LINES` lines.
    """
    num_rows = lines.count(b"\n") + (not lines.endswith(b"\n"))
    if num_rows <= min(first_rows, text.BLOCK_LINES):
        yield 0, len(lines), num_rows
        return
    ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == text.NEWLINE) + 1
    begin, row = 0, 0
    pieces = range(first_rows, num_rows, piece_rows)
    for last in sorted({*pieces, *range(text.BLOCK_LINES, num_rows, text.BLOCK_LINES), num_rows}):
        end = len(lines) if last == num_rows else int(ends[last - 1])
        yield begin, end, last - row
        begin, row = end, last


class FormatSource(LineSource):
    """Reads Criteo and Avazu files with the same parser as their readers."""

    def __init__(self, line_format: text.LineFormat, paths: Sequence[str]):
        """Reads the first line of each file.

        Args:
            line_format: Format of the lines.
            paths: Paths of the files, in order.
        """
        self._format, self.name = line_format, line_format.name
        self.header_lines = int(line_format.header is not None)
        self.columns = Columns(line_format.label, line_format.dense, line_format.fields)
        super().__init__(paths)

    def read_header(self, path: str, first_line: bytes) -> None:
        text.require_header(self._format, path, first_line)

    def parse_lines(self, header: Any, lines: bytes) -> ParsedRows:
        parsed = text.parse_block(self._format, lines)
        rows = parsed.rows
        table = table_of(self.columns, rows.label, rows.dense, rows.keys)
        return ParsedRows(table, parsed.is_good, parsed.reasons)

    def parts(self, block: Block, run: int = PART_RUN) -> Mapping[str, np.ndarray]:
        """Returns masks of the training and test rows, the same as of the readers.

        Runs of `PART_RUN` rows are counted per file; shorter runs over all files, because a file
        may have less than ten rows.
        """
        first = block.start.row if run == PART_RUN else block.start.id
        return train_and_test(first, block.num_rows, run)


class CsvSource(LineSource):
    """Reads delimited text with a schema. `CsvFormat` defines the values of a line.

    Empty lines contain no example and are no errors.
    """

    name = "table"

    def __init__(self, schema: Schema, paths: Sequence[str]):
        """Reads the first line of each file.

        Args:
            schema: Meaning of the columns.
            paths: Paths of the files, in order.
        """
        self._schema = schema
        self._has_warned = False
        self._format = CsvFormat(schema.delimiter, schema.quoting != NONE, schema.escape)
        self.header_lines = int(schema.columns is None)
        self.columns = columns_of(schema, dict.fromkeys(schema.names(), pa.binary()))
        super().__init__(paths)

    def describe(self) -> Mapping[str, Any]:
        return {"format": "csv", "schema": self._schema.to_dict()}

    def read_header(self, path: str, first_line: bytes) -> tuple[str, ...]:
        """Returns the names of all columns of a file, in order."""
        if self._schema.columns is not None:
            return self._schema.columns
        if not first_line:
            raise ValueError(
                f"{path}:1: the first line is empty. Expected the names of the columns. If the "
                "files have no header, set `columns` in the schema."
            )
        try:
            names = tuple(_decoded(name) for name in self._format.values(first_line))
        except ValueError as error:
            raise ValueError(
                f"{path}:1: the header is malformed: {error}. Expected column names."
            ) from None
        details = f", separated by {self._schema.delimiter!r}"
        advice = "If the first line is no header, set `columns` in the schema."
        if len(names) == 1:
            others = [repr(d) for d in ("\t", ";", "|", "::", ",", " ") if d in names[0]]
            found = f" The line contains {' and '.join(others)}." if others else ""
            advice = f"Set the `delimiter` of the file in the schema.{found}"
        require_columns(self._schema.names(), names, f"{path}:1", details, advice)
        return names

    def parse_lines(self, header: Any, lines: bytes) -> ParsedRows:
        values = self._format.parse(lines, header, self._schema.names())
        if not (self._has_warned or lines.isascii()):
            self._check_encoding(values)
        return values.without_headers(self._schema.label).convert(self._schema)

    def _check_encoding(self, values: ParsedValues) -> None:
        """Logs a warning at the first values of the schema's columns that are not in UTF-8."""
        for name in self._schema.names():
            try:
                values.columns[name].cast(pa.string())
            except pa.ArrowInvalid:
                self._has_warned = True
                logging.warning(
                    "The column %r contains text that is not in UTF-8. Texts of `missing` and "
                    "`positive` in the schema do not match such text, unless they are ASCII. Keys "
                    "of text depend on the encoding, therefore all files and the requests to a "
                    "served model need the same. Convert the files, for example with %s.",
                    *(name, TO_UTF_8),
                )
                return

    def parse_times(self, block: Block) -> np.ndarray:
        assert self._schema.time is not None
        header = self._headers[block.start.file]
        found = self._format.parse(block.content, header, (self._schema.time,))
        return times(self._schema, found.columns)
