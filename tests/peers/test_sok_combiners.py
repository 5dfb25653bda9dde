"""Tests of lookups of multiple tables with a combiner each, as in NVIDIA's SOK.

SOK's tests compare `sok.lookup_sparse` with `tf.nn.embedding_lookup_sparse`: losses of each step
and the rows after training. The tests here do so with this layer on native tables, and
`tests/parallel/sok/combiners.py` does so on SOK's tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import ShardedStore, SingleProcess

DIMS = {"wide": 12, "narrow": 3}
ROWS, BATCH, STEPS, RATE = 50, 16, 6, 0.5


def layer_of(kind: str, combiners: dict[str, str]) -> Any:
    """Returns a layer with a table and a feature for each name in `DIMS`."""
    tables = [slip.Table(name, dim) for name, dim in DIMS.items()]
    optimizer = slip.optimizers.SGD(RATE)
    store: Any = "native"
    if kind == "sharded":  # A single rank exchanges keys and rows with itself.
        store = ShardedStore(tables, optimizer, SingleProcess())
    specs = [slip.FeatureSpec(name, name, combiners[name]) for name in DIMS]
    return slip.keras.EmbeddingCollection(tables, optimizer, specs, store=store)


def batches(random: np.random.Generator) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns bags of 1 to 5 keys, and positive weights of the keys."""
    found = []
    for _ in range(STEPS):
        keys, weights = {}, {}
        for name in DIMS:
            lengths = random.integers(1, 6, BATCH)
            drawn = tf.constant(random.integers(0, ROWS, lengths.sum()))
            keys[name] = tf.RaggedTensor.from_row_lengths(drawn, lengths)
            own = tf.constant(random.uniform(0.1, 2.0, lengths.sum()), tf.float32)
            weights[name] = keys[name].with_values(own)
        found.append((keys, weights))
    return found


@pytest.mark.parametrize("kind", ["native", "sharded"])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    "combiners",
    [
        {"wide": "mean", "narrow": "sum"},
        {"wide": "sum", "narrow": "sqrtn"},
        {"wide": "sqrtn", "narrow": "mean"},
    ],
    ids=lambda combiners: "-".join(combiners.values()),
)
def test_training_equals_embedding_lookup_sparse(
    combiners: dict[str, str], is_weighted: bool, kind: str
) -> None:
    random = np.random.default_rng(0)
    layer = layer_of(kind, combiners)
    variables = {}
    for name, dim in DIMS.items():
        rows = random.uniform(-1, 1, (ROWS, dim)).astype(np.float32)
        layer.table(name).write(np.arange(ROWS), rows)
        variables[name] = tf.Variable(rows)

    def ours(keys: dict[str, Any], weights: dict[str, Any]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = layer(keys, weights=weights if is_weighted else None, training=True)
            loss = sum(tf.reduce_mean(tf.square(rows[name] - 1.0)) for name in DIMS)
        tape.gradient(loss, layer.trainable_variables)
        return loss

    def theirs(keys: dict[str, Any], weights: dict[str, Any]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = {
                name: tf.nn.embedding_lookup_sparse(
                    variables[name],
                    keys[name].to_sparse(),
                    weights[name].to_sparse() if is_weighted else None,
                    combiner=combiners[name],
                )
                for name in DIMS
            }
            loss = sum(tf.reduce_mean(tf.square(rows[name] - 1.0)) for name in DIMS)
        gradients = tape.gradient(loss, variables)
        for name, gradient in gradients.items():
            moved = tf.IndexedSlices(RATE * gradient.values, gradient.indices)
            variables[name].scatter_sub(moved)
        return loss

    for keys, weights in batches(random):
        np.testing.assert_allclose(ours(keys, weights), theirs(keys, weights), rtol=1e-5)
    for name, variable in variables.items():
        found = layer.table(name).read(np.arange(ROWS))
        np.testing.assert_allclose(found, variable, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["native", "sharded"])
def test_all_rows_of_repeated_keys_are_returned(kind: str) -> None:
    """As `sok.all2all_dense_embedding`, which returns a row per key, in order."""
    layer = layer_of(kind, {"wide": "sum", "narrow": "sum"})
    rows = np.random.default_rng(4).normal(size=(ROWS, 3)).astype(np.float32)
    layer.table("narrow").write(np.arange(ROWS), rows)
    keys = np.array([7, 0, 7, 49, 7, 0])
    with tf.GradientTape() as tape:
        found = layer({"narrow": keys}, training=True)["narrow"]
        loss = tf.reduce_sum(found * tf.range(1.0, 7.0)[:, None])
    tape.gradient(loss, layer.trainable_variables)
    np.testing.assert_array_equal(found, rows[keys])
    moved = RATE * np.array([[9.0], [8.0], [4.0]])
    np.testing.assert_allclose(
        layer.table("narrow").read([7, 0, 49]), rows[[7, 0, 49]] - moved, rtol=1e-5
    )
