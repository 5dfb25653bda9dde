"""A rank of test_losing_a_rank.py: sums until something happens to the last rank.

    losing.py TIMEOUT WHAT [MEANWHILE]

WHAT: "raise": it raises; "kill": it kills itself; "stop": it stops itself; "leave": it ends as if
all were done; "wait": nothing happens here, the test does it. MEANWHILE: "sum", what the other
ranks do then; "sleep": they call no collective.
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
    """Sums in a tf.function, step by step."""
    timeout, what, *meanwhile = sys.argv[1:]
    job = distributed.init(timeout_seconds=float(timeout))
    step = tf.function(lambda tensor: job.sum(tensor, "dense", "sum"))
    for _ in range(STEPS_BEFORE):
        step(tf.ones([1000]))
    print("under way", flush=True)
    if job.rank == job.size - 1:
        happen(what)
    elif meanwhile == ["sleep"]:
        time.sleep(1e6)
    while True:
        step(tf.ones([1000]))
        time.sleep(0.01)


def happen(what: str) -> None:
    """Does to this rank what the test asked for."""
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
