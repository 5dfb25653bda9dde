"""Reads Criteo's click logs (Kaggle and Terabyte).

The files are TSV with a label, 13 counts and 26 hexadecimal categories.

A count v becomes `sign(v) * log(1 + |v|)`, because a few counts are negative. A missing count
becomes `MISSING_DENSE`, which no count maps to, so that the model can distinguish it from zero. A
category is a hexadecimal number and becomes the key of this value. A missing category becomes
`MISSING_KEY`.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream_tf.data.readers.base import Rows
from slipstream_tf.data.readers.hashing import parse_hex, parse_integers, text_offsets
from slipstream_tf.data.readers.text import TextReader, shown
from slipstream_tf.data.spec import MISSING_KEY

NUM_DENSE = 13
NUM_FIELDS = 26
MISSING_DENSE = -2.0

_MAX_DIGITS = 18
_INTEGER = re.compile(rb"-?[0-9]{1,%d}" % _MAX_DIGITS)
_HEX = re.compile(rb"[0-9a-fA-F]{1,15}")


def transform_count(values: Any) -> Any:
    """Returns sign(v) * log(1 + |v|) as float32."""
    return (np.sign(values) * np.log1p(np.abs(values))).astype(np.float32)


_SMALL = transform_count(np.arange(1 << 12, dtype=np.float64))


class CriteoFormat:
    """Parses the lines of Criteo's files."""

    name = "criteo"
    fields = tuple(f"C{i}" for i in range(1, NUM_FIELDS + 1))
    label = "label"
    dense = tuple(f"I{i}" for i in range(1, NUM_DENSE + 1))
    num_columns = 1 + NUM_DENSE + NUM_FIELDS
    delimiter = "\t"
    header: bytes | None = None

    def parse_line(self, columns: Sequence[bytes]) -> tuple[float, list[float], list[int]]:
        """Returns (label, dense values, keys) of a line; see `LineFormat.parse_line`."""
        if columns[0] not in (b"0", b"1"):
            raise ValueError(f"label is {shown(columns[0])}; expected 0 or 1")
        dense = []
        for i, value in enumerate(columns[1 : 1 + NUM_DENSE]):
            if not value:
                dense.append(MISSING_DENSE)
            elif _INTEGER.fullmatch(value):
                dense.append(float(transform_count(np.float64(int(value)))))
            else:
                raise ValueError(
                    f"I{i + 1} is {shown(value)}; expected an integer of at most 18 digits or an "
                    "empty value"
                )
        keys = []
        for i, value in enumerate(columns[1 + NUM_DENSE :]):
            if not value:
                keys.append(MISSING_KEY)
            elif _HEX.fullmatch(value):
                keys.append(int(value, 16))
            else:
                raise ValueError(
                    f"C{i + 1} is {shown(value)}; expected 1 to 15 hexadecimal digits or an empty "
                    "value"
                )
        return float(columns[0] == b"1"), dense, keys

    def parse_columns(self, columns: Sequence[pa.Array]) -> tuple[Rows, np.ndarray]:
        """Returns (rows, is_sure) of many lines; see `LineFormat.parse_columns`."""
        n = len(columns[0])
        is_one = np.asarray(pc.equal(columns[0], pa.scalar(b"1")))
        is_sure = is_one | np.asarray(pc.equal(columns[0], pa.scalar(b"0")))
        # Columns are contiguous, because they become columns of a table.
        dense = np.empty((n, NUM_DENSE), np.float32, order="F")
        for i, column in enumerate(columns[1 : 1 + NUM_DENSE]):
            dense[:, i], is_valid = _counts(column)
            is_sure &= is_valid
        keys = np.empty((n, NUM_FIELDS), np.int64, order="F")
        for i, column in enumerate(columns[1 + NUM_DENSE :]):
            keys[:, i], is_parsed = parse_hex(column)
            is_sure &= is_parsed
        return Rows(is_one.astype(np.float32), dense, keys), is_sure


def _counts(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns transformed counts and a mask of the parsed values.

    Blanks and plain integers are parsed.
    """
    values, is_parsed = parse_integers(column)
    lengths = np.diff(text_offsets(column))
    is_blank, is_parsed = lengths == 0, is_parsed & (lengths <= _MAX_DIGITS)
    # Logarithms are slow, therefore the logarithms of small counts are computed once.
    is_small = (values >= 0) & (values < len(_SMALL))
    transformed = _SMALL.take(values, mode="clip")
    if not is_small.all():
        transformed[~is_small] = transform_count(values[~is_small].astype(np.float64))
    transformed[is_blank] = MISSING_DENSE
    return transformed, is_parsed | is_blank


class CriteoReader(TextReader):
    """Reads Criteo TSV files. The arguments are described in `TextReader`."""

    def __init__(self, paths: Any, batch_size: int, **options: Any):
        super().__init__(CriteoFormat(), paths, batch_size, **options)
