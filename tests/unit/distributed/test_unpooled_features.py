"""Features without a combiner, on several ranks: the rows are those of one process."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import FeatureSpec, Table, initializers, optimizers
from slipstream_tf.distributed.exchanged import ReplicatedStore
from slipstream_tf.distributed.sharded import ShardedStore
from slipstream_tf.ops.features import pack
from slipstream_tf.tables import NativeStore

DIM, RANKS = 3, 2
SPECS = [FeatureSpec("seen", "t", None, 0), FeatureSpec("item", "t", "mean", 0)]
# Keys of a rank: histories, padded with 0, and an item.
SEEN = np.array([[[1, 2, 0], [3, 1, 1]], [[2, 9, 9], [0, 0, 0]]])
ITEM = np.array([[4, 1], [2, 0]])


def tables():
    return [Table("t", DIM, initializer=initializers.RandomNormal(0.0, 1.0, seed=2))]


def train(store, inputs, scale=1.0):
    """Two steps; returns what the second one looked up, per feature."""
    packed = pack(inputs, SPECS)
    for _ in range(2):
        rows, plan = store.lookup(packed, SPECS, training=True)
        store.apply_gradients(plan, [scale * tf.sin(part) for part in rows])
    return [part.numpy() for part in rows]


@pytest.mark.parametrize("kind", [ReplicatedStore, ShardedStore])
def test_ranks_train_the_rows_of_one_process(run_as_ranks, kind):
    one = NativeStore(tables(), optimizers.SGD(0.5))
    expected = train(one, {"seen": SEEN.reshape(-1, 3), "item": ITEM.ravel()}, 1 / RANKS)

    def program(comm):
        store = kind(tables(), optimizers.SGD(0.5), comm)
        inputs = {"seen": SEEN[comm.rank], "item": ITEM[comm.rank]}
        rows = train(store, inputs)
        evaluated, _ = store.lookup(pack(inputs, SPECS), SPECS, training=False)
        return rows, [part.numpy() for part in evaluated]

    results = run_as_ranks(RANKS, program)
    evaluated, _ = one.lookup(
        pack({"seen": SEEN.reshape(-1, 3), "item": ITEM.ravel()}, SPECS), SPECS, training=False
    )
    for feature in range(2):
        for found, reference in ((0, expected), (1, evaluated)):
            ranks = np.concatenate([result[found][feature] for result in results])
            np.testing.assert_allclose(ranks, reference[feature], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["padded", "ragged"])
def test_keys_that_are_announced_give_the_same_rows(run_as_ranks, form):
    """The next batch of sequences is announced in the layout in which it is then looked up."""

    def laid_out(keys):
        keys = tf.constant(keys, tf.int64)
        return tf.RaggedTensor.from_tensor(keys, padding=0) if form == "ragged" else keys

    def program(comm, prefetch):
        store = ShardedStore(tables(), optimizers.SGD(0.5), comm, prefetch=prefetch)
        batches = [
            pack({"seen": laid_out(keys), "item": ITEM[comm.rank]}, SPECS)
            for keys in np.roll(SEEN, comm.rank, axis=0)
        ]
        looked_up = []
        for batch, following in itertools.pairwise([*batches, *batches, None]):
            rows, plan = store.lookup(batch, SPECS, training=True)
            if prefetch and following is not None:
                store.announce(following, SPECS)
            store.apply_gradients(plan, [tf.sin(part) for part in rows])
            looked_up += [part.numpy() for part in rows]
        return looked_up

    plain, ahead = (
        run_as_ranks(RANKS, functools.partial(program, prefetch=prefetch))
        for prefetch in (False, True)
    )
    for of_plain, of_ahead in zip(plain, ahead, strict=True):
        for expected, rows in zip(of_plain, of_ahead, strict=True):
            np.testing.assert_array_equal(rows, expected)
