"""Runs collectives in graphs with a constant batch size, for test_programs.py.

    constant_batches.py RANKS

RANKS: with "first" the batch size is constant on rank 0 only, with "all" on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from slipstream_tf import distributed
from slipstream_tf._utils.comm import Communicator

STEPS = 20


def main() -> None:
    """Runs collectives on values that depend only on the batch size."""
    job = distributed.init(timeout_seconds=10.0)
    batch = 4 + job.rank
    is_constant = sys.argv[1] == "all" or job.rank == 0
    sizes = [4 + rank for rank in range(job.size)]
    spec = tf.TensorSpec([batch if is_constant else None])

    def trace() -> Callable[[tf.Tensor], None]:
        return tf.function(lambda x: check(job, x, sizes)).get_concrete_function(spec)

    step = trace()
    for number in range(STEPS):
        if number == STEPS // 2 and job.rank == job.size - 1:
            step = trace()  # Only one rank has a graph to optimize.
        step(tf.ones([batch]))
    # TensorFlow has folded no collective into a constant: every step has sent its bytes.
    of_sum = 4 * 2 * (job.size - 1) // job.size
    once = {"dense": 2 * of_sum, "rows": 4, "keys": 4, "control": of_sum + 8 * (job.rank == 0)}
    sent = job.traffic().bytes
    assert {kind: n for kind, n in sent.items() if n} == {k: STEPS * n for k, n in once.items()}
    print(f"rank {job.rank}: {STEPS} steps", flush=True)


def check(job: Communicator, inputs: tf.Tensor, sizes: list[int]) -> None:
    """Asserts that the collectives of batch sizes return the expected values."""
    batch = tf.shape(inputs)[:1]
    total = job.sum(tf.cast(batch, tf.float32), "dense", "sum")
    tf.debugging.assert_equal(total, tf.constant([sum(sizes)], tf.float32))
    tf.debugging.assert_equal(job.sum(batch[0], "dense", "scalar"), sum(sizes))
    gathered = job.gather(batch, "rows", "gather")
    tf.debugging.assert_equal(gathered, np.array(sizes, np.int32))
    repeated = tf.repeat(batch, job.size)
    received, _ = job.exchange(repeated, tf.ones([job.size], tf.int32), "keys", "exchange")
    tf.debugging.assert_equal(received, np.array(sizes, np.int32))
    reported = job.broadcast(tf.cast(batch, tf.int64), 0, "control", "broadcast")
    tf.debugging.assert_equal(reported, np.array(sizes[:1], np.int64))
    loss = distributed.scale_loss(tf.reduce_mean(inputs), batch[0], job)
    tf.debugging.assert_equal(loss, 1.0)


if __name__ == "__main__":
    main()
