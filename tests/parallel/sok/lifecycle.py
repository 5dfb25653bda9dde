"""A model on SOK's tables: invalid settings, fit, evaluate, save and load."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.checkpoint.store_state import export_state, restore_state
from slipstream_tf.distributed import DistributedOptimizer, init
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables import NativeStore, SokEmbeddingStore
from slipstream_tf.tables.sok.table import slots_of

SPECS = [FeatureSpec("t", "t")]
GOOD = slip.Table("t", 4, retention=slip.Retention(256, eviction="lru"))


def refuses(named: str, function, *arguments, **settings) -> None:
    try:
        function(*arguments, **settings)
    except ValueError as error:
        assert named in str(error), error
    else:
        raise AssertionError(f"no error names {named!r}")


def refuse_what_sok_would_not(comm) -> None:
    def store(table=GOOD, optimizer=None, **settings):
        optimizer = optimizer or slip.optimizers.SGD()
        return SokEmbeddingStore([table], optimizer, comm, **settings)

    refuses("`capacity`: None", store, slip.Table("t", 4))
    refuses("such as 512", store, slip.Table("t", 4, retention=slip.Retention(300, eviction="lru")))
    refuses("'lru'", store, slip.Table("t", 4, retention=slip.Retention(256)))
    refuses("None, because hbm tables of SOK grow", store, var_type="hbm")
    refuses("max_hbm_for_vectors", store, settings={"max_hbm": 1})
    allowed = "SGD without momentum, Adagrad, or Adam with"
    refuses(allowed, store, optimizer=slip.optimizers.RowWiseAdagrad())
    refuses(allowed, store, optimizer=slip.optimizers.SGD(0.1, momentum=0.9))
    refuses(allowed, store, optimizer=slip.optimizers.Adam(bias_correction="row"))
    refuses("an optimizer without l2", store, optimizer=slip.optimizers.SGD(0.1, l2=0.1))
    no_start = slip.optimizers.Adagrad(0.1, initial_accumulator_value=0.0)
    refuses("initial_accumulator_value > 0", store, optimizer=no_start)
    refuses("cache_bytes", store, cache_bytes=100)
    if comm.size > 1:
        refuses(f"{comm.size} ranks", SokEmbeddingStore, [GOOD], slip.optimizers.SGD())
    by_movement = UpdatePolicy("defer", "movement", movement=0.1, max_rows=10)
    adam = store(optimizer=slip.optimizers.Adam())
    refuses("Interval(...)", adam.set_update_policy, "t", by_movement)
    layer = dict(tables=[GOOD], optimizer=slip.optimizers.SGD(), store="sok", comm=comm)
    refuses("prefetch", slip.keras.EmbeddingCollection, prefetch=True, **layer)
    refuses("wire_dtype", slip.keras.EmbeddingCollection, wire_dtype="bfloat16", **layer)


def train(store, steps: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        keys = tf.constant(random.integers(0, 90, 20))
        _, plan = store.lookup(pack({"t": keys}, SPECS), training=True)
        gradient = tf.constant(random.normal(size=(20, 4)), tf.float32)
        store.apply_gradients(plan, [gradient])


def rows_of(store) -> np.ndarray:
    keys = tf.range(90, dtype=tf.int64)
    (rows,), _ = store.lookup(pack({"t": keys}, SPECS), training=False)
    return rows.numpy()


def save_and_load(comm, rule, var_type: str) -> None:
    """Asserts that a loaded store continues bitwise like the saved store."""
    table = GOOD if var_type == "hybrid" else slip.Table("t", 4)
    saved, loaded = (SokEmbeddingStore([table], rule, comm, var_type) for _ in range(2))
    train(saved, 4, comm.rank)
    state = export_state(saved)
    if comm.size == 1:
        native = NativeStore([slip.Table("t", 4)], rule)
        contents = saved.export_table("t")
        del contents["trained"], contents["powers"]
        native.import_table("t", contents)
        train(native, 3, 5)
    before = rows_of(saved)
    restore_state(loaded, state, "here")
    np.testing.assert_array_equal(rows_of(loaded), before)
    for store in (saved, loaded):
        train(store, 3, 5 + comm.rank)
    np.testing.assert_array_equal(rows_of(loaded), rows_of(saved))
    assert not np.array_equal(rows_of(saved), before)
    if comm.size == 1:
        np.testing.assert_allclose(native.gather("t", np.arange(90))[0], rows_of(saved), rtol=1e-4)
    exported = loaded.export_table("t")
    load_fewer(loaded, exported)


def load_fewer(loaded, exported) -> None:
    """Asserts that loading fewer keys resets the other keys with their slots.

    SOK cannot remove keys.
    """
    kept = exported["keys"][:3]
    some = {
        name: values if name in ("steps", "powers") else values[:3]
        for name, values in exported.items()
    }
    loaded.import_table("t", some)
    now = loaded.export_table("t")
    np.testing.assert_array_equal(now["keys"], exported["keys"])
    is_kept = np.isin(now["keys"], kept)
    for name in ("rows", "slots", "trained"):
        np.testing.assert_array_equal(now[name][is_kept], some[name])
    assert not now["trained"][~is_kept].any() and exported["trained"][~is_kept].any()
    start = getattr(loaded.optimizer, "initial_accumulator_value", 0.0)
    np.testing.assert_array_equal(now["slots"][~is_kept], np.float32(start))


def take_no_more_than_there_is_room_for(comm) -> None:
    tables = [slip.Table("t", 4, retention=slip.Retention(n, eviction="lru")) for n in (64, 16)]
    rule = slip.optimizers.Adagrad(0.1, 0.1, 1e-7)
    large, small = (SokEmbeddingStore([table], rule, comm) for table in tables)
    train(large, 3, comm.rank)
    contents = large.export_table("t")
    assert contents["keys"].size > 16
    try:
        small.import_table("t", contents)
    except RuntimeError as error:
        assert "evicted" in str(error) and "Increase the capacity" in str(error)
    else:
        raise AssertionError("rows were lost without an error")
    # Existing rows are evicted for the loaded rows.
    fine = {name: v[:16] if v.ndim and len(v) > 16 else v for name, v in contents.items()}
    small.import_table("t", fine)
    for name in ("keys", "rows", "slots"):
        np.testing.assert_array_equal(small.export_table("t")[name], fine[name])
    bad = {**fine, "keys": np.arange(16) - 1}
    refuses("keys other than", small.import_table, "t", bad)


def fit(comm) -> None:
    random = np.random.default_rng(comm.rank)
    count, fields = 512, 4
    keys = np.minimum(random.zipf(1.3, (count, fields)), 100).astype(np.int64)
    dense = random.normal(size=(count, 3)).astype(np.float32)
    labels = ((keys % 3).sum(1) % 2).astype(np.float32)
    embeddings = slip.keras.EmbeddingCollection(
        [GOOD], slip.optimizers.Adagrad(0.1, 0.1, 1e-7), {f"f{i}": "t" for i in range(fields)},
        store="sok", comm=comm,
    )  # fmt: skip
    model = slip.models.DLRM(embeddings, dense_features=3, bottom=[8, 4], top=[8, 1])
    window = slip.Window(8, warmup=8)
    slipstream = slip.Slipstream(embeddings, slip.MaskGradients(), window=window)
    data = tf.data.Dataset.from_tensor_slices(({"keys": keys, "dense": dense}, labels))
    data = data.batch(32, drop_remainder=True).repeat(3)
    optimizer = DistributedOptimizer(keras.optimizers.Adagrad(0.05), comm)
    model.compile(optimizer=optimizer, loss="binary_crossentropy")
    history = model.fit(slipstream.apply(data), callbacks=[slipstream.callback()], verbose=0)
    assert np.isfinite(history.history["loss"][0])
    assert np.isfinite(model.evaluate(data.take(2), verbose=0))
    counts = [report.tables[0].rows for report in slipstream.tracker.reports]
    assert sum(c.masked for c in counts) > 0 and sum(c.sent for c in counts) > 0
    assert embeddings.get_config()["store"] == "sok"


def flush_before_the_first_update(comm) -> None:
    """Asserts that flushing restored gradients equals a first update.

    The gradients were deferred in another job, before the variables had an update.
    """
    table = slip.Table("t", 2, initializer=slip.initializers.RandomUniform(seed=3))
    rule = slip.optimizers.Adam(0.05)
    store = SokEmbeddingStore([table], rule, comm, "hbm")
    native = NativeStore([table], rule)
    keys = np.arange(6)
    own = keys[store.owners("t", keys) == comm.rank]
    policy = UpdatePolicy("defer", "interval", max_age=99, max_rows=99)
    store.set_update_policy("t", policy)
    sums = np.stack([own + 1.0, -0.5 * own], 1).astype(np.float32)
    deferred = {"keys": own, "ages": np.zeros_like(own), "ranks": np.zeros(own.size, np.int32)}
    store.import_deferred("t", {**deferred, "sums": sums, "learning_rate": np.float32(0.0)})
    store.flush()
    _, plan = native.lookup(pack({"t": tf.constant(own)}, SPECS), training=True)
    native.apply_gradients(plan, [tf.constant(sums)])
    rows, _ = store.gather("t", own)
    np.testing.assert_allclose(rows, native.gather("t", own)[0], rtol=1e-5)


def train_and_delete(comm) -> tuple[list, list, object]:
    """Trains a model. TensorFlow keeps its graphs, because "swish" is a `tf.custom_gradient`.

    Returns:
        Weak references to the model and its parts, the handles of the rows and slots in SOK, and
        the handle of the replicas.
    """
    layer = slip.keras.EmbeddingCollection(
        [GOOD], slip.optimizers.Adagrad(0.1, 0.1, 1e-7), {"t": "t"}, store="sok", comm=comm
    )
    inputs = keras.Input((), dtype="int64", name="t")
    model = keras.Model({"t": inputs}, keras.layers.Dense(1, "swish")(layer({"t": inputs})["t"]))
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1), comm), "mse")
    slipstream = slip.Slipstream(layer, slip.MaskGradients(), window=slip.Window(2, warmup=0))
    keys = {"t": np.arange(32)}
    data = tf.data.Dataset.from_tensor_slices((keys, np.zeros(32, np.float32))).batch(8)
    model.fit(slipstream.apply(data), callbacks=[slipstream.callback()], verbose=0)

    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(keys, training=True))
        return tape.gradient(loss, model.trainable_variables)

    for run in (step, tf.function(step)):
        run({"t": tf.constant([1, 2], tf.int64)})
    store = layer.store
    variables = [store.variable("t"), *slots_of(store._updater, store.variable("t")).values()]
    assert len(variables) == 2
    references = [weakref.ref(part) for part in (model, layer, store, slipstream, *variables)]
    return references, [variable.handle for variable in variables], store._handles[0]


def free_tables_of_deleted_model(comm) -> None:
    references, in_sok, replicas = train_and_delete(comm)
    gc.collect()
    assert not [reference() for reference in references if reference() is not None]
    size = lambda of: sok.raw_ops.dummy_var_shape(of, key_type=tf.int64, dtype=tf.float32)  # noqa: E731
    missing = [(size, handle, tf.errors.NotFoundError) for handle in in_sok]
    missing.append((slip.ops.table.step, replicas, tf.errors.FailedPreconditionError))
    for read, handle, expected in missing:
        try:
            read(handle)
        except expected:
            continue
        raise AssertionError("a deleted model keeps its rows")


def main() -> None:
    comm = init()
    refuse_what_sok_would_not(comm)
    save_and_load(comm, slip.optimizers.Adam(0.1), "hybrid")
    save_and_load(comm, slip.optimizers.Adagrad(0.1, 0.1, 1e-7), "hbm")
    save_and_load(comm, slip.optimizers.SGD(0.1), "hybrid")
    take_no_more_than_there_is_room_for(comm)
    flush_before_the_first_update(comm)
    fit(comm)
    free_tables_of_deleted_model(comm)
    print("all checks passed")


if __name__ == "__main__":
    main()
