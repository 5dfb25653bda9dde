"""What a source of inputs is: blocks of rows in order, each parsed on its own, in any thread."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from slipstream_tf.data.readers.base import is_in_part


@dataclasses.dataclass(frozen=True)
class Position:
    """A position between two rows of a source; what is not read yet begins there.

    Attributes:
        file: its number, from 0.
        offset: bytes of the file (decompressed), or rows of it, that lie before.
        row: data rows of the file before; its header is none.
        id: data rows of all files before.
    """

    file: int = 0
    offset: int = 0
    row: int = 0
    id: int = 0

    def rows_left(self, piece_rows: int) -> int:
        """Returns how many rows the piece still has that begins or goes on here."""
        return piece_rows - self.row % piece_rows


@dataclasses.dataclass(frozen=True)
class Block:
    """Some consecutive rows of a file, not parsed yet; never of two pieces.

    Attributes:
        start, end: where they lie.
        content: for the source's `parse`.
        done: of the source's `size`, how much lies before `end`.
    """

    start: Position
    end: Position
    content: Any
    done: int

    @property
    def num_rows(self) -> int:
        """Data rows of the block, malformed ones included."""
        return self.end.row - self.start.row


@dataclasses.dataclass
class ParsedRows:
    """The inputs of a block.

    Attributes:
        table: a column of float32 for the label and for each dense column, one of int64 or of
            lists of int64 for each field; without malformed rows.
        is_good: bool [rows of the block], which rows the inputs are of.
        reasons: what is wrong with the others, by row of the block, ascending.
    """

    table: pa.Table
    is_good: np.ndarray
    reasons: dict[int, str]


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of the columns of a source's inputs: label, numbers, fields, fields that are lists."""

    label: str
    dense: tuple[str, ...]
    keys: tuple[str, ...]
    lists: tuple[str, ...] = ()


class Source:
    """Where inputs come from; a base, in which parts go by the number of a row in its file.

    Attributes:
        name: of the data set, which presets go by.
        columns: of the inputs.
        size: of all files, in the unit of `Block.done`.
        paths: of the files, in order.
        header_lines: of each file.
    """

    name: str
    columns: Columns
    size: int
    paths: tuple[str, ...]
    header_lines = 0

    def describe(self) -> Mapping[str, Any]:
        """Returns JSON-serialisable values that tell this source from others."""
        return {"format": self.name}

    def blocks(self, start: Position, piece_rows: int) -> Iterator[Block]:
        """Yields the rows from `start` on, in order.

        Args:
            start: the end of a block, or `Position()`.
            piece_rows: a block has rows of one piece alone: of `row // piece_rows` of one file.

        Raises:
            ValueError: a file is damaged.
        """
        while start.file < len(self.paths):
            for block in self.file_blocks(start, piece_rows):
                start = block.end
                yield block
            start = Position(start.file + 1, 0, 0, start.id)

    def file_blocks(self, start: Position, piece_rows: int) -> Iterator[Block]:
        """Yields the rows of one file as `blocks` does."""
        raise NotImplementedError

    def parse(self, block: Block) -> ParsedRows:
        """Parses a block; several threads may at the same time."""
        raise NotImplementedError

    def parts(self, block: Block) -> Mapping[str, np.ndarray]:
        """Returns which rows of a block belong to each of its parts, bool [rows of the block]."""
        return train_and_test(block.start.row, block.num_rows)

    def line(self, block: Block, row: int) -> tuple[str, int]:
        """Returns (file, line or row in it from 1) of a block's row, for messages."""
        return self.paths[block.start.file], self.header_lines + block.start.row + row + 1


def train_and_test(first: int, count: int) -> dict[str, np.ndarray]:
    """Returns which rows belong to the training part and to the test part, by their position."""
    return {part: is_in_part(first, count, part) for part in ("train", "test")}


def table_of(columns: Columns, label: np.ndarray, dense: Any, keys: np.ndarray) -> pa.Table:
    """Returns inputs of one key per field as a table.

    Args:
        columns: their names.
        label: [n].
        dense: [n, numbers]; not looked at without numbers.
        keys: int64 [n, fields].
    """
    values = {columns.label: pa.array(label)}
    for names, numbers in ((columns.dense, dense), (columns.keys, keys)):
        for i, name in enumerate(names):
            values[name] = pa.array(np.ascontiguousarray(numbers[:, i]))
    return pa.table(values)
