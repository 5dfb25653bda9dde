"""Streaming text files line by line into batches; shared by the Criteo and Avazu readers."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from slipstream_tf.inputs.readers.base import BatchReader
from slipstream_tf.inputs.readers.lines import (
    MAX_LINE_BYTES,
    LineFormat,
    parse_lines,
    require_header,
)
from slipstream_tf.inputs.readers.rows import Rows, first_inputs, is_in_part
from slipstream_tf.inputs.spec import DataSpec

BLOCK_BYTES = 4 << 20
# Of very short lines, what is known of each takes far more memory than the line.
BLOCK_LINES = 1 << 16


def _open(path: str) -> Any:
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def _blocks(path: str) -> Iterator[list[bytes]]:
    """Lines of a file, without their ends, some megabytes at a time, or BLOCK_LINES."""
    rest = b""
    lines = 0
    with _open(path) as file:
        while True:
            try:
                data = file.read(BLOCK_BYTES)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path}: damaged after line {lines}: {error}") from error
            if not data:
                break
            block = (rest + data).split(b"\n")
            rest = block.pop()[: MAX_LINE_BYTES + 1]
            lines += len(block)
            for begin in range(0, len(block), BLOCK_LINES):
                yield block[begin : begin + BLOCK_LINES]
    if rest:
        yield [rest]


class TextReader(BatchReader):
    """Reads delimited text files in batches, whatever their size.

    The part of a line depends on its place alone: of each ten consecutive runs of 100 data lines
    of a file, the last run is the test part, the others are the train part.
    """

    def __init__(
        self,
        line_format: LineFormat,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        batch_size: int,
        part: str | None = None,
        strict: bool = False,
        drop_remainder: bool = False,
        max_inputs: int | None = None,
        ids: bool = False,
    ):
        """Opens nothing yet.

        Args:
            line_format: of the files.
            paths: one file or several, read in order; ".gz" files are decompressed.
            batch_size: inputs of a batch.
            part: "train", "test" or None for all lines.
            strict: make the first malformed line an error instead of leaving it out.
            drop_remainder: leave out a last batch that is not full.
            max_inputs: stop after so many inputs, or None.
            ids: add features["id"], int64 [batch]: the number of an input's data line, from 0,
                counted over all files and both parts; headers are not counted, malformed lines
                are.

        Raises:
            FileNotFoundError: a path is no file.
            ValueError: another argument is out of its range.
        """
        super().__init__(
            batch_size,
            part=part,
            strict=strict,
            drop_remainder=drop_remainder,
            max_inputs=max_inputs,
            ids=ids,
        )
        several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        self._paths = [os.fspath(path) for path in several]
        for path in self._paths:
            if not os.path.isfile(path):
                raise FileNotFoundError(f"No data file {path!r}.")
        self._format = line_format
        # The number of inputs is not known without reading.
        self.spec = DataSpec(line_format.name, line_format.fields, line_format.num_dense)

    def rows(self) -> Iterator[Rows]:
        """Yields parsed rows of the part, in file order, some thousands at a time.

        Raises:
            BadLineError: a malformed line in a strict reader.
            ValueError: a compressed file is damaged, or a file's header is another.
        """
        self.bad_lines.reset()
        try:
            yield from first_inputs(self._every_row(), self._max_inputs)
        finally:
            # Also where the reading stops early, by choice or at damaged data.
            self.bad_lines.report()

    def _every_row(self) -> Iterator[Rows]:
        first = 0
        for path in self._paths:
            first += yield from self._file_rows(path, first)

    def _file_rows(self, path: str, first: int) -> Generator[Rows, None, int]:
        """Yields the rows of a file whose data lines have ids from `first`; returns their count."""
        first_line = 1
        index = 0  # of the next data line
        for lines in _blocks(path):
            if self._format.header is not None and first_line == 1:
                require_header(self._format, path, lines[0])
                lines = lines[1:]
                first_line = 2
            chosen = np.flatnonzero(is_in_part(index, len(lines), self._part))
            if chosen.size:
                numbers, ids = chosen + first_line, chosen + first + index
                yield self._parse(path, numbers, ids, [lines[i] for i in chosen])
            index += len(lines)
            first_line += len(lines)
        return index

    def _parse(self, path: str, numbers: np.ndarray, ids: np.ndarray, lines: list[bytes]) -> Rows:
        parsed = parse_lines(self._format, lines)
        for i, reason in parsed.reasons.items():
            self.bad_lines.add(path, int(numbers[i]), reason)
        rows = parsed.rows
        rows.ids = ids[parsed.is_good] if self._ids else None
        return rows

    def _blocks(self, number: int) -> Iterator[Rows]:
        del number  # All passes are alike.
        return self.rows()
