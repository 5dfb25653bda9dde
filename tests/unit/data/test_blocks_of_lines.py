"""Tests that fast and exact line parsing agree on arbitrary bytes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream_tf.data.columns import EXACT
from slipstream_tf.data.readers.avazu import AvazuFormat
from slipstream_tf.data.readers.criteo import CriteoFormat
from slipstream_tf.data.readers.hashing import parse_hex, parse_integers, signed
from slipstream_tf.data.readers.text import ParsedLines, parse_block, parse_lines
from slipstream_tf.data.schema import HEX, INTEGER
from slipstream_tf.data.spec import MISSING_KEY

COUNTS = ["", "0", "-1", "12345", "-", "--1", "1-2", "0x10", "+3", " 4", "9" * 18, "9" * 20, "1.5"]
KEYS = ["", "0000000a", "FFFFFFFF", "a", "0000000g", "123456789abcdef", "1" * 16, "-0000001", "ä"]


def exact(line_format, block: bytes) -> ParsedLines:
    """Parses each line separately with `parse_line`."""
    lines = block.removesuffix(b"\n").split(b"\n") if block else []
    rows, reasons = [], {}
    for i, line in enumerate(lines):
        columns = line.rstrip(b"\r").split(line_format.delimiter.encode())
        try:
            if len(columns) != line_format.num_columns:
                raise ValueError(f"the line has {len(columns)} columns")
            rows.append(line_format.parse_line(columns))
        except ValueError as error:
            reasons[i] = str(error)
    return rows, reasons, len(lines)


def assert_read_as_exactly(line_format, block: bytes) -> None:
    rows, reasons, count = exact(line_format, block)
    lines = block.removesuffix(b"\n").split(b"\n") if block else []
    for parsed in (parse_block(line_format, block), parse_lines(line_format, lines)):
        assert parsed.rows.label.tolist() == [label for label, _, _ in rows]
        assert parsed.rows.keys.tolist() == [keys for _, _, keys in rows]
        dense = np.array([dense for _, dense, _ in rows], np.float32)
        np.testing.assert_array_equal(parsed.rows.dense.ravel(), dense.ravel())
        assert len(parsed.is_good) == count
        assert np.flatnonzero(~parsed.is_good).tolist() == list(reasons) == list(parsed.reasons)
        for i, reason in reasons.items():
            assert parsed.reasons[i].startswith(reason)


@st.composite
def criteo_lines(draw):
    lines = []
    for _ in range(draw(st.integers(0, 6))):
        columns = [draw(st.sampled_from(["0", "1", "1", "2", ""]))]
        plain = draw(st.booleans())
        columns += ["7"] * 13 if plain else [draw(st.sampled_from(COUNTS)) for _ in range(13)]
        columns += ["0000000b"] * 26 if plain else [draw(st.sampled_from(KEYS)) for _ in range(26)]
        lines.append("\t".join(columns[: draw(st.sampled_from([40, 40, 40, 39, 1]))]))
    return draw(st.sampled_from(["\n", "\n", "\r\n"])).join(lines).encode()


@settings(max_examples=200)
@given(criteo_lines(), st.booleans())
@example(b"", False)
@example(b"\n", False)
def test_criteo_blocks_equal_line_parser(block, ends):
    assert_read_as_exactly(CriteoFormat(), block + (b"\n" if ends and block else b""))


@pytest.mark.parametrize("bad", ["", "1,2", '1,0,14102105,"' + ",x" * 20 + '"', "\ra"])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_avazu_blocks_report_bad_line(bad, place):
    lines = [f"{i},{i % 2},1410210{i}" + f",v{i}" * 21 for i in range(7)]
    lines.insert(place, bad)
    assert_read_as_exactly(AvazuFormat(), "\n".join(lines).encode())


WORDS = [b"", b"00000000", b"fFfF09aA", b"0000000g", b"12", b"\xff" * 8, b"f" * 15, b"f" * 16]
LIMITS = [
    f"{sign * (2**bits) + more}".encode()
    for sign in (-1, 1)
    for bits in (63, 64)
    for more in (-1, 0, 1)
]
INTEGERS = [
    *LIMITS,
    b"-",
    b"-0",
    b"1-2",
    b"--1",
    b"0" * 20,
    b"0" * 21,
    b"-" + b"1" * 20,
    b"0x1",
    b"+1",
]


@pytest.mark.parametrize(("parse", "kind"), [(parse_hex, HEX), (parse_integers, INTEGER)])
@given(st.lists(st.one_of(st.sampled_from(WORDS + INTEGERS), st.integers().map(b"%d".__mod__))))
@example([b"7", *LIMITS])
@example([b"12", b"", b"34"])
def test_numbers_are_parsed(parse, kind, values):
    pattern, base = EXACT[kind]
    for array in (pa.array(values, pa.binary()), pa.array([b"skip", *values], pa.binary())[1:]):
        keys, is_parsed = parse(array)
        for value, key, parsed in zip(values, keys.tolist(), is_parsed.tolist(), strict=True):
            number = signed(int(value, base)) if pattern.fullmatch(value) else None
            if not value and kind == HEX:
                assert parsed and key == MISSING_KEY
            else:
                assert parsed == (number is not None) and (key == number or not parsed)
