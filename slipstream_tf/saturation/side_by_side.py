"""Work on many tables at a window's end, each on its own: some threads take the tables in turn.

In: a function and one or more lists of arguments. Out: what it gives, in the order of the lists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import tensorflow as tf

_Result = TypeVar("_Result")
# Fewer keys in all cost more to hand to threads than these save.
LEAST_KEYS = 1 << 19


def useful_threads() -> int:
    """Returns how many threads TensorFlow's operations use: as set, or one per allowed core."""
    return tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))


def map_tables(
    function: Callable[..., _Result], *arguments: Iterable[Any], threads: int
) -> list[_Result]:
    """Calls a function for each table, like `map`.

    Args:
        function: must neither change what it shares with other tables nor be a collective; NumPy
            and TensorFlow let other threads run meanwhile.
        arguments: lists as long as there are tables.
        threads: at most so many; with 1 tables are worked on in order, on the caller's thread.

    Returns:
        The results, in order. Of errors the first table's is raised, once no thread is at work;
        tables after it may or may not have been worked on.
    """
    calls = list(zip(*arguments, strict=True))
    if threads == 1 or len(calls) < 2:
        return [function(*call) for call in calls]
    with ThreadPoolExecutor(min(threads, len(calls)), "slipstream_tables") as pool:
        return list(pool.map(function, *zip(*calls, strict=True)))
