"""Checks the memory of replicas and the bytes of rows, for test_programs.py.

Slots are sent, as one number per row, only while gradients are deferred by movement.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from slipstream_tf import distributed, optimizers
from slipstream_tf.config import Table
from slipstream_tf.distributed import Communicator, ShardedStore
from slipstream_tf.distributed.sharded import owner_of
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables.replicas import copy_bytes

TABLES = [Table("a", 4), Table("b", 8)]
SPECS = [FeatureSpec("a", "a"), FeatureSpec("b", "b")]
BATCH, STEPS, KEYS = 30, 24, 400
# Memory of 50 replicas in each table: a row, its Adagrad slots and 64 bytes.
CACHE_BYTES = 50 * (2 * 4 * 4 + 64 + 2 * 8 * 4 + 64)


def bytes_of_copies(store: ShardedStore) -> int:
    """Returns the memory of this rank's replicas, as counted for `cache_bytes`."""
    return sum(
        store._replicas.size(t.name) * copy_bytes(t, store.optimizer_of(t.name))
        for t in store.tables
    )


def stay_in_budget(comm: Communicator) -> None:
    """Trains on more keys than the replicas' memory allows.

    Other keys are flagged meanwhile.
    """
    store = ShardedStore(TABLES, optimizers.Adagrad(0.1), comm, cache_bytes=CACHE_BYTES)
    random = np.random.default_rng(comm.rank)
    largest = 0
    for step in range(STEPS):
        if step % 8 == 4:
            first = 20 * step
            hot = np.arange(first, first + 40)
            for table in TABLES:
                store.set_row_flags(table.name, hot, np.full(40, SATURATED))
                flags = store._replicas.row_flags(table.name, hot)
                assert np.count_nonzero(flags) == 25, flags
            largest = max(largest, bytes_of_copies(store))
        inputs = {spec.name: tf.constant(random.integers(0, KEYS, BATCH)) for spec in SPECS}
        is_training = step % 3 < 2
        pooled, plan = store.lookup(pack(inputs, SPECS), is_training)
        largest = max(largest, bytes_of_copies(store))
        if is_training:
            store.apply_gradients(plan, pooled)
    assert CACHE_BYTES // 2 < largest <= CACHE_BYTES, f"{largest} bytes of {CACHE_BYTES}"


def send_slots_when_needed(comm: Communicator) -> None:
    """Compares the bytes of rows under different policies in one traced function."""
    store = ShardedStore(TABLES[:1], optimizers.Adagrad(0.1), comm)
    inputs = {"a": tf.range(100, dtype=tf.int64)}
    traces = []

    @tf.function(autograph=False)
    def train() -> tf.Tensor:
        traces.append(1)
        pooled, plan = store.lookup(pack(inputs, SPECS[:1]), True)
        store.apply_gradients(plan, [tf.ones_like(rows) for rows in pooled])
        return pooled[0]

    def row_bytes() -> int:
        before = comm.traffic().bytes["rows"]
        train()
        return comm.traffic().bytes["rows"] - before

    train()  # Rows with their initial values are not sent.
    # To each other rank: a bit per row, and the row.
    own = int((owner_of(np.arange(100), comm.size) == comm.rank).sum())
    bits, others = (own + 7) // 8, comm.size - 1
    movement = UpdatePolicy("defer", movement=1e9, max_age=10, max_rows=1000)
    shadow = dataclasses.replace(movement, is_shadow=True)
    interval = UpdatePolicy("defer", trigger="interval", max_age=10, max_rows=1000)
    for policy, slot_bytes in [
        (UpdatePolicy("mask"), 0),
        (movement, 2),
        (interval, 0),
        (shadow, 2),
        (UpdatePolicy(), 0),
    ]:
        store.set_update_policy("a", policy)
        assert row_bytes() == others * (bits + own * (4 * 4 + slot_bytes)), policy
    assert len(traces) == 1
    # In the end all deferred sums are applied, for any sequence of policies.
    store.flush()
    assert store.update_counts("a").deferred_now == 0


def leave_out_what_keys_tell(comm: Communicator) -> None:
    """Compares the bytes of rows with initial values and of other rows."""
    store = ShardedStore(TABLES[:1], optimizers.Adagrad(0.1), comm)
    keys = pack({"a": tf.range(100, dtype=tf.int64)}, SPECS[:1])
    own = int((owner_of(np.arange(100), comm.size) == comm.rank).sum())
    bits, others = (own + 7) // 8, comm.size - 1
    sent = [comm.traffic().bytes["rows"]]
    for _ in range(2):
        pooled, plan = store.lookup(keys, True)
        sent.append(comm.traffic().bytes["rows"])
        store.apply_gradients(plan, [tf.ones_like(rows) for rows in pooled])
    first, second = np.diff(sent)
    assert first == others * bits
    assert second - first == others * own * 4 * 4


def main() -> None:
    """Runs all checks."""
    comm = distributed.init()
    stay_in_budget(comm)
    send_slots_when_needed(comm)
    leave_out_what_keys_tell(comm)
    print(f"rank {comm.rank} of {comm.size}: all replicas are correct", flush=True)


if __name__ == "__main__":
    main()
