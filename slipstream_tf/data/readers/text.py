"""Streams delimited text files into batches, for Criteo and Avazu.

A format has an exact parser for one line and a fast parser for a block of lines. The exact parser
parses the lines that the fast parser cannot handle. Only the exact parser decides which lines are
malformed. A line is regular, and suitable for the fast parser, if it has the expected number of
columns, at most `MAX_LINE_BYTES` bytes and no carriage return.
"""

import bz2
import contextlib
import dataclasses
import errno
import gzip
import itertools
import lzma
import os
import posixpath
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from slipstream_tf.data.readers.base import BatchReader, Rows
from slipstream_tf.data.spec import DataSpec

BLOCK_BYTES = 4 << 20
# Bounds the memory for very short lines, because parsed values take more memory than their text.
BLOCK_LINES = 1 << 16
# Longer lines are malformed and are truncated, so that a file without line ends fits into memory.
MAX_LINE_BYTES = 1 << 20
# Errors of a damaged compressed file. Some modules raise OSError, without `errno`; one with it is
# an error of the system, see `naming_damage`.
DAMAGES = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zip")
NEWLINE = 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineFormat(Protocol):
    """Defines how the lines of a data set are parsed."""

    name: str
    fields: tuple[str, ...]
    label: str
    dense: tuple[str, ...]
    num_columns: int
    delimiter: str
    header: bytes | None  # First line of each file, or None.

    def parse_line(self, columns: Sequence[bytes]) -> tuple[float, list[float], list[int]]:
        """Parses one line exactly and returns (label, dense values, keys).

        Args:
            columns: The `num_columns` values of the line.

        Raises:
            ValueError: If a value is malformed. The message contains the column, the value and the
                allowed values.
        """
        ...

    def parse_columns(self, columns: Sequence[pa.Array]) -> tuple[Rows, np.ndarray]:
        """Parses many lines fast.

        Args:
            columns: `num_columns` binary arrays [n].

        Returns:
            (rows, is_sure bool [n]). Rows with False are parsed again by `parse_line`.
        """
        ...


@dataclasses.dataclass
class ParsedLines:
    """Holds the examples of consecutive lines.

    Attributes:
        rows: The examples.
        is_good: bool [lines]: True for lines in `rows`.
        reasons: Errors of the malformed lines, by line index, ascending.
    """

    rows: Rows
    is_good: np.ndarray
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)


def shown(value: bytes) -> str:
    """Returns the beginning of a malformed value for an error message."""
    return repr(value[:40].decode(errors="backslashreplace"))


def require_header(line_format: LineFormat, path: str, first_line: bytes) -> None:
    """Raises ValueError if a file lacks the header of its format."""
    header = line_format.header
    if header is not None and first_line.rstrip(b"\r") != header:
        given = first_line[:80].decode(errors="replace")
        raise ValueError(
            f"{path}:1: the header {given!r}... differs from the header of {line_format.name}, "
            f"{header[:80].decode()!r}... Convert other CSV files with slipstream-prepare --schema."
        )


