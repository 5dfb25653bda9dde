"""Files of named arrays in checked blocks: written and read block by block, never executed.

    8 bytes     b"slipckp2"
    uint32      bytes of the header
    uint32      CRC-32 of the header
    header      JSON: {"checkpoint": which one the file is of, "meta": {...}, "block_rows": 65536,
                "groups": [{"name": "rows", "rows": 123,
                            "columns": [["keys", "<i8", []], ["rows", "<f4", [16]]]}]}
    blocks      group by group, at most `block_rows` rows each: the bytes of each column in turn,
                then uint32, their CRC-32

Integers are little-endian. The header tells the size of the file to the byte; it is compared before
anything is allocated.
"""

import dataclasses
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream_tf._utils import disk


class CheckpointError(ValueError):
    """A checkpoint is damaged; nothing of it was restored.

    Attributes:
        path: the file.
        offset: bytes from its start to where it is wrong; None: the file as a whole is.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        problem: str,
        remedy: str = "Restore another checkpoint, or copy the file again from where it is whole.",
        offset: int | None = None,
    ) -> None:
        """Says what is wrong.

        Args:
            path: the file.
            problem: what is wrong with it, without a full stop.
            remedy: what the user can do.
            offset: see above.
        """
        self.path, self.offset = os.fspath(path), offset
        where = self.path if offset is None else f"{self.path}, offset {offset}"
        super().__init__(f"{where}: {problem}. {remedy}")


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is whole, but not of this program or version; an older one is no remedy."""


