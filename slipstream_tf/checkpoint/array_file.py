"""A file format for named arrays in checksummed blocks.

    8 bytes     b"slipckp2"
    uint32      length of the header in bytes
    uint32      CRC-32 of the header
    header      JSON: {"checkpoint": identity of the checkpoint, "meta": {...},
                "block_rows": 65536, "groups": [{"name": "rows", "rows": 123,
                            "columns": [["keys", "<i8", []], ["rows", "<f4", [16]]]}]}
    blocks      for each group, blocks of at most `block_rows` rows: the bytes of each column in
                turn, then their CRC-32 as uint32

Integers are little-endian. The header determines the exact size of the file, which is checked
before any memory is allocated. Files are read block by block, and no content is executed.
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
    """Raised when a checkpoint is damaged; no state was restored.

    Example:

    >>> error = slip.checkpoint.CheckpointError("table-0", "the file is missing", "Copy it again.")
    >>> print(error)
    table-0: the file is missing. Copy it again.

    Attributes:
        path: The path of the file.
        offset: The position of the damage in bytes, or None if it affects the whole file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        problem: str,
        remedy: str = "Restore another checkpoint, or replace the file with an undamaged copy.",
        offset: int | None = None,
    ) -> None:
        """Creates the error.

        Args:
            path: The path of the file.
            problem: A sentence that describes the damage, without a full stop.
            remedy: A suggestion for the user.
            offset: The position of the damage in bytes, or None.
        """
        self.path, self.offset = os.fspath(path), offset
        where = self.path if offset is None else f"{self.path}, offset {offset}"
        super().__init__(f"{where}: {problem}. {remedy}")


class CheckpointMismatchError(CheckpointError):
    """Raised when an intact checkpoint does not match this program or version.

    Restoring an older checkpoint of the same program does not help.

    Example:

    >>> issubclass(slip.checkpoint.CheckpointMismatchError, slip.checkpoint.CheckpointError)
    True
    """


