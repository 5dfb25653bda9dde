"""Reads Avazu's click logs.

The files are CSV with a header. They have 23 categorical fields and no dense columns.

The column `hour` (YYMMDDHH) is converted to two fields: hour of the day, and day of the week, where
Monday is 0. The column `id` is not used. The other columns are hashed to keys. A missing value
becomes `MISSING_KEY`.
"""

import datetime
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream_tf.data.readers.base import Rows
from slipstream_tf.data.readers.hashing import hash_string, hash_strings
from slipstream_tf.data.readers.text import TextReader, shown
from slipstream_tf.data.spec import MISSING_KEY

COLUMNS = (
    *("id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category"),
    *("app_id", "app_domain", "app_category", "device_id", "device_ip", "device_model"),
    *("device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22))),
)
HEADER = ",".join(COLUMNS).encode()
_HOUR = re.compile(rb"[0-9]{8}")


def _parse_hour(value: bytes) -> tuple[int, int]:
    if not _HOUR.fullmatch(value):
        raise ValueError(f"hour is {shown(value)}; expected YYMMDDHH")
    year, month, day, hour = (int(value[i : i + 2]) for i in (0, 2, 4, 6))
    try:
        moment = datetime.datetime(2000 + year, month, day, hour)
    except ValueError as error:
        raise ValueError(f"hour is {value.decode()!r} ({error}); expected YYMMDDHH") from error
    return moment.hour, moment.weekday()


class AvazuFormat:
    """Parses the lines of Avazu's files."""

    name = "avazu"
    fields = ("hour_of_day", "weekday", *COLUMNS[3:])
    label = "click"
    dense: tuple[str, ...] = ()
    num_columns = len(COLUMNS)
    delimiter = ","
    header: bytes | None = HEADER

    def parse_line(self, columns: Sequence[bytes]) -> tuple[float, list[float], list[int]]:
        """Returns (label, dense values, keys) of a line; see `LineFormat.parse_line`."""
        if columns[1] not in (b"0", b"1"):
            raise ValueError(f"click is {shown(columns[1])}; expected 0 or 1")
        hour, weekday = _parse_hour(columns[2])
        keys = [hash_string(value) if value else MISSING_KEY for value in columns[3:]]
        return float(columns[1] == b"1"), [], [hour, weekday, *keys]

    def parse_columns(self, columns: Sequence[pa.Array]) -> tuple[Rows, np.ndarray]:
        """Returns (rows, is_sure) of many lines; see `LineFormat.parse_columns`."""
        n = len(columns[0])
        click = columns[1].to_numpy(zero_copy_only=False)
        is_one = click == b"1"
        is_sure = is_one | (click == b"0")
        keys = np.empty((n, len(self.fields)), np.int64)
        # A file has few distinct hours, therefore each one is parsed only once.
        hours = columns[2].dictionary_encode()
        parsed = []
        for value in hours.dictionary.to_pylist():
            try:
                parsed.append((*_parse_hour(value), True))
            except ValueError:
                parsed.append((0, 0, False))
        of_row = np.array(parsed, np.int64)[hours.indices.to_numpy(zero_copy_only=False)]
        keys[:, :2] = of_row[:, :2]
        is_sure &= of_row[:, 2].astype(bool)
        for i, column in enumerate(columns[3:]):
            is_blank = pc.equal(pc.binary_length(column), 0)
            values = pc.if_else(is_blank, pa.scalar(None, pa.binary()), column)
            keys[:, 2 + i] = hash_strings(values)
        return Rows(is_one.astype(np.float32), np.empty((n, 0), np.float32), keys), is_sure


class AvazuReader(TextReader):
    """Reads Avazu CSV files. The arguments are described in `TextReader`."""

    def __init__(self, paths: Any, batch_size: int, **options: Any):
        super().__init__(AvazuFormat(), paths, batch_size, **options)
