"""Writes prepared examples as Parquet shards with a manifest.

A shard contains the examples of one piece: a fixed number of consecutive rows of a source file. It
is written to temporary files, synced and renamed. Then it is added to the manifest. A shard that is
not in the manifest is written again, so that an interrupted preparation ends with the same bytes.
"""

import collections
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slipstream_tf._utils import disk
from slipstream_tf.data.dense_statistics import DenseStatistics
from slipstream_tf.data.readers.prepared import FORMAT_VERSION, MANIFEST
from slipstream_tf.data.sources import TIME, Columns, ParsedRows, Position
from slipstream_tf.data.spec import PARTS
from slipstream_tf.telemetry.run_record import to_json, write_json

GROUP_ROWS = 131_072  # Number of rows in a row group.
_MAX_REASONS = 50  # Further kinds of errors of a shard are counted together.
_OTHER_REASONS = "other reasons"
_MIN_RUN = 32  # Mean length of runs of rows from which slices are faster than copies.
MAX_LABELS = 50  # Maximum number of label texts that a shard counts.
# The value in the reason of a malformed row: "price is 'x'; expected a number".
_VALUE = re.compile(r" is .*; expected", re.DOTALL)


def make_manifest(name: str, columns: Columns, source: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest of a preparation without shards.

    Args:
        name: Name of the data set.
        columns: Names of the columns.
        source: JSON-serializable values that identify this preparation.
    """
    return {
        "format_version": FORMAT_VERSION,
        "name": name,
        "columns": to_json(dataclasses.asdict(columns)),
        "source": dict(source),
        "limits": None,
        "is_complete": False,
        "shards": [],
    }


def write_manifest(folder: str, manifest: Mapping[str, Any]) -> None:
    """Replaces the manifest of a folder atomically."""
    write_json(os.path.join(folder, MANIFEST), manifest)


class ShardWriter:
    """Writes one shard, with one file for each part that has examples."""

    def __init__(
        self,
        folder: str,
        number: int,
        columns: Columns,
        compression: str,
        on_group: Callable[[pa.Table], None],
    ):
        """Creates a writer.

        Files are created when the first row group is written.

        Args:
            folder: Folder of the prepared data.
            number: Index of the shard, from 0.
            columns: Names of the columns.
            compression: One of `spec.SHARD_COMPRESSIONS`.
            on_group: Called with each row group of the training part, in order.
        """
        of_train = {"train": (columns.dense, on_group)}
        self._parts = {
            part: _PartWriter(
                folder,
                f"{part}/{number:06d}.parquet",
                columns,
                compression,
                *of_train.get(part, ()),
            )
            for part in PARTS
        }
        self._bad_reasons: collections.Counter[str] = collections.Counter()
        self._first_bad_line: str | None = None
        self._labels: collections.Counter[str] = collections.Counter()

    def add(self, parsed: ParsedRows, parts: Mapping[str, np.ndarray]) -> None:
        """Adds the examples of a block.

        Args:
            parsed: The examples.
            parts: Masks of the rows by part; see `split.Divider.parts`.
        """
        table = (
            parsed.table.drop_columns([TIME]) if TIME in parsed.table.column_names else parsed.table
        )
        self._labels.update(parsed.label_counts)
        for part, is_of_part in parts.items():
            is_wanted = is_of_part[parsed.is_good]
            if is_wanted.any():
                self._parts[part].add(_chosen(table, is_wanted))

    def add_bad_line(self, place: str, reason: str) -> None:
        """Counts a malformed row of the piece by the kind of its error.

        Args:
            place: File and line. They are kept for the first malformed row.
            reason: Description of the error. Reasons that differ only in the value are counted
                together.
        """
        kind = _VALUE.sub(r" is malformed; expected", reason)
        if kind not in self._bad_reasons and len(self._bad_reasons) >= _MAX_REASONS:
            kind = _OTHER_REASONS
        self._bad_reasons[kind] += 1
        self._first_bad_line = self._first_bad_line or f"{place}: {reason}"

    def close(self, end: Position) -> dict[str, Any]:
        """Completes and renames the files.

        Args:
            end: Position at which the next shard begins.

        Returns:
            The manifest entry of the shard.
        """
        return {
            **{part: self._parts[part].close() for part in PARTS},
            "dense": self._parts["train"].statistics(),
            "bad_lines": self._bad_reasons.total(),
            "bad_reasons": dict(self._bad_reasons),
            "first_bad_line": self._first_bad_line,
            "labels": dict(self._labels.most_common(MAX_LABELS)),
            "end": dataclasses.asdict(end),
        }

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Deletes incomplete files after an error."""
        if kind is not None:
            for writer in self._parts.values():
                writer.discard()


class _PartWriter:
    """Writes one file in row groups of `GROUP_ROWS`.

    The groups do not depend on the sizes of the added tables.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        columns: Columns,
        compression: str,
        dense: Sequence[str] = (),
        on_group: Callable[[pa.Table], None] = lambda group: None,
    ):
        self._path, self._name = Path(folder, name), name
        # Readers of folders ignore file names that start with a dot.
        self._partial = self._path.with_name(f".{self._path.name}.part")
        self._columns, self._compression = columns, compression
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._num_waiting = self._inputs = 0
        self._clicks = 0.0
        self._statistics = {name: DenseStatistics() for name in dense}
        self._on_group = on_group

    def add(self, table: pa.Table) -> None:
        self._waiting.append(table)
        self._num_waiting += len(table)
        self._inputs += len(table)
        while self._num_waiting >= GROUP_ROWS:
            self._write(GROUP_ROWS)

    def _write(self, rows: int) -> None:
        table = pa.concat_tables(self._waiting)
        self._waiting = [table.slice(rows)]
        self._num_waiting -= rows
        # Combine the chunks, because the bytes in the file must not depend on the added tables.
        whole = table.slice(0, rows).combine_chunks()
        group = whole.cast(_written_schema(whole.schema), safe=False)
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(
                self._partial, group.schema, compression=self._compression
            )
        self._clicks += pc.sum(group[self._columns.label].cast(pa.float64())).as_py()
        for name, found in self._statistics.items():
            of_group = DenseStatistics.of(whole[name].to_numpy(), is_first=not found.count)
            self._statistics[name] = found.merged(of_group)
        self._on_group(group)
        self._writer.write_table(group, row_group_size=GROUP_ROWS)

    def close(self) -> dict[str, Any] | None:
        if not self._inputs:
            return None
        if self._num_waiting:
            self._write(self._num_waiting)
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        disk.commit(self._partial, self._path)
        return {"file": self._name, "inputs": self._inputs, "clicks": self._clicks}

    def statistics(self) -> dict[str, Any]:
        """Returns JSON-serializable statistics of the columns `dense` of the written groups."""
        return {name: dataclasses.asdict(found) for name, found in self._statistics.items()}

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._partial.unlink()
            self._writer = None


def _chosen(table: pa.Table, is_wanted: np.ndarray) -> pa.Table:
    """Returns the rows of a mask, bool [n].

    Long runs of rows are slices, which are not copied. A slice keeps the whole table in memory,
    therefore most rows must be wanted.
    """
    edges = np.flatnonzero(np.diff(is_wanted, prepend=False, append=False))
    if 2 * np.count_nonzero(is_wanted) < len(table) or _MIN_RUN * len(edges) > len(table):
        return table.filter(pa.array(is_wanted))
    runs = edges.reshape(-1, 2).tolist()
    return pa.concat_tables([table.slice(start, end - start) for start, end in runs])


def _written_schema(schema: pa.Schema) -> pa.Schema:
    """Returns the schema of a shard. Its numbers are float32."""
    kinds = {pa.float64(): pa.float32()}
    return pa.schema([field.with_type(kinds.get(field.type, field.type)) for field in schema])


def training_tables(
    folder: str, entry: Mapping[str, Any], columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Yields the training part of a shard, by row group.

    Args:
        folder: Folder of the prepared data.
        entry: Manifest entry of the shard.
        columns: Names of the columns to read.
    """
    if entry["train"] is None:
        return
    with pq.ParquetFile(os.path.join(folder, entry["train"]["file"])) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=list(columns))
