"""Writes changed rows as deltas and applies them to a SavedModel.

A delta contains:

```text
FOLDER/manifest.json      tables, steps, digests of the rows before and after
FOLDER/table_0.parquet    changed rows of the first table: key int64, row list<float>, step int64;
                          a null row marks a removed key
FOLDER/weights.npz        all other weights of the model; absent in the delta of a layer
```
"""

import dataclasses
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf.config import Table
from slipstream_tf.export import rows
from slipstream_tf.export.rows import (
    ExportedTable,
    Token,
    collect,
    layers_of,
    on_rank_zero,
    weights_of,
)

_MANIFEST = Path("manifest.json")
_WEIGHTS = "weights.npz"
_SCHEMA = pa.schema(
    [
        pa.field("key", pa.int64(), nullable=False),
        pa.field("row", pa.list_(pa.float32())),
        pa.field("step", pa.int64(), nullable=False),
    ]
)
_VALUES_PER_GROUP = 1 << 22  # 16 MiB of rows per row group bound the memory of a reader.


def delta(
    model: Any,
    path: str | os.PathLike[str],
    since: str | os.PathLike[str] | Token,
    keys: Mapping[str, Any] | None = None,
) -> None:
    """Writes the rows that changed since an export.

    The rows are compared with their earlier values bit by bit, because tables do not store a step
    per row. The delta contains exactly the rows that changed, and the keys that were removed.

    For a model, the delta also contains all weights of the other layers, because these weights
    change at every step and the predictions depend on them. Variables that are not in
    `model.weights` keep their exported values. For an `EmbeddingCollection`, the delta contains
    only rows.

    For the next delta, pass as `since` the SavedModel to which this delta was applied, or a token
    that was taken together with this delta.

    With multiple ranks, call this function on all ranks. Rank 0 compares and writes.

    Note: rank 0 needs memory for two copies of the rows of all tables while it writes
    (`8 + 4 * dim` bytes per row each). Training needs no additional memory, unless `since` is a
    token, which is one copy.

    Example:

    >>> import tempfile
    >>> layer = slip.keras.Embedding(10, 2, optimizer=slip.optimizers.SGD(0.1))
    >>> before = slip.export.token(layer)
    >>> _ = layer(np.array([3]), training=True)  # Creates a row.
    >>> slip.export.delta(layer, tempfile.mkdtemp(), since=before)

    Args:
        model: The model, or its only layer with tables.
        path: Folder to write. It must not exist or must be empty.
        since: Folder of a SavedModel that `saved_model` or `apply_delta` wrote, or a token.
        keys: The keys to compare, by table name; see `saved_model`. Pass the same keys as for the
            export. Exported keys that are missing here count as removed.

    Raises:
        ValueError: If `since` is neither an export nor a token, its tables differ from the
            model's, its rows were rounded, or `path` is a file or a folder that is not empty.
        RuntimeError: On the other ranks, if rank 0 failed.
    """
    now = collect(model, keys)
    on_rank_zero(model, lambda: _write(model, now or [], path, since), f"write {os.fspath(path)}")


def _write(model: Any, now: list[ExportedTable], path: str | os.PathLike[str], since: Any) -> None:
    target = rows.require_new(path, "delta")
    before = _rows_of(since)
    here, there = ([(t.name, t.config.dim) for t in tables] for tables in (now, before))
    if here != there:
        raise invalid("since", there, "a delta", f"tables (name, dim) as in the model: {here}")
    weights = None if model is layers_of(model)[0] else weights_of(model)

    def write(folder: Path) -> None:
        folder.mkdir()
        entries = []
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            found = changes(old, new)
            write_changes(folder / f"table_{index}.parquet", found, new.step)
            numbers = {"changed": int(found.keys.size), "removed": int(found.removed.size)}
            of_old = {"step": old.step, "digest": old.digest}
            entries.append({**rows.table_entry(new), **numbers, "since": of_old})
        if weights is not None:
            values = {str(index): w.numpy() for index, w in enumerate(weights)}
            np.savez(folder / _WEIGHTS, **values)
        of_weights = None if weights is None else rows.weight_entries(weights)
        rows.write_manifest(folder, rows.manifest_of(entries, of_weights), _MANIFEST)

    rows.write_whole(target, write)


def _rows_of(since: Any) -> list[ExportedTable]:
    if isinstance(since, Token):
        return list(since.tables)
    if isinstance(since, (str, os.PathLike)):
        _require_unrounded("since", rows.read_manifest(Path(since), argument="since"), since)
        return rows.read_rows(Path(since))
    allowed = (
        "the folder of a SavedModel from slip.export.saved_model, or a token from "
        "slip.export.token. A step does not suffice, because tables do not store a step per row"
    )
    raise invalid("since", since, "a delta", allowed)


