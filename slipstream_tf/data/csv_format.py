"""Divides the lines of CSV files into values.

Arrow's parser defines the values of a line, and reads a block of lines in one call. A block that
contains an irregular line is divided into lines; regular expressions find the irregular lines, and
Arrow reads the others in one call. Therefore the values of a line depend on no other line.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream_tf.data.columns import convert
from slipstream_tf.data.readers import text
from slipstream_tf.data.schema import Schema
from slipstream_tf.data.sources import ParsedRows

_STAND_IN = b"\x1f"  # Replaces long delimiters, because Arrow's have one byte.
_QUOTED_LINE_BREAK = (
    "quoted line break: the closing quote is not on this line. Remove line breaks from values. If "
    'quotes are ordinary characters in this file, set "quoting": "none" in the schema'
)


@dataclasses.dataclass
class ParsedValues:
    """Holds the values of consecutive lines.

    Attributes:
        columns: Binary arrays [regular lines] of the used columns, by name.
        rows: int64 [regular lines]: indices of the regular lines.
        num_lines: Number of lines.
        reasons: Errors of the malformed lines, by index. Empty lines are neither regular nor
            malformed.
    """

    columns: Mapping[str, pa.Array]
    rows: np.ndarray
    num_lines: int
    reasons: dict[int, str]

    def without_headers(self, label: str) -> "ParsedValues":
        """Returns the values with the lines that repeat the header as malformed lines.

        Without this, a text label would make such a line a negative example.

        Args:
            label: Name of the label column, which is the label of a header.
        """
        is_header = pc.equal(self.columns[label], label.encode()).to_numpy(zero_copy_only=False)
        if not is_header.any():
            return self
        reason = (
            f"the line is a header, because {label} is {label!r}. If the files begin with one, "
            "remove `columns` from the schema"
        )
        return dataclasses.replace(
            self,
            columns={name: column.filter(~is_header) for name, column in self.columns.items()},
            rows=self.rows[~is_header],
            reasons={**self.reasons, **dict.fromkeys(self.rows[is_header].tolist(), reason)},
        )

    def convert(self, schema: Schema) -> ParsedRows:
        """Converts the regular lines to examples; see `columns.convert`."""
        parsed = convert(schema, self.columns)
        is_good = np.zeros(self.num_lines, bool)
        is_good[self.rows[parsed.is_good]] = True
        of_values = {int(self.rows[row]): reason for row, reason in parsed.reasons.items()}
        reasons = dict(sorted({**self.reasons, **of_values}.items()))
        return ParsedRows(parsed.table, is_good, reasons, parsed.label_counts)


class CsvFormat:
    """Defines how a line is divided into values.

    A value that begins with a quote ends at the next single quote, and text up to the delimiter is
    appended: `"12"" inch" vinyl` is `12" inch vinyl`. A doubled quote within quotes is a quote.
    Quotes at other places are ordinary characters. An escape character makes the next character
    ordinary.
    """

    def __init__(self, delimiter: str = ",", is_quoted: bool = True, escape: str | None = None):
        """Compiles the patterns of values.

        Args:
            delimiter: Text between values. It contains no quote, line end or escape character.
            is_quoted: Whether quotes have a meaning.
            escape: An ASCII character, or None.
        """
        self._delimiter = delimiter
        self._long = b"" if len(delimiter) == 1 and delimiter.isascii() else delimiter.encode()
        byte = _STAND_IN if self._long else delimiter.encode()
        self._options: dict[str, Any] = {
            "delimiter": byte.decode(),
            "quote_char": '"' if is_quoted else False,
            "escape_char": escape or False,
        }
        self._separator = re.escape(byte)
        # An escape character and the character after it. `(?!)` never matches.
        self._escape = (escape or "").encode()
        stop = re.escape(self._escape)
        pair = stop + b"." if escape else b"(?!)"
        plain = b"[^%b\\r%b]*(?:%b[^%b\\r%b]*)*" % (
            *(self._separator, stop, pair),
            *(self._separator, stop),
        )
        self._value = plain
        if is_quoted:
            inner = b'[^"%b]*' % stop
            quoted = b'"%b(?:(?:""|%b)%b)*"(?!")%b' % (inner, pair, inner, plain)
            self._value = b'(?:%b|(?!")%b)' % (quoted, plain)
        self._next = re.compile(b"(%b)(%b|\\Z)" % (self._value, self._separator), re.DOTALL)

    def values(self, line: bytes) -> list[bytes]:
        """Returns all values of a line.

        Args:
            line: The line, without its line end.

        Raises:
            ValueError: If the line is irregular.
        """
        line = self._with_short_delimiters(line)
        names = [str(i) for i in range(self._count(line))]
        columns = self._columns(line + b"\n", 1, names, names)
        return [column[0].as_py() for column in columns or ()]

    def parse(self, lines: bytes, header: Sequence[str], used: Sequence[str]) -> ParsedValues:
        """Returns the values of the regular lines, and the errors of the malformed lines.

        Args:
            lines: Complete lines. The last line may lack its line end.
            header: Names of all columns.
            used: Names of the columns to return. Each occurs once in `header`.
        """
        if not lines.endswith(b"\n"):
            lines += b"\n"
        # Prefix for unused columns. It is longer than each used name, so that no name collides.
        other = "_".join(["", *used])
        names = [name if name in used else f"{other}{i}" for i, name in enumerate(header)]
        pattern = re.compile(
            b"%b(?:%b%b){%d}" % (self._value, self._separator, self._value, len(names) - 1),
            re.DOTALL,
        )
        plain = lines.replace(b"\r\n", b"\n")
        # Arrow treats an empty line as a row of empty values.
        is_regular = text.is_regular(plain) and not plain.startswith(b"\n") and b"\n\n" not in plain
        if is_regular and not (self._long and _STAND_IN in plain):
            short = self._with_short_delimiters(plain)
            # Arrow returns one row per line, or fewer rows if a value contains a line end. It
            # accepts an unclosed quote on the last line.
            last = short[short.rfind(b"\n", 0, -1) + 1 : -1]
            count = plain.count(b"\n")
            if pattern.fullmatch(last):
                columns = self._columns(short, count, names, used)
                if columns is not None:
                    named = dict(zip(used, columns, strict=True))
                    return ParsedValues(named, np.arange(count), count, {})
        return self._parse_each(lines[:-1].split(b"\n"), pattern, names, used)

    def _parse_each(
        self, lines: Sequence[bytes], pattern: re.Pattern, names: Sequence[str], used: Sequence[str]
    ) -> ParsedValues:
        rows, regular = [], []
        reasons: dict[int, str] = {}
        for index, line in enumerate(lines):
            line = line.removesuffix(b"\r")
            if not line:
                continue
            try:
                if len(line) > text.MAX_LINE_BYTES:
                    raise ValueError(
                        f"the line has more than {text.MAX_LINE_BYTES} bytes, the maximum"
                    )
                line = self._with_short_delimiters(line)
                if not pattern.fullmatch(line):
                    self._refuse(line, len(names))
            except ValueError as error:
                reasons[index] = str(error)
            else:
                rows.append(index)
                regular.append(line)
        block = b"\n".join([*regular, b""])
        columns = self._columns(block, len(rows), names, used) if rows else []
        if columns is None:
            raise AssertionError(f"Arrow and {pattern.pattern!r} disagree on regular lines.")
        named = dict(zip(used, columns or [pa.array([], pa.binary())] * len(used), strict=True))
        return ParsedValues(named, np.array(rows, np.int64), len(lines), reasons)

    def _refuse(self, line: bytes, expected: int) -> None:
        """Raises ValueError for an irregular line with short delimiters."""
        reason = f"the line has {self._count(line)} columns; expected {expected}, separated by "
        reason += repr(self._delimiter)
        if b'\\"' in line and not self._escape:
            reason += '. If backslashes escape quotes, set "escape": "\\\\" in the schema'
        raise ValueError(reason)

    def _count(self, line: bytes) -> int:
        """Returns the number of values of a line with short delimiters.

        Raises:
            ValueError: If the line contains a part of a value.
        """
        count = end = 0
        for match in self._next.finditer(line):
            if match.start() != end:
                break
            count, end = count + 1, match.end()
            if not match[2]:
                return count
        if line[end:].startswith(b'"') and self._options["quote_char"]:
            raise ValueError(_QUOTED_LINE_BREAK)
        if b"\r" in line[end:]:
            raise ValueError("the line contains a carriage return outside quotes")
        raise ValueError(f"the line ends with the escape character {self._escape.decode()!r}")

    def _with_short_delimiters(self, lines: bytes) -> bytes:
        """Replaces long delimiters, so that Arrow can parse the lines.

        Raises:
            ValueError: If the lines contain the replacement.
        """
        if not self._long:
            return lines
        if _STAND_IN in lines:
            raise ValueError(
                f"the line contains the byte 0x1f, which is not allowed with the delimiter "
                f"{self._delimiter!r}"
            )
        return lines.replace(self._long, _STAND_IN)

    def _columns(
        self, block: bytes, count: int, names: Sequence[str], used: Sequence[str]
    ) -> list[pa.Array] | None:
        """Returns the used columns of a block; or None if a line is irregular."""
        columns = text.binary_columns(block, count, names, used, **self._options)
        is_ordinary = b'"' not in block and not (self._escape and self._escape in block)
        if columns is None or not self._long or is_ordinary:
            return columns
        # Delimiters within quotes or after an escape character belong to the value.
        long = {"pattern": _STAND_IN, "replacement": self._long}
        return [pc.replace_substring(column, **long) for column in columns]
