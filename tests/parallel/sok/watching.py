"""A SokStore validates, counts and masks, and prevents eviction of masked keys."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import init
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables import SokStore
from slipstream_tf.tables.sok import wrap_optimizer
from slipstream_tf.tables.sok.table import open_sok, slots_of

DIM, CAPACITY = 2, 16


def refuses(named: str, function, *arguments) -> None:
    try:
        function(*arguments)
    except ValueError as error:
        assert named in str(error), error
    else:
        raise AssertionError(f"no error names {named!r}")


def table(kind: str = "hybrid", capacity: int = CAPACITY, **settings):
    if kind == "hybrid":
        settings = {"init_capacity": capacity, "max_capacity": capacity, **settings}
    return open_sok().DynamicVariable(
        dimension=DIM, initializer="0.5", var_type=kind, **settings
    )  # fmt: skip


def refuse_bad_arguments(comm) -> None:
    refuses("wrap_optimizer", SokStore, table(), tf.compat.v1.train.AdamOptimizer(0.1))
    for optimizer in (keras.optimizers.Adagrad(0.1), slip.optimizers.Adagrad(0.1)):
        refuses("an optimizer of tf_keras.optimizers.legacy", wrap_optimizer, optimizer)
    refuses("a sok.DynamicVariable or a sok.Variable", SokStore, {"t": tf.Variable([[0.0]])})
    refuses("at least one variable", SokStore, {})
    refuses("`init_capacity`: 24", SokStore, table(capacity=24))
    refuses("evict_strategy", SokStore, table(evict_strategy="kLru"))
    store = SokStore({"t": table()}, comm=comm)
    nothing = np.empty(0, np.int64)
    refuses("'t'", store.size, "another")
    refuses("no optimizer", store.set_update_policy, "t", UpdatePolicy("defer"))
    refuse_unknown_movement(comm)
    refuses("loop", store.flush)
    if comm.size > 1:
        refuses(f"{comm.size} ranks", SokStore, table())
    refuses("ranks", store.set_update_policy, "t", UpdatePolicy("mask", ranks=2))
    slipstream = slip.Slipstream(store, slip.SkipExamples(slip.RowDrift()))
    refuses("Slipstream.apply", slipstream.observe, {"t": nothing})


def refuse_unknown_movement(comm) -> None:
    by_movement = UpdatePolicy("defer", "movement", movement=0.1, max_rows=10)
    adam = wrap_optimizer(tf.compat.v1.train.AdamOptimizer(0.1))
    store = SokStore({"t": table()}, adam, comm)
    refuses("store has AdamOptimizer", store.set_update_policy, "t", by_movement)
    static = open_sok().Variable(np.zeros((8, DIM)), dtype=tf.float32)
    store = SokStore({"t": static}, open_sok().SGD(0.1), comm)
    refuses("a sok.DynamicVariable only", store.set_update_policy, "t", by_movement)


def name_a_single_variable(comm) -> None:
    variable = table("hbm")
    (only,) = SokStore(variable, comm=comm).tables
    assert only.name == variable.name.split(":")[0] and only.dim == DIM


def count_every_occurrence(store: SokStore) -> None:
    bags = tf.ragged.constant([[3, 5], [], [3]], dtype=tf.int64)
    store.observe("t", bags)
    store.observe("t", tf.constant([[3, -1], [7, 5]], tf.int32))
    store.observe("t", bags.to_sparse())
    keys, counts = store.hot_keys("t", 10)
    assert keys.tolist() == [3, 5, 7] and counts.tolist() == [5.0, 3.0, 1.0]
    store.decay_counts(0.5)
    assert store.hot_keys("t", 1)[1].tolist() == [2.5]


def count_large_batches(comm, counts_on_device: bool) -> None:
    store = SokStore({"t": table()}, comm=comm, counts_on_device=counts_on_device)
    slipstream = slip.Slipstream(store, window=slip.Window(100))
    keys = tf.repeat(tf.constant([3, 5], tf.int64), [3 * 8192, 8192])
    classified = slipstream.observe({"t": keys})
    assert classified.weight.shape == keys.shape
    found, counts = store.hot_keys("t", 10)
    assert found.tolist() == [3, 5]
    # A sample of the examples is classified, but all are counted.
    assert counts.tolist() == [3 * 8192, 8192]
    assert store._counter.export_accesses("t")["counts"].sum() == keys.shape[0]


def mask_or_only_count(comm) -> None:
    store = SokStore({"t": table()}, comm=comm)
    own = np.arange(4) * comm.size + comm.rank
    other = tf.Variable([1.0])
    slices = tf.IndexedSlices(tf.ones([6, DIM]), tf.constant(own[[3, 1, 3, 0, 1, 2]]))
    everyone = np.arange(4 * comm.size)
    is_odd = everyone // comm.size % 2 == 1
    store.set_row_flags("t", everyone[is_odd], np.full(is_odd.sum(), SATURATED))
    for is_shadow in (True, False):
        store.set_update_policy("t", UpdatePolicy("mask", is_shadow=is_shadow))
        pairs = store.filter_gradients(
            [(slices, store.opened[0].variable), (None, other), (1.0, other)]
        )
        assert pairs[1:] == [(None, other), (1.0, other)]
        left = pairs[0][0]
        if is_shadow:
            np.testing.assert_array_equal(left.indices, own)
        else:
            np.testing.assert_array_equal(left.indices, [own[0], own[2]])
            np.testing.assert_array_equal(left.values, np.ones((2, DIM)))
    counts = store.update_counts("t")
    assert (counts.offered, counts.masked, counts.sent) == (8, 4, 4)
    np.testing.assert_array_equal(store.owners("t", everyone), everyone % comm.size)


def refuse_keys_of_soks_own(comm) -> None:
    for kind, bad in (("hybrid", (-1, -2, -3, -4)), ("hbm", (2**63 - 1, -(2**63)))):
        (opened,) = SokStore({"mine": table(kind)}, comm=comm).opened
        for key in bad:
            for lookup in (opened.lookup, tf.function(opened.lookup)):
                try:
                    lookup(tf.constant([7, key, 0], tf.int64))
                except tf.errors.InvalidArgumentError as error:
                    # Errors of graphs contain escaped quotes.
                    assert f"Invalid `keys`: {key} for table" in str(error), error
                    assert "mine" in str(error)
                else:
                    raise AssertionError(f"key {key} raised no error")
        fine = {-5, 0, 2**63 - 2, -(2**63) + 1} | set((-1, -4) if kind == "hbm" else ())
        assert opened.lookup(tf.constant(sorted(fine), tf.int64)).shape[0] == len(fine)


def watch_tables_on_one_rank(comm) -> None:
    """Asserts that a store can watch localized variables.

    All rows of such a variable are on one rank. `lookup_sparse` needs a variable on every rank.
    """
    sok, size = open_sok(), 6
    start = np.arange(size * DIM, dtype=np.float32).reshape(size, DIM)
    made = [sok.Variable(start, mode=f"localized:{r}") for r in range(comm.size)]
    dynamic = sok.DynamicVariable(
        dimension=DIM, initializer="0.5", var_type="hybrid", mode=f"localized:{comm.size - 1}",
        init_capacity=16, max_capacity=16,
    )  # fmt: skip
    names = [f"on_{r}" for r in range(comm.size)]
    store = SokStore({**dict(zip(names, made, strict=True)), "dynamic": dynamic}, comm=comm)
    for name in names:
        np.testing.assert_array_equal(store.owners(name, np.arange(size)), int(name[3:]))
        store.set_update_policy(name, UpdatePolicy("mask"))
        store.set_row_flags(name, np.array([1, 4]), np.full(2, SATURATED))
        assert store.size(name) == size * (int(name[3:]) == comm.rank)
    np.testing.assert_array_equal(store.owners("dynamic", np.arange(3)), comm.size - 1)
    bags = tf.RaggedTensor.from_row_lengths(tf.constant([0, 1, 2, 4], tf.int64), [2, 2])
    bags = bags.with_row_splits_dtype(tf.int64)
    with tf.GradientTape() as tape:
        pooled = sok.lookup_sparse(made, [bags] * len(made), combiners=["sum"] * len(made))
        loss = tf.add_n([tf.reduce_sum(rows) for rows in pooled])
    gradients = tape.gradient(loss, made)
    rate = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    rate.apply_gradients(store.filter_gradients(zip(gradients, made, strict=True)))
    expected = start.copy()
    expected[[0, 2]] -= np.float32(0.1) * comm.size
    np.testing.assert_allclose(made[comm.rank].numpy(), expected, rtol=1e-6)
    counts = [store.update_counts(name) for name in names]
    assert [c.masked for c in counts] == [2 * (r == comm.rank) for r in range(comm.size)]


def keep_masked_keys_from_eviction(comm, is_watched: bool) -> bool:
    """Returns whether a masked key survives new keys that fill the table.

    Checks its row and its slot.
    """
    variable = table()
    optimizer = wrap_optimizer(tf.compat.v1.train.AdagradOptimizer(0.1))
    store = SokStore({"t": variable}, optimizer if is_watched else None, comm)
    key = np.array([comm.rank], np.int64)
    gradient = tf.IndexedSlices(tf.ones([1, DIM]), tf.constant(key), tf.constant([1, DIM]))
    optimizer.apply_gradients([(gradient, variable)])
    (slot,) = slots_of(optimizer, variable).values()
    row, state = variable.sparse_read(tf.constant(key)), slot.sparse_read(tf.constant(key))
    for window in range(4):
        if is_watched:
            store.set_row_flags("t", key, np.array([SATURATED]))
        news = comm.rank + comm.size * (1 + 10 * window + np.arange(10))
        gradient = tf.IndexedSlices(tf.ones([10, DIM]), tf.constant(news), tf.constant([1, DIM]))
        optimizer.apply_gradients(store.filter_gradients([(gradient, variable)]))
    row_is_there = np.array_equal(row, variable.sparse_read(tf.constant(key)))
    return row_is_there and np.array_equal(state, slot.sparse_read(tf.constant(key)))


def main() -> None:
    comm = init()
    refuse_bad_arguments(comm)
    name_a_single_variable(comm)
    count_every_occurrence(SokStore({"t": table()}, comm=comm))
    for counts_on_device in (False, True):
        count_large_batches(comm, counts_on_device)
    mask_or_only_count(comm)
    refuse_keys_of_soks_own(comm)
    watch_tables_on_one_rank(comm)
    assert keep_masked_keys_from_eviction(comm, is_watched=True)
    assert not keep_masked_keys_from_eviction(comm, is_watched=False), (
        "HKV no longer evicts masked keys; update the documentation"
    )
    print("all checks passed")


if __name__ == "__main__":
    main()