def apply_delta(
    saved_model_path: str | os.PathLike[str],
    delta_path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
) -> None:
    """Applies a delta to a SavedModel.

    The new rows equal the trained rows bit for bit. The graph does not change, and the op library
    is not needed. The variable files are rewritten, including added and removed keys.

    Note: the update needs about four times the memory of all rows.

    Example:

    >>> import tempfile
    >>> layer = slip.keras.Embedding(10, 2, optimizer=slip.optimizers.SGD(0.1))
    >>> model = keras.Sequential([keras.Input((), dtype="int64"), layer])
    >>> served, changes = tempfile.mkdtemp(), tempfile.mkdtemp()
    >>> slip.export.saved_model(model, served)
    >>> _ = layer(np.array([3]), training=True)  # Creates a row.
    >>> slip.export.delta(model, changes, since=served)
    >>> slip.export.apply_delta(served, changes)

    Args:
        saved_model_path: Folder that `saved_model` or `apply_delta` wrote.
        delta_path: Folder that `delta` wrote. Its `since` must have been this SavedModel, or a
            token with the same rows.
        output: Folder of the updated SavedModel. It must not exist or must be empty. Use it if the
            serving system expects one folder per version. None updates the SavedModel in place:
            the folder does not exist for a moment between two renames.

    Raises:
        ValueError: If a folder is not an export or is damaged, or the delta has other tables or
            weights, or starts from another state than the SavedModel's. The SavedModel is
            unchanged in these cases.
    """
    source, folder = Path(saved_model_path), Path(delta_path)
    target = source if output is None else rows.require_new(output, "apply_delta", "output")
    saved = rows.read_manifest(source, argument="saved_model_path")
    found = rows.read_manifest(folder, _MANIFEST, "delta_path")
    _require_unrounded("saved_model_path", saved, source)
    _require_fit(saved, found, folder)
    tables = []
    for index, (table, entry) in enumerate(
        zip(rows.read_rows(source), found["tables"], strict=True)
    ):
        by = read_changes(folder / f"table_{index}.parquet", table.config.dim)
        updated = changed(table, by, entry["step"])
        if updated.digest != entry["digest"]:
            allowed = "rows with the digest in the delta. Copy the SavedModel and the delta again"
            raise invalid("delta_path", str(folder), f"table {table.name!r}", allowed)
        tables.append(updated)
    weights = _read_weights(folder, found)
    entries = [rows.table_entry(table) for table in tables]
    manifest = rows.manifest_of(entries, found.get("weights", saved["weights"]))
    rows.write_whole(target, lambda new: rows.write_updated(source, new, tables, weights, manifest))


def _require_unrounded(argument: str, manifest: Mapping[str, Any], path: Any) -> None:
    """Raises ValueError if the rows of a SavedModel were rounded.

    Args:
        argument: Name of the argument that gave the path, for the error.
        manifest: Manifest of the SavedModel.
        path: Folder of the SavedModel.
    """
    for entry in manifest["tables"]:
        dtype, own = entry.get("rows_dtype"), Table.from_config(entry["config"]).storage.dtype
        if dtype not in (None, own):
            place = f"table {entry['name']!r} with rows of dtype {dtype}"
            allowed = f"unrounded rows of dtype {own}. Export the SavedModel without rows_dtype"
            raise invalid(argument, os.fspath(path), place, allowed)


def _require_fit(saved: Mapping[str, Any], found: Mapping[str, Any], folder: Path) -> None:
    """Raises ValueError if a delta does not fit a SavedModel.

    They must have the same tables and weights, and the delta must start from the SavedModel's
    state.
    """
    here, there = ([t["name"] for t in m["tables"]] for m in (saved, found))
    if here != there:
        allowed = f"a delta of the tables {here} of the SavedModel"
        raise invalid("delta_path", str(folder), f"tables {there}", allowed)
    for table, change in zip(saved["tables"], found["tables"], strict=True):
        if table["digest"] != change["since"]["digest"]:
            place = f"table {table['name']!r} at step {table['step']} of the SavedModel"
            allowed = (
                "a delta since this state of the table, but the delta is since step "
                f"{change['since']['step']}. Apply all deltas in order, and each delta once"
            )
            raise invalid("delta_path", str(folder), place, allowed)
    if "weights" in found:
        shapes, others = ([(w["shape"], w["dtype"]) for w in m["weights"]] for m in (saved, found))
        if shapes != others:
            allowed = f"the weights of the SavedModel: {shapes}. Export the model again"
            place = f"weights (shape, dtype) {others}"
            raise invalid("delta_path", str(folder), place, allowed)


