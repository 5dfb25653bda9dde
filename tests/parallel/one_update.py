"""Compares three calls of a layer per step with one call of all keys, for test_programs.py.

    one_update.py PLACEMENT

Both ways are trained on the same ranks, with `apply="backward"` and `apply="step"`.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf import distributed

STEPS, CALLS, DIM = 4, 3, 4


def train(placement: str, apply: str, at_once: bool, comm: Any) -> dict[str, np.ndarray]:
    """Trains a layer on the batches of this rank and returns the rows that the rank stores."""
    tables = [slip.Table("item", DIM)]
    layer = slip.keras.EmbeddingCollection(
        tables, "adam", comm=comm, placement=placement, apply=apply, name=f"{apply}_{at_once}"
    )
    optimizer: Any = keras.optimizers.SGD(0.1)
    if apply == "step":
        optimizer = slip.keras.CombinedOptimizer(optimizer)
    variables = layer.trainable_variables
    optimizer.build(variables)

    def loss_of(keys: Any, upstream: Any) -> Any:
        rows = layer({"item": tf.reshape(keys, [-1])}, training=True)["item"]
        return tf.reduce_sum(rows * tf.reshape(upstream, [-1, DIM]))

    @tf.function
    def step(keys: Any, upstream: Any) -> None:
        with tf.GradientTape() as tape:
            parts = [(keys, upstream)]
            if not at_once:
                parts = list(zip(tf.unstack(keys), tf.unstack(upstream), strict=True))
            loss = tf.add_n([loss_of(*part) for part in parts])
        optimizer.apply(tape.gradient(loss, variables), variables)

    random = np.random.default_rng(comm.rank)
    for _ in range(STEPS):
        keys = random.integers(0, 20, (CALLS, 6))
        upstream = random.normal(size=(CALLS, 6, DIM)).astype(np.float32)
        step(tf.constant(keys), tf.constant(upstream))
    assert layer.store.num_updates == STEPS, layer.store.num_updates
    return layer.store.export_table("item")


def main() -> None:
    """Compares the rows of both ways."""
    placement = sys.argv[1]
    comm = distributed.init(timeout_seconds=60.0)
    want = train(placement, "backward", True, comm)
    got = train(placement, "backward", False, comm)
    for name in ("keys", "rows", "slots", "steps"):
        np.testing.assert_array_equal(got[name], want[name])
    got = train(placement, "step", False, comm)
    np.testing.assert_array_equal(got["keys"], want["keys"])
    np.testing.assert_allclose(got["rows"], want["rows"], rtol=1e-5, atol=1e-6)
    print(f"rank {comm.rank}: equal", flush=True)


if __name__ == "__main__":
    main()
