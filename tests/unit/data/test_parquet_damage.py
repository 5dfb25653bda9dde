"""Tests that errors name the damaged or inconsistent Parquet file."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from slipstream_tf.data.readers.parquet import ParquetReader

ROWS = 20_000
COLUMNS = {"click": np.arange(ROWS) % 2, "row": np.arange(ROWS)}


def reader_of(path):
    return ParquetReader(path, 64, label="click", keys=["row"])


@pytest.fixture
def path(tmp_path):
    pq.write_table(pa.table(COLUMNS), tmp_path / "a.parquet", row_group_size=1000)
    return tmp_path / "a.parquet"


@pytest.mark.parametrize("keep", [0, 100, -100])
def test_truncated_file_raises_when_opened(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"a\.parquet"):
        reader_of(path)


def test_damage_inside_file_is_reported(path):
    content = bytearray(path.read_bytes())
    content[5000:9000] = b"\xff" * 4000
    path.write_bytes(bytes(content))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"a\.parquet: the file is damaged"):
        list(reader_of(path).dataset())


@pytest.mark.parametrize("row", [np.full(ROWS, 1.5), np.full(ROWS, "x")], ids=["fractions", "text"])
def test_file_with_other_types_is_named(path, row):
    pq.write_table(pa.table({**COLUMNS, "row": row}), path.parent / "b.parquet")
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"b\.parquet: the file is damaged or unreadable, or its col",
    ):
        list(reader_of(path.parent).dataset())


def test_later_file_that_is_not_parquet_is_named(path):
    (path.parent / "b.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"b\.parquet"):
        list(reader_of(path.parent).dataset())


def test_small_file_has_test_part(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({name: values[:1000] for name, values in COLUMNS.items()}), path)
    reader = ParquetReader(path, 64, label="click", keys=["row"], part="test")
    keys = np.concatenate([f["keys"].numpy()[:, 0] for f, _ in reader.dataset()])
    np.testing.assert_array_equal(keys, np.arange(900, 1000))
