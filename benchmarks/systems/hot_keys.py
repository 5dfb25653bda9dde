"""Keys that the schedules of FAE and Hotline take as hot. Needs NumPy only."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
from task import Task

# Of the examples: all of their keys are hot in so many.
SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class HotKeys:
    """What a pass over the training part chooses.

    Attributes:
        keys: of each field, int64 [n], ascending.
        share: of the examples, those whose keys are all hot.
        accesses: share of the accesses that are of hot keys.
        seconds: of the pass.
    """

    keys: list[np.ndarray]
    share: float
    accesses: float
    seconds: float

    def told(self, dim: int) -> dict[str, float]:
        """Returns what a record says of it."""
        rows = sum(map(len, self.keys))
        return {
            "hot_examples": self.share, "hot_accesses": self.accesses, "hot_rows": rows,
            "hot_bytes": 4 * dim * rows, "seconds_of_profile": self.seconds,
        }  # fmt: skip


def choose(task: Task, share: float = SHARE) -> HotKeys:
    """Counts keys; hot are those with so many accesses that `share` of the examples are hot."""
    begin = time.perf_counter()
    columns = np.memmap(task.settings["train"], np.int32, "r").reshape(-1, task.columns)
    least = np.full(len(columns), np.iinfo(np.int64).max)
    counts = []
    for field, cardinality in enumerate(task.settings["cardinalities"]):
        column = columns[:, field]
        counts.append(np.bincount(column, minlength=cardinality))
        np.minimum(least, counts[-1][column], out=least)
    first_hot = len(least) - math.ceil(share * len(least))
    threshold = max(1, np.partition(least, first_hot)[first_hot])
    keys = [np.flatnonzero(count >= threshold) for count in counts]
    hot = sum(int(count[chosen].sum()) for count, chosen in zip(counts, keys, strict=True))
    accesses = hot / (len(columns) * task.fields)
    found = float(np.mean(least >= threshold))
    return HotKeys(keys, found, accesses, time.perf_counter() - begin)
