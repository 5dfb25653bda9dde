"""Parsed inputs on their way to batches, and which of them belong to a part of the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

# Of ten consecutive runs of this many inputs, nine are for training and one is for testing.
PART_RUN = 100
PART_PERIOD = 10


class Block(Protocol):
    """Some consecutive inputs."""

    def __len__(self) -> int: ...

    def take(self, index: Any) -> Any:
        """Returns the inputs at `index`, a slice."""
        ...

    @classmethod
    def join(cls, blocks: Sequence[Any]) -> Any:
        """Joins blocks in order."""
        ...


BlockType = TypeVar("BlockType", bound=Block)


@dataclasses.dataclass
class Rows:
    """Inputs: label float32 [n], dense float32 [n, num_dense], keys int64 [n, fields].

    ids int64 [n] are the inputs' numbers, or None where nobody asked for them.
    """

    label: np.ndarray
    dense: np.ndarray
    keys: np.ndarray
    ids: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.label)

    def take(self, index: Any) -> Rows:
        """Returns the rows at `index` (a slice, a mask or positions)."""
        ids = None if self.ids is None else self.ids[index]
        return Rows(self.label[index], self.dense[index], self.keys[index], ids)

    @classmethod
    def join(cls, blocks: Sequence[Rows]) -> Rows:
        """Joins rows in order; all of them have ids, or none."""
        ids = [b.ids for b in blocks if b.ids is not None]
        return cls(
            np.concatenate([b.label for b in blocks]),
            np.concatenate([b.dense for b in blocks]),
            np.concatenate([b.keys for b in blocks]),
            np.concatenate(ids) if ids else None,
        )

    def element(self) -> Any:
        """Returns (features, label), an element of a data set."""
        features = {"keys": self.keys}
        if self.dense.shape[1]:
            features["dense"] = self.dense
        if self.ids is not None:
            features["id"] = self.ids
        return features, self.label


def is_in_part(first: int, count: int, part: str | None) -> np.ndarray:
    """Tells which inputs belong to a part, by their place in a file alone.

    Args:
        first: place of the first input, from 0.
        count: how many consecutive inputs.
        part: "train", "test" or None for all.

    Returns:
        bool [count].
    """
    if part is None:
        return np.ones(count, bool)
    run = (np.arange(first, first + count) // PART_RUN) % PART_PERIOD
    return (run == PART_PERIOD - 1) == (part == "test")


def first_inputs(blocks: Iterable[BlockType], limit: int | None) -> Iterator[BlockType]:
    """Yields blocks until `limit` inputs have passed (None: all); never an empty block."""
    for block in blocks:
        if limit is not None:
            block = block.take(slice(limit))
            limit -= len(block)
        if len(block):
            yield block
        if limit == 0:
            return


def in_batches(
    blocks: Iterable[BlockType], batch_size: int, drop_remainder: bool
) -> Iterator[BlockType]:
    """Cuts blocks of any sizes into batches, in order.

    Args:
        blocks: not empty, each.
        batch_size: inputs of a batch.
        drop_remainder: leave out a last batch that is not full.

    Yields:
        The batches.
    """
    waiting: list[BlockType] = []
    count = 0
    for block in blocks:
        waiting.append(block)
        count += len(block)
        if count < batch_size:
            continue
        joined = waiting[0].join(waiting) if len(waiting) > 1 else block
        full = count // batch_size * batch_size
        for begin in range(0, full, batch_size):
            yield joined.take(slice(begin, begin + batch_size))
        count -= full
        waiting = [joined.take(slice(full, None))] if count else []
    if count and not drop_remainder:
        yield waiting[0].join(waiting)
