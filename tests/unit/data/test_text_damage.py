"""Tests of text readers on damaged files: only malformed lines are lost.

Time and memory stay bounded.
"""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from slipstream_tf.data.readers import text
from slipstream_tf.data.readers.avazu import HEADER, AvazuReader
from slipstream_tf.data.readers.criteo import CriteoFormat, CriteoReader


def criteo_line(index=0, count="3"):
    return "\t".join(["1", count, *["3"] * 12, *[f"{index:08x}"] * 26]).encode()


def first_keys(reader):
    return [int(key) for rows in reader.rows() for key in rows.keys[:, 0]]


@pytest.fixture
def warnings(monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: messages.append(text % values))
    return messages


@pytest.mark.parametrize("bad", [b"1.5", b"\xff\xfe", b"0x1", b"+1", b" 1", b"-", b"9" * 30])
def test_malformed_line_keeps_other_lines_in_fast_parser(tmp_path, monkeypatch, bad):
    lines = [criteo_line(i, "" if i % 3 else "-2") for i in range(200)]
    lines[70] = lines[70].replace(b"\t3\t", b"\t" + bad + b"\t", 1)
    path = tmp_path / "a.tsv"
    path.write_bytes(b"\n".join(lines))
    exactly = []
    parse_line = CriteoFormat.parse_line
    monkeypatch.setattr(
        CriteoFormat,
        "parse_line",
        lambda self, columns: exactly.append(columns) or parse_line(self, columns),
    )
    reader = CriteoReader(path, 8)
    assert first_keys(reader) == [i for i in range(200) if i != 70]
    assert len(exactly) == 1
    assert reader.bad_lines.first.startswith(f"{path}:71: I2 ")
    counts = np.concatenate([rows.dense[:, 0] for rows in reader.rows()])
    expected = [-2.0 if i % 3 else -np.log(3) for i in range(200) if i != 70]
    np.testing.assert_allclose(counts, expected, rtol=1e-6)


@pytest.mark.parametrize("block_bytes", [1, 7, 311, 4096])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_line_numbers_are_independent_of_blocks(tmp_path, monkeypatch, block_bytes, end):
    monkeypatch.setattr(text, "BLOCK_BYTES", block_bytes)
    lines = [criteo_line(i) for i in range(30)]
    lines[17] = b"truncated"
    path = tmp_path / "a.tsv"
    path.write_bytes(end.join(lines))
    reader = CriteoReader(path, 8)
    assert first_keys(reader) == [i for i in range(30) if i != 17]
    assert reader.bad_lines.first.startswith(f"{path}:18: the line has 1 columns")


def test_very_long_line_is_one_bad_line_and_is_not_buffered(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 1 << 11)
    path = tmp_path / "a.tsv"
    path.write_bytes(criteo_line(1) + b"\n" + b"x\t" * 50_000 + b"\n" + criteo_line(2))
    longest = max(len(line) for block in text._blocks(str(path)) for line in block)
    assert longest <= (1 << 10) + (1 << 11) + 1
    reader = CriteoReader(path, 8)
    assert first_keys(reader) == [1, 2]
    assert reader.bad_lines.count == 1
    assert reader.bad_lines.first == f"{path}:2: the line has more than 2048 bytes, the maximum"


def test_damaged_compressed_data_raises_after_good_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "BLOCK_BYTES", 1 << 10)
    rng = np.random.default_rng(0)
    content = b"".join(criteo_line(int(i)) + b"\n" for i in rng.integers(0, 1 << 31, 2000))
    damaged = bytearray(gzip.compress(content))
    middle = len(damaged) // 2
    damaged[middle : middle + 64] = b"\xff" * 64
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(bytes(damaged))
    with pytest.raises(ValueError, match=r"a\.tsv\.gz: the file is damaged after line [0-9]+: "):
        first_keys(CriteoReader(path, 8))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"a\.tsv\.gz: the file is damaged"):
        list(CriteoReader(path, 8).dataset())


def test_bad_lines_are_reported_once_per_pass(tmp_path, warnings):
    path = tmp_path / "a.tsv"
    path.write_bytes(b"\n".join([b"bad", *[criteo_line(i) for i in range(9)], b"worse"]))
    reader = CriteoReader(path, 4)
    dataset = reader.dataset()
    for passes in (1, 2):
        assert [int(label.shape[0]) for _, label in dataset] == [4, 4, 1]
        assert (reader.bad_lines.count, len(warnings)) == (2, passes)
    assert warnings[0] == warnings[1]
    assert f"2 malformed lines. First error: {path}:1: the line has 1 columns" in warnings[0]
    rows = reader.rows()
    assert len(next(rows)) == 9
    rows.close()
    assert len(warnings) == 3


def test_each_file_has_separate_header_and_line_numbers(tmp_path):
    row = ",".join(["1", "0", "14102105", *["x"] * 21]).encode()
    first, second, empty = (tmp_path / name for name in ("a.csv", "b.csv", "c.csv"))
    first.write_bytes(b"\n".join([HEADER, row, row]))
    second.write_bytes(b"\r\n".join([HEADER, row, b"bad", row]))
    empty.write_bytes(b"")
    reader = AvazuReader([first, empty, second], 8)
    assert sum(len(rows) for rows in reader.rows()) == 4
    assert reader.bad_lines.first.startswith(f"{second}:3: the line has 1 columns")
