"""A start of an elastic training: what it is told of the ranks, and how it ends when they change.

In: a function that trains, in a process that `agent` has started, or in any other. Out: what it
returns; or the end of the process, after which the agent starts it again with the ranks that there
are then. `elastic_state` has what a program needs to go on where it was.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import tensorflow as tf

from slipstream_tf._utils import agent
from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.link import Link
from slipstream_tf.checkpoint.manager import JobCheckpoints
from slipstream_tf.distributed import horovod, watch

TIMEOUT_SECONDS = 20.0
_Result = TypeVar("_Result")


class ElasticJob:
    """The ranks of a start; see `run`.

    Attributes:
        comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        """Takes the ranks."""
        self.comm = comm
        self._has_committed = False

    def committed(self, saved: JobCheckpoints) -> None:
        """Hears of hosts that join or leave; a collective, after each commit.

        Does not return if there are such: all ranks end when what was saved is on the disk.

        Args:
            saved: what has saved it.
        """
        self._has_committed = True
        if not agent.is_started_by_agent():
            return
        own = tf.constant([int(agent.is_noticed())], tf.int64)
        if int(self.comm.sum(own, "control", "slipstream.elastic.hosts")[0]):
            saved.wait()
            self._end("Hosts join or leave.")

    def _end(self, reason: str) -> NoReturn:
        """Ends this process at once, so that no rank waits for it; another start comes."""
        print(f"slipstream_tf: rank {self.comm.rank}: {reason}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(agent.AGAIN if self._has_committed else agent.AGAIN_WITHOUT_COMMIT)


def run(
    train: Callable[[ElasticJob], _Result],
    timeout_seconds: float = TIMEOUT_SECONDS,
    link: Link | None = None,
) -> _Result:
    """Trains with the ranks that there are; ends the process when they change.

    Under `agent`. Started otherwise, by a launcher or not, ranks stay the same, and the loss of one
    is an error as in any job.

    Ranks change

    - when a process or a host is lost: the next collective of each other rank fails, at once if a
      process has ended, and within the timeout if a host is silent;
    - when the launcher's script names other hosts: after the next commit.

    Args:
        train: called with the job; goes on from what was saved last, and calls `committed` after
            each commit.
        timeout_seconds: at least 1: how long a host may be silent, and how long ranks wait for each
            other when they start.
        link: see `init`.

    Returns:
        What `train` returned.

    Raises:
        ImportError, ValueError: see `init`.
        Exception: what `train` raised, unless it comes of ranks that were lost.
    """
    job = ElasticJob(horovod.init(timeout_seconds, link))
    try:
        return train(job)
    except tf.errors.OpError as error:
        if not agent.is_started_by_agent() or not watch.is_of_collective(error):
            raise
        job._end(f"Others are lost: {error.message}")
