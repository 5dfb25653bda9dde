"""Sums in a loop until the last rank fails, for test_losing_a_rank.py.

    losing.py TIMEOUT WHAT [MEANWHILE]

WHAT is the event on the last rank. "raise": it raises an error. "kill" and "stop": it sends itself
SIGKILL or SIGSTOP. "leave": it exits as if training were finished. "wait": nothing, because the
test triggers the event. MEANWHILE is the activity of the other ranks: "sum" (the default), or
"sleep", which calls no collective.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import tensorflow as tf

from slipstream_tf import distributed

STEPS_BEFORE = 20


def main() -> None:
    """Runs a sum in a tf.function, step by step."""
    timeout, what, *meanwhile = sys.argv[1:]
    job = distributed.init(timeout_seconds=float(timeout))
    step = tf.function(lambda tensor: job.sum(tensor, "dense", "sum"))
    for _ in range(STEPS_BEFORE):
        step(tf.ones([1000]))
    print("training started", flush=True)
    if job.rank == job.size - 1:
        happen(what)
    elif meanwhile == ["sleep"]:
        time.sleep(1e6)
    while True:
        step(tf.ones([1000]))
        time.sleep(0.01)


def happen(what: str) -> None:
    """Triggers the event on this rank."""
    if what == "raise":
        raise ValueError("no such column: price")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "leave":
        sys.exit(0)


if __name__ == "__main__":
    main()
