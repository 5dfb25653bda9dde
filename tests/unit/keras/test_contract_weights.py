"""Tests of docs/keras.md: rows are saved and restored with Keras weights."""

from __future__ import annotations

import gc
import json
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from contract_models import assert_same, contents, data, differ, layer_of, make_layer, make_model

import slipstream_tf as slip
from slipstream_tf import optimizers
from slipstream_tf.keras import (
    Embedding,
    EmbeddingCollection,
    Model,
    limit_snapshots,
    row_snapshots,
)

KEYS, LABELS = data()


def train(model, epochs=1, **kwargs):
    return model.fit(KEYS, LABELS, batch_size=16, epochs=epochs, shuffle=False, verbose=0, **kwargs)


@pytest.fixture
def model():
    made = make_model()
    train(made)
    return made


@pytest.fixture
def limits():
    """Sets limits of snapshots and restores the defaults after the test."""
    yield limit_snapshots
    limit_snapshots()


def test_get_and_set_weights_restore_rows(model):
    weights, before = model.get_weights(), contents(model)
    train(model)
    assert differ(before, contents(model)) >= {"user rows", "item slots", "top/kernel"}
    model.set_weights(weights)
    assert_same(model, before)
    train(model)
    model.set_weights(weights)  # A snapshot can be used multiple times.
    assert_same(model, before)


def test_clone_starts_empty_and_receives_weights(model):
    clone = keras.models.clone_model(model)
    assert layer_of(clone).store.size("user") == 0
    clone.set_weights(model.get_weights())
    assert_same(clone, contents(model))


@pytest.mark.parametrize("rule", [optimizers.SGD(1.0), optimizers.Adagrad(0.5)])
def test_weights_of_rows_near_overflow_are_saved_and_loaded(rule, tmp_path):
    model, factor = make_model(layer=make_layer(rule)), 1e10
    layer = layer_of(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="table 'user'"):
        while factor < 1e39:
            with tf.GradientTape() as tape:
                rows = layer(tf.constant([[1, 1], [2, 2]]), training=True)
            upstream = tf.fill(rows.shape, np.float32(factor))
            tape.gradient(rows, layer.trainable_variables, output_gradients=upstream)
            factor *= 2.0
    before = contents(model)
    largest = max(np.abs(before[f"user {part}"]).max(initial=0.0) for part in ("rows", "slots"))
    assert 1e37 < largest < np.inf
    model.save_weights(tmp_path / "near.weights.h5")
    restored = make_model(layer=make_layer(rule))
    restored.load_weights(tmp_path / "near.weights.h5")
    assert_same(restored, before)


class EpochRows(keras.callbacks.Callback):
    """Records rows and weights after each epoch."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(contents(self.model))


def test_early_stopping_restores_rows_of_best_epoch():
    model, seen = make_model(), EpochRows()
    # With inverted labels, the validation loss rises as the model learns the training labels.
    others = (KEYS, 1 - LABELS)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    history = train(model, 6, validation_data=others, callbacks=[seen, stop]).history
    best = int(np.argmin(history["val_loss"]))
    assert len(seen.epochs) == best + 3 < 6
    assert_same(model, seen.epochs[best])
    loss = model.evaluate(*others, batch_size=16, verbose=0)
    np.testing.assert_allclose(loss, history["val_loss"][best], rtol=1e-6)


@pytest.mark.parametrize("is_weights", [False, True])
def test_model_checkpoint_restores_rows(model, tmp_path, is_weights):
    path = str(tmp_path / ("best.weights.h5" if is_weights else "best.keras"))
    save = keras.callbacks.ModelCheckpoint(path, save_weights_only=is_weights)
    train(model, callbacks=[save])
    before = contents(model)
    if is_weights:
        train(model)
        model.load_weights(path)
        assert_same(model, before)
    else:
        assert_same(keras.models.load_model(path), before)


class RaisingCallback(keras.callbacks.Callback):
    """Interrupts `fit` in the third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


def test_backup_and_restore_resumes_rows(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    whole = make_model()
    train(whole, 4)
    with pytest.raises(InterruptedError):
        train(make_model(), 4, callbacks=[backup, RaisingCallback()])
    resumed = make_model()
    train(resumed, 4, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "backup")])
    assert_same(resumed, contents(whole))


def test_keras_files_restore_rows(model, tmp_path):
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same(loaded, contents(model))
    train(loaded)
    train(model)
    assert_same(loaded, contents(model))