def parse_block(line_format: LineFormat, block: bytes) -> ParsedLines:
    """Parses the lines of a block.

    The block is only split into lines if a line is irregular or not parsed by the fast parser.

    Args:
        line_format: Format of the lines.
        block: Complete lines. The last line may lack its line end.

    Returns:
        The examples, and the errors of the malformed lines.
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
    return _settle(line_format, _split(block), range(len(is_sure)), rows, is_sure)


def parse_lines(line_format: LineFormat, lines: Sequence[bytes]) -> ParsedLines:
    """Parses lines.

    Args:
        line_format: Format of the lines.
        lines: Lines without line ends. Trailing carriage returns are ignored.

    Returns:
        The examples, and the errors of the malformed lines.
    """
    lines = [line.rstrip(b"\r") for line in lines]
    separators = line_format.num_columns - 1
    delimiter = line_format.delimiter.encode()
    # The fast parser would treat a carriage return within a line as a line end.
    regular = [
        index
        for index, line in enumerate(lines)
        if line.count(delimiter) == separators and b"\r" not in line and len(line) <= MAX_LINE_BYTES
    ]
    block = b"".join(lines[i] + b"\n" for i in regular)
    columns = _columns(line_format, block, len(regular)) if regular else None
    if columns is None:
        return _settle(line_format, lines, [], _zeros(line_format, 0), np.zeros(0, bool))
    return _settle(line_format, lines, regular, *line_format.parse_columns(columns))


def parse_line(line_format: LineFormat, line: bytes) -> tuple[float, list[float], list[int]]:
    """Parses one line exactly and returns (label, dense values, keys).

    Raises:
        ValueError: If the line is malformed. The message describes the allowed values.
    """
    line = line.rstrip(b"\r")
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"the line has more than {MAX_LINE_BYTES} bytes, the maximum")
    columns = line.split(line_format.delimiter.encode())
    if len(columns) != line_format.num_columns:
        raise ValueError(
            f"the line has {len(columns)} columns; expected {line_format.num_columns}, separated "
            f"by {line_format.delimiter!r}"
        )
    return line_format.parse_line(columns)


def _settle(
    line_format: LineFormat,
    lines: Sequence[bytes],
    regular: Sequence[int],
    rows: Rows,
    is_sure: np.ndarray,
) -> ParsedLines:
    """Completes the result of the fast parser with the exact parser.

    Args:
        line_format: Format of the lines.
        lines: All lines.
        regular: Indices of the lines that the fast parser parsed.
        rows: Result of the fast parser.
        is_sure: bool [len(regular)]. Lines with False are parsed again.
    """
    indices = np.asarray(regular, np.int64)
    is_unsure = np.ones(len(lines), bool)
    is_unsure[indices[is_sure]] = False
    if not is_unsure.any():
        return ParsedLines(rows, ~is_unsure)
    result = _zeros(line_format, len(lines))
    result.label[indices], result.dense[indices] = rows.label, rows.dense
    result.keys[indices] = rows.keys
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
    return block.removesuffix(b"\n").split(b"\n")


def is_regular(block: bytes) -> bool:
    """Returns whether the fast parser can parse all lines of a block."""
    if b"\r" in block:
        return False
    start = 0
    while len(block) - start > MAX_LINE_BYTES:
        # All lines up to the last line end within this distance are short.
        start = block.rfind(b"\n", start, start + MAX_LINE_BYTES + 1) + 1
        if not start:
            return False
    return True


def _zeros(line_format: LineFormat, count: int) -> Rows:
    return Rows(
        np.zeros(count, np.float32),
        np.zeros((count, len(line_format.dense)), np.float32),
        np.zeros((count, len(line_format.fields)), np.int64),
    )


def _columns(line_format: LineFormat, block: bytes, count: int) -> list[pa.Array] | None:
    """Returns all columns of the lines, or None if any is irregular."""
    names = [str(i) for i in range(line_format.num_columns)]
    how = {"delimiter": line_format.delimiter, "quote_char": False}
    return binary_columns(block, count, names, names, **how)


def binary_columns(
    block: bytes, count: int, names: Sequence[str], used: Sequence[str], **options: Any
) -> list[pa.Array] | None:
    """Returns columns as binary arrays, or None if a line is irregular.

    Args:
        block: The lines.
        count: Number of lines.
        names: Names of all columns.
        used: Names of the columns to return.
        **options: Arguments of `pyarrow.csv.ParseOptions`, for example the delimiter.
    """
    if block.startswith(_BYTE_ORDER_MARK):
        block = _BYTE_ORDER_MARK + block  # Arrow skips a mark at the beginning of its input.
    # Read the block in one piece, because Arrow could split it within a line.
    read = pa_csv.ReadOptions(column_names=names, use_threads=False, block_size=len(block) + 1)
    parse = pa_csv.ParseOptions(ignore_empty_lines=False, **options)
    types = dict.fromkeys(used, pa.binary())
    convert = pa_csv.ConvertOptions(include_columns=used, column_types=types, check_utf8=False)
    try:
        table = pa_csv.read_csv(pa.BufferReader(block), read, parse, convert)
    except pa.ArrowInvalid:
        return None
    if table.num_rows != count:
        return None
    return [column.combine_chunks() for column in table.columns]


@contextlib.contextmanager
def open_text(path: str) -> Iterator[tuple[Any, Any]]:
    """Opens a text file for reading bytes after its byte order mark, if it has one.

    Files that end with one of `COMPRESSIONS` are decompressed. A .zip file contains one file.

    Yields:
        (decompressed file, stored file). The position of the latter measures progress.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If a .zip file is damaged, encrypted, or does not contain one file.
    """
    with contextlib.ExitStack() as stack:
        stored: Any = stack.enter_context(open(path, "rb"))
        file, end = stored, os.path.splitext(path)[1].lower()
        if end == ".zip":
            file = stack.enter_context(_member(path, stored))
        elif end in COMPRESSIONS:
            kind = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}[end]
            file = stack.enter_context(kind(fileobj=stored) if end == ".gz" else kind(stored))
        try:
            if file.read(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
                file.seek(0)
        except DAMAGES:
            file.seek(0)  # The caller's read fails again and reports the path.
        yield file, stored


@contextlib.contextmanager
def naming_damage(path: str, place: Callable[[], str]) -> Iterator[None]:
    """Names the file in errors that are raised while it is read.

    Args:
        path: Path of the file.
        place: Returns where the file is damaged, for example "after line 7".

    Raises:
        OSError: If the system cannot read the file, for example because a network fails.
        ValueError: If the content of the file is damaged.
    """
    try:
        yield
    except DAMAGES as error:
        _raise_damage(error, path, f"the file is damaged {place()}")


def _raise_damage(error: Exception, path: str, message: str) -> NoReturn:
    """Raises an error of the system with the path, and other errors as a ValueError.

    In a damaged .zip file, `zipfile` seeks before the beginning, which is EINVAL.
    """
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        error.filename = error.filename or path
        raise error
    raise ValueError(f"{path}: {message}: {error}") from error


def _member(path: str, stored: Any) -> Any:
    """Opens the only file of a .zip file."""
    try:
        archive = zipfile.ZipFile(stored)
        names = [n for n in archive.namelist() if not n.endswith("/") and not _is_metadata(n)]
        if len(names) == 1:
            return archive.open(names[0])
    except (zipfile.BadZipFile, RuntimeError, OSError) as error:
        _raise_damage(error, path, "the .zip file cannot be read")
    raise ValueError(
        f"{path}: the .zip file contains {len(names)} files: {names[:10]}. Expected one. Extract "
        "it and pass the files."
    )


def _is_metadata(name: str) -> bool:
    """Returns whether a system added a file to a .zip file, for example .DS_Store of macOS."""
    return any(part.startswith((".", "__MACOSX")) for part in posixpath.normpath(name).split("/"))


def whole_lines(file: Any) -> Iterator[tuple[bytes, int]]:
    """Reads a file in blocks that end at line ends.

    Lines of more than `MAX_LINE_BYTES` may be truncated, but stay longer than this maximum, so that
    the parser rejects them.

    Args:
        file: Binary file, read from its current position.

    Yields:
        (lines, number of bytes in the file that they take, before truncation).
    """
    rest, rest_bytes = b"", 0
    while data := file.read(BLOCK_BYTES):
        cut = data.rfind(b"\n") + 1
        if cut:
            yield rest + data[:cut], rest_bytes + cut
            rest, rest_bytes = data[cut:][: MAX_LINE_BYTES + 1], len(data) - cut
        else:
            rest, rest_bytes = (rest + data)[: MAX_LINE_BYTES + 1], rest_bytes + len(data)
    if rest:
        yield rest, rest_bytes


def _blocks(path: str) -> Iterator[list[bytes]]:
    """Yields lists of at most `BLOCK_LINES` lines, without line ends."""
    count = 0
    with open_text(path) as (file, _), naming_damage(path, lambda: f"after line {count}"):
        for block, _ in whole_lines(file):
            lines = _split(block)
            count += len(lines)
            for begin in range(0, len(lines), BLOCK_LINES):
                yield lines[begin : begin + BLOCK_LINES]


class TextReader(BatchReader):
    """Reads delimited text files of any size in batches.

    The part of a line depends only on its position: in every ten consecutive runs of 100 data lines
    of a file, the tenth run belongs to the test part and the others to the training part. The ninth
    run also belongs to the validation part.
    """

    def __init__(
        self,
        line_format: LineFormat,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        batch_size: int,
        **options: Any,
    ):
        """Creates a reader. Files are opened when it is iterated.

        Args:
            line_format: Format of the files.
            paths: One or more files, read in order. See `open_text` for compressed files.
            batch_size: Number of examples in a batch.
            **options: Options of all readers: `part` (`"train"`, `"valid"`, `"test"`, or None for
                all lines), `hold_out` (whether to exclude the lines of `"valid"` from `"train"`)
                and `strict` (whether the first malformed line raises an error).

        Raises:
            FileNotFoundError: If a path is not a file.
            ValueError: If another argument is out of range.
        """
        super().__init__(batch_size, **options)
        several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        self._paths = [os.fspath(path) for path in several]
        for path in self._paths:
            if not os.path.isfile(path):
                raise FileNotFoundError(f"There is no data file {path!r}.")
        self._format = line_format
        # The number of well-formed lines is only known after reading.
        self.spec = DataSpec(line_format.name, line_format.fields, len(line_format.dense))

    def rows(self) -> Iterator[Rows]:
        """Yields the parsed rows of the part in file order.

        Each result has at most `BLOCK_LINES` rows.

        Raises:
            BadLineError: If a line is malformed and the reader is strict.
            ValueError: If a compressed file is damaged or a file has another header.
        """
        files = map(self._file_rows, self._paths)
        return self._with_bad_lines(itertools.chain.from_iterable(files))

    def _file_rows(self, path: str) -> Iterator[Rows]:
        first_line = 1
        index = 0  # Index of the next data line.
        for lines in _blocks(path):
            if self._format.header is not None and first_line == 1:
                require_header(self._format, path, lines[0])
                lines = lines[1:]
                first_line = 2
            chosen = np.flatnonzero(self._is_wanted(index, len(lines)))
            if chosen.size:
                yield self._parse(path, chosen + first_line, [lines[i] for i in chosen])
            index += len(lines)
            first_line += len(lines)

    def _parse(self, path: str, numbers: np.ndarray, lines: list[bytes]) -> Rows:
        parsed = parse_lines(self._format, lines)
        for i, reason in parsed.reasons.items():
            self.bad_lines.add(path, int(numbers[i]), reason)
        return parsed.rows

    def _blocks(self, number: int) -> Iterator[Rows]:  # All passes have the same order.
        return self.rows()
