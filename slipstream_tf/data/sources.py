"""Defines sources of examples: ordered blocks of rows, which threads parse independently."""

import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from slipstream_tf.data.readers.base import PART_RUN, is_in_part
from slipstream_tf.data.spec import MISSING_KEY

_BLOCKS_AHEAD = 2  # Number of parsed blocks that wait, in addition to one block per thread.
_Parsed = TypeVar("_Parsed")
TIME = "\0time"
"""Name of the column of `ParsedRows.table` that orders the rows for a split. It is not written."""


@dataclasses.dataclass(frozen=True)
class Position:
    """Marks a position between two rows of a source.

    Attributes:
        file: Index of the file, from 0.
        offset: Number of bytes (decompressed) or rows of the file before the position.
        row: Number of data rows of the file before the position, without the header.
        id: Number of data rows of all files before the position.
    """

    file: int = 0
    offset: int = 0
    row: int = 0
    id: int = 0

    def rows_left(self, piece_rows: int) -> int:
        """Returns the number of rows until the end of the piece (`Source.blocks`)."""
        return piece_rows - self.row % piece_rows


@dataclasses.dataclass(frozen=True)
class Block:
    """Holds consecutive unparsed rows of a file.

    A block never spans two pieces; see `Source.blocks`.

    Attributes:
        start, end: Positions of the first row and after the last row.
        content: Input of the source's `parse`.
        done: Progress at `end`, in the unit of `Source.size`.
    """

    start: Position
    end: Position
    content: Any
    done: int

    @property
    def num_rows(self) -> int:
        """Returns the number of data rows, including malformed rows."""
        return self.end.row - self.start.row


@dataclasses.dataclass
class ParsedRows:
    """Holds the examples of a block.

    Attributes:
        table: The well-formed rows. The label is float32. Dense columns are float32 or float64, and
            shards contain them as float32. Each categorical field is a column of int64 ids, with
            null for missing values, or of lists of ids, which contain no missing values. If the
            schema has a time column, the float64 column `TIME` contains it.
        is_good: bool [rows of the block]: True for rows in `table`.
        reasons: Errors of the malformed rows, by row of the block, ascending. A row that is in
            neither `table` nor `reasons` is an empty line.
        label_counts: Number of each of the most frequent texts of the label column, if the schema
            has `positive`.
    """

    table: pa.Table
    is_good: np.ndarray
    reasons: dict[int, str]
    label_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names the columns of a source.

    `keys` are the categorical fields. `lists` are the fields with lists of keys. `tables` are the
    tables of the fields, or empty if each field has its own, see `DataSpec.tables`. `key_types` are
    the types of the fields in the files: "text", "int64" or "uint64"; empty without a schema.
    `standardize` are the dense columns that models standardize. None means that the format
    transforms all numbers and replaces missing ones.
    """

    label: str
    dense: tuple[str, ...]
    keys: tuple[str, ...]
    lists: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    key_types: tuple[str, ...] = ()
    standardize: tuple[str, ...] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The names of the fields whose type is text."""
        return tuple(n for n, t in zip(self.keys, self.key_types, strict=False) if t == "text")


