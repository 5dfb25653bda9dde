"""What the unit tests of several ranks share: ranks that are threads of this process."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf


class ThreadRank:
    """A communicator of eager code; ranks meet at a barrier and must name the same collective."""

    local_rank = 0

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Any]):
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier, board

    def _meet(self, tensor: Any, name: str) -> list[np.ndarray]:
        # Ranks of one process share the numbers that `Names` gives to objects of one prefix.
        name = re.sub(r"\.\d+", "", name)
        self._board[self.rank] = (name, np.asarray(tensor))
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


def _run_as_ranks(size: int, program: Callable[[Any], Any]) -> list[Any]:
    """Runs a function on every rank.

    Args:
        size: number of ranks.
        program: called with a rank's communicator.

    Returns:
        What it returned on each rank, or the exception that it raised.
    """
    barrier, board, results = threading.Barrier(size), [None] * size, [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = program(ThreadRank(rank, size, barrier, board))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.fixture(scope="session")
def run_as_ranks() -> Callable[..., list[Any]]:
    """Gives `_run_as_ranks`."""
    return _run_as_ranks
