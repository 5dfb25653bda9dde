"""Runs slipstream-train as one rank of a test.

With the first argument `fail-on-1`, the data of rank 1 fails. With `kill-1-at` and a step, rank 1
is killed after the step. With `own-data` and a folder, each rank first runs in the subfolder with
its number, on the prepared data "clicks" there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any

from slipstream_tf._utils import agent
from slipstream_tf.cli import train


def break_off() -> None:
    """Makes the data of this rank fail at its third batch."""
    import numpy as np
    import tensorflow as tf

    from slipstream_tf.cli import pipeline

    whole = pipeline.slice_of_rank

    def check(index: np.int64) -> np.int64:
        if index == 2:
            raise ValueError("the third batch is damaged")
        return index

    def torn(dataset: tf.data.Dataset, *of_rank: Any) -> tf.data.Dataset:
        def read(index: Any, batch: Any) -> Any:
            with tf.control_dependencies([tf.numpy_function(check, [index], tf.int64)]):
                return tf.nest.map_structure(tf.identity, batch)

        return whole(dataset, *of_rank).enumerate().map(read)

    pipeline.slice_of_rank = torn


def kill_after(last: int) -> None:
    """Kills this rank with SIGKILL after a step. Call it before other threads start.

    The rank is a child of this process, and the launcher learns of its death a second later.
    Otherwise the launcher sometimes terminates the other rank before it has reported the loss.
    """
    child = os.fork()
    if child:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
        os.waitpid(child, 0)
        time.sleep(1)
        os._exit(128 + signal.SIGKILL)
    from slipstream_tf.cli.checkpoints import RunCheckpoints

    after_step = RunCheckpoints.after_step

    def kill(self: RunCheckpoints, step: int, notes: Any) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        after_step(self, step, notes)

    RunCheckpoints.after_step = kill  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "kill-1-at":
        step = int(sys.argv[2])
        del sys.argv[1:3]
        if agent.rank() == 1:
            kill_after(step)
    if sys.argv[1] == "own-data":
        begin = os.getcwd()
        os.chdir(os.path.join(sys.argv[2], str(agent.rank())))
        with contextlib.suppress(SystemExit):
            train.entry_point(["--data=clicks", "--model=dcn"])
        os.chdir(begin)
        del sys.argv[1:3]
    if sys.argv[1] == "fail-on-1":
        del sys.argv[1]
        if agent.rank() == 1:
            break_off()
    train.entry_point()
