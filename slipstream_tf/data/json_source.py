"""Reads JSON lines as a source: one object per line."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from slipstream_tf._utils.errors import shown
from slipstream_tf.data.columns import columns_of, times
from slipstream_tf.data.csv_format import ParsedValues
from slipstream_tf.data.line_source import LineSource
from slipstream_tf.data.readers import text
from slipstream_tf.data.schema import Schema
from slipstream_tf.data.sources import Block, ParsedRows
from slipstream_tf.data.spec import require_columns

_SAMPLE_LINES = 10_000
_ADVICE = "Write each object on one line, for example with jq --compact-output '.[]'"


class JsonSource(LineSource):
    """Reads JSON lines with a schema.

    A value is read as its text, as in CSV: 12 and "12" are the same key. A list is a bag of keys;
    nested lists are flattened. Null and an absent name are missing values; a missing list is an
    empty bag. Empty lines contain no example and are no errors.
    """

    name = "table"

    def __init__(self, schema: Schema, paths: Sequence[str]):
        """Reads the first lines of the files, which determine the columns with lists.

        More lines are read while all values of a key column are null.

        Args:
            schema: Meaning of the columns.
            paths: Paths of the files, in order.

        Raises:
            OSError: If a file cannot be read.
            ValueError: If the first lines contain no JSON object, or lack a column.
        """
        self._schema = schema
        self._numbers = {dense.column for dense in schema.dense}
        super().__init__(paths)
        first: dict[str, Any] = {}  # The first value that is not null, by column.
        for path, records in _samples(self.paths):
            for record in records:
                for name, value in record.items():
                    if first.get(name) is None:
                        first[name] = value
            require_columns(schema.names(), list(first), path)
            if all(first[key.column] is not None for key in schema.keys):
                break
        require_columns(schema.names(), list(first), self.paths[0])
        self._types = {
            name: pa.list_(pa.binary()) if isinstance(first[name], list) else pa.binary()
            for name in schema.names()
        }
        self.columns = columns_of(schema, self._types)

    def describe(self) -> Mapping[str, Any]:
        return {"format": "json", "schema": self._schema.to_dict()}

    def read_header(self, path: str, first_line: bytes) -> None:
        """Does nothing, because the files have no header."""

    def parse_lines(self, header: Any, lines: bytes) -> ParsedRows:
        return self._parse(lines, self._schema.names()).convert(self._schema)

    def parse_times(self, block: Block) -> np.ndarray:
        assert self._schema.time is not None
        return times(self._schema, self._parse(block.content, (self._schema.time,)).columns)

    def _parse(self, lines: bytes, names: Sequence[str]) -> ParsedValues:
        """Returns the values of the regular lines, and the errors of the malformed lines."""
        several = lines.removesuffix(b"\n").split(b"\n")
        rows: list[int] = []
        values: dict[str, list[Any]] = {name: [] for name in names}
        reasons: dict[int, str] = {}
        for index, line in enumerate(several):
            if line in (b"", b"\r"):
                continue
            try:
                record = _record(line)
                found = [self._value(name, record.get(name)) for name in values]
            except ValueError as error:
                reasons[index] = str(error)
                continue
            rows.append(index)
            for column, value in zip(values.values(), found, strict=True):
                column.append(value)
        columns = {name: pa.array(values[name], self._types[name]) for name in values}
        return ParsedValues(columns, np.array(rows, np.int64), len(several), reasons)

    def _value(self, name: str, value: Any) -> Any:
        """Returns a value of a column as bytes, as a list of bytes, or None."""
        try:
            if self._types[name] == pa.binary():
                return _text(value, name in self._numbers)
            if value is None:
                return None
            return [_text(v, False) for v in _flattened(value if type(value) is list else [value])]
        except (TypeError, RecursionError):
            is_value = self._types[name] == pa.binary()
            expected = "a value" if is_value else "a list of values"
            if type(value) is dict or not is_value:
                expected += ", not an object. Write each value of an object as a column of the line"
            elif any(key.column == name for key in self._schema.keys):
                expected += ", as in the first lines. If some lines have a list, write one in each"
            raise ValueError(f"{name} is {shown(value)}; expected {expected}") from None


def _samples(paths: Sequence[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the path and objects of at most `_SAMPLE_LINES` lines at a time.

    Empty and malformed lines are left out.

    Raises:
        ValueError: If the first lines contain no object or begin with a JSON array.
    """
    is_first = True
    for path in paths:
        with text.open_text(path) as (file, _), text.naming_damage(path, lambda: "in its lines"):
            for block, _ in text.whole_lines(file):
                several = block.split(b"\n")
                for begin in range(0, len(several), _SAMPLE_LINES):
                    lines = [v for v in several[begin : begin + _SAMPLE_LINES] if v.rstrip(b"\r")]
                    records = []
                    for line in lines:
                        with contextlib.suppress(ValueError):
                            records.append(_record(line))
                    if is_first and lines and (not records or lines[0].startswith(b"[")):
                        try:
                            _record(lines[0])
                        except ValueError as error:
                            number = several.index(lines[0]) + 1
                            raise ValueError(f"{path}:{number}: {error}.") from None
                    if lines:
                        is_first = False
                        yield path, records


def _record(line: bytes) -> dict[str, Any]:
    """Parses a line; numbers stay text.

    Raises:
        ValueError: If the line is not a JSON object.
    """
    if len(line) > text.MAX_LINE_BYTES:
        raise ValueError(f"the line has more than {text.MAX_LINE_BYTES} bytes, the maximum")
    try:
        record = json.loads(line.decode(), parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError) as error:
        advice = _ADVICE
        if line.startswith((b"{'", b"{u'")):
            advice = "Convert Python dictionaries with ast.literal_eval and json.dumps"
        raise ValueError(f"the line is not JSON: {error}; expected an object. {advice}") from None
    if not isinstance(record, dict):
        raise ValueError(f"the line is {text.shown(line)}; expected an object. {_ADVICE}")
    return record


def _text(value: Any, is_number: bool) -> bytes | None:
    """Returns the text of a JSON value that is not a list or object, else raises TypeError."""
    if value is None:
        return None
    if isinstance(value, bool):
        return (b"1" if value else b"0") if is_number else (b"true" if value else b"false")
    if not isinstance(value, str):
        raise TypeError
    return value.encode("utf-8", "surrogatepass")


def _flattened(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _flattened(value)
        else:
            yield value
