"""The files of an export: a SavedModel's manifest and variables, read and written.

FOLDER/saved_model.pb                  the graph; never changed
FOLDER/variables/variables.*           keys and rows of tables, weights of the other layers
FOLDER/assets.extra/slipstream_tf.json what is in there; serving systems pass it over
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf._version import __version__
from slipstream_tf.config import Table
from slipstream_tf.export.rows import TableRows
from slipstream_tf.export.serving import decoded, encoded

FORMAT = 1
_MANIFEST = Path("assets.extra") / "slipstream_tf.json"
_VARIABLES = Path("variables") / "variables"
# Of the object graph's paths that TensorFlow names a SavedModel's variables by.
_VALUE = ".ATTRIBUTES/VARIABLE_VALUE"


def table_entry(table: TableRows, rows_dtype: str | None = None) -> dict[str, Any]:
    """Returns what a manifest says of a table, served in a dtype or as the table keeps its rows."""
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
    """Returns the manifest of a SavedModel or a delta; None: of other weights nothing is said."""
    manifest = {"format": FORMAT, "slipstream_tf": __version__, "tables": tables}
    return manifest if weights is None else {**manifest, "weights": weights}


def weight_entries(weights: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns what a manifest says of a model's other weights, tf.Variables in order."""
    return [
        {"name": w.name, "shape": w.shape.as_list(), "dtype": w.dtype.base_dtype.name}
        for w in weights
    ]


def write_manifest(path: Path, manifest: Mapping[str, Any], file: Path = _MANIFEST) -> None:
    """Writes the manifest of an export: JSON that people can read, too."""
    (path / file).parent.mkdir(parents=True, exist_ok=True)
    (path / file).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def read_manifest(path: Path, file: Path = _MANIFEST) -> dict[str, Any]:
    """Reads the manifest of an export.

    Args:
        path: folder of a SavedModel, or of a delta.
        file: of the manifest, in it.

    Raises:
        ValueError: there is none, it cannot be read, or is of another format.
    """
    allowed = "a folder that slipstream_tf.export wrote"
    try:
        manifest = json.loads((path / file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise invalid("path", str(path), f"an export without {file} ({error})", allowed) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise invalid("path", str(path), f"an export of a format other than {FORMAT}", allowed)
    return manifest


def read_rows(path: Path) -> list[TableRows]:
    """Reads keys and rows of a SavedModel's tables, without loading its graph.

    Raises:
        ValueError: it was not written by `saved_model`.
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
        found.append(TableRows(entry["name"], config, keys, rows, entry["step"]))
    return found


def write_updated(
    source: Path,
    target: Path,
    tables: list[TableRows],
    weights: list[np.ndarray] | None,
    manifest: Mapping[str, Any],
) -> None:
    """Copies a SavedModel with other rows and weights.

    Args:
        source: the SavedModel.
        target: folder of the copy, which is not there yet.
        tables: all tables, in the manifest's order.
        weights: all weights, in order; None: as they are.
        manifest: of the copy.
    """
    # The fingerprint is of the variables that are replaced; loaders do without.
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
    tf.raw_ops.SaveV2(
        prefix=str(target / _VARIABLES),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=tensors,
    )
    write_manifest(target, manifest)


def _name(*parts: Any) -> str:
    return "/".join([*map(str, parts), _VALUE])


def require_new(path: str | os.PathLike[str], what: str) -> Path:
    """Returns the path of a folder to be written.

    Raises:
        ValueError: something is there already.
    """
    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        allowed = "a folder that is not there yet, or is empty"
        raise invalid("path", str(path), what, allowed)
    return target


def write_whole(target: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder under another name, and gives it its own when it is whole.

    Args:
        target: the folder; a former one is replaced, and may be missing for a moment.
        write: writes the folder it is given, which is not there yet.
    """
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
