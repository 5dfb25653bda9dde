"""Measures a lower bound of an embedding step: copying its bytes.

A step writes the outputs of a batch and reads their gradients. It also reads and writes the row and
the optimizer slots of each distinct key once. Because a copy reads and writes each byte, copying
half of the bytes moves as much memory. The copy cycles through 1 GiB, therefore its data is never
in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
from typing import Any

import numpy as np
import worker

_POOL = 1 << 30  # Bytes of the source and of the target.
_FLOAT = 4


def bytes_that_must_move(settings: Mapping[str, Any], keys: np.ndarray) -> int:
    """Returns the mean number of bytes that a step moves.

    Args:
        settings: "dim", and "slots": the number of optimizer values per row.
        keys: Keys, int64 [steps, batch, tables].
    """
    steps, batch, tables = keys.shape
    distinct = sum(np.unique(keys[i, :, t]).size for i in range(steps) for t in range(tables))
    rows = distinct / steps * (settings["dim"] + settings["slots"])
    outputs = batch * tables * settings["dim"]
    return round(2 * _FLOAT * (rows + outputs))


def make(settings: Mapping[str, Any], keys: np.ndarray) -> worker.Step:
    """Allocates the memory and returns a step that copies; see `worker.serve`."""
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
        # Loop over the steps in one task, as our ops do, to exclude the cost of waking threads.
        for turn in range(len(keys)):
            copy(thread, turn % turns)

    def step(_: int) -> None:
        list(crew.map(copy_all, range(threads)))

    step(0)
    return step


if __name__ == "__main__":
    worker.serve(make, {"numpy": np.__version__})
