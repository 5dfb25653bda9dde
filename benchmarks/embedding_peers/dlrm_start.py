"""Initial values and batches that all DLRMs share. Requires only NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_HALF_WIDTH = 0.05
# Constants of Adagrad. The accumulators of rows start at 0, as in FBGEMM. Dense weights start at
# the default of Keras, which is large enough that sqrt(sum) + epsilon (PyTorch) equals
# sqrt(sum + epsilon) (Keras) for all practical purposes.
DENSE_ACCUMULATOR = 0.1
DENSE_EPSILON = 1e-10
ROWS_EPSILON = 1e-10


@dataclasses.dataclass(frozen=True)
class Batches:
    """Numeric features and labels of all batches.

    Attributes:
        dense: Numeric features, float32 [steps, batch, numbers].
        labels: Labels, float32 [steps, batch], 0 or 1.
    """

    dense: np.ndarray
    labels: np.ndarray


def read_batches(settings: Mapping[str, Any]) -> Batches:
    """Reads the numeric features and labels from the file `settings["inputs"]`."""
    with np.load(settings["inputs"]) as file:
        return Batches(file["dense"], file["labels"])


def initial_rows(settings: Mapping[str, Any], table: int) -> np.ndarray:
    """Returns the initial rows, float32 [rows, dim], by key."""
    generator = np.random.default_rng([settings["seed"], table])
    shape = (settings["cardinalities"][table], settings["dim"])
    return (2 * _HALF_WIDTH * generator.random(shape, np.float32) - _HALF_WIDTH).astype(np.float32)


def dense_weights(settings: Mapping[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the initial weights of the bottom and of the top MLP.

    The input of the top MLP is the bottom MLP's output, followed by the dot products of the pairs
    in the order of `pairs`.

    Returns:
        Two lists, each with a kernel [inputs, units] and a bias [units] per layer.
    """
    generator = np.random.default_rng([settings["seed"], 1 << 20])
    vectors = len(settings["cardinalities"]) + 1
    inputs = settings["dim"] + vectors * (vectors - 1) // 2

    def stack(width: int, units: Iterable[int]) -> list[np.ndarray]:
        weights = []
        for count in units:
            scale = np.sqrt(6.0 / (width + count))
            kernel = generator.uniform(-scale, scale, (width, count))
            weights += [kernel.astype(np.float32), np.zeros(count, np.float32)]
            width = count
        return weights

    return stack(settings["numbers"], settings["bottom"]), stack(inputs, settings["top"])


def pairs(vectors: int) -> list[tuple[int, int]]:
    """Returns the pairs (i, j) with i > j, row by row.

    Vector 0 is the output of the bottom MLP.
    """
    return [(i, j) for i in range(vectors) for j in range(i)]
