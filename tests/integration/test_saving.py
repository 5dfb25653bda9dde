"""Saving and loading with `.weights.h5`, `.keras` and `tf.train.Checkpoint`."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import (
    DeferGradients,
    MaskGradients,
    Movement,
    Retention,
    Saturation,
    Slipstream,
    Table,
    Window,
    initializers,
    optimizers,
)
from slipstream_tf.checkpoint.store_state import excluded_from_checkpoint
from slipstream_tf.distributed import CheckpointManager, SingleProcess
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.ops.update_policy import UpdatePolicy

FORMATS = ("weights", "model", "checkpoint")


def make_model(tables=None, optimizer=None, seed=0):
    layer = EmbeddingCollection(
        tables
        or [
            Table("a/b", 4, initializer=initializers.RandomUniform(seed=seed)),
            Table("b", 4, retention=Retention(16, eviction="lru")),
        ],
        optimizer or optimizers.Adam(0.1),
        features=None if tables is None else {f"f{i}": t.name for i, t in enumerate(tables)},
        name="tables",
    )
    inputs = keras.Input((2,), dtype="int64")
    outputs = keras.layers.Dense(1, name="head")(keras.layers.Flatten()(layer(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer="sgd", loss="mse")
    return model


def train(model, seed=0):
    generator = np.random.default_rng(seed)
    keys = generator.integers(0, 30, (64, 2)) + (1 << 60)
    model.fit(keys, np.ones((64, 1)), batch_size=16, verbose=0, shuffle=False)


def state(model):
    layer = model.get_layer("tables")
    return {t.name: layer.store.export_table(t.name) for t in layer.tables}


def assert_same_state(first, second):
    for table, contents in first.items():
        for name, value in contents.items():
            np.testing.assert_array_equal(value, second[table][name], err_msg=f"{table} {name}")
            assert value.dtype == second[table][name].dtype


def save(model, form, folder):
    if form == "weights":
        model.save_weights(folder / "x.weights.h5")
        return str(folder / "x.weights.h5")
    if form == "model":
        model.save(folder / "x.keras")
        return str(folder / "x.keras")
    return tf.train.Checkpoint(model=model).save(str(folder / "x"))


def load(form, path, model=None):
    model = model or make_model(seed=5)
    if form == "model":
        return keras.models.load_model(path)
    if form == "weights":
        model.load_weights(path)
    else:
        tf.train.Checkpoint(model=model).restore(path).expect_partial()
    return model


@pytest.mark.parametrize("form", FORMATS)
def test_save_and_load_restore_state(form, tmp_path):
    model = make_model()
    train(model)
    model.get_layer("tables").learning_rate = 0.025
    before = state(model)
    assert len(before["b"]["keys"]) == 16
    path = save(model, form, tmp_path)
    loaded = load(form, path)
    assert_same_state(before, state(loaded))
    assert float(loaded.get_layer("tables").learning_rate) == pytest.approx(0.025)
    keys = np.arange(60).reshape(30, 2) + (1 << 60)
    loaded_keys = loaded.predict(keys, verbose=0)
    if form == "model":  # The table's seed is part of the configuration.
        np.testing.assert_array_equal(loaded_keys, model.predict(keys, verbose=0))


@pytest.mark.parametrize("form", FORMATS)
def test_training_continues_identically_after_restore(form, tmp_path):
    keras.utils.set_random_seed(0)
    model = make_model()
    train(model)
    path = save(model, form, tmp_path)
    train(model, seed=1)
    continued = load(form, path, make_model())
    train(continued, seed=1)
    assert_same_state(state(model), state(continued))


@pytest.mark.parametrize("form", FORMATS)
def test_empty_tables_save_and_load(form, tmp_path):
    model = make_model()
    loaded = load(form, save(model, form, tmp_path))
    assert loaded.get_layer("tables").store.size("b") == 0


def test_loading_replaces_existing_rows(tmp_path):
    model = make_model()
    train(model)
    path = save(model, "checkpoint", tmp_path)
    before = state(model)
    train(model, seed=7)
    tf.train.Checkpoint(model=model).restore(path).expect_partial()
    assert_same_state(before, state(model))


@pytest.mark.parametrize("form", ["weights", "checkpoint"])
@pytest.mark.parametrize(
    ("tables", "optimizer", "message"),
    [
        (
            [Table("a/b", 4), Table("c", 4)],
            None,
            r"saved with tables \['a/b', 'b'\].* this program has \['a/b', 'c'\]",
        ),
        (
            [Table("a/b", 8), Table("b", 8)],
            None,
            "table 'a/b' was saved with dim=4, but this program has dim=8",
        ),
        (
            [Table("a/b", 4), Table("b", 4)],
            optimizers.Adagrad(0.1),
            "saved with the optimizer Adam, but this program uses Adagrad",
        ),
    ],
    ids=["names", "dim", "rule"],
)
def test_loading_into_different_layer_raises_and_changes_nothing(
    form, tables, optimizer, message, tmp_path
):
    model = make_model()
    train(model)
    path = save(model, form, tmp_path)
    other = make_model(tables, optimizer)
    train(other, seed=3)
    before = state(other)
    with pytest.raises(ValueError, match=message):
        load(form, path, other)
    assert_same_state(before, state(other))


def test_weights_of_other_layer_type_raise(tmp_path):
    inputs = keras.Input((2,), dtype="int64")
    embedded = keras.layers.Embedding(10, 4, name="tables")(inputs)
    model = keras.Model(
        inputs, keras.layers.Dense(1, name="head")(keras.layers.Flatten()(embedded))
    )
    model.save_weights(tmp_path / "x.weights.h5")
    with pytest.raises(ValueError, match="no embedding tables"):
        make_model().load_weights(tmp_path / "x.weights.h5")


def test_damaged_checkpoint_raises():
    layer = EmbeddingCollection([Table("a", 2)], optimizers.SGD(), name="tables")
    with pytest.raises(ValueError, match="layer 'tables': the checkpoint is damaged"):
        layer._store_state.deserialize(layer._store_state.serialize()[:-40])


def test_single_layer_checkpoint_restores(tmp_path):
    layer = EmbeddingCollection([Table("a", 2)], optimizers.SGD(0.5))
    layer(np.array([[1], [2]]), training=True)
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "x"))
    other = EmbeddingCollection([Table("a", 2)], optimizers.SGD(0.1))
    tf.train.Checkpoint(layer=other).restore(path).assert_consumed()
    assert other.store.size("a") == 2
    assert float(other.learning_rate) == 0.5


@pytest.mark.parametrize("form", FORMATS)
def test_deferred_gradients_are_applied_at_load_without_deferring_policy(form, tmp_path):
    model = make_model(optimizer=optimizers.SGD(0.1))
    store = model.get_layer("tables").store
    for table in store.tables:
        policy = UpdatePolicy("defer", movement=1e9, max_age=1000, max_rows=1000)
        store.set_update_policy(table.name, policy)
    train(model)
    deferred = [store.update_counts(table.name).deferred_now for table in store.tables]
    assert all(deferred)
    restored = load(form, save(model, form, tmp_path), make_model(optimizer=optimizers.SGD(0.1)))
    # Saving does not apply them.
    assert deferred == [store.update_counts(table.name).deferred_now for table in store.tables]
    found = restored.get_layer("tables").store
    assert not any(found.update_counts(table.name).deferred_now for table in store.tables)
    assert_same_state(state(model), state(restored))


POLICIES = {
    # The warm-up has ended when the state is saved, but has not in the program that restores it.
    "masked": (MaskGradients(fraction=0.6), Window(4, warmup=0)),
    "deferred": (DeferGradients(Movement(0.2, max_age=6)), Window(4, warmup=8)),
}


def reports_of(slipstream):
    """Returns the reports of all windows without values that depend on the process."""
    reports = [report.to_dict() for report in slipstream.tracker.reports]
    for report in reports:
        del report["seconds"]
        for table in report["tables"]:
            del table["rows"]["deferred_bytes"]
    return reports


@pytest.mark.parametrize("first", ["slipstream", "model"])
@pytest.mark.parametrize("kind", POLICIES)
def test_engine_continues_identically_after_restore(kind, first, tmp_path):
    (policy, window), rule = POLICIES[kind], optimizers.Adagrad(0.1)

    def make():
        model = make_model(optimizer=rule)
        layer = model.get_layer("tables")
        saturation = Saturation(metric="l2") if kind == "masked" else None
        slipstream = Slipstream(layer, policy, window, saturation=saturation)
        # TensorFlow restores in the order of names. Test both orders.
        names = ("a", "b") if first == "slipstream" else ("b", "a")
        tracked = dict(zip(names, (slipstream, layer), strict=True))
        return model, slipstream, tf.train.Checkpoint(model=model, **tracked)

    def run(model, slipstream, begin, end):
        for step in range(begin, end):
            keys = (np.random.default_rng(step).zipf(1.5, (16, 2)) % 12).astype(np.int64)
            slipstream.observe(tf.constant(keys))
            model.train_on_batch(keys, np.ones((16, 1)))
            slipstream.step()

    keras.utils.set_random_seed(0)
    model, slipstream, checkpoint = make()
    run(model, slipstream, 0, 14)
    path = checkpoint.write(str(tmp_path / "x"))
    run(model, slipstream, 14, 30)

    other, resumed, checkpoint = make()
    checkpoint.read(path).expect_partial()
    assert len(resumed.report().reports) == 3
    run(other, resumed, 14, 30)
    assert_same_state(state(model), state(other))
    assert reports_of(slipstream) == reports_of(resumed)
    assert getattr(slipstream.report().rows, kind) > 0


def test_checkpoint_without_tables_names_checkpoint_manager(tmp_path):
    model = make_model()
    train(model)
    store = model.get_layer("tables").store
    with excluded_from_checkpoint(store):
        path = tf.train.Checkpoint(model=model).write(str(tmp_path / "x"))
    before = state(model)
    with pytest.raises(
        ValueError, match=r"Restore it with slipstream_tf\.distributed\.CheckpointManager"
    ):
        tf.train.Checkpoint(model=model).read(path)
    assert_same_state(before, state(model))


# Tables with every kind of state. "deferred" has an update policy that defers gradients.
KINDS = [
    Table("admitted", 2, optimizers.Adagrad(0.1), retention=Retention(admit_after=4)),
    Table("expiring", 2, optimizers.Adam(0.1), retention=Retention(expire_after=4)),
    Table("lru", 2, optimizers.Ftrl(0.1), retention=Retention(8, eviction="lru")),
    Table("lfu", 2, optimizers.SGD(0.1, momentum=0.9), retention=Retention(8, eviction="lfu")),
    Table("deferred", 2, optimizers.RowWiseAdagrad(0.1)),
]
DEFERS = UpdatePolicy("defer", movement=0.08, max_age=4, max_rows=1000)
EPOCH = 5  # Steps


def make_all_kinds(defers=True):
    keras.utils.set_random_seed(1)
    layer = EmbeddingCollection(KINDS, name="tables")
    if defers:
        layer.store.set_update_policy("deferred", DEFERS)
    keys = keras.Input((len(KINDS),), dtype="int64")
    model = keras.Model(keys, keras.layers.Dense(1)(keras.layers.Flatten()(layer(keys))))
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    return model


def train_epoch(model, epoch, **arguments):
    """Trains one epoch. Some keys occur in the first epoch only."""
    keys = (np.random.default_rng(epoch).zipf(1.3, (8 * EPOCH, len(KINDS))) % 50).astype(np.int64)
    labels = np.sin(np.arange(len(keys)))
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0, "initial_epoch": epoch}
    model.fit(keys, labels, epochs=epoch + 1, **settings, **arguments)


def everything(model):
    """Returns all state of the tables and the dense weights, without applying gradients."""
    layer = model.get_layer("tables")
    found = {f"dense {i}": w.numpy() for i, w in enumerate(model.layers[-1].weights)}
    for table in layer.tables:
        groups = {
            "contents": layer.store.export_table(table.name, flush=False),
            "deferred": layer.store.export_deferred(table.name),
            "admission": layer.store.export_admission(table.name) if table.admits else {},
        }
        found |= {f"{table.name} {g} {n}": v for g, of in groups.items() for n, v in of.items()}
    return found


def restart(form, model, folder):
    """Saves a model and returns another model with the saved state."""
    if form == "load_model":
        model.save(folder / "x.keras")
        loaded = keras.models.load_model(folder / "x.keras")
        loaded.run_eagerly = True
        return loaded
    other = make_all_kinds()
    if form in ("weights.h5", "keras"):
        path = folder / f"x.{form}"
        model.save_weights(path) if form == "weights.h5" else model.save(path)
        other.load_weights(path)
    elif form == "get_weights":
        other.set_weights(model.get_weights())
    elif form.startswith("checkpoint"):
        of_optimizer = [{}, {}]
        if form == "checkpoint with optimizer":
            of_optimizer = [{"optimizer": m.optimizer} for m in (model, other)]
            other.optimizer.build(other.trainable_variables)
        path = tf.train.Checkpoint(model=model, **of_optimizer[0]).save(folder / "x")
        status = tf.train.Checkpoint(model=other, **of_optimizer[1]).restore(path)
        status.assert_existing_objects_matched()
    elif form == "manager":
        managers = [
            CheckpointManager(
                folder,
                tf.train.Checkpoint(dense=m.layers[-1]),
                SingleProcess(),
                m.get_layer("tables").store,
                background=False,
            )
            for m in (model, other)
        ]
        managers[0].save(EPOCH)
        managers[1].restore()
    return other


RESTARTS = (
    *("weights.h5", "keras", "load_model", "get_weights", "checkpoint"),
    *("checkpoint with optimizer", "manager", "backup"),
)


@pytest.mark.parametrize("form", RESTARTS)
def test_restarted_training_equals_unbroken_training_bitwise(form, tmp_path):
    defers = form != "load_model"  # The loaded model has no policy yet that defers.

    def callbacks():
        if form != "backup":
            return []
        return [keras.callbacks.BackupAndRestore(tmp_path / "x", delete_checkpoint=False)]

    unbroken, saved = make_all_kinds(defers), make_all_kinds(defers)
    train_epoch(unbroken, 0)
    train_epoch(saved, 0, callbacks=callbacks())
    before = everything(unbroken)
    other = restart(form, saved, tmp_path)
    for model in (saved, other) if form != "backup" else (saved,):
        assert_same_arrays(everything(model), before)
    train_epoch(unbroken, 1)
    train_epoch(other, 1, callbacks=callbacks())
    assert_same_arrays(everything(other), everything(unbroken))
    # There was state to lose.
    store = unbroken.get_layer("tables").store
    assert before["admitted admission counters"].any() and store.statistics("admitted").rows
    assert store.statistics("expiring").expired_rows
    assert store.statistics("lru").evicted_rows and store.statistics("lfu").evicted_rows
    counts = store.update_counts("deferred")
    assert not defers or (len(before["deferred deferred keys"]) and counts.due_by_movement)


def assert_same_arrays(found, expected):
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert found[name].dtype == array.dtype, name


class Stop(keras.callbacks.Callback):
    """Ends training in the middle of the third epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() == 27:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", POLICIES)
def test_backup_and_restore_includes_engine(kind, tmp_path):
    policy, window = POLICIES[kind][0], Window(4, warmup=0.1, planned_steps=40)
    keys = (np.random.default_rng(5).zipf(1.5, (160, 2)) % 12).astype(np.int64)
    data = tf.data.Dataset.from_tensor_slices((keys, np.ones((160, 1), np.float32))).batch(16, True)

    def run(backup, *callbacks):
        keras.utils.set_random_seed(0)
        model = make_model(optimizer=optimizers.Adagrad(0.1))
        slipstream = Slipstream(model.get_layer("tables"), policy, window)
        model.compile(optimizer="adagrad", loss="mse")
        keras_backup = keras.callbacks.BackupAndRestore(str(backup))
        # The backup holds the state at the end of an epoch.
        used = [slipstream.callback(), keras_backup, *callbacks]
        model.fit(slipstream.apply(data), epochs=4, verbose=0, shuffle=False, callbacks=used)
        return model, slipstream

    straight, engine = run(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", Stop())
    resumed, other = run(tmp_path / "b")
    assert_same_state(state(straight), state(resumed))
    assert len(reports_of(engine)) == 10 and reports_of(engine) == reports_of(other)
    assert getattr(engine.report().rows, kind) > 0
