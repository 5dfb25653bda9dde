"""Compares every collective with its expected result on one rank of test_programs.py."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from slipstream_tf import distributed


def rows_of(rank: int) -> np.ndarray:
    """Returns the initial rows of a rank, [rank, 2]."""
    return np.full((rank, 2), rank + 1, np.float32)


def part_for(sender: int, receiver: int) -> np.ndarray:
    """Returns the rows that `sender` sends to `receiver`.

    Their number is the absolute difference of the two ranks.
    """
    return np.full((abs(sender - receiver), 3), 10 * sender + receiver, np.float32)


def check(job: distributed.Communicator) -> None:
    """Runs every collective once, in eager code or in a tf.function."""
    ranks = range(job.size)
    total = job.sum(tf.constant([1.0, job.rank]), "dense", "sum")
    tf.debugging.assert_equal(total, tf.constant([job.size, sum(ranks)], tf.float32))
    gathered = job.gather(tf.constant(rows_of(job.rank)), "rows", "gather")
    tf.debugging.assert_equal(gathered, np.concatenate([rows_of(rank) for rank in ranks]))
    parts = [part_for(job.rank, rank) for rank in ranks]
    splits = tf.constant([len(part) for part in parts], tf.int32)
    received, counts = job.exchange(tf.constant(np.concatenate(parts)), splits, "keys", "exchange")
    wanted = [part_for(rank, job.rank) for rank in ranks]
    tf.debugging.assert_equal(received, np.concatenate(wanted))
    tf.debugging.assert_equal(counts, tf.constant([len(part) for part in wanted], tf.int32))
    reported = job.broadcast(
        tf.constant([job.rank], tf.int64), job.size - 1, "control", "broadcast"
    )
    tf.debugging.assert_equal(reported, tf.constant([job.size - 1], tf.int64))


def main() -> None:
    """Checks eager code, a tf.function, and the number of bytes sent."""
    job = distributed.init()
    check(job)
    tf.function(lambda: check(job))()
    sent = job.traffic().bytes
    distances = sum(abs(job.rank - rank) for rank in range(job.size))
    wanted = {
        "dense": 2 * (8 * 2 * (job.size - 1) // job.size),
        "rows": 2 * 8 * job.rank * (job.size - 1),
        "keys": 2 * 12 * distances,
        # A binomial tree with the last rank as root, for 2 or 4 ranks.
        "control": 2 * 8 * {2: [0, 1], 4: [1, 0, 0, 2]}[job.size][job.rank],
        "gradients": 0,
        "deferred": 0,
    }
    assert sent == wanted, (sent, wanted)
    print(f"rank {job.rank} of {job.size}: all equal", flush=True)


if __name__ == "__main__":
    main()
