"""Shared fixtures of the unit tests: ranks simulated by threads."""

from __future__ import annotations

import collections
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf._utils.comm import KINDS, Mixed, Traffic


class ThreadRank:
    """Communicator for eager code in which each rank is a thread.

    The ranks meet at a barrier, and every rank must call the same collective.
    """

    local_rank = 0
    link: Any = None

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Any]):
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier, board
        # Bytes that this rank sent to other ranks by `exchange`, per kind.
        self.sent: collections.Counter[str] = collections.Counter()

    def _meet(self, tensor: Any, name: str) -> list[np.ndarray]:
        return self._meet_with(np.asarray(tensor), name)

    def _meet_with(self, given: Any, name: str) -> list[Any]:
        # The threads share the counter of `CollectiveNames`, so that equal objects get different
        # numbers. Remove the numbers to compare names across ranks.
        name = re.sub(r"\.\d+", "", name)
        self._board[self.rank] = (name, given)
        self._barrier.wait(20)
        posted = list(self._board)
        self._barrier.wait(20)
        assert {other for other, _ in posted} == {name}
        return [values for _, values in posted]

    def sum(self, tensor: Any, kind: Any, name: str) -> tf.Tensor:
        del kind
        return tf.constant(np.sum(self._meet(tensor, name), axis=0))

    def gather(self, tensor: Any, kind: Any, name: str) -> tf.Tensor:
        del kind
        return tf.constant(np.concatenate(self._meet(tensor, name)))

    def exchange(self, tensor: Any, splits: Any, kind: Any, name: str) -> tuple[Any, Any]:
        pieces = np.split(np.asarray(tensor), np.cumsum(splits)[:-1])
        if isinstance(kind, str):
            self.sent[kind] += sum(p.nbytes for r, p in enumerate(pieces) if r != self.rank)
        for part, nbytes in kind.parts if isinstance(kind, Mixed) else ():
            if isinstance(part, str):
                self.sent[part] += int(nbytes)
        mine = [sent[self.rank] for sent in self._meet_with(pieces, name)]
        lengths = tf.constant([len(piece) for piece in mine], tf.int32)
        return tf.constant(np.concatenate(mine)), lengths

    def traffic(self) -> Traffic:
        return Traffic({kind: self.sent[kind] for kind in KINDS})


def _run_as_ranks(size: int, program: Callable[[Any], Any]) -> list[Any]:
    """Runs a function on every simulated rank.

    Args:
        size: The number of ranks.
        program: The function. It receives the communicator of its rank.

    Returns:
        A list with the return value or the raised exception of each rank.
    """
    barrier, board = threading.Barrier(size), [None] * size
    results: list[Any] = [TimeoutError("the rank did not end")] * size

    def run(rank: int) -> None:
        try:
            results[rank] = program(ThreadRank(rank, size, barrier, board))
        except BaseException as error:  # Failures in pytest derive from BaseException.
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.fixture(scope="session")
def run_as_ranks() -> Callable[..., list[Any]]:
    """Returns `_run_as_ranks`."""
    return _run_as_ranks
