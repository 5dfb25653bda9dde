"""Tests of `slip.keras.Embedding` as a replacement of `keras.layers.Embedding`."""

from __future__ import annotations

import inspect
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.data.readers.hashing import hash_string

KEYS = np.array([[1, 2, 0], [3, 1, 1]])


def make_layer(input_dim=10, **kwargs):
    return slip.keras.Embedding(input_dim, 4, optimizer=slip.optimizers.SGD(0.5), **kwargs)


def rows_of(layer, keys):
    name = layer.tables[0].name
    rows = layer.store.gather(name, np.asarray(keys, np.int64).ravel())[0].numpy()
    return rows.reshape(*np.shape(keys), layer.output_dim)


def test_arguments_have_order_of_keras():
    ours = list(inspect.signature(slip.keras.Embedding.__init__).parameters)
    theirs = list(inspect.signature(keras.layers.Embedding.__init__).parameters)
    assert ours[:7] == theirs[:7]


@pytest.mark.parametrize(
    "keys", [np.int64(3), KEYS[0], KEYS, KEYS[None], KEYS.astype(np.uint8), KEYS.tolist()]
)
def test_keys_of_any_shape_are_accepted(keys):
    layer = make_layer()
    np.testing.assert_array_equal(layer(keys), rows_of(layer, keys))
    assert layer.compute_output_shape(np.shape(keys)) == (*np.shape(keys), 4)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("input_dim", [10, None])
@pytest.mark.parametrize(("keys", "shape"), [([], (0,)), ((), (0,)), ([[], []], (2, 0))])
def test_empty_lists_are_accepted(keys, shape, input_dim, training):
    """NumPy makes empty lists float arrays, although keys must be integers."""
    layer = make_layer(input_dim)
    assert layer(keys, training=training).shape == (*shape, 4)
    assert layer.store.size("embedding") == 0


def test_ragged_and_sparse_keys_are_accepted():
    layer = make_layer()
    flat = [1, 2, 3]
    for keys in (
        tf.ragged.constant([[[1], []], [[2, 3]]], dtype=tf.int64),
        tf.ragged.constant([[1], [], [2, 3]], dtype=tf.int32),
        tf.sparse.from_dense(tf.constant([[1, 0], [2, 3]], tf.int64)),
    ):
        rows = layer(keys)
        assert isinstance(rows, tf.RaggedTensor)
        np.testing.assert_array_equal(rows.flat_values, rows_of(layer, flat))


@pytest.mark.parametrize(
    "keys",
    [
        tf.RaggedTensor.from_row_splits([[1, 2, 3], [3, 4, 5]], [0, 1, 1, 2]),
        tf.RaggedTensor.from_uniform_row_length(tf.ragged.constant([[1], [2, 3], [4], []]), 2),
        tf.ragged.constant([[[[1, 2]], []], [[[3, 4], [5, 6]]]], ragged_rank=2),
    ],
)
def test_ragged_keys_of_any_layout_equal_keras_embedding(keys):
    layer, theirs = make_layer(), keras.layers.Embedding(10, 4)
    theirs.build()
    theirs.set_weights([rows_of(layer, np.arange(10))])
    expected = theirs(keys)
    for rows in (layer(keys), tf.function(layer)(keys)):
        assert rows.shape.as_list() == expected.shape.as_list()
        np.testing.assert_array_equal(rows.flat_values, expected.flat_values)
        for own, other in zip(rows.nested_row_splits, expected.nested_row_splits, strict=True):
            np.testing.assert_array_equal(own, other)


def test_symbolic_sparse_keys_give_ragged_rows():
    keys = keras.Input((3,), dtype="int64", sparse=True)
    rows = make_layer()(keys)
    assert rows.ragged and rows.shape == (None, None, 4)
    model = keras.Model(keys, rows)
    given = tf.sparse.from_dense(tf.constant([[1, 2, 0], [0, 0, 3]], tf.int64))
    assert model(given).shape.as_list() == [2, None, 4]


def test_gradients_of_all_positions_are_summed():
    layer = make_layer()
    before = rows_of(layer, [0, 1, 2, 3])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(KEYS, training=True))
    tape.gradient(loss, layer.trainable_variables)
    counts = np.array([1, 3, 1, 1])[:, None]
    np.testing.assert_allclose(rows_of(layer, [0, 1, 2, 3]), before - 0.5 * counts, rtol=1e-5)


