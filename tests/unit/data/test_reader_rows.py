"""Tests that readers return every example of a part exactly once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream_tf.data.readers.avazu import HEADER, AvazuReader
from slipstream_tf.data.readers.criteo import CriteoReader
from slipstream_tf.data.readers.parquet import ParquetReader


def numbers(reader):
    """Returns the first keys of a pass, which number the examples."""
    return np.concatenate([features["keys"][:, 0].numpy() for features, _ in reader.dataset()])


def criteo_line(number):
    return "\t".join(["1", *["3"] * 13, f"{number:08x}", *["0000000a"] * 25])


def write_text(path, first, count, bad=()):
    lines = [criteo_line(i) if i not in bad else "bad" for i in range(first, first + count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_lines_are_numbered_over_files_parts_and_bad_lines(tmp_path):
    bad = {3, 903, 1700, 3204}
    paths = [
        write_text(tmp_path / "a.tsv", 0, 2250, bad),
        write_text(tmp_path / "b.tsv", 2250, 1000, bad),
    ]
    good = sorted(set(range(3250)) - bad)
    for batch_size in (7, 1000):
        reader = CriteoReader(paths, batch_size)
        assert [numbers(reader).tolist() for _ in range(2)] == [good, good]
    parts = [numbers(CriteoReader(paths, 9, part=part)) for part in ("train", "test")]
    assert sorted(np.concatenate(parts)) == good


def test_lines_of_exact_parser_keep_their_numbers(tmp_path):
    # The exact parser reads the short category, and the fast parser the lines around it.
    lines = [criteo_line(0), criteo_line(1).replace("0000000a", "a"), "", criteo_line(3)]
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(lines))
    assert numbers(CriteoReader(path, 4)).tolist() == [0, 1, 3]


def test_header_lines_are_not_examples(tmp_path):
    def line(number):
        return ",".join(["1", "0", "14102105", str(number), *["x"] * 20])

    paths = []
    for name, first in (("a.csv", 0), ("b.csv", 10)):
        lines = [HEADER.decode(), *(line(i) for i in range(first, first + 10))]
        (tmp_path / name).write_text("\n".join(lines))
        paths.append(tmp_path / name)
    assert len(numbers(AvazuReader(paths, 4))) == 20


@pytest.mark.parametrize("batch_size", [9, 5000])
def test_parquet_rows_are_numbered_over_files_parts_and_bad_rows(tmp_path, batch_size):
    bad = {0, 905, 1600, 2999}
    for name, first in (("a.parquet", 0), ("b.parquet", 1600)):
        row = np.arange(first, first + 1600)
        label = np.where(np.isin(row, list(bad)), np.nan, 0.0)
        pq.write_table(pa.table({"click": label, "row": row}), tmp_path / name, row_group_size=77)
    options = {"label": "click", "keys": ["row"]}
    good = sorted(set(range(3200)) - bad)
    reader = ParquetReader(tmp_path, batch_size, **options)
    assert [numbers(reader).tolist() for _ in range(2)] == [good, good]
    parts = [ParquetReader(tmp_path, 50, part=part, **options) for part in ("train", "test")]
    assert sorted(np.concatenate([numbers(part) for part in parts])) == good
