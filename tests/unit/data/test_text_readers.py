"""Tests of Criteo and Avazu readers on valid and malformed lines."""

from __future__ import annotations

import gzip
import os
import pathlib

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf.data.readers.avazu import HEADER, AvazuReader
from slipstream_tf.data.readers.criteo import MISSING_DENSE, CriteoFormat, CriteoReader
from slipstream_tf.data.readers.hashing import hash_string, hash_strings
from slipstream_tf.data.readers.text import parse_line
from slipstream_tf.data.spec import MISSING_KEY, BadLineError

DATA = pathlib.Path(
    os.environ.get("SLIPSTREAM_DATA")
    or pathlib.Path(__file__).resolve().parents[4] / "shared" / "data"
)


def criteo_line(label="1", counts=("3",) * 13, categories=("0000000a",) * 26):
    return "\t".join([label, *counts, *categories])


def avazu_line(click="0", hour="14102105", rest=("x",) * 21):
    return ",".join(["1", click, hour, *rest])


def read(reader):
    parts = list(reader.rows())
    keys = np.concatenate([p.keys for p in parts]) if parts else np.zeros((0, 0))
    return len(keys), parts


def write(path, lines, end="\n"):
    path.write_bytes(b"".join(line.encode() + end.encode() for line in lines))
    return path


def test_missing_values_differ_from_zero(tmp_path):
    line = criteo_line("0", ("", "0", "-2", *("7",) * 10), ("", "ffffffff", *("00000001",) * 24))
    reader = CriteoReader(write(tmp_path / "a.tsv", [line]), 4)
    _, (rows,) = read(reader)
    np.testing.assert_allclose(rows.dense[0, :4], [MISSING_DENSE, 0, -np.log(3), np.log(8)])
    assert rows.keys[0, :3].tolist() == [MISSING_KEY, 0xFFFFFFFF, 1]
    assert rows.label.tolist() == [0.0]


def test_short_hexadecimal_values_equal_padded_values(tmp_path):
    line = criteo_line(categories=("a", "0A", *("00000001",) * 24))
    _, (rows,) = read(CriteoReader(write(tmp_path / "a.tsv", [line]), 4))
    assert rows.keys[0, :2].tolist() == [10, 10]


BAD_CRITEO = [
    (criteo_line("2"), r"label is '2'; expected 0 or 1"),
    (criteo_line("1")[:-30], r"columns; expected 40"),
    (criteo_line() + "\t00000001", r"41 columns"),
    (criteo_line(counts=("1.5", *("3",) * 12)), r"I1 is '1\.5'; expected an integer"),
    (criteo_line(counts=("3",) * 12 + ("0x1",)), r"I13 is '0x1'"),
    (criteo_line(categories=("zz", *("00000001",) * 25)), r"C1 is 'zz'.*hexadecimal"),
    (criteo_line(categories=("0000000g", *("00000001",) * 25)), r"C1 is '0000000g'"),
    (criteo_line(categories=("0" * 16, *("00000001",) * 25)), r"C1"),
    ("", r"1 columns"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_CRITEO, ids=lambda v: v[:20])
def test_bad_line_is_counted_reported_and_skipped(tmp_path, bad, reason):
    good = criteo_line()
    path = write(tmp_path / "a.tsv", [good, good, bad, good, bad])
    reader = CriteoReader(path, 2)
    count, _ = read(reader)
    assert count == 3
    assert reader.bad_lines.count == 2
    assert reader.bad_lines.first.startswith(f"{path}:3: ")
    with pytest.raises(BadLineError, match=f"a.tsv:3: .*{reason}"):
        read(CriteoReader(path, 2, strict=True))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"a\.tsv:3: "):
        list(CriteoReader(path, 2, strict=True).dataset())


def test_undecodable_bytes_and_carriage_returns_drop_one_line(tmp_path):
    path = tmp_path / "a.tsv"
    good = criteo_line().encode()
    path.write_bytes(
        good + b"\n\xff\xfe" + good + b"\n" + good[:9] + b"\r" + good[9:] + b"\n" + good
    )
    reader = CriteoReader(path, 2)
    assert read(reader)[0] == 2
    assert reader.bad_lines.count == 2


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_line_ends_and_compression_do_not_change_examples(tmp_path, end, is_compressed):
    lines = [criteo_line(categories=(f"{i:08x}",) * 26) for i in range(2500)]
    content = end.join(lines).encode()  # The last line has no line break.
    path = tmp_path / ("a.tsv.gz" if is_compressed else "a.tsv")
    path.write_bytes(gzip.compress(content) if is_compressed else content)
    keys = [batch["keys"].numpy()[:, 0] for batch, _ in CriteoReader(path, 1000).dataset()]
    assert [len(k) for k in keys] == [1000, 1000, 500]
    np.testing.assert_array_equal(np.concatenate(keys), np.arange(2500))