MAGIC = b"slipckp2"
BLOCK_ROWS = 1 << 16
_PREFIX = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_MAX_HEADER_BYTES = 64 << 20
_MAX_VALUES = 1 << 56  # Per array.
_DTYPES = frozenset(("<i8", "<i4", "<u8", "<u2", "|u1", "<f2", "<f4", "<f8", "|b1"))

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Group:
    """The layout of a group: arrays ("columns") of the same length.

    Attributes:
        rows: The length of the arrays.
        columns: Name of each array -> little-endian dtype with the shape of one row.
        offset: The position of the first block in bytes.
    """

    rows: int
    columns: dict[str, np.dtype]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Size of one row of all columns in bytes."""
        return sum(column.itemsize for column in self.columns.values())


def write(
    path: Path,
    checkpoint: str,
    meta: Mapping[str, Any],
    groups: Mapping[str, Mapping[str, np.ndarray]],
    block_rows: int = BLOCK_ROWS,
) -> int:
    """Writes a file and waits until it is on disk.

    Args:
        path: The path of the file. An existing file is replaced.
        checkpoint: The identity of the checkpoint.
        meta: JSON-serializable metadata.
        groups: Group -> column -> array [rows of the group, ...] of a numeric or bool dtype.
        block_rows: The maximum number of rows per block.

    Returns:
        The size of the file in bytes.

    Raises:
        OSError: If writing fails, for example because the disk is full.
        ValueError: If the arrays of a group differ in length.
        TypeError: If the dtype of an array is not supported, or if an array is a scalar.
    """
    little = {
        name: {n: _little_endian(array, f"{name}/{n}") for n, array in columns.items()}
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
            raise ValueError(
                f"Arrays of group {group['name']!r} have lengths {lengths}. Expected equal lengths."
            )
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
    """Reads files from `write` after checking their header and size.

    Attributes:
        meta: The metadata of the file.
        groups: Name of each group -> its layout.
    """

    def __init__(self, path: Path, checkpoint: str) -> None:
        """Reads and checks the header.

        Args:
            path: The path of the file.
            checkpoint: The expected identity of the checkpoint.

        Raises:
            CheckpointError: If the file is missing, damaged, or belongs to another checkpoint.
            CheckpointMismatchError: If the file has another format version.
        """
        self._path = path
        if not path.is_file() and os.path.lexists(path):
            raise self._error("the path is not a regular file")
        try:
            self._size = path.stat().st_size
            with open(path, "rb") as file:
                prefix = file.read(_PREFIX.size)
                if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC[:-1]):
                    raise self._error(f"the file starts with {prefix[:8]!r}; expected {MAGIC!r}", 0)
                magic, header_bytes, crc = _PREFIX.unpack(prefix)
                if magic != MAGIC:
                    problem = f"the file has format {magic!r}; this version reads {MAGIC!r}"
                    remedy = "Restore it with the version of slipstream_tf that wrote it."
                    raise CheckpointMismatchError(path, problem, remedy, 0)
                maximum = min(self._size - _PREFIX.size, _MAX_HEADER_BYTES)
                if header_bytes > maximum:
                    problem = f"the size of the header is {header_bytes} bytes"
                    raise self._error(f"{problem}; expected at most {maximum}", 8)
                header = file.read(header_bytes)
        except (FileNotFoundError, NotADirectoryError):
            raise self._error("the file is missing") from None
        if zlib.crc32(header) != crc:
            raise self._error("the header does not match its checksum", 12)
        try:
            values = json.loads(header)
            self.meta: dict[str, Any] = values["meta"]
            self._block_rows = _count(values["block_rows"], 1)
            self.groups = self._layout(values["groups"], _PREFIX.size + header_bytes)
            found = values["checkpoint"]
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            problem = f"the header is invalid ({type(error).__name__}: {error})"
            raise self._error(problem, _PREFIX.size) from error
        if found != checkpoint:
            problem = f"the file belongs to checkpoint {found!r}; expected {checkpoint!r}"
            raise self._error(problem, _PREFIX.size)

    def _layout(self, listed: Any, offset: int) -> dict[str, Group]:
        groups = {}
        for entry in listed:
            rows, columns = _count(entry["rows"], 0), {}
            for name, dtype, sizes in entry["columns"]:
                if dtype not in _DTYPES:
                    allowed = f"expected one of {sorted(_DTYPES)}"
                    raise ValueError(f"column {name!r} has dtype {dtype!r}; {allowed}")
                shape = tuple(_count(size, 0) for size in sizes)
                # The file size does not bound the shape of an array with a dimension of 0.
                if math.prod(max(size, 1) for size in (rows, *shape)) > _MAX_VALUES:
                    problem = f"column {name!r} has shape {[rows, *shape]}"
                    raise ValueError(f"{problem}; expected at most {_MAX_VALUES} values")
                columns[name] = np.dtype((dtype, shape))
            if not columns:
                raise ValueError(f"group {entry['name']!r} has no columns")
            group = groups[entry["name"]] = Group(rows, columns, offset)
            num_blocks = -(-rows // self._block_rows)
            offset += rows * group.row_bytes + num_blocks * _CRC.size
        if offset != self._size:
            problem = f"the file has {self._size} bytes; expected {offset} bytes as in its header"
            raise self._error(problem, self._size)
        return groups

    def blocks(self, group: str) -> Iterator[Arrays]:
        """Yields a group block by block, after checking each checksum.

        Args:
            group: The name of the group.

        Yields:
            Column -> array [rows of the block, ...].

        Raises:
            CheckpointError: If the group is missing or a block is damaged.
        """
        layout = self._group(group)
        with open(self._path, "rb") as file:
            file.seek(layout.offset)
            for begin in range(0, layout.rows, self._block_rows):
                rows = min(self._block_rows, layout.rows - begin)
                offset = file.tell()
                content = file.read(rows * layout.row_bytes + _CRC.size)
                if len(content) != rows * layout.row_bytes + _CRC.size:
                    raise self._error(
                        "the file became shorter during the read", offset + len(content)
                    )
                (crc,) = _CRC.unpack(content[-_CRC.size :])
                if zlib.crc32(content[: -_CRC.size]) != crc:
                    problem = f"rows {begin} to {begin + rows - 1} of group {group!r}"
                    raise self._error(f"{problem} do not match their checksum", offset)
                yield _split(content, layout, rows)

    def read(self, group: str) -> Arrays:
        """Returns the complete arrays of a group by column name.

        Args:
            group: The name of the group.

        Raises:
            CheckpointError: If the group is missing or a block is damaged.
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
            raise self._error(f"group {group!r} is missing; the file has {sorted(self.groups)}")
        return self.groups[group]

    def _error(self, problem: str, offset: int | None = None) -> CheckpointError:
        return CheckpointError(self._path, problem, offset=offset)


def _little_endian(array: np.ndarray, place: str) -> np.ndarray:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if little.dtype.str not in _DTYPES or little.ndim < 1:
        raise TypeError(
            f"Unsupported array {place!r} for a checkpoint: its dtype is {array.dtype}, and its "
            f"shape is {list(array.shape)}. Expected at least one dimension and a dtype of "
            f"{sorted(_DTYPES)}."
        )
    return np.ascontiguousarray(little)


def _split(content: bytes, layout: Group, rows: int) -> Arrays:
    arrays, begin = {}, 0
    for name, column in layout.columns.items():
        flat = np.frombuffer(content, column.base, rows * math.prod(column.shape), begin)
        arrays[name] = flat.reshape((rows, *column.shape))
        begin += rows * column.itemsize
    return arrays


def _count(value: Any, minimum: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{value!r} is not an integer >= {minimum}")
    return value
