"""Reads the folders that `slipstream-prepare` writes.

A folder contains Parquet shards and a manifest, which describes their columns.

Labels, dense values, keys, and the train and test parts are the same as from the reader of the
original files. Key columns contain ids: hashes of text, or the integers of the original files,
where uint64 has the int64 of the same 64 bits. Missing values are null.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from slipstream_tf._utils import disk
from slipstream_tf._utils.errors import require_choice, shown
from slipstream_tf.data.dense_statistics import merged_statistics
from slipstream_tf.data.readers.base import PART_PERIOD, PART_RUN, is_in_part
from slipstream_tf.data.readers.parquet import ParquetReader
from slipstream_tf.data.spec import PARTS, DenseScale

MANIFEST = "prepared.json"
FORMAT_VERSION = 3
KEY_TYPES = ("text", "int64", "uint64")
"""Types of key columns in the original files."""

_FILE_KINDS: dict[str, Any] = {"file": str, "inputs": int, "clicks": (int, float)}
_NONE = type(None)
_DENSE_KINDS: dict[str, Any] = {
    **dict.fromkeys(("count", "missing"), int),
    **dict.fromkeys(("mean", "std", "min", "max"), (int, float, _NONE)),
    "is_like_ids": bool,
}
# Name -> allowed types of its value, or a dictionary for a nested object.
_SHARD_KINDS: dict[str, Any] = {
    **{part: (dict, _NONE) for part in PARTS},
    "dense": dict,
    "bad_lines": int,
    "bad_reasons": dict,
    "first_bad_line": (str, _NONE),
    "end": dict.fromkeys(("file", "offset", "row", "id"), int),
}
_COLUMNS = {
    **{"label": str, "dense": list, "keys": list, "lists": list, "key_types": list},
    **{"tables": (list, _NONE), "standardize": (list, _NONE)},
}
_SCHEMA_KINDS: dict[str, Any] = {
    "keys": {"column": str, "kind": str, "separator": (str, _NONE)},
    "dense": {"column": str, "transform": str},
}
_KINDS: dict[str, Any] = {
    **{
        "name": str,
        "columns": _COLUMNS,
        "source": dict,
        "limits": (dict, _NONE),
        "is_complete": bool,
        "shards": list,
    }
}


def is_prepared(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a folder of `slipstream-prepare`, complete or not."""
    return os.path.isfile(os.path.join(os.fspath(path), MANIFEST))


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the manifest of prepared data.

    Args:
        folder: Folder of the data.

    Returns:
        The manifest. `"shards"` lists the complete shards.

    Raises:
        OSError: If the manifest cannot be read.
        ValueError: If the manifest is damaged or has another format version.
    """
    path = os.path.join(os.fspath(folder), MANIFEST)
    manifest = disk.read_json(path)
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: `format_version` is {shown(version)}; expected {FORMAT_VERSION}. "
            "Run slipstream-prepare --overwrite."
        )
    if (problem := _problem(manifest)) is not None:
        raise ValueError(
            f"{path}: the manifest is damaged: {problem}. Run slipstream-prepare --overwrite."
        )
    return manifest


def tables_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Returns the table of each field, by field."""
    columns = manifest["columns"]
    return dict(zip(columns["keys"], columns.get("tables") or columns["keys"], strict=True))


def _problem(manifest: dict[str, Any]) -> str | None:
    """Returns the first error in a manifest, or None.

    Paths of shards must be inside the folder, so that a manifest cannot name other files.
    """
    if (wrong := _wrong(manifest, _KINDS)) is not None:
        return wrong
    columns = manifest["columns"]
    for name in ("dense", "keys", "lists"):
        if not all(isinstance(column, str) for column in columns[name]):
            return f"`columns`: `{name}` is {shown(columns[name])}"
    types, has_schema = columns["key_types"], "schema" in manifest["source"]
    count = len(columns["keys"]) if has_schema else 0
    if len(types) != count or not all(t in KEY_TYPES for t in types):
        return f"`columns`: `key_types` is {shown(types)}"
    if has_schema and (wrong := _wrong_schema(manifest["source"]["schema"])) is not None:
        return f"`source`: `schema`: {wrong}"
    tables = columns.get("tables") or []
    is_text = all(isinstance(table, str) for table in tables)
    if not is_text or len(tables) not in (0, len(columns["keys"])):
        return f"`columns`: `tables` is {shown(tables)}"
    for number, shard in enumerate(manifest["shards"]):
        place = f"`shards[{number}]`"
        if (wrong := _wrong(shard, _SHARD_KINDS)) is not None:
            return f"{place}: {wrong}"
        end = shard["end"]
        if len(end) != len(_SHARD_KINDS["end"]) or min(end.values()) < 0:
            return f"{place}: `end` is {shown(end)}"
        for name in ("bad_reasons", "labels"):
            found = shard.get(name, {})
            if not isinstance(found, dict) or not all(type(n) is int for n in found.values()):
                return f"{place}: `{name}` is {shown(found)}"
        for name in columns["dense"]:
            found = shard["dense"].get(name)
            if (wrong := _wrong(found, _DENSE_KINDS)) is not None:
                return f"{place}: `dense`: {name!r}: {wrong}"
            lacks_moments = found["count"] and None in found.values()
            if len(found) != len(_DENSE_KINDS) or lacks_moments:
                return f"{place}: `dense`: {name!r} is {shown(found)}"
        for part in PARTS:
            if shard[part] is None:
                continue
            if (wrong := _wrong(shard[part], _FILE_KINDS)) is not None:
                return f"{place}: `{part}`: {wrong}"
            file = shard[part]["file"]
            if not re.fullmatch(rf"{part}/[0-9]+\.parquet", file) or shard[part]["inputs"] < 0:
                return f"{place}: `{part}` is {shown(shard[part])}"
    return None


