"""Data that `slipstream-prepare` wrote: a folder of Parquet shards that says what its columns are.

Labels, numbers, keys and parts are those that the reader of the original files gives.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream_tf._utils import disk
from slipstream_tf._utils.errors import invalid, require_choice
from slipstream_tf.data.readers.arrays import ArrayReader
from slipstream_tf.data.readers.base import PART_PERIOD, PART_RUN, Rows, is_in_part
from slipstream_tf.data.readers.parquet import ROWS_AT_ONCE, ParquetReader
from slipstream_tf.data.spec import PARTS

MANIFEST = "prepared.json"
FORMAT_VERSION = 2

_FILE_KINDS: dict[str, Any] = {"file": str, "inputs": int, "clicks": (int, float)}
_NONE = type(None)
# Name -> the types that its value may have, or the names in it.
_SHARD_KINDS: dict[str, Any] = {
    **{part: (dict, _NONE) for part in PARTS},
    "bad_lines": int,
    "first_bad_line": (str, _NONE),
    "end": dict.fromkeys(("file", "offset", "row", "id"), int),
}
_COLUMNS = {"label": str, "dense": list, "keys": list, "lists": list}
_KINDS: dict[str, Any] = {
    **{"name": str, "columns": _COLUMNS, "source": dict, "is_complete": bool, "shards": list}
}


def is_prepared(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder that `slipstream-prepare` wrote, complete or not."""
    return os.path.isfile(os.path.join(os.fspath(path), MANIFEST))


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the manifest of prepared data.

    Args:
        folder: of the data.

    Returns:
        The manifest; "shards" lists the shards that are whole.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such manifest, or of another version of this package.
    """
    path = os.path.join(os.fspath(folder), MANIFEST)
    manifest = disk.read_json(path)
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version {version!r}. Allowed: {FORMAT_VERSION}; prepare the data anew."
        )
    if (problem := _problem(manifest)) is not None:
        raise ValueError(f"{path}: damaged: {problem}. Prepare the data anew.")
    return manifest


def _problem(manifest: dict[str, Any]) -> str | None:
    """What is wrong with a manifest, or None. A shard's file is one beside it, whatever it says."""
    if (wrong := _wrong(manifest, _KINDS)) is not None:
        return wrong
    columns = manifest["columns"]
    for name in ("dense", "keys", "lists"):
        if not all(isinstance(column, str) for column in columns[name]):
            return f"`columns`: `{name}` is {columns[name]!r}"
    for number, shard in enumerate(manifest["shards"]):
        place = f"`shards`, {number}"
        if (wrong := _wrong(shard, _SHARD_KINDS)) is not None:
            return f"{place}: {wrong}"
        end = shard["end"]
        if len(end) != len(_SHARD_KINDS["end"]) or min(end.values()) < 0:
            return f"{place}: `end` is {end!r}"
        for part in PARTS:
            if shard[part] is None:
                continue
            if (wrong := _wrong(shard[part], _FILE_KINDS)) is not None:
                return f"{place}: `{part}`: {wrong}"
            file = shard[part]["file"]
            if not re.fullmatch(rf"{part}/[0-9]+\.parquet", file) or shard[part]["inputs"] < 0:
                return f"{place}: `{part}` is {shard[part]!r}"
    return None


def _wrong(values: Any, kinds: Mapping[str, Any]) -> str | None:
    if not isinstance(values, dict):
        return f"it is {values!r}, not an object with {', '.join(kinds)}"
    for name, kind in kinds.items():
        value = values.get(name)
        if isinstance(kind, dict):
            if (wrong := _wrong(value, kind)) is not None:
                return f"`{name}`: {wrong}"
        elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            return f"`{name}` is {value!r}"
    return None


class PreparedReader(ParquetReader):
    """Reads one part, or both, of prepared data; shards in order, or shuffled in every pass."""

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
            folder: that `slipstream-prepare` wrote.
            batch_size: inputs of a batch.
            part: "train", "valid", "test" or None for all, the training part first. If the folder
                has no validation part, "valid" is one in ten runs of the training part's rows:
                other inputs than the validation part of the original files.
            hold_out: whether "valid" is left out of "train". A validation part of the folder is
                never in "train".
            shuffle_seed: None keeps the order of the original files. With a seed, pass e (counted
                over the passes of this reader) reads the shards in the order that (seed, e) gives;
                within a shard the order stays.
            **options: of `ParquetReader`: strict.

        Raises:
            OSError: the manifest or a shard cannot be read.
            ValueError: the preparation is not complete, the part has no inputs, or another
                argument is out of its range.
        """
        name = os.fspath(folder)
        if part is not None:
            require_choice("part", part, PARTS, "PreparedReader")
        manifest = read_manifest(name)
        if not manifest["is_complete"]:
            raise ValueError(
                f"{name}: its preparation was interrupted. Run the same slipstream-prepare again: "
                "it goes on where it stopped."
            )
        parts, chosen = PARTS if part is None else (part,), None
        if not any(shard["valid"] for shard in manifest["shards"]) and part in ("train", "valid"):
            parts = ("train",)
            # Of rows of the training part as of those of any other file.
            chosen = "test" if part == "valid" else ("train" if hold_out else None)
        shards = [shard[p] for p in parts for shard in manifest["shards"] if shard[p] is not None]
        if not shards:
            raise ValueError(f"{name}: no inputs in the part {part or ' or '.join(PARTS)}.")
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
            # The parts repeat themselves.
            whole, rest = divmod(num_inputs, PART_RUN * PART_PERIOD)
            of_period, of_rest = (
                int(is_in_part(0, count, chosen).sum()) for count in (PART_RUN * PART_PERIOD, rest)
            )
            num_inputs = whole * of_period + of_rest
        if not num_inputs:
            raise ValueError(f"{name}: no inputs in the part {part}.")
        self.spec = dataclasses.replace(self.spec, name=manifest["name"], num_examples=num_inputs)

    def in_memory(self, shuffle_seed: int) -> ArrayReader:
        """Reads all examples, and returns a reader that shuffles them in every pass.

        Args:
            shuffle_seed: of `ArrayReader`.

        Raises:
            ValueError: a field is a list, or a shard is damaged.
        """
        if self._lists:
            allowed = "data whose fields are no lists"
            raise invalid("shuffle", "examples", f"the lists {sorted(self._lists)}", allowed)
        blocks = []
        for features, label in self.in_batches_of(ROWS_AT_ONCE)._batches():
            dense = features.get("dense", np.empty((len(label), 0), np.float32))
            blocks.append(Rows(label, dense, features["keys"]))
        return ArrayReader(self.spec, Rows.join(blocks), self._batch_size, shuffle_seed)