def _read_weights(folder: Path, manifest: Mapping[str, Any]) -> list[np.ndarray] | None:
    if "weights" not in manifest:
        return None
    try:
        with np.load(folder / _WEIGHTS, allow_pickle=False) as arrays:
            values = [arrays[str(index)] for index in range(len(manifest["weights"]))]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        place = f"a delta with an unreadable {_WEIGHTS} ({error})"
        allowed = "a complete folder from slip.export.delta. Copy the delta again"
        raise invalid("delta_path", str(folder), place, allowed) from error
    for index, entry in enumerate(manifest["weights"]):
        if list(values[index].shape) != entry["shape"]:
            place = f"weight {entry['name']!r} with shape {list(values[index].shape)}"
            allowed = f"shape {entry['shape']}. Copy the delta again"
            raise invalid("delta_path", str(folder), place, allowed)
        if values[index].dtype.kind == "V":  # NumPy files store bfloat16 as raw bytes.
            values[index] = values[index].view(tf.as_dtype(entry["dtype"]).as_numpy_dtype)
    return values


@dataclasses.dataclass(frozen=True)
class TableDelta:
    """Holds the changes of a table between two times.

    Attributes:
        keys: int64 [n], ascending: keys with new or changed rows.
        rows: float32 [n, dim]: the current rows of these keys.
        removed: int64 [m], ascending: removed keys.
    """

    keys: np.ndarray
    rows: np.ndarray
    removed: np.ndarray


def changes(before: ExportedTable, now: ExportedTable) -> TableDelta:
    """Compares two copies of a table bit by bit.

    0.0 and -0.0 differ.

    Args:
        before: The earlier copy.
        now: The current copy of the same table.
    """
    _, there, here = np.intersect1d(before.keys, now.keys, assume_unique=True, return_indices=True)
    is_changed = np.ones(now.keys.size, bool)
    old, new = before.rows.view(np.int32), now.rows.view(np.int32)
    is_changed[here] = (old[there] != new[here]).any(axis=1)
    removed = np.setdiff1d(before.keys, now.keys, assume_unique=True)
    return TableDelta(now.keys[is_changed], now.rows[is_changed], removed)


def changed(before: ExportedTable, by: TableDelta, step: int) -> ExportedTable:
    """Returns a table after changes.

    Args:
        before: The table before the changes.
        by: The changes.
        step: Number of updates of the table after the changes.
    """
    gone = np.concatenate([by.keys, by.removed])
    stays = ~np.isin(before.keys, gone, assume_unique=True)
    keys = np.concatenate([before.keys[stays], by.keys])
    rows = np.concatenate([before.rows[stays], by.rows])
    order = np.argsort(keys, kind="stable")
    return dataclasses.replace(before, keys=keys[order], rows=rows[order], step=step)


def write_changes(path: Path, found: TableDelta, step: int) -> None:
    """Writes the changes of a table to a Parquet file.

    Args:
        path: Path of the file.
        found: The changes.
        step: Number of updates of the table. It is written next to every key.
    """
    dim = found.rows.shape[1]
    group = max(1, _VALUES_PER_GROUP // dim)
    with pq.ParquetWriter(path, _SCHEMA) as writer:
        for first in range(0, found.keys.size, group):
            rows = np.ascontiguousarray(found.rows[first : first + group])
            offsets = pa.array(np.arange(rows.shape[0] + 1, dtype=np.int32) * np.int32(dim))
            lists = pa.ListArray.from_arrays(offsets, pa.array(rows.reshape(-1)))
            _write_group(writer, found.keys[first : first + group], lists, step)
        for first in range(0, found.removed.size, group):
            keys = found.removed[first : first + group]
            _write_group(writer, keys, pa.nulls(keys.size, pa.list_(pa.float32())), step)


def _write_group(writer: pq.ParquetWriter, keys: np.ndarray, rows: pa.Array, step: int) -> None:
    steps = pa.array(np.full(keys.size, step, np.int64))
    writer.write_table(pa.Table.from_arrays([pa.array(keys), rows, steps], schema=_SCHEMA))


def read_changes(path: Path, dim: int) -> TableDelta:
    """Reads a file that `write_changes` wrote.

    Args:
        path: Path of the file.
        dim: Expected number of values per row.

    Raises:
        ValueError: If the file is missing or damaged, or its rows do not have length `dim`.
    """
    allowed = (
        f"a Parquet file with columns key (int64), row (list<float> with {dim} values) and step "
        "(int64). Copy the delta again"
    )
    keys, rows, removed = [], [np.empty((0, dim), np.float32)], []
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["key", "row"]):
                column = batch.column("row")
                is_present = np.asarray(column.is_valid())
                values = np.asarray(column.flatten(), np.float32)
                lengths = column.value_lengths().drop_null()
                if any(length != dim for length in lengths.unique().to_pylist()):
                    raise ValueError(f"its rows have {lengths.unique().to_pylist()} values")
                batch_keys = np.asarray(batch.column("key"), np.int64)
                keys.append(batch_keys[is_present])
                rows.append(values.reshape(-1, dim))
                removed.append(batch_keys[~is_present])
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise invalid("delta_path", str(path), f"an unreadable delta ({error})", allowed) from error
    none = np.empty(0, np.int64)
    return TableDelta(
        np.concatenate([none, *keys]), np.concatenate(rows), np.concatenate([none, *removed])
    )