def _wrong_schema(schema: Any) -> str | None:
    """Returns the first error in the parts of a schema that exported models need, or None."""
    lists = dict.fromkeys((*_SCHEMA_KINDS, "missing"), list)
    if (wrong := _wrong(schema, lists)) is not None:
        return wrong
    if not all(isinstance(text, str) for text in schema["missing"]):
        return f"`missing` is {shown(schema['missing'])}"
    for name, kinds in _SCHEMA_KINDS.items():
        for number, column in enumerate(schema[name]):
            if (wrong := _wrong(column, kinds)) is not None:
                return f"`{name}[{number}]`: {wrong}"
    return None


def _wrong(values: Any, kinds: Mapping[str, Any]) -> str | None:
    if not isinstance(values, dict):
        return f"the value is {shown(values)}; expected an object with {', '.join(kinds)}"
    for name, kind in kinds.items():
        value = values.get(name)
        if isinstance(kind, dict):
            if (wrong := _wrong(value, kind)) is not None:
                return f"`{name}`: {wrong}"
        elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            return f"`{name}` is {shown(value)}"
    return None


def _scales(manifest: Mapping[str, Any]) -> tuple[DenseScale, ...]:
    columns = manifest["columns"]
    if columns["standardize"] is None:
        return ()
    statistics = merged_statistics(manifest["shards"], columns["dense"])
    scales = []
    for name, found in statistics.items():
        scale = DenseScale(has_missing=found.missing > 0)
        if name in columns["standardize"] and found.mean is not None:
            # The std of a constant column is 0.
            scale = dataclasses.replace(scale, mean=found.mean, std=found.std or 1.0)
        scales.append(scale)
    return tuple(scales)


class PreparedReader(ParquetReader):
    """Reads parts of prepared data.

    The shards are read in order, or in another order in each pass.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        batch_size: int,
        part: str | None = None,
        hold_out: bool = False,
        shuffle_seed: int | None = None,
        **options: Any,
    ):
        """Reads the manifest.

        Args:
            folder: Folder that `slipstream-prepare` wrote.
            batch_size: Number of examples in a batch.
            part: `"train"`, `"valid"`, `"test"`, or None for all parts in this order. If the folder
                has no validation part, `"valid"` is one of ten runs of the training part's rows, or
                every tenth row if there are fewer than 1,000. These are other examples than in the
                validation part of the original files.
            hold_out: Whether to exclude the examples of `"valid"` from `"train"`. A validation part
                of the folder is never in `"train"`.
            shuffle_seed: Seed of the shard order. Pass e of this reader, from 0, reads the shards
                in the order that `(seed, e)` determines. The order within a shard does not change.
                None keeps the order of the original files.
            **options: Options of `ParquetReader`: `strict`.

        Raises:
            OSError: If the manifest or a shard cannot be read.
            ValueError: If the preparation is not complete, the part has no examples, or another
                argument is out of range.
        """
        name = os.fspath(folder)
        if part is not None:
            require_choice("part", part, PARTS, "PreparedReader")
        manifest = read_manifest(name)
        if not manifest["is_complete"]:
            raise ValueError(
                f"{name}: the preparation is incomplete. Run slipstream-prepare again with the "
                "same flags to complete it."
            )
        parts, chosen = PARTS if part is None else (part,), None
        if not any(shard["valid"] for shard in manifest["shards"]) and part in ("train", "valid"):
            parts = ("train",)
            # Select every tenth run of the training part's rows, as `is_in_part` does for "test".
            chosen = "test" if part == "valid" else ("train" if hold_out else None)
        shards = [shard[p] for p in parts for shard in manifest["shards"] if shard[p] is not None]
        if not shards:
            where = "data" if part is None else f"part {part!r}"
            raise ValueError(_without_examples(name, where))
        columns = manifest["columns"]
        super().__init__(
            [os.path.join(name, *shard["file"].split("/")) for shard in shards],
            batch_size,
            label=columns["label"],
            keys=columns["keys"],
            dense=columns["dense"],
            shuffle_seed=shuffle_seed,
            part=chosen,
            **options,
        )
        num_inputs = sum(shard["inputs"] for shard in shards)
        if chosen is not None:
            self._part_run = PART_RUN if num_inputs >= PART_RUN * PART_PERIOD else 1
            # The pattern of the parts repeats after each period.
            period = self._part_run * PART_PERIOD
            whole, rest = divmod(num_inputs, period)
            of_period, of_rest = (
                int(is_in_part(0, count, chosen, run=self._part_run).sum())
                for count in (period, rest)
            )
            num_inputs = whole * of_period + of_rest
        if not num_inputs:
            raise ValueError(_without_examples(name, f"part {part!r}"))
        self.spec = dataclasses.replace(
            self.spec,
            name=manifest["name"],
            num_examples=num_inputs,
            tables=tuple(tables_of(manifest).values()),
            scales=_scales(manifest),
        )


def _without_examples(folder: str, what: str) -> str:
    return (
        f"{folder}: the {what} contains no examples. Prepare at least ten lines, or choose the "
        "parts with --split, --valid or --test of slipstream-prepare."
    )
