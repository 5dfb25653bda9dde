"""Choice of the hot set: the most accessed keys whose snapshots fit a byte budget. No state."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf.ops import _loader

_BYTES_PER_VALUE = 4  # float32


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Keys of one table that may become hot.

    Attributes:
        keys: int64 [n], each once.
        counts: float32 [n], decayed access counts; keys without any access are never hot.
        dim: values per row of the table.
    """

    keys: np.ndarray
    counts: np.ndarray
    dim: int


def snapshot_bytes(dim: int) -> int:
    """Bytes that the snapshot of one row of `dim` float32 values takes."""
    return dim * _BYTES_PER_VALUE


def most_candidates(dim: int, budget_bytes: int) -> int:
    """How many keys of a table could fit the budget if no other table had hot keys."""
    return budget_bytes // snapshot_bytes(dim)


def choose_hot_keys(tables: Sequence[Candidates], budget_bytes: int) -> list[np.ndarray]:
    """Chooses the hot set over all tables (Slipstream, arXiv 2404.04270, snapshot block).

    Keys are taken in the order of their counts, highest first (ties: earlier table first, then
    smaller key), each if its snapshot still fits the budget.

    Args:
        tables: the candidates of every table.
        budget_bytes: bytes of all snapshots together.

    Returns:
        int64 [hot keys] per table, ascending.

    Raises:
        ValueError: the budget is not positive.
    """
    require_integer("budget_bytes", budget_bytes, 1, None, "choose_hot_keys")
    accessed = [_where(table.counts > 0.0, np.asarray(table.keys, np.int64)) for table in tables]
    sizes = [snapshot_bytes(table.dim) for table in tables]
    if sum(keys.size * size for keys, size in zip(accessed, sizes, strict=True)) <= budget_bytes:
        return sort_keys(accessed)
    accesses = [_where(table.counts > 0.0, np.asarray(table.counts)) for table in tables]
    if len(set(sizes)) == 1:
        return _most_accessed(accessed, accesses, budget_bytes // sizes[0])
    lengths = [keys.size for keys in accessed]
    keys, counts = np.concatenate(accessed), np.concatenate(accesses).astype(np.float32)
    owner, row_bytes = np.repeat(np.arange(len(tables)), lengths), np.repeat(sizes, lengths)
    order = np.lexsort((keys, owner, -counts))
    chosen = order[_take_greedily(row_bytes[order], budget_bytes)]
    return sort_keys([keys[chosen[owner[chosen] == index]] for index in range(len(tables))])


def _where(is_wanted: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The wanted values; without a copy if all are."""
    return values if is_wanted.all() else values[is_wanted]


def _most_accessed(
    keys: Sequence[np.ndarray], counts: Sequence[np.ndarray], most: int
) -> list[np.ndarray]:
    """The same for rows of one size, of which `most` fit, fewer than there are; without sorting."""
    if most < 1:
        return [own_keys[:0] for own_keys in keys]
    all_counts = np.concatenate(counts)
    rank = all_counts.size - most
    least = np.partition(all_counts, rank)[rank]
    left = most - int((all_counts > least).sum())
    chosen = []
    last = sort_keys([k[c == least] for k, c in zip(keys, counts, strict=True)])
    for own_keys, own_counts, own_last in zip(keys, counts, last, strict=True):
        chosen.append(np.concatenate([own_keys[own_counts > least], own_last[:left]]))
        left -= min(left, own_last.size)
    return sort_keys(chosen)


def _take_greedily(row_bytes: np.ndarray, budget_bytes: int) -> np.ndarray:
    """Positions of the items that a pass in order takes, each one if it still fits."""
    taken = []
    positions = np.arange(row_bytes.size)
    left = budget_bytes
    # Each round ends at an item too large for what is left, which no later item of that size
    # fits either: there are at most as many rounds as different sizes.
    while positions.size:
        total = np.cumsum(row_bytes[positions], dtype=np.int64)
        fitting = int(np.searchsorted(total, left, side="right"))
        taken.append(positions[:fitting])
        left -= int(total[fitting - 1]) if fitting else 0
        positions = positions[fitting:]
        positions = positions[row_bytes[positions] <= left]
    return np.concatenate(taken) if taken else positions


def sort_keys(lists: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sorts lists of keys, each for itself, eagerly.

    Args:
        lists: int64 [n] each, n its own.

    Returns:
        As many, int64 [n], ascending; those that are so already, as they are.

    Raises:
        ValueError: a list is not int64 [n].
    """
    for number, keys in enumerate(lists):
        if keys.dtype != np.int64 or keys.ndim != 1:
            given = f"{keys.dtype} {keys.shape}"
            raise invalid("lists", given, f"sort_keys, list {number}", "int64 [n]")
    ordered = list(lists)
    unordered = [i for i, keys in enumerate(lists) if (keys[1:] < keys[:-1]).any()]
    if unordered:
        with tf.device("CPU:0"):
            found = _loader.library().slipstream_sort_keys(
                keys=[tf.constant(lists[i]) for i in unordered]
            )
        for i, keys in zip(unordered, found, strict=True):
            ordered[i] = keys.numpy()
    return ordered
