"""The communicator counts the bytes that SOK sends."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import init
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables import SokEmbeddingStore
from slipstream_tf.tables.sok.table import open_sok

SPECS = [FeatureSpec("a", "one", "mean"), FeatureSpec("b", "two")]
TABLES = [
    slip.Table("one", 4, retention=slip.Retention(256, eviction="lru")),
    slip.Table("two", 3, retention=slip.Retention(256, eviction="lru")),
]


class MeasuredTraffic:
    """Counts the bytes that SOK sends to other ranks, by dtype."""

    def __init__(self, comm):
        self.comm = comm
        self.tool = open_sok().communication._COMM_TOOL
        self.sent = dict.fromkeys((tf.int64, tf.float32), 0)
        self.tool.alltoall = self.alltoall

    def take(self, dtype) -> int:
        """Returns a dtype's bytes since the last call, over all ranks."""
        own, self.sent[dtype] = self.sent[dtype], 0
        return int(self.comm.sum(tf.constant(own, tf.int64), "control", "seen"))

    def alltoall(self, tensor, splits):
        others = int(tf.reduce_sum(splits) - splits[self.comm.rank])
        row = int(np.prod(tensor.shape[1:])) * tensor.dtype.size
        self.sent[tensor.dtype] += others * row
        return type(self.tool).alltoall(self.tool, tensor, splits)


class CountedTraffic:
    """Returns the communicators' counts since the last call, summed over ranks."""

    def __init__(self, comm):
        self.comm, self.before = comm, comm.traffic().bytes

    def take(self) -> dict:
        now = self.comm.traffic().bytes
        own = [now[kind] - self.before[kind] for kind in ("keys", "rows", "gradients", "deferred")]
        total = self.comm.sum(tf.constant(own, tf.int64), "control", "counted").numpy().tolist()
        self.before = self.comm.traffic().bytes
        return dict(zip(("keys", "rows", "gradients", "deferred"), total, strict=True))


def batch_of(comm) -> tuple[dict, dict]:
    random = np.random.default_rng(comm.rank)
    lengths = random.integers(0, 3, 10 + comm.rank)
    bags = tf.RaggedTensor.from_row_lengths(random.integers(-5, 40, lengths.sum()) % 50, lengths)
    weights = bags.with_values(tf.ones_like(bags.values, tf.float32))
    return {"a": bags, "b": tf.constant(random.integers(0, 40, 10 + comm.rank))}, {"a": weights}


def step(store, inputs, weights) -> None:
    pooled, plan = store.lookup(pack(inputs, SPECS, weights), training=True)
    store.apply_gradients(plan, [tf.ones_like(rows) for rows in pooled])


def count_stores(comm) -> None:
    seen, counted = MeasuredTraffic(comm), CountedTraffic(comm)
    inputs, weights = batch_of(comm)
    store = SokEmbeddingStore(TABLES, slip.optimizers.SGD(0.1), comm)
    counted.take(), seen.take(tf.int64), seen.take(tf.float32)
    step(store, inputs, weights)
    found = counted.take()
    assert found["keys"] == seen.take(tf.int64) > 0, found
    assert found["rows"] + found["gradients"] == seen.take(tf.float32) > 0, found
    assert found["gradients"] == found["rows"] and found["deferred"] == 0, found
    store = SokEmbeddingStore(TABLES, slip.optimizers.SGD(0.1), comm)
    deferred = UpdatePolicy("defer", "movement", movement=9.0, max_age=99, max_rows=1000)
    for table in TABLES:
        store.set_update_policy(table.name, deferred)
    counted.take()
    step(store, inputs, weights)
    found = counted.take()
    assert found["gradients"] == found["deferred"] == 0 < found["rows"]
    store.flush()
    assert counted.take()["deferred"] == found["rows"]


def main() -> None:
    comm = init()
    count_stores(comm)
    print("all checks passed")


if __name__ == "__main__":
    main()
