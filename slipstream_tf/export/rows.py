"""Reads the rows of a model's tables and writes export files.

All ranks take part in reading rows. Rank 0 receives them as arrays. An export contains:

```text
FOLDER/saved_model.pb                  the graph, which deltas do not change
FOLDER/variables/variables.*           keys and rows of tables, weights of the other layers
FOLDER/assets.extra/slipstream_tf.json the manifest, which serving systems ignore
```
"""

import dataclasses
import hashlib
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.agreement import on_all_ranks
from slipstream_tf._utils.comm import SingleProcess
from slipstream_tf._utils.errors import invalid
from slipstream_tf._version import __version__
from slipstream_tf.config import Table
from slipstream_tf.export.serving import decoded, encoded
from slipstream_tf.tables.base import EmbeddingStore


@dataclasses.dataclass(frozen=True)
class ExportedTable:
    """Holds a copy of the keys and rows of a table.

    Attributes:
        name: Name of the table, or `"layer/table"` if multiple layers have a table of this name.
        config: Configuration of the table.
        keys: int64 [n], ascending.
        rows: float32 [n, dim].
        step: Number of updates of the table before the copy.
    """

    name: str
    config: Table
    keys: np.ndarray
    rows: np.ndarray
    step: int

    @property
    def digest(self) -> str:
        """Returns a hash of keys and rows as 32 hexadecimal digits."""
        hashed = hashlib.blake2b(digest_size=16)
        hashed.update(np.ascontiguousarray(self.keys, "<i8").data)
        hashed.update(np.ascontiguousarray(self.rows, "<f4").data)
        return hashed.hexdigest()


@dataclasses.dataclass(frozen=True)
class Token:
    """Holds a copy of a model's rows for a later `delta`.

    It takes `8 + 4 * dim` bytes per row on rank 0. It is empty on other ranks.

    Attributes:
        tables: Copies of the tables, in the order of the layers and their tables.
    """

    tables: tuple[ExportedTable, ...]


def token(model: Any, keys: Mapping[str, Any] | None = None) -> Token:
    """Copies the rows of a model's tables for a later `delta`.

    With multiple ranks, call this function on all ranks.

    Example:

    >>> layer = slip.keras.Embedding(10, 2, optimizer=slip.optimizers.SGD(0.1))
    >>> before = slip.export.token(layer)

    Args:
        model: A Keras model with an `EmbeddingCollection` at any depth, or an
            `EmbeddingCollection`.
        keys: The keys to copy, by table name; see `saved_model`.

    Returns:
        A token. Pass it to `delta` as `since`.

    Raises:
        ValueError: If the model has no `EmbeddingCollection`, or `keys` names an unknown table or
            contains keys that are not integers [n].
    """
    return Token(tuple(collect(model, keys) or ()))


def layers_of(model: Any) -> list[Any]:
    """Returns the layers with embedding tables in a model.

    If `model` is such a layer, returns this layer.

    Raises:
        ValueError: If there are no such layers.
    """
    allowed = "a slipstream_tf.keras.EmbeddingCollection, or a Keras model with such a layer"
    try:
        parts = _compat.layers_in(model)
    except TypeError as error:
        raise invalid("model", model, "an export", allowed) from error
    found = [part for part in parts if isinstance(getattr(part, "store", None), EmbeddingStore)]
    if not found:
        raise invalid("model", model, "an export", allowed)
    return found


def weights_of(model: Any) -> list[Any]:
    """Returns the weights of the other layers as a list of `tf.Variable`.

    Keras weights that only represent the rows of a table are not included.
    """
    return [
        _compat.tensorflow_variable(weight)
        for weight in model.weights
        if not getattr(weight, "stands_for_rows", False)
    ]


def table_names(layers: list[Any]) -> list[tuple[Any, Table, str]]:
    """Returns (layer, table, unique name) for all tables of the layers.

    The unique name is the table's name, or `"layer/table"` if multiple layers have a table of this
    name.

    Raises:
        ValueError: If two layers with the same name have tables with the same name.
    """
    listed = [(layer, table) for layer in layers for table in layer.tables]
    times = Counter(table.name for _, table in listed)
    named = [
        (layer, table, table.name if times[table.name] == 1 else f"{layer.name}/{table.name}")
        for layer, table in listed
    ]
    twice = [name for name, count in Counter(n for _, _, n in named).items() if count > 1]
    if twice:
        allowed = "different names of the layers and tables. Rename a layer or a table"
        raise invalid("model", twice, "tables of an export", allowed)
    return named


