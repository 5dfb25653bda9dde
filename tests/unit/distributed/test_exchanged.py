"""Tests of stores across ranks: counts, refused calls and unpooled features."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table, initializers, optimizers
from slipstream_tf.distributed.exchanged import ReplicatedStore
from slipstream_tf.distributed.sharded import ShardedStore
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables import NativeStore

TABLES = [Table("t", dim=2)]
SPECS = [FeatureSpec("f", "t")]


def test_restored_store_continues_wire_warmup(run_as_ranks):
    """A flush counts as an update in `num_updates` and saved steps."""
    warmup = {"wire_dtype": "bfloat16", "wire_warmup_steps": 3}

    def program(comm):
        store = ReplicatedStore(TABLES, optimizers.SGD(1.0), comm, **warmup)
        store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=99, max_rows=1000))
        rounded = []
        for _ in range(2):
            keys = pack({"f": tf.constant([comm.rank], tf.int64)}, SPECS)
            _, plan = store.lookup(keys, training=True)
            store.apply_gradients(plan, [tf.ones([1, 2])])
            store.flush()
            rounded.append(bool(store.wire.dtype_of("bfloat16", tf.constant(store.num_updates))))
        saved = store.export_table("t")
        restored = ReplicatedStore(TABLES, optimizers.SGD(1.0), comm, **warmup)
        restored.import_table("t", saved)
        return store.num_updates, int(saved["steps"][0]), restored.num_updates, rounded

    assert run_as_ranks(2, program) == [(4, 4, 4, [False, True])] * 2


@pytest.mark.parametrize("kind", [ReplicatedStore, ShardedStore])
def test_empty_flush_is_not_counted_as_update(run_as_ranks, kind):
    """Policies that an engine tries before training cause no update."""

    def program(comm):
        store = kind(TABLES, optimizers.SGD(1.0), comm, "bfloat16", wire_warmup_steps=1)
        store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=99, max_rows=1000))
        store.set_update_policy("t", UpdatePolicy())
        tried = store.num_updates
        store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=99, max_rows=1000))
        if comm.rank:  # Rank 0 has no gradients to flush, but takes part.
            keys = pack({"f": tf.constant([5], tf.int64)}, SPECS)
        else:
            keys = pack({"f": tf.zeros([0], tf.int64)}, SPECS)
        _, plan = store.lookup(keys, training=True)
        store.apply_gradients(plan, [tf.ones([comm.rank, 2])])
        store.flush()
        return tried, store.num_updates, int(store.export_table("t")["steps"][0])

    assert run_as_ranks(2, program) == [(0, 2, 2)] * 2


@pytest.mark.parametrize("kind", [ReplicatedStore, ShardedStore])
def test_decay_of_masked_moments_on_ranks_raises(run_as_ranks, kind):
    def program(comm):
        store = kind(TABLES, optimizers.Adam(0.1), comm)
        with pytest.raises(ValueError, match="`decay_moments`: True for table 't' on 2 ranks"):
            store.set_update_policy("t", UpdatePolicy("mask", decay_skipped=True))

    assert run_as_ranks(2, program) == [None, None]


DIM, RANKS = 3, 2
UNPOOLED_SPECS = [FeatureSpec("seen", "t", None, 0), FeatureSpec("item", "t", "mean", 0)]
# Keys per rank: histories padded with 0, and items.
SEEN = np.array([[[1, 2, 0], [3, 1, 1]], [[2, 9, 9], [0, 0, 0]]])
ITEM = np.array([[4, 1], [2, 0]])


def tables():
    return [Table("t", DIM, initializer=initializers.RandomNormal(0.0, 1.0, seed=2))]


def train(store, inputs, scale=1.0):
    """Trains two steps and returns the rows of the second lookup."""
    packed = pack(inputs, UNPOOLED_SPECS)
    for _ in range(2):
        rows, plan = store.lookup(packed, training=True)
        store.apply_gradients(plan, [scale * tf.sin(part) for part in rows])
    return [part.numpy() for part in rows]


@pytest.mark.parametrize("kind", [ReplicatedStore, ShardedStore])
def test_ranks_equal_rows_of_single_process(run_as_ranks, kind):
    one = NativeStore(tables(), optimizers.SGD(0.5))
    expected = train(one, {"seen": SEEN.reshape(-1, 3), "item": ITEM.ravel()}, 1 / RANKS)

    def program(comm):
        store = kind(tables(), optimizers.SGD(0.5), comm)
        inputs = {"seen": SEEN[comm.rank], "item": ITEM[comm.rank]}
        rows = train(store, inputs)
        evaluated, _ = store.lookup(pack(inputs, UNPOOLED_SPECS), training=False)
        return rows, [part.numpy() for part in evaluated]

    results = run_as_ranks(RANKS, program)
    evaluated, _ = one.lookup(
        pack({"seen": SEEN.reshape(-1, 3), "item": ITEM.ravel()}, UNPOOLED_SPECS),
        training=False,
    )
    for feature in range(2):
        for found, reference in ((0, expected), (1, evaluated)):
            ranks = np.concatenate([result[found][feature] for result in results])
            np.testing.assert_allclose(ranks, reference[feature], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["padded", "ragged"])
def test_prefetched_keys_give_same_rows(run_as_ranks, form):
    """The next batch is prefetched and looked up in the same layout."""

    def laid_out(keys):
        keys = tf.constant(keys, tf.int64)
        return tf.RaggedTensor.from_tensor(keys, padding=0) if form == "ragged" else keys

    def program(comm, prefetch):
        store = ShardedStore(tables(), optimizers.SGD(0.5), comm, prefetch=prefetch)
        batches = [
            pack({"seen": laid_out(keys), "item": ITEM[comm.rank]}, UNPOOLED_SPECS)
            for keys in np.roll(SEEN, comm.rank, axis=0)
        ]
        looked_up = []
        for batch, following in itertools.pairwise([*batches, *batches, None]):
            rows, plan = store.lookup(batch, training=True)
            if prefetch and following is not None:
                store.prefetch_keys(following)
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