MAGIC = b"slipckp2"
BLOCK_ROWS = 1 << 16
_PREFIX = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_MOST_HEADER_BYTES = 64 << 20
_MOST_VALUES = 1 << 56
_DTYPES = frozenset(("<i8", "<i4", "<u8", "<u2", "|u1", "<f2", "<f4", "<f8", "|b1"))

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Group:
    """Arrays of one length, which are split into blocks of rows together.

    Attributes:
        rows: their length.
        columns: name of each array -> dtype, little-endian, with the shape of one row.
        offset: bytes from the file's start to the first block.
    """

    rows: int
    columns: dict[str, np.dtype]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all columns."""
        return sum(column.itemsize for column in self.columns.values())


def write(
    path: Path,
    checkpoint: str,
    meta: Mapping[str, Any],
    groups: Mapping[str, Mapping[str, np.ndarray]],
    block_rows: int = BLOCK_ROWS,
) -> int:
    """Writes a file and waits until it is on the disk.

    Args:
        path: of the file, which is replaced.
        checkpoint: what the file belongs to.
        meta: JSON-serialisable.
        groups: group -> column -> array [rows of the group, ...], of a number or bool dtype.
        block_rows: most rows of a block.

    Returns:
        The bytes of the file.

    Raises:
        OSError: the disk is full, the folder may not be written to, ...
        ValueError: arrays of a group differ in length.
    """
    little = {
        name: {n: _little_endian(array) for n, array in columns.items()}
        for name, columns in groups.items()
    }
    layout: list[dict[str, Any]] = [
        {
            "name": name,
            "rows": len(next(iter(columns.values()))),
            "columns": [[n, a.dtype.str, list(a.shape[1:])] for n, a in columns.items()],
        }
        for name, columns in little.items()
    ]
    for group, columns in zip(layout, little.values(), strict=True):
        lengths = {name: len(array) for name, array in columns.items()}
        if set(lengths.values()) != {group["rows"]}:
            raise ValueError(f"Arrays of {group['name']!r} have lengths {lengths}, not one.")
    header = json.dumps(
        {"checkpoint": checkpoint, "meta": meta, "block_rows": block_rows, "groups": layout}
    ).encode()
    with open(path, "wb", buffering=0) as file:
        disk.write(file, _PREFIX.pack(MAGIC, len(header), zlib.crc32(header)) + header)
        for group, columns in zip(layout, little.values(), strict=True):
            for begin in range(0, group["rows"], block_rows):
                crc = 0
                for array in columns.values():
                    part = np.ascontiguousarray(array[begin : begin + block_rows])
                    data = part.reshape(-1).view(np.uint8).data
                    crc = zlib.crc32(data, crc)
                    disk.write(file, data)
                disk.write(file, _CRC.pack(crc))
        size = file.tell()
    disk.sync(path)
    return size


class ArrayFile:
    """A file that `write` made, whose header is sound and whose size is what the header says.

    Attributes:
        meta: as written.
        groups: name -> layout.
    """

    def __init__(self, path: Path, checkpoint: str) -> None:
        """Reads the header.

        Args:
            path: of the file.
            checkpoint: that it must be of.

        Raises:
            CheckpointError: it is missing, damaged, or of another checkpoint.
        """
        self._path = path
        if not path.is_file() and os.path.lexists(path):
            raise self._error("is no file")
        try:
            self._size = path.stat().st_size
            with open(path, "rb") as file:
                prefix = file.read(_PREFIX.size)
                if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC[:-1]):
                    raise self._error(f"starts with {prefix[:8]!r}, not {MAGIC!r}", 0)
                magic, header_bytes, crc = _PREFIX.unpack(prefix)
                if magic != MAGIC:
                    remedy = "Restore it with the version that wrote it."
                    raise CheckpointMismatchError(path, f"is of format {magic!r}", remedy, 0)
                most = min(self._size - _PREFIX.size, _MOST_HEADER_BYTES)
                if header_bytes > most:
                    problem = f"says that its header has {header_bytes} bytes, but at most {most}"
                    raise self._error(f"{problem} are there", 8)
                header = file.read(header_bytes)
        except (FileNotFoundError, NotADirectoryError):
            raise self._error("is missing") from None
        if zlib.crc32(header) != crc:
            raise self._error("the header has another checksum than when it was written", 12)
        try:
            values = json.loads(header)
            self.meta: dict[str, Any] = values["meta"]
            self._block_rows = _count(values["block_rows"], 1)
            self.groups = self._layout(values["groups"], _PREFIX.size + header_bytes)
            found = values["checkpoint"]
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            problem = f"the header is no header ({type(error).__name__}: {error})"
            raise self._error(problem, _PREFIX.size) from error
        if found != checkpoint:
            raise self._error(f"is of checkpoint {found!r}, not {checkpoint!r}", _PREFIX.size)

    def _layout(self, listed: Any, offset: int) -> dict[str, Group]:
        groups = {}
        for entry in listed:
            rows, columns = _count(entry["rows"], 0), {}
            for name, dtype, sizes in entry["columns"]:
                if dtype not in _DTYPES:
                    raise ValueError(f"dtype {dtype!r} is none of {sorted(_DTYPES)}")
                shape = tuple(_count(size, 0) for size in sizes)
                # Of no bytes if one of them is 0, which the file's size does not bound.
                if math.prod(max(size, 1) for size in (rows, *shape)) > _MOST_VALUES:
                    raise ValueError(f"array {name!r} has shape {[rows, *shape]}")
                columns[name] = np.dtype((dtype, shape))
            if not columns:
                raise ValueError(f"group {entry['name']!r} has no columns")
            group = groups[entry["name"]] = Group(rows, columns, offset)
            num_blocks = -(-rows // self._block_rows)
            offset += rows * group.row_bytes + num_blocks * _CRC.size
        if offset != self._size:
            raise self._error(f"has {self._size} bytes, but its header says {offset}", self._size)
        return groups

    def blocks(self, group: str) -> Iterator[Arrays]:
        """Yields the arrays of a group block by block; each block's checksum is compared before.

        Raises:
            CheckpointError: the group is missing or a block is damaged.
        """
        layout = self._group(group)
        with open(self._path, "rb") as file:
            file.seek(layout.offset)
            for begin in range(0, layout.rows, self._block_rows):
                rows = min(self._block_rows, layout.rows - begin)
                offset = file.tell()
                content = file.read(rows * layout.row_bytes + _CRC.size)
                if len(content) != rows * layout.row_bytes + _CRC.size:
                    raise self._error("was cut short while it was read", offset + len(content))
                (crc,) = _CRC.unpack(content[-_CRC.size :])
                if zlib.crc32(content[: -_CRC.size]) != crc:
                    problem = f"rows {begin} to {begin + rows - 1} of {group!r} have another"
                    raise self._error(f"{problem} checksum than when they were written", offset)
                yield _split(content, layout, rows)

    def read(self, group: str) -> Arrays:
        """Returns the arrays of a group.

        Raises:
            CheckpointError: as `blocks`.
        """
        layout = self._group(group)
        arrays = {
            name: np.empty((layout.rows, *column.shape), column.base)
            for name, column in layout.columns.items()
        }
        begin = 0
        for block in self.blocks(group):
            rows = len(next(iter(block.values())))
            for name, values in block.items():
                arrays[name][begin : begin + rows] = values
            begin += rows
        return arrays

    def _group(self, group: str) -> Group:
        if group not in self.groups:
            raise self._error(f"has no {group!r}, only {sorted(self.groups)}")
        return self.groups[group]

    def _error(self, problem: str, offset: int | None = None) -> CheckpointError:
        return CheckpointError(self._path, problem, offset=offset)


def _little_endian(array: np.ndarray) -> np.ndarray:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if little.dtype.str not in _DTYPES or little.ndim < 1:
        raise TypeError(f"An array of {array.dtype} {array.shape} has no place in a checkpoint.")
    return np.ascontiguousarray(little)


def _split(content: bytes, layout: Group, rows: int) -> Arrays:
    arrays, begin = {}, 0
    for name, column in layout.columns.items():
        flat = np.frombuffer(content, column.base, rows * math.prod(column.shape), begin)
        arrays[name] = flat.reshape((rows, *column.shape))
        begin += rows * column.itemsize
    return arrays


def _count(value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r} is no integer >= {least}")
    return value
