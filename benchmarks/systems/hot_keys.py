"""Selects hot keys for FAE and Hotline. Requires only NumPy."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
from task import Task

# Default fraction of the examples that contain only hot keys.
SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class HotKeys:
    """Hot keys, selected in one pass over the training part.

    Attributes:
        keys: Hot keys of each field, int64 [n], ascending.
        fraction: Fraction of the examples that contain only hot keys.
        accesses: Fraction of all lookups that look up a hot key.
        seconds: Duration of the pass.
    """

    keys: list[np.ndarray]
    fraction: float
    accesses: float
    seconds: float

    def reported(self, dim: int) -> dict[str, float]:
        """Returns the fields for a record; rows have `dim` values."""
        rows = sum(map(len, self.keys))
        return {
            "hot_examples": self.fraction, "hot_accesses": self.accesses, "hot_rows": rows,
            "hot_bytes": 4 * dim * rows, "seconds_of_profile": self.seconds,
        }  # fmt: skip


def choose(task: Task, fraction: float = SHARE) -> HotKeys:
    """Selects hot keys that make `fraction` of the examples hot.

    A key is hot if its number of accesses reaches a threshold. The threshold is the largest that
    makes at least the fraction `fraction` of the training examples contain only hot keys.

    Args:
        task: Task with the training part.
        fraction: Fraction of the examples that shall contain only hot keys, in (0, 1].

    Returns:
        The hot keys and their statistics.
    """
    begin = time.perf_counter()
    columns = np.memmap(task.settings["train"], np.int32, "r").reshape(-1, task.columns)
    minimum = np.full(len(columns), np.iinfo(np.int64).max)
    counts = []
    for field, cardinality in enumerate(task.settings["cardinalities"]):
        column = columns[:, field]
        counts.append(np.bincount(column, minlength=cardinality))
        np.minimum(minimum, counts[-1][column], out=minimum)
    first_hot = len(minimum) - math.ceil(fraction * len(minimum))
    threshold = max(1, np.partition(minimum, first_hot)[first_hot])
    keys = [np.flatnonzero(count >= threshold) for count in counts]
    hot = sum(int(count[chosen].sum()) for count, chosen in zip(counts, keys, strict=True))
    accesses = hot / (len(columns) * task.fields)
    found = float(np.mean(minimum >= threshold))
    return HotKeys(keys, found, accesses, time.perf_counter() - begin)
