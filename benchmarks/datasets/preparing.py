"""Shared parts of the programs that prepare research data sets for slipstream-train."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slipstream_tf.cli import prepare
from slipstream_tf.cli.flag_set import Flag, FlagSet, UsageError
from slipstream_tf.cli.program import import_tensorflow, run_program

import_tensorflow()

from slipstream_tf.data.readers.base import PART_RUN  # noqa: E402
from slipstream_tf.data.sources import (  # noqa: E402
    Block,
    Columns,
    ParsedRows,
    Position,
    Source,
    table_of,
)

_ROWS_AT_ONCE = 32_768

Parts = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Maps "train", "valid" or "test" to keys, integers [n, fields], and labels [n]."""


class PartsSource(Source):
    """A source of examples in memory. Each part is one file."""

    def __init__(
        self, name: str, path: str, fields: Sequence[str], parts: Parts, settings: Mapping[str, Any]
    ) -> None:
        """Initializes the source without copying the arrays.

        Args:
            name: Name of the data set.
            path: Path of the file from which the examples were read.
            fields: Names of the categorical fields.
            parts: Arrays of each part, see `Parts`. "valid" is optional.
            settings: JSON-serializable values that determine the examples.
        """
        self.name, self.columns = name, Columns("label", (), tuple(fields))
        self.paths = (path,) * len(parts)
        self._parts, self._settings = dict(parts), dict(settings)
        self.size = sum(len(labels) for _, labels in parts.values())

    def describe(self) -> Mapping[str, Any]:
        return {"format": self.name, **self._settings}

    def file_blocks(
        self, start: Position, piece_rows: int, only_time: bool = False
    ) -> Iterator[Block]:
        sizes = [len(labels) for _, labels in self._parts.values()]
        done = sum(sizes[: start.file])
        while start.row < sizes[start.file]:
            left = min(sizes[start.file] - start.row, start.rows_left(piece_rows), _ROWS_AT_ONCE)
            row = start.row + left
            end = dataclasses.replace(start, offset=row, row=row, id=start.id + left)
            yield Block(start, end, None, done + row)
            start = end

    def parse(self, block: Block) -> ParsedRows:
        keys, labels = self._parts[self._part_of(block)]
        rows = slice(block.start.row, block.end.row)
        values = labels[rows].astype(np.float32), None, keys[rows].astype(np.int64)
        return ParsedRows(table_of(self.columns, *values), np.ones(block.num_rows, bool), {})

    def parts(self, block: Block, run: int = PART_RUN) -> Mapping[str, np.ndarray]:
        return {self._part_of(block): np.ones(block.num_rows, bool)}

    def _part_of(self, block: Block) -> str:
        return list(self._parts)[block.start.file]


def read_arrays(path: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Reads arrays of an .npz file by name.

    Args:
        path: Path of the file.
        names: Names of the arrays to read.

    Returns:
        The arrays by name.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged or not an .npz file, or an array is missing.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in names if name not in arrays]
            if missing:
                raise ValueError(f"it contains {list(arrays)}, but not {missing}")
            return {name: arrays[name] for name in names}
    except FileNotFoundError:
        raise
    except Exception as error:  # NumPy and zipfile raise errors of many types for damaged files.
        raise ValueError(f"{path} is not an .npz file with {', '.join(names)}: {error}") from error


def require_integers(path: str, arrays: Mapping[str, np.ndarray], bits: int) -> None:
    """Raises ValueError unless all values are integers of `bits` bits."""
    limits = np.iinfo(f"int{bits}")
    for name, values in arrays.items():
        if values.dtype.kind not in "iu":
            raise ValueError(
                f"{path}: Invalid type of {name!r}: {values.dtype}. Expected integers, because "
                "they are keys."
            )
        for extreme in (int(values.min(initial=0)), int(values.max(initial=0))):
            if not limits.min <= extreme <= limits.max:
                raise ValueError(
                    f"{path}: Invalid value in {name!r}: {extreme}. Expected {limits.min} to "
                    f"{limits.max}."
                )


def entry_point(
    program: str,
    purpose: str,
    file: str,
    flags: Sequence[Flag],
    read: Callable[..., PartsSource],
) -> None:
    """Runs a program that prepares a data set, and exits.

    Args:
        program: File name of the program.
        purpose: Description for `--help`.
        file: Name of the input file for `--help`.
        flags: Flags that are specific to the data set.
        read: Function that takes the path of the file and the values of `flags` as keyword
            arguments, and returns the examples.
    """
    flag_set = FlagSet(
        program,
        purpose,
        (f"python benchmarks/datasets/{program} {file} --output=prepared/{program[:-3]}",),
        {**({"Data": flags} if flags else {}), **prepare.WRITING_FLAGS},
        arguments="DATA",
    )

    def main(values: dict[str, Any], given: frozenset[str]) -> None:
        if len(values["DATA"]) != 1:
            raise UsageError(
                f"Invalid argument DATA: {values['DATA']}. Expected the path of {file}."
            )
        (path,) = values["DATA"]
        chosen = {flag.name: values[flag.name] for flag in flags}
        prepare.write(lambda: (read(path, **chosen), [path]), values)

    sys.exit(run_program(flag_set, main))
