"""Changed rows as Parquet: key int64, row list<float>, step int64; a null row: the key has left."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream_tf.errors import invalid
from slipstream_tf.export.rows import TableRows

_SCHEMA = pa.schema(
    [
        pa.field("key", pa.int64(), nullable=False),
        pa.field("row", pa.list_(pa.float32())),
        pa.field("step", pa.int64(), nullable=False),
    ]
)
_VALUES_PER_GROUP = 1 << 22  # 16 MiB of rows: bounds the memory of a reader.


@dataclasses.dataclass(frozen=True)
class Changes:
    """What happened to a table between two times.

    Attributes:
        keys: int64 [n], ascending: of rows that are new or have other bits.
        rows: float32 [n, dim]: what they are now.
        removed: int64 [m], ascending: keys that have left.
    """

    keys: np.ndarray
    rows: np.ndarray
    removed: np.ndarray


def changes(before: TableRows, now: TableRows) -> Changes:
    """Finds the rows that are not the same bits as before, -0.0 and 0.0 being different."""
    place = np.searchsorted(before.keys, now.keys)
    inside = np.minimum(place, max(before.keys.size - 1, 0))
    was_there = np.zeros(now.keys.size, bool)
    if before.keys.size:
        was_there = before.keys[inside] == now.keys
    is_changed = np.ones(now.keys.size, bool)
    old, new = before.rows.view(np.int32), now.rows.view(np.int32)
    is_changed[was_there] = (old[inside[was_there]] != new[was_there]).any(axis=1)
    removed = np.setdiff1d(before.keys, now.keys, assume_unique=True)
    return Changes(now.keys[is_changed], now.rows[is_changed], removed)


def changed(before: TableRows, by: Changes, step: int) -> TableRows:
    """Returns a table as it is after changes."""
    gone = np.concatenate([by.keys, by.removed])
    stays = ~np.isin(before.keys, gone, assume_unique=True)
    keys = np.concatenate([before.keys[stays], by.keys])
    rows = np.concatenate([before.rows[stays], by.rows])
    order = np.argsort(keys, kind="stable")
    return dataclasses.replace(before, keys=keys[order], rows=rows[order], step=step)


def write_changes(path: Path, found: Changes, step: int) -> None:
    """Writes the changes of a table, as of an update step of it."""
    dim = found.rows.shape[1]
    group = max(1, _VALUES_PER_GROUP // dim)
    with pq.ParquetWriter(path, _SCHEMA) as writer:
        for first in range(0, found.keys.size, group):
            rows = np.ascontiguousarray(found.rows[first : first + group])
            offsets = pa.array(np.arange(rows.shape[0] + 1, dtype=np.int32) * np.int32(dim))
            lists = pa.ListArray.from_arrays(offsets, pa.array(rows.reshape(-1)))
            _write_group(writer, found.keys[first : first + group], lists, step)
        for first in range(0, found.removed.size, group):
            keys = found.removed[first : first + group]
            _write_group(writer, keys, pa.nulls(keys.size, pa.list_(pa.float32())), step)


def _write_group(writer: pq.ParquetWriter, keys: np.ndarray, rows: pa.Array, step: int) -> None:
    steps = pa.array(np.full(keys.size, step, np.int64))
    writer.write_table(pa.Table.from_arrays([pa.array(keys), rows, steps], schema=_SCHEMA))


def read_changes(path: Path, dim: int) -> Changes:
    """Reads what `write_changes` wrote.

    Raises:
        ValueError: the file is missing or damaged, or has rows of another length.
    """
    allowed = f"a Parquet file of key int64, row list<float> of {dim} and step int64"
    keys, rows, removed = [], [np.empty((0, dim), np.float32)], []
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["key", "row"]):
                column = batch.column("row")
                is_there = np.asarray(column.is_valid())
                values = np.asarray(column.flatten(), np.float32)
                lengths = column.value_lengths().drop_null()
                if any(length != dim for length in lengths.unique().to_pylist()):
                    raise ValueError(f"rows of {lengths.unique().to_pylist()} values")
                batch_keys = np.asarray(batch.column("key"), np.int64)
                keys.append(batch_keys[is_there])
                rows.append(values.reshape(-1, dim))
                removed.append(batch_keys[~is_there])
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise invalid("path", str(path), f"a delta ({error})", allowed) from error
    none = np.empty(0, np.int64)
    return Changes(
        np.concatenate([none, *keys]), np.concatenate(rows), np.concatenate([none, *removed])
    )