def collect(model: Any, keys: Mapping[str, Any] | None) -> list[ExportedTable] | None:
    """Applies deferred gradients, then copies the rows of a model's tables.

    With multiple ranks, call this function on all ranks. Rows of sharded tables are sent to rank 0,
    which must have enough memory for them.

    Args:
        model: A model or layer.
        keys: The keys to copy, as a mapping from table name to int64 [n]. Tables that are not named
            are copied completely. None copies all tables completely.

    Returns:
        The tables in the order of the layers and their tables, or None on ranks other than 0.

    Raises:
        ValueError: If the model has no `EmbeddingCollection`, or `keys` names an unknown table or
            contains keys that are not integers [n].
    """
    named = table_names(layers_of(model))
    wanted = {name: _wanted(name, some) for name, some in (keys or {}).items()}
    unknown = sorted(set(wanted) - {name for _, _, name in named})
    if unknown:
        allowed = "names of the model's tables: " + ", ".join(repr(name) for _, _, name in named)
        raise invalid("keys", unknown, "an export", allowed)
    for layer in layers_of(model):
        layer.store.flush()
    collected = []
    for index, (layer, config, name) in enumerate(named):
        comm = layer.store.comm
        is_alone = comm is None or comm.size == 1
        is_spread = not is_alone and layer.store.is_spread
        if not is_alone and not is_spread and comm.rank > 0:
            continue  # Tables are replicated: rank 0 has the same rows.
        part = _read(layer.store, config, name, wanted.get(name))
        if is_spread:
            part = _sent_to_first(comm, part, f"slipstream_export.{index}")
        if is_alone or comm.rank == 0:
            collected.append(part)
    return collected if collected else None


def _wanted(table: str, keys: Any) -> np.ndarray:
    keys = np.asarray(keys)
    if keys.ndim != 1 or (keys.size and keys.dtype.kind not in "iu"):
        value = f"{keys.dtype} array of shape {list(keys.shape)}"
        allowed = "an array of integers of shape [n]"
        raise invalid("keys", value, f"table {table!r} of an export", allowed)
    return np.unique(keys.astype(np.int64))


def _read(store: Any, config: Table, name: str, wanted: np.ndarray | None) -> ExportedTable:
    contents = store.export_table(config.name)
    keys, rows = np.asarray(contents["keys"]), np.asarray(contents["rows"])
    if wanted is not None:
        is_wanted = np.isin(keys, wanted, assume_unique=True)
        keys, rows = keys[is_wanted], rows[is_wanted]
    if config.storage.dtype != "float32":
        # `export_table` returns rows at the precision of updates: slots may store extra bits of a
        # row. Serving must return the same values as lookups.
        rows = store.gather(config.name, keys)[0].numpy()
    return ExportedTable(name, config, keys, rows, int(contents["steps"][0]))


def _sent_to_first(comm: Any, part: ExportedTable, name: str) -> ExportedTable:
    splits = tf.constant([part.keys.size] + [0] * (comm.size - 1), tf.int32)
    keys, _ = comm.exchange(tf.constant(part.keys), splits, "keys", f"{name}.keys")
    rows, _ = comm.exchange(tf.constant(part.rows), splits, "rows", f"{name}.rows")
    order = np.argsort(keys.numpy(), kind="stable")
    return dataclasses.replace(part, keys=keys.numpy()[order], rows=rows.numpy()[order])


def on_rank_zero(model: Any, work: Callable[[], None], what: str) -> None:
    """Runs a function on rank 0 while the other ranks wait.

    Args:
        model: A model or layer. Its stores determine the ranks.
        work: The function to run on rank 0.
        what: Description such as `"write PATH"`, for the error on the other ranks.

    Raises:
        RuntimeError: On other ranks, if rank 0 failed. Rank 0 raises the original error.
    """
    comms = [layer.store.comm for layer in layers_of(model)]
    comm = max(comms, key=lambda c: 1 if c is None else c.size) or SingleProcess()
    own: Callable[[], None] = work if comm.rank == 0 else lambda: None
    on_all_ranks(comm, own, "slipstream_export.done", what)


FORMAT = 1
_MANIFEST = Path("assets.extra") / "slipstream_tf.json"
_VARIABLES = Path("variables") / "variables"
# TensorFlow appends it to the object path of each variable, for example "tables/0/keys".
_VALUE = ".ATTRIBUTES/VARIABLE_VALUE"


def table_entry(table: ExportedTable, rows_dtype: str | None = None) -> dict[str, Any]:
    """Returns the manifest entry of a table.

    Args:
        table: The exported rows.
        rows_dtype: Dtype of the rows in the SavedModel. None means the table's dtype.
    """
    return {
        "rows_dtype": rows_dtype,
        "name": table.name,
        "config": table.config.get_config(),
        "rows": int(table.keys.size),
        "step": table.step,
        "digest": table.digest,
    }


