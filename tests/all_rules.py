"""Optimizers of every kind for parametrized tests, and functions that train them."""

from __future__ import annotations

import numpy as np

from slipstream_tf import Table, distributed, initializers, optimizers
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables import NativeStore

SPECS = [FeatureSpec("f", "t", "sum")]

ALL_RULES = [
    optimizers.SGD(0.1),
    optimizers.SGD(0.1, momentum=0.5),
    optimizers.SGD(0.1, momentum=0.5, nesterov=True),
    optimizers.Adagrad(0.1),
    optimizers.RowWiseAdagrad(0.1),
    optimizers.Adam(0.1),
    optimizers.Adam(0.1, bias_correction="row"),
    optimizers.RowWiseAdam(0.1),
    optimizers.Ftrl(0.1, initial_accumulator_value=0.1),
]


def name_of(rule: optimizers.SparseOptimizer) -> str:
    """Returns the name of an optimizer for a test's id."""
    return rule.layout + ("Nesterov" if getattr(rule, "nesterov", False) else "")


def train(rule, rows, batches, gradients):
    """Trains a table on batches of keys and returns all rows."""
    table = Table("t", rows.shape[1], initializer=initializers.Zeros())
    store = NativeStore([table], rule)
    store.write_rows("t", np.arange(len(rows)), rows)
    for keys, gradient in zip(batches, gradients, strict=True):
        _, plan = store.lookup(pack({"f": keys}, SPECS), training=True)
        store.apply_gradients(plan, [gradient])
    return store.gather("t", np.arange(len(rows)))[0].numpy()


def train_on_ranks(comm, kind, rule, steps=3, keys=9):
    """Trains a store of class `kind` and returns this rank's rows.

    Returns:
        (keys, rows with their slots), both arrays in the order of the export.
    """
    random = np.random.default_rng(0)
    store = getattr(distributed, kind)([Table("t", 4)], rule, comm)
    for _ in range(steps):
        drawn = random.integers(0, keys, 16)
        gradient = random.normal(size=(16, 4)).astype(np.float32)
        mine = slice(comm.rank, None, comm.size)
        _, plan = store.lookup(pack({"f": drawn[mine]}, SPECS), training=True)
        # The store averages over ranks. The factor makes the average equal to the gradient that one
        # process applies.
        store.apply_gradients(plan, [gradient[mine] * comm.size])
    exported = store.export_table("t")
    return exported["keys"], np.concatenate([exported["rows"], exported["slots"]], axis=1)
