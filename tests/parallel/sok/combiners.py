"""Checks that layers on SOK's tables combine bags as `sok.lookup_sparse` and as NumPy.

All ranks train the same batches, so that averages over ranks are equal to one rank's gradients.
"""

from __future__ import annotations

import sys

import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf

import slipstream_tf as slip

KEYS, BATCH, STEPS, RATE = 30, 12, 5, 0.5
DIMS = {"sum": 5, "mean": 3, "sqrtn": 4}


def layer_of(comm) -> slip.keras.EmbeddingCollection:
    """Returns a layer on SOK with a table and a feature per combiner."""
    retention = slip.Retention(1 << 10, "lru")
    tables = [slip.Table(name, dim, retention=retention) for name, dim in DIMS.items()]
    features = [slip.FeatureSpec(name, name, combiner=name) for name in DIMS]
    return slip.keras.EmbeddingCollection(
        tables, slip.optimizers.SGD(RATE), features, store="sok", comm=comm
    )


def batch_of(random) -> tuple[dict, dict]:
    """Returns bags and the weights of their keys."""
    bags, weights = {}, {}
    for name in DIMS:
        lengths = random.integers(1, 5, BATCH)
        keys = tf.constant(random.integers(0, KEYS, lengths.sum()))
        bags[name] = tf.RaggedTensor.from_row_lengths(keys, lengths)
        own = tf.constant(random.uniform(0.2, 2.0, lengths.sum()), tf.float32)
        weights[name] = bags[name].with_values(own)
    return bags, weights


def divisor(combiner: str, weights: np.ndarray) -> float:
    if combiner == "sum":
        return 1.0
    return weights.sum() if combiner == "mean" else np.sqrt(np.square(weights).sum())


def check_training(comm, is_weighted: bool) -> None:
    random = np.random.default_rng(8)
    layer, everything = layer_of(comm), np.arange(KEYS)
    rows = {name: layer.table(name).read(everything).astype(np.float64) for name in DIMS}
    for _ in range(STEPS):
        bags, weights = batch_of(random)
        with tf.GradientTape() as tape:
            found = layer(bags, weights=weights if is_weighted else None, training=True)
            loss = sum(tf.reduce_sum(tf.square(values)) for values in found.values())
        tape.gradient(loss, layer.trainable_variables)
        for name, values in found.items():
            gradient, pooled = np.zeros_like(rows[name]), []
            for bag, own in zip(bags[name].to_list(), weights[name].to_list(), strict=True):
                own = np.array(own if is_weighted else np.ones(len(bag)))
                own /= divisor(name, own)
                pooled.append(own @ rows[name][bag])
                np.add.at(gradient, bag, own[:, None] * 2 * pooled[-1])
            np.testing.assert_allclose(values, pooled, rtol=1e-4, atol=1e-5)
            rows[name] -= RATE * gradient
    for name, expected in rows.items():
        found = layer.table(name).read(everything)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def check_lookups_of_sok_return_the_same(comm) -> None:
    layer, random = layer_of(comm), np.random.default_rng(9)
    names = ["sum", "mean"]  # SOK has no "sqrtn".
    bags, weights = batch_of(random)
    variables = [
        sok.Variable(layer.table(name).read(np.arange(KEYS)), dtype=tf.float32) for name in names
    ]
    # From Python 3.12 on, SOK's function raises an error; see traps.py.
    for given in (None, weights) if sys.version_info < (3, 12) else ():
        theirs = sok.lookup_sparse(
            variables,
            [bags[name] for name in names],
            sp_weights=given and [given[name] for name in names],
            combiners=names,
        )
        ours = layer(bags, weights=given, training=False)
        for name, values in zip(names, theirs, strict=True):
            np.testing.assert_allclose(ours[name], values, rtol=1e-5)
    keys = np.array([7, 0, 7, 29])
    rows = layer({name: keys for name in DIMS})["mean"]
    np.testing.assert_allclose(rows, sok.all2all_dense_embedding(variables[1], tf.constant(keys)))


def check(comm) -> None:
    """Runs all checks; a collective."""
    for is_weighted in (False, True):
        check_training(comm, is_weighted)
    check_lookups_of_sok_return_the_same(comm)