class Source:
    """Reads examples from files. Base class; subclasses define the format.

    By default, the part of a row depends on its position in all files.

    Attributes:
        name: Name of the data set. Presets are selected by this name.
        columns: Names of the columns.
        size: Total size of the files, in the unit of `Block.done`.
        paths: Paths of the files, in order.
        header_lines: Number of header lines per file.
    """

    name: str
    columns: Columns
    size: int
    paths: tuple[str, ...]
    header_lines = 0

    def describe(self) -> Mapping[str, Any]:
        """Returns JSON-serializable values that identify this source."""
        return {"format": self.name}

    def blocks(self, start: Position, piece_rows: int) -> Iterator[Block]:
        """Yields the rows from `start` on as blocks, in order.

        Args:
            start: The end of an earlier block, or `Position()`.
            piece_rows: Number of rows in a piece. Piece i of a file contains the rows with
                `row // piece_rows == i`. A block contains rows of only one piece.

        Raises:
            ValueError: If a file is damaged.
        """
        while start.file < len(self.paths):
            for block in self.file_blocks(start, piece_rows):
                start = block.end
                yield block
            start = Position(start.file + 1, 0, 0, start.id)

    def file_blocks(
        self, start: Position, piece_rows: int, only_time: bool = False
    ) -> Iterator[Block]:
        """Yields the rows of one file from `start` on, as `blocks` does.

        Args:
            start, piece_rows: See `blocks`.
            only_time: Whether the blocks are passed to `parse_times`, so that other columns may be
                missing.
        """
        raise NotImplementedError

    def parse(self, block: Block) -> ParsedRows:
        """Returns a block's examples and the errors of its malformed rows.

        Multiple threads may call it concurrently.
        """
        raise NotImplementedError

    def parse_times(self, block: Block) -> np.ndarray:
        """Returns the times of a block's rows, in order, float64 [rows with a time].

        Multiple threads may call it concurrently. Only sources with a time column have it.
        """
        raise NotImplementedError

    def parts(self, block: Block, run: int = PART_RUN) -> Mapping[str, np.ndarray]:
        """Returns masks of the rows of a block by part, for example "train".

        A mask is bool [rows of the block] and covers malformed rows, too.

        Args:
            block: The block.
            run: Number of consecutive rows in the same part, see `readers.base.is_in_part`.
        """
        return train_and_test(block.start.id, block.num_rows, run)

    def line(self, block: Block, row: int) -> tuple[str, int]:
        """Returns the path and line number of a row, for messages.

        Lines, or rows of Parquet files, are counted from 1.

        Args:
            block: Block that contains the row.
            row: Index of the row in the block, from 0.
        """
        return self.paths[block.start.file], self.header_lines + block.start.row + row + 1


@contextlib.contextmanager
def workers(threads: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Yields a thread pool; cancels its pending work at the end."""
    executor = concurrent.futures.ThreadPoolExecutor(threads)
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def in_threads(
    parse: Callable[[Block], _Parsed], blocks: Iterable[Block], threads: int
) -> Generator[tuple[Block, _Parsed], None, None]:
    """Yields blocks with the results of a function, in order.

    Some blocks are parsed ahead in threads.
    """
    waiting: collections.deque[tuple[Block, Any]] = collections.deque()
    with workers(threads) as pool:
        for block in blocks:
            waiting.append((block, pool.submit(parse, block)))
            while len(waiting) > threads + _BLOCKS_AHEAD:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()


def train_and_test(first: int, count: int, run: int = PART_RUN) -> dict[str, np.ndarray]:
    """Returns masks of the training and test rows; see `is_in_part`.

    Args:
        first: Position of the first row, from 0.
        count: Number of consecutive rows.
        run: Number of consecutive rows in the same part.

    Returns:
        bool [count] by part: "train" and "test".
    """
    return {part: is_in_part(first, count, part, run=run) for part in ("train", "test")}


def table_of(columns: Columns, label: np.ndarray, dense: Any, keys: np.ndarray) -> pa.Table:
    """Returns a table of examples with one key per field.

    Args:
        columns: Names of the columns.
        label: [n].
        dense: [n, num_dense]. Ignored if there are no dense columns.
        keys: int64 [n, fields]. `MISSING_KEY` becomes null.
    """
    values = {columns.label: pa.array(label)}
    for i, name in enumerate(columns.dense):
        values[name] = pa.array(np.ascontiguousarray(dense[:, i]))
    for i, name in enumerate(columns.keys):
        column = np.ascontiguousarray(keys[:, i])
        is_missing = column == MISSING_KEY
        values[name] = pa.array(column, mask=is_missing if is_missing.any() else None)
    return pa.table(values)
