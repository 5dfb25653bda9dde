"""Writes the data of time_to_quality.py to files that every system can read.

systems/task.py describes the format. Keys are numbered from 0 in each field, as tables of fixed
size require. The numbering includes keys that occur only in the test part.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import common
import numpy as np

from slipstream_tf.data.readers import registry
from slipstream_tf.data.readers.prepared import PreparedReader
from slipstream_tf.data.spec import Reader

_PARTS = ("train", "valid", "test")
_READ_AT_ONCE = 65536


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set and its model.

    Attributes:
        reported: A description.
        data: The name of a data set to prepare, or of generated data.
        options: Options of the program that prepares the data.
        epochs: The number of passes.
        model: "dim", "bottom", "top" and "batch".
        skip_fraction: The fraction of examples that skipping systems drop.
    """

    reported: str
    data: str
    epochs: int
    model: Mapping[str, Any]
    skip_fraction: float
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_CRITEO = {"dim": 16, "bottom": [512, 256, 64, 16], "top": [512, 256, 1], "batch": 2048}
_GLOBO = {"dim": 32, "bottom": [], "top": [128, 64, 1], "batch": 1024}
_FRAPPE = {"dim": 16, "bottom": [], "top": [400, 400, 1], "batch": 1024}
DATA: Mapping[str, Data] = {
    "criteo": Data("Criteo's shape, 2M", "generated:2000000:100000:0.25", 1, _CRITEO, 0.3),
    "criteo_2": Data(
        "Criteo's shape, 2M, 2% clicks", "generated:2000000:100000:0.02", 1, _CRITEO, 0.85
    ),
    "criteo_20M": Data("Criteo's shape, 20M", "generated:20000000:100000:0.25", 1, _CRITEO, 0.3),
    "globo_9": Data(
        "globo, 9 negatives",
        "globo",
        1,
        _GLOBO,
        0.5,
        {"negatives": 9, "clicks": 200_000, "hold_out": True},
    ),
    "globo_49": Data(
        "globo, 49 negatives",
        "globo",
        1,
        _GLOBO,
        0.85,
        {"negatives": 49, "clicks": 100_000, "hold_out": True},
    ),
    "frappe": Data("Frappe", "frappe", 10, _FRAPPE, 0.5),
}


def files_of(
    name: str, folder: Path, seeds: Iterable[int], examples: int | None
) -> dict[int, dict[str, Any]]:
    """Writes missing files; returns the task settings of each seed.

    Args:
        name: A name in `DATA`.
        folder: The folder of the files.
        seeds: The seeds of the order of the training part.
        examples: The maximum number of training examples. None uses all. For generated data, each
            other part has a tenth as many.
    """
    data, files = DATA[name], folder / "data"
    files.mkdir(parents=True, exist_ok=True)
    reported, trains = files / "told.json", {seed: files / f"train-{seed}.bin" for seed in seeds}
    missing = {seed: train for seed, train in trains.items() if not train.exists()}
    if not reported.exists() or missing:
        parts = {part: _read(data, part, examples) for part in _PARTS}
        cardinalities = _number(parts)
        for part in _PARTS[1:]:
            _rows(parts.pop(part)).tofile(files / f"{part}.bin")
        numbers, rows = parts["train"]["dense"].shape[1], _rows(parts.pop("train"))
        for seed, train in missing.items():
            _write_train(rows, train, data, seed)
        description = {"cardinalities": cardinalities, "numbers": numbers, "examples": len(rows)}
        reported.write_text(json.dumps(description), encoding="utf-8")
    description = json.loads(reported.read_text(encoding="utf-8"))
    steps = data.epochs * description.pop("examples") // data.model["batch"]
    shared = {
        "valid": str((files / "valid.bin").resolve()),
        "test": str((files / "test.bin").resolve()), **description, **data.model, "steps": steps,
        "skip_fraction": data.skip_fraction,
    }  # fmt: skip
    return {seed: {"train": str(train.resolve()), **shared} for seed, train in trains.items()}


def _read(data: Data, part: str, maximum: int | None) -> dict[str, np.ndarray]:
    """Reads a part of the data set.

    Returns:
        "keys" int64 [n, fields], "dense" float32 [n, numbers] and "label" float32 [n].
    """
    if data.data in common.DATASETS:
        folder = common.prepared(data.data, **data.options)["data"]
        found_part = PreparedReader(folder, _READ_AT_ONCE, part)
        reader: Reader = found_part.in_memory(0) if part == "train" else found_part
    else:
        fraction = 1.0 if part == "train" else 0.1
        _, count, *law = data.data.split(":")
        file = ":".join(["generated", str(min(int(count), maximum or int(count))), *law])
        reader = registry.open_generated(file, part, _READ_AT_ONCE, fraction)
    found: dict[str, list[np.ndarray]] = {"keys": [], "dense": [], "label": []}
    for features, label in reader.dataset().as_numpy_iterator():
        found["keys"].append(features["keys"])
        found["dense"].append(features.get("dense", np.zeros((len(label), 0), np.float32)))
        found["label"].append(label)
    taken = maximum if part == "train" else None
    return {name: np.concatenate(blocks)[:taken] for name, blocks in found.items()}


def _number(parts: Mapping[str, dict[str, np.ndarray]]) -> list[int]:
    """Numbers each field's keys from 0, in place; returns the counts."""
    ends = np.cumsum([len(parts[part]["label"]) for part in _PARTS])[:-1]
    counts = []
    for field in range(parts["train"]["keys"].shape[1]):
        columns = [parts[part]["keys"][:, field] for part in _PARTS]
        known, numbers = np.unique(np.concatenate(columns), return_inverse=True)
        for column, own in zip(columns, np.split(numbers, ends), strict=True):
            column[:] = own
        counts.append(len(known))
    return counts


def _rows(part: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the examples as int32 [n, fields + numbers + 1]."""
    numbers = np.concatenate([part["dense"], part["label"][:, np.newaxis]], axis=1)
    return np.concatenate([part["keys"].astype(np.int32), numbers.view(np.int32)], axis=1)


def _write_train(rows: np.ndarray, path: Path, data: Data, seed: int) -> None:
    random, unfinished = np.random.default_rng(seed), Path(f"{path}.part")
    with unfinished.open("wb") as file:
        for _ in range(data.epochs):
            rows[random.permutation(len(rows))].tofile(file)
        # Use only full batches.
        block = data.model["batch"] * rows.shape[1] * rows.itemsize
        file.truncate(file.tell() // block * block)
    os.replace(unfinished, path)
