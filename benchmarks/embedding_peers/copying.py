"""The limit of an embedding step: a copy of as many bytes as must move, by as many threads.

Of a batch: its outputs written and its gradients read, and the distinct keys' rows, with what the
rule keeps beside them, read and written, once each. A copy of half as many bytes reads and writes
them all. Memory that it copies is long out of the cache when its turn comes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
from typing import Any

import numpy as np
import worker

_POOL = 1 << 30  # bytes that are copied from, and as many to
_FLOAT = 4


def bytes_that_must_move(settings: Mapping[str, Any], keys: np.ndarray) -> int:
    """Returns the bytes of a step, the mean over batches.

    Args:
        settings: dim, and slots: values beside a row.
        keys: int64 [steps, batch, tables].
    """
    steps, batch, tables = keys.shape
    distinct = sum(np.unique(keys[i, :, t]).size for i in range(steps) for t in range(tables))
    rows = distinct / steps * (settings["dim"] + settings["slots"])
    outputs = batch * tables * settings["dim"]
    return round(2 * _FLOAT * (rows + outputs))


def make(settings: Mapping[str, Any], keys: np.ndarray) -> worker.Step:
    """Makes the memory; see `worker.serve`."""
    threads = settings["threads"]
    half = bytes_that_must_move(settings, keys) // 2
    part = half // threads
    source, target = (np.ones(_POOL // threads * threads, np.uint8) for _ in range(2))
    each = source.size // threads
    turns = max(1, each // max(part, 1))
    crew = futures.ThreadPoolExecutor(threads)

    def copy(thread: int, turn: int) -> None:
        begin = thread * each + turn * part
        np.copyto(target[begin : begin + part], source[begin : begin + part])

    def copy_all(thread: int) -> None:
        # As our ops' steps, in a loop: what it costs to wake a thread is not the copy's.
        for turn in range(len(keys)):
            copy(thread, turn % turns)

    def step(_: int) -> None:
        list(crew.map(copy_all, range(threads)))

    step(0)
    return step


if __name__ == "__main__":
    worker.serve(make, {"numpy": np.__version__})
