"""Data that `slipstream-prepare` wrote: a folder of Parquet shards that says what its columns are.

Labels, numbers, keys, parts and the inputs' numbers are those that the reader of the original files
gives.
"""

from __future__ import annotations

import json
import os
from typing import Any

from slipstream_tf.errors import require_choice
from slipstream_tf.inputs.readers.parquet import ParquetReader
from slipstream_tf.inputs.spec import PARTS, DataSpec

MANIFEST = "prepared.json"
FORMAT_VERSION = 1


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
    with open(path, encoding="utf-8") as file:
        try:
            manifest = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version {version!r}. Allowed: {FORMAT_VERSION}; prepare the data anew."
        )
    return manifest


class PreparedReader(ParquetReader):
    """Reads one part, or both, of prepared data; shards in order, or shuffled in every pass."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        batch_size: int,
        part: str | None = None,
        shuffle_seed: int | None = None,
        **options: Any,
    ):
        """Reads the manifest.

        Args:
            folder: that `slipstream-prepare` wrote.
            batch_size: inputs of a batch.
            part: "train", "test" or None for both, the training part first.
            shuffle_seed: None keeps the order of the original files. With a seed, pass e (counted
                over the passes of this reader) reads the shards in the order that (seed, e) gives;
                within a shard the order stays.
            **options: of `ParquetReader`: strict, drop_remainder, max_inputs, ids. With ids,
                features["id"] has the numbers that the reader of the original files gives.

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
        parts = PARTS if part is None else (part,)
        shards = [shard[p] for p in parts for shard in manifest["shards"] if shard[p] is not None]
        if not shards:
            raise ValueError(f"{name}: no inputs in the part {part or 'train or test'}.")
        columns = manifest["columns"]
        self._name = manifest["name"]
        self._num_inputs = sum(shard["inputs"] for shard in shards)
        super().__init__(
            [os.path.join(name, *shard["file"].split("/")) for shard in shards],
            batch_size,
            label=columns["label"],
            keys=columns["keys"],
            dense=columns["dense"],
            id_column=columns["id"],
            shuffle_seed=shuffle_seed,
            **options,
        )

    @property
    def spec(self) -> DataSpec:
        """What the batches hold."""
        return DataSpec(self._name, self._keys, len(self._dense), self._num_inputs)
