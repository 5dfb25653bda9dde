"""Layers on SOK's tables and on sharded native tables have equal rows.

The program also runs the checks of combiners.py, because a launch takes longer than they do.

Arguments: cases, each "mode,rule".
"""

from __future__ import annotations

import sys

import by_interval
import combiners
import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import init

KEYS, BATCH, STEPS, INTERVAL = 80, 16, 40, 8
TABLES = {"one": 4, "two": 3}
FEATURES = {"a": "one", "bag": "one", "b": "two"}
RULES = {
    "sgd": slip.optimizers.SGD(0.1),
    "adagrad": slip.optimizers.Adagrad(0.1, 0.1, 1e-12),
    "adam": slip.optimizers.Adam(0.05),
}
POLICIES = {
    "mask": [slip.MaskGradients(fraction=0.5)],
    "interval": [by_interval.DeferGradients(slip.Interval(3, fraction=0.5))],
    "movement": [slip.DeferGradients(slip.Movement(0.02))],
}


def layer_on(store: str, rule: str, comm):
    settings = {"retention": slip.Retention(1 << 10, "lru")} if store == "sok" else {}
    tables = [slip.Table(n, d, combiner="mean", **settings) for n, d in TABLES.items()]
    placement = {} if store == "sok" else {"placement": "sharded"}
    layer = slip.keras.EmbeddingCollection(
        tables, RULES[rule], FEATURES, store=store, comm=comm, **placement
    )  # fmt: skip
    return layer


def batch_of(random) -> dict:
    """Returns a batch of one rank.

    All ranks draw the batches in the order of ranks.
    """
    draw = lambda n: np.minimum(random.zipf(1.4, n), KEYS).astype(np.int64)  # noqa: E731
    lengths = random.integers(0, 4, BATCH)
    bags = tf.RaggedTensor.from_row_lengths(tf.constant(draw(lengths.sum())), lengths)
    return {"a": tf.constant(draw(BATCH)), "bag": bags, "b": tf.constant(2**40 + draw(BATCH))}


def train(layer, slipstream):
    """Returns a training step of the layer, traced once."""
    signature = {
        "a": tf.TensorSpec([None], tf.int64),
        "bag": tf.RaggedTensorSpec([None, None], tf.int64, row_splits_dtype=tf.int64),
        "b": tf.TensorSpec([None], tf.int64),
    }
    weights = tf.constant(
        np.random.default_rng(5).normal(size=sum(TABLES.values()) + 4), tf.float32
    )

    @tf.function(input_signature=[signature], autograph=False)
    def step(inputs):
        with tf.GradientTape() as tape:
            rows = layer(inputs, training=True)
            joined = tf.concat([rows[name] for name in FEATURES], axis=1)
            # The gradients shrink during training, so that some keys move less than others.
            loss = tf.reduce_mean(tf.square(joined - weights))
        gradient = tape.gradient(loss, layer.update_anchor.value)
        with tf.control_dependencies([gradient]):
            return tf.identity(loss)

    return step


def compare(comm, mode: str, rule: str) -> None:
    random = np.random.default_rng(11)
    layers = {store: layer_on(store, rule, comm) for store in ("sok", "native")}
    engines = {
        store: slip.Slipstream(
            layer,
            POLICIES[mode],
            window=slip.Window(INTERVAL, warmup=0, seed=3),
            hot_set=slip.HotSet(memory="1MiB"),
            saturation=None if mode == "movement" else slip.Saturation(revisit_every=3),
        )
        for store, layer in layers.items()
    }
    steps = {store: train(layer, engines[store]) for store, layer in layers.items()}
    masked = deferred = 0
    for _ in range(STEPS):
        inputs = [batch_of(random) for _ in range(comm.size)][comm.rank]
        losses, reports = {}, {}
        for store, engine in engines.items():
            engine.observe(inputs)
            losses[store] = float(steps[store](inputs))
            reports[store] = engine.step()
        np.testing.assert_allclose(losses["sok"], losses["native"], rtol=1e-4)
        if reports["sok"] is not None:
            found, expected = reports["sok"], reports["native"]
            np.testing.assert_allclose(found.threshold, expected.threshold, rtol=1e-3)
            for mine, theirs in zip(found.tables, expected.tables, strict=True):
                assert mine.rows.offered == theirs.rows.offered
                assert mine.rows.masked == theirs.rows.masked
                assert mine.rows.deferred == theirs.rows.deferred
                masked, deferred = masked + mine.rows.masked, deferred + mine.rows.deferred
    if mode != "mask":
        for layer in layers.values():
            layer.store.flush()
    everything = np.arange(1, KEYS + 1)
    keys = {"a": everything, "bag": everything[:, None], "b": 2**40 + everything}
    rows = {store: layer(keys) for store, layer in layers.items()}
    for name in FEATURES:
        np.testing.assert_allclose(rows["sok"][name], rows["native"][name], rtol=1e-4, atol=1e-6)
    if mode == "mask":
        assert masked > 0
    else:
        assert deferred > 0
    print(mode, rule, masked, "masked", deferred, "deferred")


def main() -> None:
    comm = init()
    combiners.check(comm)
    for case in sys.argv[1:]:
        compare(comm, *case.split(","))
    print("all checks passed")


if __name__ == "__main__":
    main()