def test_mask_zero_masks_key_zero():
    layer = make_layer(mask_zero=True)
    rows = layer(KEYS, training=True)
    assert rows._keras_mask.numpy().tolist() == [[True, True, False], [True, True, True]]
    assert not rows[0, 2].numpy().any()
    assert layer.store.export_table("embedding")["keys"].tolist() == [1, 2, 3]
    assert layer.supports_masking and not make_layer().supports_masking
    assert make_layer().compute_mask(tf.constant(KEYS)) is None


@pytest.mark.parametrize("keys", [np.int64(0), KEYS[0], KEYS, KEYS[None], KEYS.tolist()])
def test_masks_equal_keras_embedding(keys):
    ours, theirs = (
        cls(10, 4, mask_zero=True) for cls in (slip.keras.Embedding, keras.layers.Embedding)
    )
    np.testing.assert_array_equal(ours.compute_mask(keys), theirs.compute_mask(keys))
    np.testing.assert_array_equal(ours(keys)._keras_mask, ours.compute_mask(keys))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint64", "string"])
def test_symbolic_keys_have_symbolic_mask(dtype):
    layer = make_layer(None, mask_zero=True)
    inputs = keras.Input((3,), dtype=dtype)
    mask = layer.compute_mask(inputs)
    assert (mask.shape, mask.dtype) == ((None, 3), "bool")
    padding, key = ("", "a") if dtype == "string" else (0, 2)
    keys = tf.constant([[key, padding, key]], dtype)
    outputs = keras.Model(inputs, [mask, layer(inputs)._keras_mask])(keys)
    np.testing.assert_array_equal(outputs, [[[True, False, True]]] * 2)


@pytest.mark.parametrize("is_functional", [True, False])
def test_mask_reaches_following_layers(is_functional):
    layer, gru = make_layer(mask_zero=True), keras.layers.GRU(3)
    model = keras.Sequential([layer, gru])
    if is_functional:
        inputs = keras.Input((None,), dtype="int64")
        model = keras.Model(inputs, gru(layer(inputs)))
    short, long = np.array([[1, 2]]), np.array([[1, 2, 0, 0]])
    np.testing.assert_allclose(model.predict(short), model.predict(long), rtol=1e-5)


@pytest.mark.parametrize("key", [10, -1, 1 << 40])
@pytest.mark.parametrize("training", [True, False])
def test_keys_beyond_input_dim_raise(key, training):
    layer = make_layer()
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r">= 0 and < input_dim=10.*input_dim=None"
    ):
        layer(np.array([[1, key]]), training=training)
    assert layer.store.size("embedding") == 0
    unbounded = make_layer(None)
    np.testing.assert_array_equal(unbounded(np.array([key])), rows_of(unbounded, [key]))


