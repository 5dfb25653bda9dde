"""Lines of delimited text to inputs: how a format reads them, exactly and fast.

A format says how one line is parsed, exactly, and how a block of lines is parsed fast. Lines that
the fast way is not sure about go through the exact one, which alone decides what is malformed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from slipstream_tf.inputs.readers.rows import Rows

# A longer line is malformed, and is not kept: a file without line ends must not fill the memory.
MAX_LINE_BYTES = 1 << 20
_NEWLINE = 10


class LineFormat(Protocol):
    """How the lines of a data set are read."""

    name: str
    fields: tuple[str, ...]
    num_dense: int
    num_columns: int
    delimiter: str
    header: bytes | None  # first line of every file, or None

    def parse_line(self, columns: Sequence[bytes]) -> tuple[float, list[float], list[int]]:
        """Parses one line exactly: (label, dense values, keys).

        Raises:
            ValueError: a value is malformed; the message names its column, itself and what is
                allowed.
        """
        ...

    def parse_columns(self, columns: Sequence[pa.Array]) -> tuple[Rows, np.ndarray]:
        """Parses many lines fast.

        Args:
            columns: `num_columns` binary arrays [n].

        Returns:
            (rows, is_sure bool [n]); rows that are not sure are parsed again by `parse_line`.
        """
        ...


@dataclasses.dataclass
class ParsedLines:
    """What some consecutive lines hold.

    Attributes:
        rows: the inputs, without ids.
        is_good: bool [lines], which lines the inputs are of.
        reasons: what is wrong with the others, by place among the lines, ascending.
    """

    rows: Rows
    is_good: np.ndarray
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)


def shown(value: bytes) -> str:
    """Returns the begin of a malformed value, for an error message."""
    return repr(value[:40].decode(errors="backslashreplace"))


def require_header(line_format: LineFormat, path: str, first_line: bytes) -> None:
    """Raises ValueError unless a file starts as its format says."""
    header = line_format.header
    if header is not None and first_line.rstrip(b"\r") != header:
        given = first_line[:80].decode(errors="replace")
        raise ValueError(
            f"{path}:1: header {given!r}... is not that of {line_format.name}: "
            f"{header[:80].decode()!r}... CSV of other columns: slipstream-prepare --schema first."
        )


def parse_block(line_format: LineFormat, block: bytes) -> ParsedLines:
    """Parses the lines of a block as `parse_lines` does, without taking them apart where it can.

    Args:
        line_format: of the lines.
        block: whole lines, each with its end but for the last one, which may lack it.

    Returns:
        The inputs, and what is wrong with the other lines.
    """
    if not block:
        return parse_lines(line_format, [])
    if not block.endswith(b"\n"):
        block += b"\n"
    columns = _columns(line_format, block, block.count(b"\n")) if is_regular(block) else None
    if columns is None:
        return parse_lines(line_format, _split(block))
    rows, is_sure = line_format.parse_columns(columns)
    if is_sure.all():
        return ParsedLines(rows, is_sure)
    return _settle(line_format, _split(block), np.arange(len(is_sure)), rows, is_sure)


def parse_lines(line_format: LineFormat, lines: Sequence[bytes]) -> ParsedLines:
    """Parses lines.

    Args:
        line_format: of the lines.
        lines: without their ends; a carriage return at one's end is passed over.

    Returns:
        The inputs, and what is wrong with the other lines.
    """
    lines = [line.rstrip(b"\r") for line in lines]
    separators = line_format.num_columns - 1
    delimiter = line_format.delimiter.encode()
    # A carriage return inside a line would be a line end to the fast parser.
    is_regular = np.array(
        [
            line.count(delimiter) == separators
            and b"\r" not in line
            and len(line) <= MAX_LINE_BYTES
            for line in lines
        ],
        bool,
    )
    regular = np.flatnonzero(is_regular)
    block = b"".join(lines[i] + b"\n" for i in regular)
    columns = _columns(line_format, block, regular.size) if regular.size else None
    if columns is None:
        rows, is_sure = _zeros(line_format, regular.size), np.zeros(regular.size, bool)
    else:
        rows, is_sure = line_format.parse_columns(columns)
    return _settle(line_format, lines, regular, rows, is_sure)


def parse_line(line_format: LineFormat, line: bytes) -> tuple[float, list[float], list[int]]:
    """Parses one line exactly: (label, dense values, keys).

    Raises:
        ValueError: it is malformed; the message says what is allowed.
    """
    line = line.rstrip(b"\r")
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"more than {MAX_LINE_BYTES} bytes; allowed: so many at most")
    columns = line.split(line_format.delimiter.encode())
    if len(columns) != line_format.num_columns:
        raise ValueError(
            f"{len(columns)} columns; allowed: {line_format.num_columns}, separated by "
            f"{line_format.delimiter!r}"
        )
    return line_format.parse_line(columns)


def _settle(
    line_format: LineFormat,
    lines: Sequence[bytes],
    regular: np.ndarray,
    rows: Rows,
    is_sure: np.ndarray,
) -> ParsedLines:
    """Parses exactly what the fast way (`rows`, of the lines `regular`) is not sure about."""
    is_unsure = np.ones(len(lines), bool)
    is_unsure[regular[is_sure]] = False
    if not is_unsure.any():
        return ParsedLines(rows, ~is_unsure)
    result = _zeros(line_format, len(lines))
    result.label[regular], result.dense[regular] = rows.label, rows.dense
    result.keys[regular] = rows.keys
    is_good = np.ones(len(lines), bool)
    reasons = {}
    for i in np.flatnonzero(is_unsure).tolist():
        try:
            parsed = parse_line(line_format, lines[i])
        except ValueError as error:
            is_good[i] = False
            reasons[i] = str(error)
        else:
            result.label[i], result.dense[i], result.keys[i] = parsed
    return ParsedLines(result.take(is_good), is_good, reasons)


def _split(block: bytes) -> list[bytes]:
    return block[:-1].split(b"\n")


def is_regular(block: bytes) -> bool:
    """Whether the lines of a block are such as the fast parser takes them to be."""
    if b"\r" in block:
        return False
    if len(block) <= MAX_LINE_BYTES:
        return True
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE)
    return int(np.diff(ends, prepend=-1).max()) <= MAX_LINE_BYTES + 1


def _zeros(line_format: LineFormat, count: int) -> Rows:
    return Rows(
        np.zeros(count, np.float32),
        np.zeros((count, line_format.num_dense), np.float32),
        np.zeros((count, len(line_format.fields)), np.int64),
    )


def _columns(line_format: LineFormat, block: bytes, count: int) -> list[pa.Array] | None:
    """The columns of `count` lines as binary arrays, or None if they are not all regular."""
    names = [str(i) for i in range(line_format.num_columns)]
    try:
        table = pa_csv.read_csv(
            pa.BufferReader(block),
            read_options=pa_csv.ReadOptions(
                # The block as one: a second one could end within a line.
                column_names=names, use_threads=False, block_size=len(block) + 1,
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=line_format.delimiter,
                quote_char=False,
                double_quote=False,
                escape_char=False,
                ignore_empty_lines=False,
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.binary()), check_utf8=False
            ),
        )  # fmt: skip
    except pa.ArrowInvalid:
        return None
    if table.num_rows != count:
        return None
    return [_one_chunk(column) for column in table.columns]


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined
