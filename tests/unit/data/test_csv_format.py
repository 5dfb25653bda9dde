"""Tests that the values of a CSV line do not depend on the other lines of its block."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream_tf.data.csv_format import CsvFormat
from slipstream_tf.data.readers import text

HEADER = ("y", "a", "b")
MARK = b"\xef\xbb\xbf"


def alone(line: bytes, delimiter: str, **options) -> tuple[bytes, ...] | None:
    """Returns the values that Arrow reads from a line between two regular lines.

    The line may end with a carriage return. The result is None if the line is malformed, and () if
    it is empty.
    """
    line = line.removesuffix(b"\r")
    if not line:
        return ()
    byte, long = delimiter.encode(), delimiter.encode()
    if len(delimiter) > 1:
        byte = b"\x1f"
        if byte in line:
            return None
        line = line.replace(long, byte)
    between = byte.join([b"0", b"0", b"0"])
    block = between + b"\n" + line + (b"\r\n" if line.endswith(b"\r") else b"\n") + between + b"\n"
    try:
        table = pa_csv.read_csv(
            pa.BufferReader(block),
            pa_csv.ReadOptions(column_names=list(HEADER)),
            pa_csv.ParseOptions(delimiter=byte.decode(), ignore_empty_lines=False, **options),
            pa_csv.ConvertOptions(
                column_types=dict.fromkeys(HEADER, pa.binary()), check_utf8=False
            ),
        )
    except pa.ArrowInvalid:
        return None
    rows = [tuple(row.values()) for row in table.to_pylist()]
    if len(rows) != 3 or rows[0] != rows[2]:
        return None
    return tuple(value.replace(byte, long) for value in rows[1])


def read(csv_format: CsvFormat, lines: bytes) -> list[tuple[bytes, ...] | None]:
    """Returns the values of each line, None for malformed and () for empty lines."""
    found = csv_format.parse(lines, HEADER, HEADER)
    values: list[tuple[bytes, ...] | None] = [()] * found.num_lines
    for index in found.reasons:
        values[index] = None
    for row, index in enumerate(found.rows.tolist()):
        values[index] = tuple(found.columns[name][row].as_py() for name in HEADER)
    assert found.num_lines == len(found.rows) + len(found.reasons) + values.count(())
    return values


FORMATS = [
    (delimiter, escape, is_quoted)
    for delimiter, escape, is_quoted in itertools.product((",", "::"), (None, "\\"), (True, False))
]
PIECES = [b"a", b'"', b'"', b'""', b"\\", b"\r", b"\x1f", b":", b";", b" ", b"\x00", b"\xff", MARK]


@st.composite
def blocks(draw):
    delimiter, escape, is_quoted = draw(st.sampled_from(FORMATS))
    piece = st.sampled_from([*PIECES, delimiter.encode()])
    value = st.one_of(st.sampled_from([b"", b"x", b'"q""q"']), st.lists(piece).map(b"".join))
    line = st.lists(value, min_size=3, max_size=3).map(delimiter.encode().join)
    lines = draw(st.lists(st.one_of(line, line, line, value), min_size=1, max_size=6))
    ends = [draw(st.sampled_from([b"", b"", b"\r"])) for _ in lines]
    lines = [line + end for line, end in zip(lines, ends, strict=True)]
    return (delimiter, escape, is_quoted), lines, draw(st.sampled_from([b"", b"\n"]))


@settings(max_examples=300)
@given(blocks())
@example(((",", None, True), [b'1,a,"Say \\"hi\\" again"', b""], b"\n"))
@example(((",", None, True), [b'1,a,"12"" inch" vinyl', b'1,"Big" Jim,"a'], b"\n"))
@example(((",", None, True), [b'1,a,"oops', b"1,a,b", b'1,a,oops"'], b"\n"))
@example(((",", "\\", True), [b"1,a,\\", b"1,a,\\\r", b"1,\\,,c", b'1,"\\"",c'], b""))
@example((("::", None, True), [b'1::"a::b"::c', b"1:::a::c", b'":":::a::c'], b"\n"))
def test_values_of_line_do_not_depend_on_other_lines(drawn):
    (delimiter, escape, is_quoted), lines, end = drawn
    csv_format = CsvFormat(delimiter, is_quoted, escape)
    options = {"quote_char": '"' if is_quoted else False, "escape_char": escape or False}
    expected = [alone(line, delimiter, **options) for line in lines]
    if not end and not lines[-1]:
        expected.pop()  # The last line end follows a line and does not begin another.
    assert read(csv_format, b"\n".join(lines) + end) == expected or not expected
    each = [read(csv_format, line + b"\n") for line in lines]
    assert each[: len(expected)] == [[values] for values in expected]
    for line, values in zip(lines, expected, strict=False):
        if values and not line.endswith(b"\r"):
            assert tuple(csv_format.values(line)) == values


def test_regular_blocks_are_read_at_once(monkeypatch):
    def refuse(*_):
        raise AssertionError("the block was divided into lines")

    monkeypatch.setattr(CsvFormat, "_parse_each", refuse)
    for end in (b"\n", b"\r\n"):
        lines = [b"1,%d,b" % i if i % 2 else b'0,"%d, ""x""" y,\\' % i for i in range(100)]
        found = CsvFormat().parse(end.join(lines), HEADER, HEADER)
        assert found.rows.tolist() == list(range(100)) and not found.reasons
        assert found.columns["a"][2].as_py() == b'2, "x" y'


@pytest.mark.parametrize(
    ("options", "line", "named"),
    [
        ({}, b'1,a,"b', 'quoted line break: .* "quoting": "none"'),
        ({}, b'1,"a,b', "quoted line break"),
        ({}, b'1,"a ""b"",c', "quoted line break"),
        ({}, b'1,"a \\"b, c\\"",d', r'4 columns; expected 3, .* "escape": "\\\\"'),
        ({}, b"1,a", "the line has 2 columns; expected 3, separated by ','"),
        ({}, b"1,a\rb,c", "a carriage return outside quotes"),
        ({"escape": "\\"}, b"1,a,\\", r"ends with the escape character '\\\\'"),
        ({"delimiter": "::"}, b"1::a:b", "2 columns; expected 3, separated by '::'"),
        ({"delimiter": "::"}, b"1::\x1f::b", "byte 0x1f"),
    ],
)
def test_malformed_line_is_named_with_setting_that_helps(options, line, named):
    found = CsvFormat(**options).parse(line + b"\n", HEADER, HEADER)
    assert list(found.reasons) == [0] and not len(found.rows)
    with pytest.raises(ValueError, match=named):
        raise ValueError(found.reasons[0])


def test_lines_of_quoted_line_break_are_judged_separately():
    found = CsvFormat().parse(b'1,a,b\n1,"two\nlines",b\n\n1,a,"c"\n', HEADER, ("b", "y"))
    assert found.rows.tolist() == [0, 4]
    assert "quoted line break" in found.reasons[1]
    assert "2 columns" in found.reasons[2] and list(found.reasons) == [1, 2]
    assert {name: column.to_pylist() for name, column in found.columns.items()} == {
        "b": [b"b", b"c"],
        "y": [b"1", b"1"],
    }


def test_long_line_is_malformed_in_every_block(monkeypatch):
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 10)
    long, good = b"1,abcdefg,b\n", b"1,abcdef,b\r\n"
    for lines in (long, good + long + good):
        found = CsvFormat().parse(lines, HEADER, HEADER)
        assert len(found.reasons) == 1 and len(found.rows) == lines.count(b"\n") - 1
    assert np.all(found.rows == [0, 2])
