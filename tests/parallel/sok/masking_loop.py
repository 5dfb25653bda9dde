"""A custom loop on SOK has the rows of a native table.

The loop uses three calls of this package.

Arguments: cases, each "optimizers,rule,lookup,mode". An engine runs with SOK's table and with the
native table, on the same batches and settings. Rows, masked keys, states and thresholds must be
equal after every window.

Run with TF_USE_LEGACY_KERAS=1, because SOK's legacy optimizers are the optimizers of Keras 2.
"""

from __future__ import annotations

import sys

import by_interval
import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import init
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables.sok import wrap_optimizer
from slipstream_tf.tables.sok.table import open_sok

DIM, KEYS, BATCH, STEPS, INTERVAL, RATE = 4, 60, 24, 48, 8, 0.1
SPECS = [FeatureSpec("t", "t")]
RULES = {
    "sgd": slip.optimizers.SGD(RATE),
    "adagrad": slip.optimizers.Adagrad(RATE, 0.1, 1e-12),
    "adam": slip.optimizers.Adam(RATE, epsilon=1e-7),
}


def sok_optimizer(kind: str, rule: str):
    if kind == "sok":
        return open_sok().SGD(RATE)
    if kind == "v1":
        first = tf.compat.v1.train
        return {
            "sgd": lambda: first.GradientDescentOptimizer(RATE),
            "adagrad": lambda: first.AdagradOptimizer(RATE, 0.1),
            "adam": lambda: first.AdamOptimizer(RATE, epsilon=1e-7),
        }[rule]()
    from tf_keras.optimizers import legacy

    return {
        "sgd": lambda: legacy.SGD(RATE),
        "adagrad": lambda: legacy.Adagrad(RATE, 0.1, epsilon=1e-12),
        "adam": lambda: legacy.Adam(RATE, epsilon=1e-7),
    }[rule]()


def batches(ranks: int):
    """Yields keys [ranks, batch] and targets [ranks, batch, dim] per step.

    A small number of keys is frequent.
    """
    random = np.random.default_rng(7)
    for _ in range(STEPS):
        keys = np.minimum(random.zipf(1.5, (ranks, BATCH)), KEYS).astype(np.int64)
        keys[:, 0] = 2**40 + keys[:, 0]
        yield keys, random.normal(size=(ranks, BATCH, DIM)).astype(np.float32) / 8


def engine_on(watched, mode: str) -> slip.Slipstream:
    """Returns the engine of a mode for a store or layer."""
    policies = {
        "defer": by_interval.DeferGradients(slip.Interval(3, fraction=0.5)),
        "movement": slip.DeferGradients(slip.Movement(0.02)),
    }
    return slip.Slipstream(
        watched,
        policies.get(mode, slip.MaskGradients(fraction=0.5)),
        window=slip.Window(INTERVAL, warmup=0, seed=3),
        hot_set=slip.HotSet(memory="1MiB"),
        saturation=None if mode == "movement" else slip.Saturation(revisit_every=3),
    )


class SokLoop:
    """A SOK user's training loop with three calls of this package."""

    def __init__(self, comm, kind: str, rule: str, lookup: str, mode: str):
        sok, is_static = open_sok(), mode == "static"
        if is_static:
            self.variable = sok.Variable(np.full((2 * KEYS, DIM), 0.5), dtype=tf.float32)
        else:
            self.variable = sok.DynamicVariable(
                dimension=DIM, initializer="0.5", var_type="hybrid",
                init_capacity=1024, max_capacity=1024,
            )  # fmt: skip
        self.sok, self.comm, self.lookup = sok, comm, lookup
        optimizer = sok_optimizer(kind, rule)
        # SOK's wrapper supports only its dynamic variables. Any optimizer can update other
        # variables.
        self.optimizer = optimizer if is_static else wrap_optimizer(optimizer)
        watched = None if is_static else self.optimizer
        counts = {"counts_on_device": True, "counted_keys": 1 << 14} if mode == "estimated" else {}
        self.store = slip.tables.SokStore({"t": self.variable}, watched, comm, **counts)
        self.slipstream = engine_on(self.store, mode)

    def rows(self, keys):
        if self.lookup == "all2all":
            return self.sok.all2all_dense_embedding(self.variable, keys)
        bags = tf.RaggedTensor.from_row_lengths(keys, tf.ones_like(keys))
        return self.sok.lookup_sparse([self.variable], [bags], combiners=["sum"])[0]

    def step(self, keys, targets) -> None:
        self.slipstream.observe({"t": keys})
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.rows(keys) * targets) / self.comm.size
        gradients = tape.gradient(loss, [self.variable])
        self.optimizer.apply_gradients(self.store.filter_gradients([(gradients[0], self.variable)]))


def native_of(rule: str, mode: str):
    """Returns a native table that trains the whole batch, and its engine.

    The gradients are averaged over the ranks.
    """
    table = slip.Table("t", DIM, initializer=slip.initializers.Constant(0.5))
    store = slip.tables.NativeStore([table], RULES[rule])
    layer = slip.keras.EmbeddingCollection([table], RULES[rule], SPECS, store=store)
    return store, engine_on(layer, mode)


def compare(comm, kind: str, rule: str, lookup: str, mode: str) -> None:
    is_static = mode == "static"
    loop = SokLoop(comm, kind, rule, lookup, mode)
    native, reference = native_of(rule, mode)
    is_graph = mode in ("graph", "defer", "movement", "estimated")
    step = tf.function(loop.step, reduce_retracing=True) if is_graph else loop.step
    filtered = 0
    for keys, targets in batches(comm.size):
        if is_static:
            keys %= 2 * KEYS
        flat = keys.reshape(-1)
        step(tf.constant(keys[comm.rank]), tf.constant(targets[comm.rank]))
        report = loop.slipstream.step()

        reference.tracker.classifier.classify({"t": flat}, SPECS)
        _, plan = native.lookup(pack({"t": flat}, SPECS), training=True)
        native.apply_gradients(plan, [tf.constant(targets.reshape(-1, DIM) / comm.size)])
        expected = reference.step()

        if report is not None and expected is not None:
            np.testing.assert_allclose(report.threshold, expected.threshold, rtol=1e-4)
            assert report.hot_keys == expected.hot_keys, (report.hot_keys, expected.hot_keys)
            found, wanted = (s.tracker.states["t"] for s in (loop.slipstream, reference))
            np.testing.assert_array_equal(found.keys, wanted.keys)
            np.testing.assert_array_equal(found.states, wanted.states)
            mine, theirs = report.tables[0].rows, expected.tables[0].rows
            filtered += mine.masked + mine.deferred
            assert (mine.masked, mine.offered) == (theirs.masked, theirs.offered)
            assert (mine.deferred, mine.due_by_age) == (theirs.deferred, theirs.due_by_age)
            assert mine.due_by_movement == theirs.due_by_movement
    if mode in ("defer", "movement"):
        assert loop.store.update_counts("t").deferred_now > 0
        loop.store.flush(loop.optimizer)
        assert loop.store.update_counts("t").deferred_now == 0
        native.flush()
    seen = np.unique(native.export_table("t")["keys"])
    rows = loop.rows(tf.constant(seen)).numpy()
    np.testing.assert_allclose(rows, native.gather("t", seen)[0].numpy(), rtol=1e-4, atol=1e-5)
    assert filtered > 0
    print(kind, rule, lookup, mode, filtered, "rows masked or deferred")


def main() -> None:
    comm = init()
    for case in sys.argv[1:]:
        compare(comm, *case.split(","))
    print("all checks passed")


if __name__ == "__main__":
    main()