def test_strings_are_hashed_to_keys():
    layer = make_layer(None, mask_zero=True)
    rows = layer(np.array([["a", ""], ["b", "a"]]))
    a, b = rows_of(layer, [hash_string(b"a"), hash_string(b"b")])
    np.testing.assert_array_equal(rows, [[a, np.zeros(4)], [b, a]])
    with pytest.raises(ValueError, match=r"Invalid `input_dim`: 10.*text keys"):
        make_layer()(np.array(["a"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_dim": 0}, "Invalid `input_dim`: 0"),
        ({"input_dim": []}, r"Invalid `input_dim`: \[\]"),
        ({"input_dim": 1.5}, "Invalid `input_dim`: 1.5"),
        ({"output_dim": 0}, "Invalid `output_dim`: 0"),
        ({"embeddings_regularizer": "l2"}, r"`embeddings_regularizer`: 'l2' .*Adam\(l2="),
        ({"embeddings_constraint": "max_norm"}, r"`embeddings_constraint`.*Adam\(max_norm="),
        ({"input_length": 5}, "Invalid `input_length`: 5 .*any length"),
        ({"lora_rank": 2}, "Invalid `lora_rank`: 2 .*rows of a batch"),
        ({"quantization_config": 8}, "`quantization_config`.*rows_dtype='int8'"),
        ({"weights": [np.zeros((10, 3))]}, r"of shape \(10, 3\) .*= \[10, 4\]"),
        ({"weights": [np.zeros((10, 4))] * 2}, "Invalid `initializer`"),
        ({"embeddings_initializer": np.zeros((9, 4))}, r"of shape \(9, 4\) .*= \[10, 4\]"),
        (
            {"embeddings_initializer": np.zeros(4)},
            r"`initializer`: float64 ndarray of shape \(4,\)",
        ),
        ({"embeddings_initializer": lambda shape, dtype: np.zeros(3)}, r"shape \(3,\)"),
        ({"embeddings_initializer": "unknown"}, "Invalid `initializer`: 'unknown'"),
        ({"input_dim": None, "weights": [np.zeros((9, 4))]}, "`input_dim`: None.*from_embedding"),
        ({"input_dim": None, "embeddings_initializer": "glorot_uniform"}, "`input_dim`: None"),
        ({"input_dim": 1 << 50, "embeddings_initializer": "glorot_uniform"}, "`input_dim`.*memory"),
        ({"optimizer": "lion"}, "Invalid `optimizer`"),
    ],
)
def test_invalid_arguments_raise(options, message):
    with pytest.raises(ValueError, match=message):
        slip.keras.Embedding(**{"input_dim": 10, "output_dim": 4, **options})


def test_numpy_sizes_and_keras_initializers_are_accepted():
    layer = make_layer(np.int64(10), embeddings_initializer=keras.initializers.Constant(0.25))
    assert (layer(KEYS).numpy() == 0.25).all()
    assert (make_layer(embeddings_initializer="zeros")(KEYS).numpy() == 0.0).all()


MATRIX = np.arange(40, dtype=np.float32).reshape(10, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"weights": [MATRIX]},
        {"weights": MATRIX},
        {"embeddings_initializer": MATRIX.astype(np.float64)},
        {"embeddings_initializer": tf.constant(MATRIX)},
        {"embeddings_initializer": tf.Variable(MATRIX)},
        {"embeddings_initializer": keras.Variable(MATRIX)},
        {"embeddings_initializer": keras.initializers.Constant(MATRIX)},
        {"embeddings_initializer": lambda shape, dtype: np.arange(40.0).reshape(shape)},
    ],
)
def test_matrix_gives_initial_rows(options, tmp_path):
    layer = make_layer(**options)
    np.testing.assert_array_equal(rows_of(layer, np.arange(10)), MATRIX)
    assert layer.store.size("embedding") == 10
    config = json.dumps(layer.get_config())
    assert len(config) < 2000 and '"RandomUniform"' in config
    model = keras.Sequential([layer])
    model.compile("sgd", "mse")
    model.fit(KEYS, np.ones((2, 3, 4)), verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    every_key = np.arange(9).reshape(3, 3)
    np.testing.assert_array_equal(loaded(every_key), model(every_key))
    np.testing.assert_array_equal(loaded(every_key)[2], MATRIX[6:9])


def test_keras_initializer_computes_all_rows():
    initializer = keras.initializers.GlorotUniform(seed=3)
    layer = make_layer(embeddings_initializer=initializer)
    np.testing.assert_array_equal(rows_of(layer, np.arange(10)), initializer((10, 4)))
    again = slip.keras.Embedding.from_config(json.loads(json.dumps(layer.get_config())))
    np.testing.assert_array_equal(rows_of(again, np.arange(10)), initializer((10, 4)))
    by_name = make_layer(embeddings_initializer="glorot_uniform")
    assert 0 < np.abs(rows_of(by_name, np.arange(10))).max() <= (6 / 14) ** 0.5


def test_matrix_attribute_names_functions_for_rows():
    layer = make_layer(name="user")
    assert not hasattr(layer, "embeddings")
    with pytest.raises(AttributeError, match=r"layer.table\('user'\).read.*from_embedding"):
        _ = layer.embeddings


def test_config_round_trip():
    layer = make_layer(mask_zero=True, name="user", embeddings_initializer="normal")
    config = json.loads(json.dumps(layer.get_config()))
    again = slip.keras.Embedding.from_config(config)
    assert again.get_config() == layer.get_config()
    assert (again.tables, again.specs) == (layer.tables, layer.specs)


def test_rebuilt_model_loads_weights(tmp_path):
    """Keras numbers unnamed layers, but the table names stay the same."""

    def build():
        return keras.Sequential([make_layer(), keras.layers.Flatten(), keras.layers.Dense(1)])

    models = [build(), build()]
    models[0].compile("sgd", "mse")
    models[0].fit(KEYS, np.ones((2, 1)), verbose=0)
    models[0].save_weights(tmp_path / "m.weights.h5")
    models[1](KEYS)
    models[1].load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(models[1](KEYS), models[0](KEYS))
    models[0].save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded(KEYS), models[0](KEYS))


@keras.saving.register_keras_serializable(package="test_embedding")
class SubclassedEmbedding(slip.keras.Embedding):
    """A subclass, which Keras names "subclassed_embedding"."""


