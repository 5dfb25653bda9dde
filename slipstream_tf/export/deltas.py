"""What changed since an export, and bringing a SavedModel up to it.

FOLDER/manifest.json      tables, steps, digests of the rows before and after
FOLDER/table_0.parquet    changed rows of the first table; see `row_files`
FOLDER/weights.npz        the model's other weights, all of them; not of a layer's delta
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._version import __version__
from slipstream_tf.errors import invalid
from slipstream_tf.export import files
from slipstream_tf.export.row_files import changed, changes, read_changes, write_changes
from slipstream_tf.export.rows import TableRows, Token, collect, layers_of, on_rank_zero

_MANIFEST = Path("manifest.json")
_WEIGHTS = "weights.npz"


def delta(
    model: Any,
    path: str | os.PathLike[str],
    since: str | os.PathLike[str] | Token,
    keys: Mapping[str, Any] | None = None,
) -> None:
    """Writes the rows that changed since an export.

        slip.export.saved_model(model, "served/1")
        ...                                             # further training
        slip.export.delta(model, "deltas/2", since="served/1")
        slip.export.apply_delta("served/1", "deltas/2", "served/2")   # where it is served

    Found by comparing the rows with what they were, bit by bit: no row that changed is left out,
    and none is in it that did not. The tables keep no step per row, so that a step number does
    not say enough. What it costs: while it is written, memory for the rows of all tables twice
    (8 + 4 * dim bytes per row each, on rank 0), nothing while training, unless `since` is a token,
    which is such a copy.

    The next delta is since the SavedModel to which this one was applied, or a token of the same
    moment. Of a model, all weights of its other layers are in it, too: they change in every step,
    and predictions would not fit otherwise; variables that Keras does not count among
    `model.weights` stay as they were exported. Of an `EmbeddingCollection` by itself, only rows
    are.

    On several ranks all must call it; rank 0 compares and writes.

    Args:
        model: the model, or its only layer with tables.
        path: folder to be written; not there yet, or empty.
        since: folder of a SavedModel that `saved_model` or `apply_delta` wrote, or a token.
        keys: as for `saved_model`; the same as for the export, or keys that it has and that are
            not named here count as gone.

    Raises:
        ValueError: `since` is neither, or of other tables, or something is at `path`.
    """
    now = collect(model, keys)
    on_rank_zero(model, lambda: _write(model, now or [], path, since), f"write {os.fspath(path)}")


def _write(model: Any, now: list[TableRows], path: str | os.PathLike[str], since: Any) -> None:
    target = files.require_new(path, "delta")
    before = _rows_of(since)
    _require_same_tables(now, before, "since")
    weights = None
    if model is not layers_of(model)[0]:
        weights = [_compat.tensorflow_variable(weight) for weight in model.weights]

    def write(folder: Path) -> None:
        folder.mkdir()
        entries = []
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            found = changes(old, new)
            write_changes(folder / f"table_{index}.parquet", found, new.step)
            entries.append(
                {
                    **files.table_entry(new),
                    "changed": int(found.keys.size),
                    "removed": int(found.removed.size),
                    "since": {"step": old.step, "digest": old.digest},
                }
            )
        manifest = {"format": files.FORMAT, "slipstream_tf": __version__, "tables": entries}
        if weights is not None:
            manifest["weights"] = files.weight_entries(weights)
            values = {str(index): w.numpy() for index, w in enumerate(weights)}
            np.savez(folder / _WEIGHTS, **values)
        files.write_json(folder / _MANIFEST, manifest)

    files.write_whole(target, write)


def _rows_of(since: Any) -> list[TableRows]:
    if isinstance(since, Token):
        return list(since.tables)
    if isinstance(since, (str, os.PathLike)):
        return files.read_rows(Path(since))
    allowed = (
        "the folder of an export, or a token of slip.export.token (a step is not enough: tables "
        "keep no step per row)"
    )
    raise invalid("since", since, "a delta", allowed)


def _require_same_tables(now: list[TableRows], before: list[TableRows], argument: str) -> None:
    here, there = ([(t.name, t.config.dim) for t in tables] for tables in (now, before))
    if here != there:
        raise invalid(argument, there, "a delta", f"of the same tables (name, dim): {here}")


def apply_delta(
    saved_model_path: str | os.PathLike[str],
    delta_path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
) -> None:
    """Brings a SavedModel up to a delta, without the op library: its rows, bit for bit.

    The graph stays as it is; the files of its variables are written anew, keys that are new or have
    left included. While it writes, it needs memory for all rows about four times.

    Args:
        saved_model_path: what `saved_model` or `apply_delta` wrote.
        delta_path: what `delta` wrote since that state.
        output: folder of the updated SavedModel, not there yet, or empty, as where a serving system
            expects a folder per version. None: in place; for a moment, between two renames, the
            folder is missing.

    Raises:
        ValueError: one of them is something else or damaged; the delta is of other tables or
            weights, or since another state than the SavedModel's. Nothing has changed then.
    """
    source, folder = Path(saved_model_path), Path(delta_path)
    target = source if output is None else files.require_new(output, "apply_delta")
    saved, found = files.read_manifest(source), files.read_manifest(folder, _MANIFEST)
    _require_fit(saved, found, folder)
    tables = []
    for index, (table, entry) in enumerate(
        zip(files.read_rows(source), found["tables"], strict=True)
    ):
        by = read_changes(folder / f"table_{index}.parquet", table.config.dim)
        updated = changed(table, by, entry["step"])
        if updated.digest != entry["digest"]:
            allowed = "an undamaged SavedModel and delta, whose rows give the digest in the delta"
            raise invalid("delta_path", str(folder), f"table {table.name!r}", allowed)
        tables.append(updated)
    weights = _read_weights(folder, found)
    manifest = files.manifest_of(tables, found.get("weights", saved["weights"]))
    files.write_whole(
        target, lambda new: files.write_updated(source, new, tables, weights, manifest)
    )


def _require_fit(saved: Mapping[str, Any], found: Mapping[str, Any], folder: Path) -> None:
    """Refuses a delta of other tables or weights, or since another state."""
    here, there = ([t["name"] for t in m["tables"]] for m in (saved, found))
    if here != there:
        raise invalid("delta_path", str(folder), f"tables {there}", f"a delta of tables {here}")
    for table, change in zip(saved["tables"], found["tables"], strict=True):
        if table["digest"] != change["since"]["digest"]:
            place = f"table {table['name']!r} as of step {table['step']}"
            allowed = (
                f"a delta since that state (this one is since step {change['since']['step']}: "
                "apply the deltas before it first)"
            )
            raise invalid("delta_path", str(folder), place, allowed)
    if "weights" in found:
        shapes, others = ([(w["shape"], w["dtype"]) for w in m["weights"]] for m in (saved, found))
        if shapes != others:
            raise invalid("delta_path", str(folder), f"weights {others}", f"weights {shapes}")


def _read_weights(folder: Path, manifest: Mapping[str, Any]) -> list[np.ndarray] | None:
    if "weights" not in manifest:
        return None
    try:
        with np.load(folder / _WEIGHTS, allow_pickle=False) as arrays:
            values = [arrays[str(index)] for index in range(len(manifest["weights"]))]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        allowed = f"a delta with a whole {_WEIGHTS}"
        raise invalid("delta_path", str(folder), str(error), allowed) from error
    for index, entry in enumerate(manifest["weights"]):
        if list(values[index].shape) != entry["shape"]:
            allowed = f"shape {entry['shape']} for weight {entry['name']!r}"
            raise invalid("delta_path", str(folder), f"shape {list(values[index].shape)}", allowed)
        if values[index].dtype.kind == "V":  # As which NumPy's files keep bfloat16.
            values[index] = values[index].view(tf.as_dtype(entry["dtype"]).as_numpy_dtype)
    return values