def manifest_of(
    tables: list[dict[str, Any]], weights: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """Returns the manifest of a SavedModel or a delta.

    Args:
        tables: Entries from `table_entry`.
        weights: Entries from `weight_entries`. None for the delta of a layer, which has no weights.
    """
    manifest = {"format": FORMAT, "slipstream_tf": __version__, "tables": tables}
    return manifest if weights is None else {**manifest, "weights": weights}


def weight_entries(weights: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns the manifest entries of a model's other weights, in order."""
    return [
        {"name": w.name, "shape": w.shape.as_list(), "dtype": w.dtype.base_dtype.name}
        for w in weights
    ]


def write_manifest(path: Path, manifest: Mapping[str, Any], file: Path = _MANIFEST) -> None:
    """Writes the manifest of an export as indented JSON.

    Args:
        path: Folder of the export.
        manifest: The manifest.
        file: Path of the manifest file, relative to the folder.
    """
    (path / file).parent.mkdir(parents=True, exist_ok=True)
    (path / file).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def read_manifest(path: Path, file: Path = _MANIFEST, argument: str = "path") -> dict[str, Any]:
    """Reads the manifest of an export.

    Args:
        path: Folder of a SavedModel or a delta.
        file: Path of the manifest, relative to the folder.
        argument: Name of the argument that gave the path, for errors.

    Returns:
        The manifest, as from `manifest_of`.

    Raises:
        ValueError: If the manifest is missing, unreadable or has another format version.
    """
    allowed = "a folder that slipstream_tf.export wrote"
    try:
        manifest = json.loads((path / file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        place = f"an export without a readable {file} ({error})"
        raise invalid(argument, str(path), place, allowed) from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        allowed = f"format {FORMAT}. Export the model again with this version of slipstream_tf"
        raise invalid(argument, str(path), f"an export of format {found!r}", allowed)
    return manifest


def read_rows(path: Path) -> list[ExportedTable]:
    """Reads a SavedModel's keys and rows without loading its graph.

    Returns:
        The tables in the order of the manifest. Rows of a narrower dtype are converted to float32.

    Raises:
        ValueError: If `saved_model` did not write the folder.
    """
    manifest = read_manifest(path)
    reader = tf.train.load_checkpoint(str(path / _VARIABLES))
    found = []
    for index, entry in enumerate(manifest["tables"]):
        scales = None
        if entry.get("rows_dtype") == "int8":
            scales = reader.get_tensor(_name("tables", index, "scales"))
        rows = decoded(reader.get_tensor(_name("tables", index, "rows")), scales)
        keys = reader.get_tensor(_name("tables", index, "keys"))
        config = Table.from_config(entry["config"])
        found.append(ExportedTable(entry["name"], config, keys, rows, entry["step"]))
    return found


def write_updated(
    source: Path,
    target: Path,
    tables: list[ExportedTable],
    weights: list[np.ndarray] | None,
    manifest: Mapping[str, Any],
) -> None:
    """Copies a SavedModel and replaces its rows and weights.

    Args:
        source: Folder of the SavedModel.
        target: Folder of the copy. It must not exist.
        tables: All tables, in the order of the manifest.
        weights: New values of the other layers' weights, in the order of the manifest. None keeps
            the values of the source.
        manifest: Manifest of the copy.
    """
    # The fingerprint would not match the replaced variables. Loaders accept a SavedModel without a
    # fingerprint.
    left_out = shutil.ignore_patterns("variables", "fingerprint.pb", _MANIFEST.name)
    shutil.copytree(source, target, ignore=left_out)
    reader = tf.train.load_checkpoint(str(source / _VARIABLES))
    values: dict[str, Any] = {}
    for index, table in enumerate(tables):
        values[_name("tables", index, "keys")] = table.keys
        values[_name("tables", index, "rows")] = encoded(table.config, table.rows, None)["rows"]
    for index, weight in enumerate(weights or ()):
        values[_name("weights", index)] = weight
    dtypes = reader.get_variable_to_dtype_map()
    names = sorted(dtypes)
    tensors = [
        tf.constant(values[n] if n in values else reader.get_tensor(n), dtypes[n]) for n in names
    ]
    (target / _VARIABLES).parent.mkdir()
    prefix, slices = str(target / _VARIABLES), [""] * len(names)
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=slices, tensors=tensors)
    write_manifest(target, manifest)


def _name(*parts: Any) -> str:
    return "/".join([*map(str, parts), _VALUE])


def require_new(path: str | os.PathLike[str], what: str, argument: str = "path") -> Path:
    """Returns the path if a new folder can be written there.

    Args:
        path: The path to check.
        what: Name of the calling function, for the error.
        argument: Name of the argument that gave the path, for the error.

    Raises:
        ValueError: If the path is a file or a folder that is not empty.
    """
    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        allowed = "a new or empty folder"
        raise invalid(argument, str(path), what, allowed)
    return target


_being_written: set[Path] = set()
_set_lock = threading.Lock()


def write_whole(target: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder under a temporary name, then renames it.

    Args:
        target: Path of the folder. An existing folder is replaced. The path does not exist for a
            moment between the two renames.
        write: Writes the folder at the given path, which does not exist yet.

    Raises:
        ValueError: If another thread is writing the folder.
    """
    path = target.absolute()
    with _set_lock:
        if path in _being_written:
            allowed = "a folder that no other thread is writing"
            raise invalid("path", str(target), "an export", allowed)
        _being_written.add(path)
    try:
        _write_and_rename(target, write)
    finally:
        _being_written.discard(path)


def _write_and_rename(target: Path, write: Callable[[Path], None]) -> None:
    staging, former = (target.with_name(f".{target.name}.{part}") for part in ("new", "old"))
    for left in (staging, former):
        if left.exists():
            shutil.rmtree(left)
    staging.parent.mkdir(parents=True, exist_ok=True)
    write(staging)
    if target.exists():
        os.rename(target, former)
    os.rename(staging, target)
    if former.exists():
        shutil.rmtree(former)
