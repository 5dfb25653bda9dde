"""The same work on several tables at once. In: a function and tables. Out: results, in order.

A table's kernels use all threads themselves, but each is short, and much of a window's end around
them is on one thread. Measured with 26 tables and two processors: 413 ms instead of 556.
"""

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import tensorflow as tf

from slipstream_tf.tables.base import TrackedStore

Result = TypeVar("Result")
# Hot keys of all tables; with fewer, threads cost more than they save.
FEW_KEYS = 1 << 16
# A table that is measured takes its snapshot's memory twice.
MOST_AT_ONCE = 4


def tables_at_once(store: TrackedStore, ranks: int) -> int:
    """Returns how many tables of a store may be worked on at once.

    One where the store does not say that it takes more, or where ranks meet for each table, in the
    same order on all of them; else as many as TensorFlow has threads for a kernel, at most
    `MOST_AT_ONCE`.
    """
    if ranks > 1 or not store.takes_tables_at_once:
        return 1
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    return min(threads or len(os.sched_getaffinity(0)), MOST_AT_ONCE)


def for_each(work: Callable[..., Result], threads: int, *arguments: Iterable[Any]) -> list[Result]:
    """Returns `list(map(work, *arguments))`, computed by this thread and `threads` - 1 others.

    By fewer where the system gives no more: an interpreter that is about to end starts none, which
    is why no executor of the standard library is used here. No call is begun after one that failed.

    Raises:
        Whatever a call raises: of several, that of the first; all that began have ended by then.
    """
    calls = list(zip(*arguments, strict=True))
    results: list[Any] = [None] * len(calls)
    errors: dict[int, BaseException] = {}
    left, lock = iter(range(len(calls))), threading.Lock()

    def take_calls() -> None:
        while True:
            with lock:
                index = None if errors else next(left, None)
            if index is None:
                return
            try:
                results[index] = work(*calls[index])
            except BaseException as error:
                errors[index] = error

    helpers: list[threading.Thread] = []
    for _ in range(min(threads, len(calls)) - 1):
        helper = threading.Thread(target=take_calls, name="slipstream-window-end")
        try:
            helper.start()
        except RuntimeError:
            break
        helpers.append(helper)
    take_calls()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[min(errors)]
    return results
