"""Streaming text files line by line into batches; shared by the Criteo and Avazu readers."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.errors import require_choice, require_integer
from slipstream_tf.inputs.bad_lines import BadLines
from slipstream_tf.inputs.readers.lines import (
    MAX_LINE_BYTES,
    LineFormat,
    parse_lines,
    require_header,
)
from slipstream_tf.inputs.readers.passes import Passes
from slipstream_tf.inputs.readers.rows import Rows, first_inputs, in_batches, is_in_part
from slipstream_tf.inputs.spec import PARTS, DataSpec

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


class TextReader:
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
        several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        self._paths = [os.fspath(path) for path in several]
        for path in self._paths:
            if not os.path.isfile(path):
                raise FileNotFoundError(f"No data file {path!r}.")
        require_integer("batch_size", batch_size, 1)
        if max_inputs is not None:
            require_integer("max_inputs", max_inputs, 1)
        if part is not None:
            require_choice("part", part, PARTS)
        self._format = line_format
        self._batch_size = batch_size
        self._part = part
        self._drop_remainder = drop_remainder
        self._max_inputs = max_inputs
        self._ids = ids
        self.bad_lines = BadLines(strict)
        self._passes = Passes(self._batches)

    @property
    def spec(self) -> DataSpec:
        """What the batches hold; the number of inputs is not known without reading."""
        return DataSpec(self._format.name, self._format.fields, self._format.num_dense)

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
        header = self._format.header
        first_line = 1
        index = 0  # of the next data line
        for block in _blocks(path):
            lines = block
            if header is not None and first_line == 1:
                require_header(self._format, path, lines[0])
                lines = lines[1:]
                first_line = 2
            numbers = np.arange(first_line, first_line + len(lines))
            ids = np.arange(first + index, first + index + len(lines))
            if self._part is not None:
                chosen = np.flatnonzero(is_in_part(index, len(lines), self._part))
                numbers, ids = numbers[chosen], ids[chosen]
                wanted_lines = [lines[i] for i in chosen]
            else:
                wanted_lines = lines
            index += len(lines)
            first_line += len(lines)
            if wanted_lines:
                yield self._parse(path, numbers, ids if self._ids else None, wanted_lines)
        return index

    def _parse(
        self, path: str, numbers: np.ndarray, ids: np.ndarray | None, lines: list[bytes]
    ) -> Rows:
        parsed = parse_lines(self._format, lines)
        for i, reason in parsed.reasons.items():
            self.bad_lines.add(path, int(numbers[i]), reason)
        rows = parsed.rows
        rows.ids = None if ids is None else ids[parsed.is_good]
        return rows

    def dataset(self) -> tf.data.Dataset:
        """Returns the batches; each iteration reads the files anew."""
        fields, dense = len(self._format.fields), self._format.num_dense
        batch = self._batch_size if self._drop_remainder else None
        features = {"keys": tf.TensorSpec([batch, fields], tf.int64)}
        if dense:
            features["dense"] = tf.TensorSpec([batch, dense], tf.float32)
        if self._ids:
            features["id"] = tf.TensorSpec([batch], tf.int64)
        return self._passes.dataset((features, tf.TensorSpec([batch], tf.float32)))

    def _batches(self, number: int = 0) -> Iterator[Any]:
        del number  # All passes are alike.
        for rows in in_batches(self.rows(), self._batch_size, self._drop_remainder):
            yield rows.element()
