"""Criteo's click logs (Kaggle and Terabyte): label, 13 counts, 26 hexadecimal categories, by tab.

A count v becomes sign(v) * log(1 + |v|) (a few counts are negative); a missing count becomes
`MISSING_DENSE`, which no count gives, so that missing stays apart from zero. A category is the
value of its hexadecimal digits; a missing one is `MISSING_KEY`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream_tf.inputs.readers.hashing import parse_hex, text_offsets
from slipstream_tf.inputs.readers.rows import Rows
from slipstream_tf.inputs.readers.text import TextReader
from slipstream_tf.inputs.spec import MISSING_KEY

NUM_DENSE = 13
NUM_FIELDS = 26
MISSING_DENSE = -2.0

_INTEGER = re.compile(rb"-?[0-9]{1,18}")
_MOST_DIGITS = 18
_IS_OF_INTEGER = np.zeros(256, bool)
_IS_OF_INTEGER[list(b"0123456789-")] = True
_HEX = re.compile(rb"[0-9a-fA-F]{1,15}")


def transform_count(values: Any) -> Any:
    """Returns sign(v) * log(1 + |v|), float32."""
    return (np.sign(values) * np.log1p(np.abs(values))).astype(np.float32)


class CriteoFormat:
    """Lines of Criteo's files."""

    name = "criteo"
    fields = tuple(f"C{i}" for i in range(1, NUM_FIELDS + 1))
    num_dense = NUM_DENSE
    num_columns = 1 + NUM_DENSE + NUM_FIELDS
    delimiter = "\t"
    header: bytes | None = None

    def parse_line(self, columns: Sequence[bytes]) -> tuple[float, list[float], list[int]]:
        """See `LineFormat.parse_line`."""
        if columns[0] not in (b"0", b"1"):
            raise ValueError(f"label {_text(columns[0])}; allowed: 0 or 1")
        dense = []
        for i, value in enumerate(columns[1 : 1 + NUM_DENSE]):
            if not value:
                dense.append(MISSING_DENSE)
            elif _INTEGER.fullmatch(value):
                dense.append(float(transform_count(np.float64(int(value)))))
            else:
                raise ValueError(f"I{i + 1} {_text(value)}; allowed: an integer or nothing")
        keys = []
        for i, value in enumerate(columns[1 + NUM_DENSE :]):
            if not value:
                keys.append(MISSING_KEY)
            elif _HEX.fullmatch(value):
                keys.append(int(value, 16))
            else:
                raise ValueError(
                    f"C{i + 1} {_text(value)}; allowed: 1 to 15 hexadecimal digits or nothing"
                )
        return float(columns[0] == b"1"), dense, keys

    def parse_columns(self, columns: Sequence[pa.Array]) -> tuple[Rows, np.ndarray]:
        """See `LineFormat.parse_columns`."""
        n = len(columns[0])
        is_one = _numpy(pc.equal(columns[0], pa.scalar(b"1")))
        is_sure = is_one | _numpy(pc.equal(columns[0], pa.scalar(b"0")))
        dense = np.empty((n, NUM_DENSE), np.float32)
        for i, column in enumerate(columns[1 : 1 + NUM_DENSE]):
            values, is_valid = _integers(column)
            dense[:, i] = values
            is_sure &= is_valid
        keys = np.empty((n, NUM_FIELDS), np.int64)
        for i, column in enumerate(columns[1 + NUM_DENSE :]):
            keys[:, i], is_parsed = parse_hex(column)
            is_sure &= is_parsed
        return Rows(is_one.astype(np.float32), dense, keys), is_sure


def _integers(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Transformed counts and which of them are certain: blanks and plain integers."""
    offsets = text_offsets(column)
    length = np.diff(offsets)
    is_blank = length == 0
    is_sure = length <= _MOST_DIGITS
    try:
        if not is_sure.all() or not _is_of_digits(column, offsets):
            raise pa.ArrowInvalid("not plain integers alone")
        values = _cast(column, is_blank)
    except pa.ArrowInvalid:
        # At least one value is malformed: the others still go the fast way.
        is_integer = _numpy(pc.match_substring_regex(column, "^-?[0-9]{1,17}$"))
        is_sure = is_integer | is_blank
        values = _cast(column, ~is_integer)
    transformed = transform_count(values.astype(np.float64))
    return np.where(is_blank, np.float32(MISSING_DENSE), transformed), is_sure


def _is_of_digits(column: pa.Array, offsets: np.ndarray) -> bool:
    """Whether digits and minus signs are all there is: Arrow reads more than that as integers."""
    if offsets[0] == offsets[-1]:
        return True
    text = np.frombuffer(column.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    return bool(_IS_OF_INTEGER.take(text).all())


def _cast(column: pa.Array, is_left_out: np.ndarray) -> np.ndarray:
    """Integers of a column, 0 where left out; raises ArrowInvalid if one is malformed."""
    wanted = pc.if_else(pa.array(is_left_out), pa.scalar(None, pa.binary()), column)
    integers = wanted.cast(pa.string()).cast(pa.int64())
    return pc.fill_null(integers, 0).to_numpy(zero_copy_only=False)


def _numpy(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


def _text(value: bytes) -> str:
    return repr(value[:40].decode(errors="backslashreplace"))


class CriteoReader(TextReader):
    """Reads Criteo TSV files; see `TextReader` for the arguments."""

    def __init__(self, paths: Any, batch_size: int, **options: Any):
        super().__init__(CriteoFormat(), paths, batch_size, **options)