@keras.saving.register_keras_serializable(package="test_contract_weights")
class ModelOfTables(keras.Model):
    """Takes objects of slipstream_tf, which Keras's default `from_config` passes on as they are."""

    def __init__(self, tables, row_optimizer, features=None, **kwargs):
        super().__init__(**kwargs)
        self.arguments = {"tables": tables, "row_optimizer": row_optimizer, "features": features}
        self.rows = slip.keras.EmbeddingCollection(tables, row_optimizer, features)
        self.top = keras.layers.Dense(1)

    def call(self, keys, training=False):
        return self.top(
            keras.ops.concatenate(list(self.rows(keys, training=training).values()), axis=-1)
        )

    def get_config(self):
        return {**super().get_config(), **self.arguments}

    @classmethod
    def from_config(cls, config):
        return cls(
            **{name: keras.saving.deserialize_keras_object(value) for name, value in config.items()}
        )


@pytest.mark.parametrize(
    "row_optimizer",
    [
        slip.optimizers.Adagrad(0.1, clip_norm=2.0),
        slip.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)),
    ],
    ids=["number", "schedule"],
)
def test_keras_files_contain_arguments_of_subclassed_model(row_optimizer, tmp_path):
    tables = [
        slip.Table(
            *("user", 4),
            initializer=slip.initializers.RandomNormal(stddev=0.5),
            retention=slip.Retention(capacity=100),
            storage=slip.Storage("bfloat16"),
        ),
        slip.Table("item", 4, slip.optimizers.Adam(0.01), combiner="mean"),
    ]
    features = [slip.FeatureSpec("user", "user", padding_key=0), slip.FeatureSpec("item", "item")]
    model = ModelOfTables(tables, row_optimizer, features)
    x = {"user": np.arange(8).reshape(4, 2), "item": np.arange(4)}
    model.compile("sgd", "mse")
    model.fit(x, np.ones((4, 1)), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for arguments in (model.arguments, loaded.arguments):
        assert arguments["tables"] == tables and arguments["features"] == features
        saved = slip.optimizers.serialize(arguments["row_optimizer"])
        assert saved == slip.optimizers.serialize(row_optimizer)
    unseen = {"user": np.arange(4, 12).reshape(4, 2), "item": np.arange(2, 6)}
    np.testing.assert_array_equal(loaded.predict(unseen), model.predict(unseen))
    for trained in (model, loaded):
        trained.fit(x, np.ones((4, 1)), verbose=0)
    np.testing.assert_array_equal(loaded.predict(unseen), model.predict(unseen))


@pytest.mark.parametrize(
    "value",
    [
        slip.Retention(admit_after=2),
        slip.Storage("float16"),
        *(slip.initializers.Constant(2.0), slip.initializers.Zeros()),
        slip.optimizers.Ftrl(0.1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_keras_serializes_settings(value):
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(value)))
    assert keras.saving.deserialize_keras_object(config) == value


def test_weight_files_restore_rows(model, tmp_path):
    before = contents(model)
    model.save_weights(tmp_path / "model.weights.h5")
    train(model)
    model.load_weights(tmp_path / "model.weights.h5")
    assert_same(model, before)


def test_saving_legacy_h5_file_raises(model, tmp_path):
    with pytest.raises(ValueError, match=r"Invalid `filepath`.*layer 'tables'.*NAME.keras"):
        model.save(tmp_path / "model.h5")


def test_saving_legacy_h5_file_of_subclassed_model_raises(tmp_path):
    """Keras does not call `get_config` of its layers."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.tables = make_layer()

        def call(self, keys, training=False):
            return self.tables(keys, training=training)

    model = Model()
    model(KEYS[:4])
    with pytest.raises(ValueError, match=r"Invalid `filepath`.*layer '.*NAME.keras"):
        model.save(tmp_path / "model.h5")


def test_loading_legacy_h5_file_raises(model, tmp_path, monkeypatch):
    """Earlier releases did not refuse to write files without rows."""
    monkeypatch.setattr("slipstream_tf._compat.is_in_legacy_file", lambda: False)
    model.save(tmp_path / "model.h5")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"would lose them"):
        keras.models.load_model(tmp_path / "model.h5")


def test_changed_or_foreign_token_raises(model):
    *_, token = layer_of(model).get_weights()
    before = contents(model)
    others = {
        "another process's": token + (1 << 40),
        "zeros": np.zeros_like(token),
        "an average": (token + token) / 2,
        "negative": -token,
        "one that was not made": token + 1000,
    }
    for what, value in others.items():
        with pytest.raises(ValueError, match=r"Invalid `weights`.*layer 'tables'.*unchanged"):
            layer_of(model).set_weights([np.float32(0.0), np.asarray(value)])
        assert differ(before, contents(model)) == set(), what


def test_token_of_deleted_snapshot_raises(model, limits):
    limits(last=1)
    weights = model.get_weights()
    gone = np.array(int(layer_of(model).get_weights()[1]))
    model.get_weights()
    gc.collect()
    with pytest.raises(
        ValueError, match=r"layer 'tables'.*a snapshot that was not deleted.*`last`"
    ):
        layer_of(model).set_weights([np.float32(0.0), gone])
    model.set_weights(weights)  # This snapshot is still alive.
    model.set_weights([np.copy(weight) for weight in weights])


@pytest.mark.parametrize("change", ["dim", "rule"])
def test_rows_of_other_tables_raise(model, change):
    rule = optimizers.SGD(0.5) if change == "rule" else optimizers.Adagrad(0.5)
    layer = make_layer(rule, dim=8 if change == "dim" else 4)
    layer(KEYS, training=True)
    before = contents(layer)
    with pytest.raises(ValueError, match="the optimizer" if change == "rule" else "dim=4"):
        layer.set_weights(layer_of(model).get_weights())
    assert_same(layer, before)


def test_snapshots_beyond_memory_limit_are_stored_on_disk(model, limits, tmp_path):
    limits(memory_bytes=0, folder=str(tmp_path))
    weights, before = model.get_weights(), contents(model)
    (folder,) = tmp_path.iterdir()
    assert (folder / "table_0_contents_rows.npy").exists()
    train(model)
    model.set_weights(weights)
    assert_same(model, before)
    del weights
    limits(memory_bytes=0, folder=str(tmp_path))  # Drops the last snapshots.
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"last": 0}, "Invalid `last`: 0"),
        ({"memory_bytes": -1}, "Invalid `memory_bytes`: -1"),
        ({"folder": "/nowhere"}, "Invalid `folder`: '/nowhere'"),
    ],
)
def test_invalid_snapshot_limits_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        limit_snapshots(**arguments)


def test_only_get_weights_creates_snapshots(model, monkeypatch, tmp_path):
    monkeypatch.setattr(row_snapshots, "export_state", lambda store: pytest.fail("a snapshot"))
    model.get_layer("top").get_weights()
    board = keras.callbacks.TensorBoard(tmp_path, histogram_freq=1)
    train(model, validation_data=(KEYS, LABELS), callbacks=[board])
    for weight in model.weights:
        tf.convert_to_tensor(weight)
        repr(weight)
    (rows,) = (weight for weight in model.weights if weight.name == "rows")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy warns if a class ignores its argument `copy`.
        assert np.array(rows) == 0
    model.summary(print_fn=lambda text: None)


def test_learning_rate_is_not_a_weight(model):
    weights = model.get_weights()
    layer_of(model).learning_rate = 0.125
    model.set_weights(weights)
    assert float(layer_of(model).learning_rate) == 0.125


def test_set_weights_in_graph_raises(model):
    weight = next(weight for weight in layer_of(model).weights if weight.path.endswith("rows"))
    with pytest.raises(ValueError, match="in a graph"):
        tf.function(lambda value: weight.assign(value))(tf.constant(0, tf.int64))


def test_checkpoint_structure_is_unchanged(model):
    """Checkpoints of releases without this weight must still restore completely."""
    children = tf.train.TrackableView(model).children(layer_of(model))
    assert sorted(children) == ["_store_state", "update_anchor"]


CONTAINERS = {
    "list": lambda user, item: [user, item],
    "tuple": lambda user, item: (user, item),
    "dictionary": lambda user, item: {"u": user, "i": item},
    "nested": lambda user, item: {"towers": [{"u": user}, (item,)]},
}


def layers_in(held):
    """Returns the layers in a container, in order."""
    if isinstance(held, keras.layers.Layer):
        return [held]
    parts = held.values() if isinstance(held, dict) else held
    return [layer for part in parts for layer in layers_in(part)]


def make_model_with(base, container):
    """Returns a model of class `base` with two embedding layers in a container."""

    class Towers(base):
        def __init__(self):
            super().__init__()
            layers = [Embedding(None, 4, optimizer="adagrad", name=name) for name in ("u", "i")]
            self.held = CONTAINERS[container](*layers)
            self.top = keras.layers.Dense(1)

        def call(self, inputs, training=False):
            user, item = layers_in(self.held)
            return self.top(user(inputs, training=training) + item(inputs + 1, training=training))

    model = Towers()
    model(KEYS[:1, 0])
    return model


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("form", ["weights", "compiled", "optimizer", "slip.keras.Model", "layers"])
def test_rows_of_layers_in_containers_are_restored(container, form, tmp_path):
    base = Model if form == "slip.keras.Model" else keras.Model
    trained, loaded = models = [make_model_with(base, container) for _ in range(2)]
    dense = [keras.optimizers.SGD(), keras.optimizers.SGD()]
    for model, optimizer in zip(models, dense, strict=True):
        if form == "compiled":
            model.compile(optimizer)
        optimizer.build(model.trainable_variables)
    trained(KEYS[:, 0], training=True)
    expected = [contents(layer) for layer in layers_in(trained.held)]
    if form == "weights":
        trained.save_weights(tmp_path / "x.weights.h5")
        loaded.load_weights(tmp_path / "x.weights.h5")
    else:
        more = [{}, {}]
        if form == "optimizer":
            more = [{"optimizer": optimizer} for optimizer in dense]
        elif form == "layers":
            more = [{"embeddings": layers_in(model.held)} for model in models]
        path = tf.train.Checkpoint(model=trained, **more[0]).save(tmp_path / "x")
        tf.train.Checkpoint(model=loaded, **more[1]).restore(path).assert_consumed()
    for layer, found in zip(layers_in(loaded.held), expected, strict=True):
        assert len(found[f"{layer.name} keys"])
        assert_same(layer, found)


def test_checkpoint_without_rows_is_not_consumed(tmp_path):
    models = [make_model_with(keras.Model, "list") for _ in range(2)]
    path = tf.train.Checkpoint(model=models[0]).save(tmp_path / "x")  # Keras omits the layers.
    models[1].compile("sgd", "mse")
    models[1].optimizer.build(models[1].trainable_variables)
    for arguments in ({"model": models[1]}, {"model": make_model_with(Model, "list")}):
        status = tf.train.Checkpoint(**arguments).restore(path)
        with pytest.raises(AssertionError):
            status.assert_consumed()


@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_weights_restore_rows_of_each_rank(run_as_ranks, placement):
    def program(comm):
        layer = make_layer(optimizers.Adagrad(0.5), comm=comm, placement=placement)
        keys = tf.constant(KEYS[comm.rank :: comm.size])

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(keys, training=True) ** 2)
            tape.gradient(loss, layer.trainable_variables)

        step()
        weights, before = layer.get_weights(), contents(layer)
        step()
        changed = differ(before, contents(layer))
        layer.set_weights(weights)
        assert_same(layer, before)
        return changed >= {"user rows"}

    assert run_as_ranks(2, program) == [True, True]


def test_summary_counts_rows(model):
    layer = layer_of(model)
    values = 4 * (layer.store.size("user") + layer.store.size("item"))
    assert layer.count_params() == values > 100
    lines = []
    model.summary(print_fn=lines.append)
    assert any(f"{values}" in line for line in "\n".join(lines).splitlines() if "tables" in line)


def test_weights_of_multiple_layers_are_restored():
    one, two = make_layer(name="one"), make_layer(name="two")
    assert isinstance(one, EmbeddingCollection)
    keys = keras.Input((2,), dtype="int64")
    model = keras.Model(keys, keras.layers.Add()([one(keys), two(keys)]))
    one(KEYS[:4], training=True)
    two(KEYS, training=True)
    weights, before = model.get_weights(), (contents(one), contents(two))
    one(KEYS, training=True)
    model.set_weights(weights)
    assert_same(one, before[0])
    assert_same(two, before[1])


def test_weights_of_embedding_layer_are_restored(tmp_path):
    layer = Embedding(30, 4, optimizer=optimizers.SGD(0.5))
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer, keras.layers.Flatten()])
    layer(KEYS, training=True)
    weights, before = layer.get_weights(), contents(layer)
    layer(KEYS + 1, training=True)
    assert differ(before, contents(layer))
    layer.set_weights(weights)
    assert_same(layer, before)
    model.export(tmp_path / "model", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.serve(KEYS), model.predict(KEYS, verbose=0), atol=1e-6)
