"""Tests of `checkpoint.array_file`: round trips, and damaged files that raise an error."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream_tf.checkpoint import array_file
from slipstream_tf.checkpoint.array_file import ArrayFile, CheckpointError, CheckpointMismatchError

DTYPES = ("int64", "int32", "uint64", "uint8", "float32", "float64", "bool")


def some_groups(rows: int = 1000, dim: int = 3) -> dict[str, dict[str, np.ndarray]]:
    random = np.random.default_rng(rows)
    return {
        "contents": {
            "keys": random.integers(-(1 << 62), 1 << 62, rows),
            "rows": random.normal(size=(rows, dim)).astype(np.float32),
            "slots": np.empty((rows, 0), np.float32),
        },
        "other": {"values": random.random((2, 2, 2))},
        "empty": {"values": np.empty(0, np.int32)},
    }


def write(path: Path, **changes: Any) -> Path:
    arguments = {"meta": {"a": 1.5}, "groups": some_groups(), "block_rows": 300, **changes}
    size = array_file.write(path, "me", **arguments)
    assert size == path.stat().st_size
    return path


def test_groups_are_read_block_by_block(tmp_path: Path) -> None:
    file = ArrayFile(write(tmp_path / "x"), "me")
    assert file.meta == {"a": 1.5}
    assert [len(block["keys"]) for block in file.blocks("contents")] == [300, 300, 300, 100]
    for name, columns in some_groups().items():
        found = file.read(name)
        assert set(found) == set(columns)
        for column, values in columns.items():
            np.testing.assert_array_equal(found[column], values)
            assert found[column].dtype == values.dtype


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_groups_round_trip(tmp_path: Path, data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    groups = {}
    for g in range(data.draw(st.integers(0, 3))):
        rows = data.draw(st.integers(0, 20))
        groups[f"g{g}"] = {
            f"c{c}": random.integers(0, 2, (rows, *shape)).astype(dtype)
            for c, (dtype, shape) in enumerate(
                data.draw(
                    st.lists(
                        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=2)),
                        min_size=1,
                        max_size=3,
                    )
                )
            )
        }
    block_rows = data.draw(st.integers(1, 7))
    file = ArrayFile(write(tmp_path / "y", groups=groups, block_rows=block_rows), "me")
    for name, columns in groups.items():
        found = file.read(name)
        for column, values in columns.items():
            np.testing.assert_array_equal(found[column], values)


def read_all(path: Path) -> None:
    file = ArrayFile(path, "me")
    for group in file.groups:
        file.read(group)


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    path = write(tmp_path / "x", groups=some_groups(20, 2), block_rows=8)
    whole = path.read_bytes()
    for at in range(len(whole)):
        content = bytearray(whole)
        content[at] ^= 1 << (at % 8)
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as raised:
            read_all(path)
        assert str(path) in str(raised.value)
        assert raised.value.offset is not None and raised.value.offset <= at + len(whole)


def test_every_truncation_is_detected(tmp_path: Path) -> None:
    path = write(tmp_path / "x", groups=some_groups(20, 2), block_rows=8)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="offset"):
            read_all(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(
        CheckpointError, match=f"the file has {len(whole) + 1} bytes; expected {len(whole)} bytes"
    ):
        read_all(path)


def forge(path: Path, header: Any, header_bytes: int | None = None) -> Path:
    """Writes a file with the given header and a matching checksum."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if header_bytes is None else header_bytes
    prefix = struct.pack("<8sII", array_file.MAGIC, size, zlib.crc32(text))
    path.write_bytes(prefix + text + bytes(64))
    return path


def layout(rows: Any, dtype: Any = "<f4", shape: Any = (4,), block_rows: Any = 10) -> Any:
    group = {"name": "g", "rows": rows, "columns": [["c", dtype, shape]]}
    return {"checkpoint": "me", "meta": {}, "block_rows": block_rows, "groups": [group]}


@pytest.mark.parametrize(
    "header",
    [
        layout(1 << 60),
        layout(10**30),
        layout(5, shape=[1 << 50]),
        layout(-1),
        layout(2.0),
        layout(True),
        layout(5, dtype="|O"),
        layout(5, dtype="<U4"),
        layout(5, dtype=["<f4"]),
        layout(5, shape=[-4]),
        layout(5, shape="abc"),
        layout(5, block_rows=0),
        layout(5, block_rows=None),
        # 16 empty blocks: the 64 bytes after the header are exactly their 16 checksums.
        layout(10**30, shape=[0], block_rows=10**30 // 16),
        layout(16, shape=[0, 1 << 50, 1 << 50], block_rows=1),
        {**layout(16, block_rows=1), "groups": [{"name": "g", "rows": 16, "columns": []}]},
        {**layout(5), "groups": 3},
        {"checkpoint": "me"},
        [],
        b"\xff\xfe",
        b"{",
        b"",
    ],
    ids=str,
)
def test_false_header_raises_without_allocation(tmp_path: Path, header: Any) -> None:
    path = forge(tmp_path / "x", header)
    tracemalloc.start()
    with pytest.raises(CheckpointError) as raised:
        read_all(path)
    _, maximum = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(raised.value)
    assert maximum < 1 << 22


def test_header_longer_than_file_raises(tmp_path: Path) -> None:
    path = forge(tmp_path / "x", layout(5), header_bytes=0xFFFFFFFF)
    with pytest.raises(
        CheckpointError, match="offset 8: the size of the header is 4294967295 bytes"
    ):
        read_all(path)


def test_files_of_other_formats_raise(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="x: the file is missing"):
        read_all(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(CheckpointError, match="offset 0: the file starts with"):
        read_all(tmp_path / "x")
    path = write(tmp_path / "y")
    path.write_bytes(b"slipckp3" + path.read_bytes()[8:])
    with pytest.raises(
        CheckpointMismatchError, match="Restore it with the version of slipstream_tf that wrote it"
    ):
        read_all(path)
    with pytest.raises(CheckpointError, match="belongs to checkpoint 'me'; expected 'another'"):
        ArrayFile(write(tmp_path / "z"), "another")
    with pytest.raises(CheckpointError, match="group 'rows' is missing"):
        ArrayFile(write(tmp_path / "z"), "me").read("rows")


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["a"]), np.float32(1)])
def test_non_numeric_arrays_raise(tmp_path: Path, array: Any) -> None:
    with pytest.raises(TypeError, match="Unsupported array 'g/c' for a checkpoint"):
        array_file.write(tmp_path / "x", "me", {}, {"g": {"c": array}})


def test_arrays_of_group_must_have_equal_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Arrays of group 'g' have lengths \{'a': 2, 'b': 3\}"):
        array_file.write(tmp_path / "x", "me", {}, {"g": {"a": np.zeros(2), "b": np.zeros(3)}})
    assert not (tmp_path / "x").exists()
