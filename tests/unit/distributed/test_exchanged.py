"""What stores of several ranks count and refuse, whatever their placement."""

from __future__ import annotations

import pytest
import tensorflow as tf

from slipstream_tf import Table, optimizers
from slipstream_tf.distributed.exchanged import ReplicatedStore
from slipstream_tf.distributed.sharded import ShardedStore
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import UpdatePolicy

TABLES = [Table("t", dim=2)]
SPECS = [FeatureSpec("f", "t")]


def test_a_store_that_is_restored_goes_on_with_its_warmup(run_as_ranks):
    """A flush is an update of the tables, too: what counts steps must not tell them apart."""
    warmup = {"wire_dtype": "bfloat16", "wire_warmup_steps": 3}

    def program(comm):
        store = ReplicatedStore(TABLES, optimizers.SGD(1.0), comm, **warmup)
        store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=99, max_rows=1000))
        rounded = []
        for _ in range(2):
            keys = pack({"f": tf.constant([comm.rank], tf.int64)}, SPECS)
            _, plan = store.lookup(keys, SPECS, training=True)
            store.apply_gradients(plan, [tf.ones([1, 2])])
            store.flush()
            rounded.append(bool(store.wire.dtype_of("bfloat16", tf.constant(store.num_updates))))
        saved = store.export_table("t")
        restored = ReplicatedStore(TABLES, optimizers.SGD(1.0), comm, **warmup)
        restored.import_table("t", saved)
        return store.num_updates, int(saved["steps"][0]), restored.num_updates, rounded

    assert run_as_ranks(2, program) == [(4, 4, 4, [False, True])] * 2


@pytest.mark.parametrize("kind", [ReplicatedStore, ShardedStore])
def test_a_flush_of_nothing_is_no_update(run_as_ranks, kind):
    """An engine tries its policies on the store before training: that is no step of a warm-up."""

    def program(comm):
        store = kind(TABLES, optimizers.SGD(1.0), comm, "bfloat16", wire_warmup_steps=1)
        store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=99, max_rows=1000))
        store.set_update_policy("t", UpdatePolicy())
        tried = store.num_updates
        store.set_update_policy("t", UpdatePolicy("defer", movement=1e9, max_age=99, max_rows=1000))
        if comm.rank:  # The other rank has nothing to flush, and takes part.
            keys = pack({"f": tf.constant([5], tf.int64)}, SPECS)
        else:
            keys = pack({"f": tf.zeros([0], tf.int64)}, SPECS)
        _, plan = store.lookup(keys, SPECS, training=True)
        store.apply_gradients(plan, [tf.ones([comm.rank, 2])])
        store.flush()
        return tried, store.num_updates, int(store.export_table("t")["steps"][0])

    assert run_as_ranks(2, program) == [(0, 2, 2)] * 2


@pytest.mark.parametrize("kind", [ReplicatedStore, ShardedStore])
def test_moments_of_masked_rows_do_not_decay_on_several_ranks(run_as_ranks, kind):
    def program(comm):
        store = kind(TABLES, optimizers.Adam(0.1), comm)
        with pytest.raises(ValueError, match="`decay_moments`: True for table 't' of 2 ranks"):
            store.set_update_policy("t", UpdatePolicy("mask", decay_skipped=True))

    assert run_as_ranks(2, program) == [None, None]
