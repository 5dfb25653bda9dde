"""Chooses the hot set: the most accessed keys within a memory budget."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf.ops import _loader

_BYTES_PER_VALUE = 4  # float32


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Holds the keys of one table that may become hot.

    Attributes:
        keys: int64 [n], unique.
        counts: float32 [n], decayed access counts. Keys with a count of 0 never become hot.
        dim: Number of values per row of the table.
    """

    keys: np.ndarray
    counts: np.ndarray
    dim: int


def snapshot_bytes(dim: int) -> int:
    """Returns the bytes of the snapshot of one float32 row."""
    return dim * _BYTES_PER_VALUE


def max_candidates(dim: int, budget_bytes: int) -> int:
    """Returns how many row snapshots of one table fit into `budget_bytes`."""
    return budget_bytes // snapshot_bytes(dim)


def choose_hot_keys(tables: Sequence[Candidates], budget_bytes: int) -> list[np.ndarray]:
    """Chooses the hot set over all tables.

    Keys are visited in descending order of their counts. Ties are broken by the order of the
    tables, then by ascending key. A key is chosen if its snapshot fits the remaining budget.
    Source: Slipstream, arXiv 2404.04270, snapshot block.

    Args:
        tables: The candidates of every table.
        budget_bytes: Maximum bytes of all snapshots together.

    Returns:
        For each table, int64 [hot keys] in ascending order.

    Raises:
        ValueError: The budget is not positive.
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
    """Returns the selected values, without a copy if all are selected."""
    return values if is_wanted.all() else values[is_wanted]


def _most_accessed(
    keys: Sequence[np.ndarray], counts: Sequence[np.ndarray], maximum: int
) -> list[np.ndarray]:
    """Implements `choose_hot_keys` for tables of equal dim without sorting all keys.

    Args:
        keys: For each table, int64 [n].
        counts: For each table, float32 [n].
        maximum: Number of keys to choose, below the total number of keys.
    """
    if maximum < 1:
        return [own_keys[:0] for own_keys in keys]
    all_counts = np.concatenate(counts)
    rank = all_counts.size - maximum
    minimum = np.partition(all_counts, rank)[rank]
    left = maximum - int((all_counts > minimum).sum())
    chosen = []
    last = sort_keys([k[c == minimum] for k, c in zip(keys, counts, strict=True)])
    for own_keys, own_counts, own_last in zip(keys, counts, last, strict=True):
        chosen.append(np.concatenate([own_keys[own_counts > minimum], own_last[:left]]))
        left -= min(left, own_last.size)
    return sort_keys(chosen)


def _take_greedily(row_bytes: np.ndarray, budget_bytes: int) -> np.ndarray:
    """Returns the positions of the items that a greedy pass selects.

    Args:
        row_bytes: int64 [n], the size of each item, in the order of the pass.
        budget_bytes: Maximum bytes of the selected items together.
    """
    taken = []
    positions = np.arange(row_bytes.size)
    left = budget_bytes
    # Each round ends at an item that exceeds the remaining budget. Later items of the same size
    # exceed it, too, so that the number of rounds is at most the number of different sizes.
    while positions.size:
        total = np.cumsum(row_bytes[positions], dtype=np.int64)
        fitting = int(np.searchsorted(total, left, side="right"))
        taken.append(positions[:fitting])
        left -= int(total[fitting - 1]) if fitting else 0
        positions = positions[fitting:]
        positions = positions[row_bytes[positions] <= left]
    return np.concatenate(taken) if taken else positions


def sort_keys(lists: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sorts each list of keys in ascending order (eager only).

    Args:
        lists: Arrays int64 [n]. The lengths may differ.

    Returns:
        The sorted arrays. A list that is already sorted is returned without a copy.

    Raises:
        ValueError: A list is not int64 [n].
    """
    for number, keys in enumerate(lists):
        if keys.dtype != np.int64 or keys.ndim != 1:
            given = f"{keys.dtype} {keys.shape}"
            raise invalid(f"lists[{number}]", given, "sort_keys", "int64 values of shape [n]")
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