@pytest.mark.parametrize("layer_class", [slip.keras.Embedding, SubclassedEmbedding])
def test_unnamed_layers_are_saved_and_cloned(layer_class, tmp_path, caplog):
    """Two layers of a model have equal table names, and each finds its own rows."""

    def build():
        inputs = keras.Input((3,), dtype="int64")
        outputs = [layer_class(10, 4)(inputs) for _ in range(2)]
        return keras.Model(inputs, keras.layers.Concatenate()(outputs))

    model, rebuilt = build(), build()
    assert [layer.tables[0].name for layer in model.layers[1:3]] == ["embedding", "embedding"]
    model.compile("sgd", "mse")
    model.fit(KEYS, np.ones((2, 3, 8)), verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    cloned = keras.models.clone_model(model)
    cloned.set_weights(model.get_weights())
    every_key = np.arange(9).reshape(3, 3)
    np.testing.assert_array_equal(loaded(every_key), model(every_key))
    np.testing.assert_array_equal(cloned(every_key), model(every_key))
    model.save_weights(tmp_path / "m.weights.h5")
    with caplog.at_level("WARNING"):
        rebuilt.load_weights(tmp_path / "m.weights.h5")
    assert caplog.text.count("keys without a row start with other values") == 2
    np.testing.assert_array_equal(rebuilt(KEYS), model(KEYS))


def test_given_names_are_names_of_tables():
    layers = [make_layer(name=name) for name in ("embedding_1", "embedding_2")]
    assert [layer.tables[0].name for layer in layers] == ["embedding_1", "embedding_2"]
    slip.Slipstream(layers)  # Requires distinct names.
    layer = make_layer(name="user", table_name="users")
    assert layer.table("users").name == layer.specs[0].name == "users"
    assert slip.keras.Embedding.from_config(layer.get_config()).tables == layer.tables


def test_unnamed_layers_start_with_different_rows():
    keras.utils.clear_session()
    first, second, named = make_layer(), make_layer(), make_layer(name="embedding")
    assert not np.isin(first(KEYS), second(KEYS)).any()
    np.testing.assert_array_equal(named(KEYS), first(KEYS))
    keras.utils.clear_session()
    np.testing.assert_array_equal(make_layer()(KEYS), first(KEYS))
    np.testing.assert_array_equal(make_layer()(KEYS), second(KEYS))


@pytest.mark.parametrize("apply", ["backward", "step"])
def test_training_equals_keras_embedding(apply):
    """With equal initial rows and SGD, the losses match Keras."""
    layer = make_layer(name="user", apply=apply)
    theirs = keras.layers.Embedding(10, 4)
    theirs.build()
    theirs.set_weights([rows_of(layer, np.arange(10))])
    losses = []
    for embedding in (layer, theirs):
        model = keras.Sequential([keras.Input((3,), dtype="int64"), embedding])
        optimizer = keras.optimizers.SGD(0.5)
        if embedding is layer and apply == "step":
            optimizer = slip.keras.CombinedOptimizer(optimizer)
        model.compile(optimizer, "mse")
        losses.append(model.fit(KEYS, np.ones((2, 3, 4)), epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    np.testing.assert_allclose(rows_of(layer, np.arange(10)), theirs.get_weights()[0], rtol=1e-5)


def test_engine_tracks_layer():
    layer = make_layer(name="item")
    slipstream = slip.Slipstream(layer, window=slip.Window(steps=1, warmup=0.0))
    data = tf.data.Dataset.from_tensors(({"item": KEYS, "price": np.ones(2)}, np.ones((2, 3, 4))))
    train = slipstream.apply(data, batch_size=2).map(lambda x, y: (x["item"], y))
    model = keras.Sequential([layer])
    model.compile("sgd", "mse")
    model.fit(train, callbacks=[slipstream.callback()], verbose=0)
    assert len(slipstream.tracker.reports) == 1
    assert set(layer.store.hot_keys("item", 9)[0]) == {0, 1, 2, 3}


def test_served_model_gives_same_outputs(tmp_path):
    layer = make_layer(None, mask_zero=True)
    model = keras.Sequential([keras.Input((None,), dtype="string"), layer, keras.layers.GRU(3)])
    keys = tf.constant([["a", "b", ""], ["c", "", ""]])
    model(keys, training=True)
    slip.export.saved_model(model, tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1"))
    np.testing.assert_allclose(served.serve(keys), model(keys), rtol=1e-5)


@pytest.mark.parametrize("shape", [(), ((None, 3),)])
def test_build_accepts_no_shape(shape, tmp_path):
    layer = make_layer()
    layer.build(*shape)
    model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(KEYS, np.ones((2, 1)), verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded(KEYS), model(KEYS))
    slip.keras.EmbeddingCollection([slip.Table("t", 2)]).build()
