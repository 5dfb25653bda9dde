"""Batches of click logs in Criteo's format for the SOK examples.

An example has 13 numeric features and 26 keys. The batches are generated or read from a TSV file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

DENSE, FIELDS = 13, 26
# All fields share a table. The field number in the upper bits makes the keys distinct.
_FIELD_OFFSETS = np.arange(FIELDS, dtype=np.int64) << 40
_LARGEST = np.geomspace(10, 10_000, FIELDS)
_TEST_EVERY = 10

Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def batches(data: str, part: str, batch_size: int, rank: int, ranks: int) -> Iterator[Batch]:
    """Yields this rank's batches, the same number on every rank.

    Examples that do not fill a batch on all ranks are dropped.

    Args:
        data: "generated:COUNT", or the path of a Criteo TSV file. Every tenth line of a file
            belongs to the test part.
        part: "train" or "test". The test part of generated data has COUNT / 5 examples.
        batch_size: Number of examples per rank and batch.
        rank: Rank of this process.
        ranks: Number of ranks.

    Yields:
        A tuple of dense features float32 [batch, 13], keys int64 [batch, 26] and labels float32
        [batch].
    """
    everyones, own = batch_size * ranks, slice(rank * batch_size, (rank + 1) * batch_size)
    if data.startswith("generated:"):
        count = int(data.removeprefix("generated:")) // (5 if part == "test" else 1)
        for step in range(count // everyones):
            generator = np.random.default_rng([part == "test", step])
            yield tuple(values[own] for values in _draw(generator, everyones))
        return
    with open(data, encoding="utf-8") as file:
        is_test = part == "test"
        lines = (line for i, line in enumerate(file) if (i % _TEST_EVERY == 0) == is_test)
        while len(block := list(itertools.islice(lines, everyones))) == everyones:
            yield _parse(block[own])


def _draw(generator: np.random.Generator, count: int) -> Batch:
    """Generates examples with skewed keys and a weight per key."""
    keys = (_LARGEST ** generator.random((count, FIELDS))).astype(np.int64)
    dense = generator.normal(size=(count, DENSE)).astype(np.float32)
    weights = np.sin(7.0 * keys + 3.0 * np.arange(FIELDS))
    logits = weights.sum(axis=1) * 0.6 + dense[:, :3].sum(axis=1) * 0.3 - 1.2
    labels = generator.random(count) < 1 / (1 + np.exp(-logits))
    return dense, keys + _FIELD_OFFSETS, labels.astype(np.float32)


def _parse(lines: list[str]) -> Batch:
    rows = [line.rstrip("\n").split("\t") for line in lines]
    labels = np.array([row[0] for row in rows], np.float32)
    numbers = np.array([[float(v or 0) for v in row[1 : 1 + DENSE]] for row in rows], np.float32)
    keys = np.array([[int(v or "0", 16) for v in row[1 + DENSE :]] for row in rows], np.int64)
    return np.log1p(np.maximum(numbers, 0)), keys + _FIELD_OFFSETS, labels
