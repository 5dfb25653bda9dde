"""SOK's files of watched variables contain all rows and slots.

Run with TF_USE_LEGACY_KERAS=1, because SOK's legacy optimizers are the optimizers of Keras 2.
"""

from __future__ import annotations

import datetime
import tempfile
import time

import numpy as np
import tensorflow as tf
import tf_keras

from slipstream_tf.distributed import init
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables import SokStore, sok_files
from slipstream_tf.tables.sok import wrap_optimizer
from slipstream_tf.tables.sok.table import open_sok, slots_of

DIM, KEYS = 3, np.arange(12, dtype=np.int64)
NEVER_UPDATED = np.array([100, 101, 102], np.int64)


def opened(comm, kind: str, optimizer) -> SokStore:
    settings = {"init_capacity": 64, "max_capacity": 64} if kind == "hybrid" else {}
    variable = open_sok().DynamicVariable(
        dimension=DIM, initializer="0.5", var_type=kind, name=f"files_{kind}", **settings
    )  # fmt: skip
    return SokStore({"t": variable}, optimizer, comm)


def train(store: SokStore, steps: int) -> None:
    (table,) = store.opened
    for step in range(steps):
        keys = tf.constant(KEYS[step:])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table.lookup(keys) * tf.cast(keys + 1, tf.float32)[:, None])
        gradient = tape.gradient(loss, table.variable)
        store.optimizer.apply_gradients(store.filter_gradients([(gradient, table.variable)]))


def rows_of(store: SokStore) -> np.ndarray:
    (table,) = store.opened
    return table.lookup(tf.constant(np.concatenate([KEYS, NEVER_UPDATED]))).numpy()


def dump_and_load(comm, folder: str, kind: str) -> None:
    def adam():
        return wrap_optimizer(tf_keras.optimizers.legacy.Adam(0.1))

    saved = opened(comm, kind, adam())
    train(saved, 3)
    before = rows_of(saved)
    sok_files.dump(saved, folder)
    # SOK restores neither the optimizer's iterations nor the names of new variables. Load into the
    # existing objects.
    (table,) = saved.opened
    slots = slots_of(saved.optimizer, table.variable)
    own = tf.constant(table.own(KEYS))
    moments = {name: slot.sparse_read(own).numpy() for name, slot in slots.items()}
    assert set(moments) == {"m", "v"}
    train(saved, 2)
    assert not np.array_equal(rows_of(saved), before)
    sok_files.load(saved, folder)
    np.testing.assert_array_equal(rows_of(saved), before)
    for name, slot in slots.items():
        np.testing.assert_array_equal(slot.sparse_read(own), moments[name])


def refuse(comm, folder: str) -> None:
    def refuses(named: str, function, *arguments) -> None:
        try:
            function(*arguments)
        except ValueError as error:
            assert named in str(error), error
        else:
            raise AssertionError(f"no error names {named!r}")

    first = wrap_optimizer(tf.compat.v1.train.AdamOptimizer(0.1))
    refuses("silently omits", sok_files.dump, opened(comm, "hbm", first), folder)
    refuses("at least one row", sok_files.dump, opened(comm, "hbm", None), folder)
    hbm = opened(comm, "hbm", None)
    now = datetime.datetime.now(datetime.timezone.utc)
    refuses("HKV", sok_files.written_since, hbm, now)
    refuses("time zone", sok_files.written_since, hbm, now.replace(tzinfo=None))


def ask_what_was_written(comm) -> None:
    sgd = open_sok().SGD(0.1)
    store = opened(comm, "hybrid", sgd)
    train(store, 1)
    since = datetime.datetime.now(datetime.timezone.utc)
    (table,) = store.opened
    some = KEYS[::3]
    own = tf.constant(table.own(some))
    ones = tf.IndexedSlices(tf.ones([own.shape[0], DIM]), own, tf.constant([12, DIM]))
    sgd.apply_gradients([(ones, table.variable)])
    keys, rows = sok_files.written_since(store, since)["t"]
    np.testing.assert_array_equal(np.sort(keys), some)
    np.testing.assert_array_equal(rows[np.argsort(keys)], rows_of(store)[:12][::3])


def tell_writes_from_changes(comm) -> None:
    """Asserts that writes that only prevent eviction are not changes.

    The engine writes the rows of masked keys to keep them. A key that is no longer masked counts as
    changed.
    """
    store = opened(comm, "hybrid", open_sok().SGD(0.1))
    store.set_update_policy("t", UpdatePolicy("mask"))
    masked = KEYS[:6]
    train(store, 1)
    store.set_row_flags("t", masked, np.full(6, SATURATED))
    time.sleep(0.01)
    since = datetime.datetime.now(datetime.timezone.utc)
    train(store, 1)
    store.set_row_flags("t", masked, np.full(6, SATURATED))
    written = open_sok().incremental_model_dump([store.opened[0].variable], [since])[0][0]
    np.testing.assert_array_equal(np.sort(written), KEYS)
    keys, rows = sok_files.written_since(store, since)["t"]
    np.testing.assert_array_equal(np.sort(keys), KEYS[6:])
    kept = store.opened[0].lookup(tf.constant(KEYS[6:]))
    np.testing.assert_array_equal(rows[np.argsort(keys)], kept)
    store.set_row_flags("t", masked[1:], np.full(5, SATURATED))
    keys, _ = sok_files.written_since(store, since)["t"]
    np.testing.assert_array_equal(np.setdiff1d(KEYS, keys), masked[1:])
    # Under a policy that masks nothing, all keys count as changed.
    store.set_update_policy("t", UpdatePolicy("mask", is_shadow=True))
    keys, _ = sok_files.written_since(store, since)["t"]
    np.testing.assert_array_equal(np.sort(keys), KEYS)


def main() -> None:
    comm = init()
    for kind in ("hybrid", "hbm"):
        with tempfile.TemporaryDirectory() as own:
            folder = open_sok().communication.hvd.broadcast_object(own)
            dump_and_load(comm, folder, kind)
            refuse(comm, folder)
    ask_what_was_written(comm)
    tell_writes_from_changes(comm)
    print("all checks passed")


if __name__ == "__main__":
    main()