def test_damaged_compressed_file_raises(tmp_path):
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(criteo_line().encode() * 1000)[:-20])
    with pytest.raises(ValueError, match=r"a\.tsv\.gz: the file is damaged"):
        read(CriteoReader(path, 2))


def test_every_line_belongs_to_one_part(tmp_path):
    path = write(
        tmp_path / "a.tsv", [criteo_line(categories=(f"{i:08x}",) * 26) for i in range(2345)]
    )
    seen = {}
    for part in ("train", "test"):
        _, rows = read(CriteoReader(path, 7, part=part))
        seen[part] = [int(k) for r in rows for k in r.keys[:, 0]]
    assert sorted(seen["train"] + seen["test"]) == list(range(2345))
    assert seen["test"] == [*range(900, 1000), *range(1900, 2000)]


@settings(max_examples=60)
@given(data=st.data())
def test_random_bytes_are_read_or_counted(tmp_path_factory, data):
    good = criteo_line().encode()
    lines = []
    for _ in range(data.draw(st.integers(0, 12))):
        line = bytearray(good)
        for _ in range(data.draw(st.integers(0, 2))):
            at = data.draw(st.integers(0, len(line) - 1))
            line[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=2))
        lines.append(bytes(line).replace(b"\n", b""))
    path = tmp_path_factory.mktemp("any") / "a.tsv"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    reader = CriteoReader(path, 3)
    count, parts = read(reader)
    assert count + reader.bad_lines.count == len(lines)
    for part in parts:
        assert np.isfinite(part.dense).all()
        assert set(part.label) <= {0.0, 1.0}
    # The exact parser defines which lines are valid.
    good_lines = 0
    for line in lines:
        try:
            parse_line(CriteoFormat(), line)
            good_lines += 1
        except ValueError:
            pass
    assert count == good_lines


def test_avazu_fields_are_parsed_and_bad_lines_counted(tmp_path):
    lines = [
        HEADER.decode(),
        avazu_line("1"),
        avazu_line(hour="14139905"),
        avazu_line("x"),
        avazu_line()[:-4],
        avazu_line(rest=("", *("y",) * 20)),
    ]
    path = write(tmp_path / "a.csv", lines)
    reader = AvazuReader(path, 2)
    count, (rows,) = read(reader)
    assert (count, reader.bad_lines.count) == (2, 3)
    assert reader.bad_lines.first.startswith(f"{path}:3: hour is '14139905'")
    assert rows.keys[0, :2].tolist() == [5, 1]  # 21 October 2014 was a Tuesday.
    assert rows.keys[0, 2] == hash_string(b"x")
    assert rows.keys[1, 2] == MISSING_KEY
    assert rows.label.tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"b\.csv:1: the header"):
        read(AvazuReader(write(tmp_path / "b.csv", lines[1:]), 2))


def test_hashes_are_stable():
    keys = hash_strings(pa.array([b"a", None, b"a", b""]))
    assert keys.tolist() == [keys[0], MISSING_KEY, keys[0], hash_string(b"")]
    assert hash_string(b"a") == keys[0] == 3405396810240292928


@pytest.mark.parametrize(
    ("reader", "name", "lines"),
    [(CriteoReader, "criteo_first10k.tsv", 10000), (AvazuReader, "avazu_first9k.csv", 8999)],
)
def test_real_samples_are_read_completely(reader, name, lines):
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"no {name} in SLIPSTREAM_DATA or ../shared/data")
    opened = reader(path, 512, strict=True)
    batches = list(opened.dataset())
    assert sum(int(label.shape[0]) for _, label in batches) == lines
    assert all(int(label.shape[0]) == 512 for _, label in batches[:-1])
    assert path.read_bytes().count(b"\n") == lines + (name.endswith(".csv"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "`batch_size`: 0"),
        ({"batch_size": 2, "part": "dev"}, "`part`: 'dev'"),
    ],
)
def test_invalid_options_raise(tmp_path, options, message):
    path = write(tmp_path / "a.tsv", [criteo_line()])
    with pytest.raises(ValueError, match=message):
        CriteoReader(path, **options)
    with pytest.raises(FileNotFoundError, match=r"none\.tsv"):
        CriteoReader(tmp_path / "none.tsv", 2)
