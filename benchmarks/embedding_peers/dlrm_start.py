"""Where every library's DLRM starts: the same batches, rows and weights. Needs NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_HALF_WIDTH = 0.05
# Of Adagrad: rows start with sums of 0, as FBGEMM's do, dense weights with Keras's and more than
# enough to tell sqrt(sum) + epsilon, PyTorch's, from sqrt(sum + epsilon), Keras's.
DENSE_ACCUMULATOR = 0.1
DENSE_EPSILON = 1e-10
ROWS_EPSILON = 1e-10


@dataclasses.dataclass(frozen=True)
class Batches:
    """Inputs and labels.

    Attributes:
        dense: float32 [steps, batch, numbers].
        labels: float32 [steps, batch], 0 or 1.
    """

    dense: np.ndarray
    labels: np.ndarray


def read_batches(settings: Mapping[str, Any]) -> Batches:
    """Reads what the files that the settings name hold, beside the keys."""
    with np.load(settings["inputs"]) as file:
        return Batches(file["dense"], file["labels"])


def initial_rows(settings: Mapping[str, Any], table: int) -> np.ndarray:
    """Rows of a table before training, float32 [rows, dim]; row k is that of key k."""
    generator = np.random.default_rng([settings["seed"], table])
    shape = (settings["cardinalities"][table], settings["dim"])
    return (2 * _HALF_WIDTH * generator.random(shape, np.float32) - _HALF_WIDTH).astype(np.float32)


def dense_weights(settings: Mapping[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Kernels and biases of the bottom and the top MLP, kernel [inputs, units] first.

    The top MLP takes the bottom's output, then the dots of pairs as `pairs` orders them.
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
    """Pairs (i, j), i > j, row by row; vector 0 is the bottom MLP's output."""
    return [(i, j) for i in range(vectors) for j in range(i)]
