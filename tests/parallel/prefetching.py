"""Compares sharded tables with and without prefetched keys, for test_programs.py.

Arguments: number of cases, seed. A random event happens between the prefetch and the lookup of
a batch: rows are flagged or removed, an evaluation runs, the batch is forgotten, or nothing
happens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import distributed, initializers, optimizers
from slipstream_tf.config import Table
from slipstream_tf.distributed import ShardedStore
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy

TABLES = (
    Table("t0", 4, initializer=initializers.RandomUniform(seed=1)),
    Table("t1", 3, initializer=initializers.RandomUniform(seed=2)),
)
SPECS = (FeatureSpec("a", "t0"), FeatureSpec("b", "t0", "mean"), FeatureSpec("c", "t1"))
LARGEST_KEY, STEPS = 64, 12
NO_KEYS = np.empty(0, np.int64)
# Memory for about 30 replicas per table: the rows of one batch and a few more.
CACHE_BYTES = 30 * (2 * 64 + 4 * 2 * (4 + 3))
EVENTS = ("nothing", "nothing", "mark", "remove", "evaluation", "forget")


def draw_inputs(random: np.random.Generator, size: int) -> dict[str, Any]:
    """Returns random keys of two dense features and a ragged feature."""
    lengths = random.integers(0, 3, size)
    bags = tf.constant(random.integers(0, LARGEST_KEY, lengths.sum()), tf.int64)
    return {
        "a": tf.constant(random.integers(0, LARGEST_KEY, size), tf.int64),
        "b": tf.RaggedTensor.from_row_lengths(bags, tf.constant(lengths, tf.int64)),
        "c": tf.constant(random.integers(0, LARGEST_KEY, size), tf.int64),
    }


def trainer(store: ShardedStore, is_traced: bool) -> Callable[..., list[tf.Tensor]]:
    """Returns a function that trains a step and prefetches the next batch."""

    def train(inputs: Any, gradients: Any, next_inputs: Any) -> list[tf.Tensor]:
        if store.comm.rank and is_traced:
            # Note: ranks may trace different graphs. Names of collectives must not depend on
            # other nodes of the graph.
            tf.cond(tf.size(inputs["a"]) > 2, lambda: tf.constant(1), lambda: tf.constant(2))
        pooled, plan = store.lookup(pack(inputs, SPECS), training=True)
        if next_inputs is not None:
            store.prefetch_keys(pack(next_inputs, SPECS))
        store.apply_gradients(plan, gradients)
        return [tf.identity(rows) for rows in pooled]

    return tf.function(train, autograph=False) if is_traced else train


class Case:
    """Two stores with the same batches. Only one of them prefetches."""

    def __init__(self, comm: Any, seed: int, number: int):
        self.comm = comm
        # `random` is equal on all ranks. `own` is different on each rank.
        self.random = np.random.default_rng([seed, number])
        self.own = np.random.default_rng([seed, number, comm.rank])
        rule = optimizers.Adagrad(0.1, 0.1)
        self.ahead, self.at_once = (
            ShardedStore(TABLES, rule, comm, prefetch=prefetch, cache_bytes=CACHE_BYTES)
            for prefetch in (True, False)
        )
        policy = (UpdatePolicy(), UpdatePolicy("mask"), UpdatePolicy("defer", trigger="interval"))
        for store in (self.ahead, self.at_once):
            for table in TABLES:
                store.set_update_policy(table.name, policy[number % 3])
        self.is_traced = number % 4 == 3
        self.trainers = [trainer(s, self.is_traced) for s in (self.ahead, self.at_once)]

    def run(self) -> None:
        """Trains both stores and asserts bitwise equal vectors and final rows."""
        sizes = self.random.integers(0, 6, [STEPS, self.comm.size])
        sizes[self.random.random(sizes.shape) < 0.2] = 0
        batches = [draw_inputs(self.own, int(size)) for size in sizes[:, self.comm.rank]]
        for step, inputs in enumerate(batches):
            gradients = [
                tf.constant(self.own.normal(0, 0.5, [inputs["a"].shape[0], dim]), tf.float32)
                for dim in (4, 4, 3)
            ]
            is_prefetched = step + 1 < STEPS and self.random.random() < 0.9
            next_inputs = batches[step + 1] if is_prefetched else None
            got = self.trainers[0](inputs, gradients, next_inputs)
            wanted = self.trainers[1](inputs, gradients, None)
            for rows, others in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(rows, others, f"step {step}")
            self._event(EVENTS[self.random.integers(len(EVENTS))])
        for store in (self.ahead, self.at_once):
            store.flush()
        for table in TABLES:
            got, wanted = (s.export_table(table.name) for s in (self.ahead, self.at_once))
            for name in ("keys", "rows", "slots", "counts"):
                np.testing.assert_array_equal(got[name], wanted[name])

    def _event(self, event: str) -> None:
        keys = self.random.choice(LARGEST_KEY, 12, replace=False).astype(np.int64)
        seen = [draw_inputs(self.own, 5) for _ in range(3)]
        results = []
        for store in (self.ahead, self.at_once):
            for table in TABLES:
                if event == "mark":
                    store.set_row_flags(table.name, keys[:6], np.full(6, SATURATED))
                if event == "remove":
                    store.remove_rows(table.name, keys[:6])
            if event == "evaluation":
                looked_up = [store.lookup(pack(x, SPECS), training=False)[0] for x in seen]
                results.append([rows for pooled in looked_up for rows in pooled])
        if event == "forget":
            self.ahead.discard_prefetched()
        for rows, others in zip(*results, strict=True) if results else ():
            np.testing.assert_array_equal(rows, others)


def reads_no_stale_row(comm: Any) -> None:
    """Asserts that the lookup of a prefetched batch reads the updated rows."""
    cache_bytes = 32 * (64 + 4 * 4)  # 32 rows of t0. Its update rule has no slots.
    rule = optimizers.SGD(1.0)
    store = ShardedStore(TABLES[:1], rule, comm, cache_bytes=cache_bytes, prefetch=True)
    specs, keys = SPECS[:1], np.arange(8, dtype=np.int64)
    batch = pack({"a": tf.constant(keys)}, specs)

    def step(prefetches: bool) -> np.ndarray:
        pooled, plan = store.lookup(batch, training=True)
        if prefetches:
            store.prefetch_keys(batch)
        store.apply_gradients(plan, [tf.ones([8, 4])])
        return pooled[0].numpy()

    first = step(prefetches=False)
    store.set_row_flags("t0", keys, np.full(8, SATURATED))
    # Each update subtracts 1, the mean of the ranks' gradients.
    np.testing.assert_allclose(step(prefetches=True), first - 1, rtol=1e-5)
    store.set_row_flags("t0", keys[:0], np.empty(0, np.uint8))
    np.testing.assert_allclose(step(prefetches=False), first - 2, rtol=1e-5)


def refuses(comm: Any, is_traced: bool) -> None:
    """Asserts that all ranks reject batches that were not prefetched and repeated prefetches."""
    random = np.random.default_rng(comm.rank)
    first, second, third = (draw_inputs(random, 4) for _ in range(3))
    gradients = [tf.zeros([4, dim]) for dim in (4, 4, 3)]
    store = ShardedStore(TABLES, optimizers.SGD(0.1), comm, prefetch=True)
    train = trainer(store, is_traced)
    train(first, gradients, second)
    shorter = {**second, "c": second["c"][:3]}
    wrong = [
        third,  # Other keys.
        {**second, "b": tf.RaggedTensor.from_row_splits(NO_KEYS, tf.zeros([5], tf.int64))},
        {**second, "b": second["b"].to_tensor(-1)},  # The same keys in another layout.
        # The first examples of the prefetched batch.
        {**shorter, "a": second["a"][:3], "b": second["b"][:3]},
    ]
    for inputs in wrong:
        shares = [gradient[: inputs["a"].shape[0]] for gradient in gradients]
        require_error("discard_prefetched", lambda i=inputs, s=shares: train(i, s, None))
    train(second, gradients, None)
    train(third, gradients, first)
    require_error("once per step", lambda: store.prefetch_keys(pack(second, SPECS)))
    store.discard_prefetched()
    train(second, gradients, None)
    plain = ShardedStore(TABLES, optimizers.SGD(0.1), comm)
    require_error("prefetch=True", lambda: plain.prefetch_keys(pack(first, SPECS)))


def require_error(text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except (tf.errors.InvalidArgumentError, ValueError) as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"no error contains {text!r}")


def main() -> None:
    """Runs all cases."""
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    comm = distributed.init()
    tf.get_logger().setLevel("ERROR")  # Every size causes a new trace, which is intended.
    reads_no_stale_row(comm)
    for is_traced in (False, True):
        refuses(comm, is_traced)
    for number in range(count):
        try:
            Case(comm, seed, number).run()
        except Exception:
            print(f"rank {comm.rank}: case {number}", file=sys.stderr, flush=True)
            raise
    print(f"rank {comm.rank} of {comm.size}: {count} cases equal", flush=True)


if __name__ == "__main__":
    main()
