"""Tests that `export.saved_model` reproduces the predictions with only TensorFlow's ops."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import FeatureSpec, Table, export, initializers, optimizers
from slipstream_tf.export.saved import flat_specs
from slipstream_tf.export.serving import ServedTable, initial_rows
from slipstream_tf.keras import Embedding, EmbeddingCollection
from slipstream_tf.models import DLRM, DCNv2

COMBINERS = ("sum", "mean", "sqrtn")
RULE = optimizers.Adagrad(0.1)


def trained_layer(dims=(4, 4), features=None, seen=50, **kwargs):
    """Returns a layer with trained rows for keys below `seen`."""
    tables = [
        Table(name, dim, initializer=initializers.RandomUniform(seed=7))
        for name, dim in zip("ab", dims, strict=False)
    ]
    layer = EmbeddingCollection(tables, RULE, features, **kwargs)
    for table in layer.tables:
        train(layer.store, table.name, np.arange(seen))
    return layer


def train(store, table, keys):
    """Trains the rows of some keys with a random gradient."""
    from slipstream_tf.ops.features import FeatureSpec, pack

    specs = [FeatureSpec("x", table)]
    rows, plan = store.lookup(pack({"x": np.asarray(keys)}, specs), training=True)
    gradient = np.random.default_rng(len(keys)).normal(size=rows[0].shape).astype(np.float32)
    store.apply_gradients(plan, [tf.constant(gradient)])


def served(model, tmp_path, **kwargs):
    export.saved_model(model, tmp_path / "1", **kwargs)
    return tf.saved_model.load(str(tmp_path / "1"))


def assert_same(ours, theirs):
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), ours, theirs
    )


@pytest.mark.parametrize(
    "initializer", ["RandomUniform", "RandomNormal", "TruncatedNormal", "Zeros", "Constant"]
)
@pytest.mark.parametrize("seed", [0, -5, (1 << 63) - 1])
def test_initial_rows_equal_table_rows(initializer, seed):
    values = {"RandomUniform": (-0.3, 0.1, seed), "RandomNormal": (0.1, 0.7, seed)}
    values |= {"TruncatedNormal": (0.1, 0.7, seed), "Constant": (0.3,)}
    start = getattr(initializers, initializer)(*values.get(initializer, ()))
    config = Table("t", 5, initializer=start)
    store = EmbeddingCollection([config], RULE).store
    keys = np.array([0, 1, -1, 1 << 40, (1 << 63) - 1, -(1 << 63), 12345], np.int64)
    expected = store.gather("t", keys)[0]
    table = ServedTable(config, np.empty(0, np.int64), np.empty((0, 5), np.float32))
    rows = table.gather(tf.constant(keys))
    if "Normal" in initializer:
        np.testing.assert_allclose(rows, expected, rtol=1e-6, atol=1e-7)
    else:
        np.testing.assert_array_equal(rows, expected)


def test_uniform_initial_rows_are_bitwise_equal():
    config = Table("t", 16, initializer=initializers.RandomUniform(seed=11))
    keys = np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 5000)
    expected = EmbeddingCollection([config], RULE).store.gather("t", keys)[0]
    np.testing.assert_array_equal(initial_rows(config, tf.constant(keys)), expected)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_exported_features_equal_layer_output(combiner, stacked, tmp_path):
    names = ("one", "padded", "ragged", "weighted", "ragged_weighted", "one_weighted", "narrow")
    tables = dict(zip(names, "abaabbb", strict=True))
    layer = trained_layer(
        features=[FeatureSpec(n, tables[n], combiner) for n in names], stacked=stacked
    )
    generator = np.random.default_rng(1)
    count = 40
    keys = generator.integers(0, 100, (count, 6))  # Half of the keys have no row.
    padded = np.where(generator.random((count, 6)) < 0.4, -1, keys)
    padded[3] = -1
    lengths = generator.integers(0, 7, count)
    lengths[5] = 0
    flat = generator.integers(-3, 100, lengths.sum())
    ragged = tf.RaggedTensor.from_row_lengths(flat, lengths)
    weights = generator.normal(size=(count, 6)).astype(np.float32)
    weights[7] = 0
    positive = np.abs(weights) + 0.1
    inputs = {
        "one": np.where(np.arange(count) == 2, -1, keys[:, 0]),
        "padded": padded,
        "ragged": ragged,
        "weighted": padded,
        "ragged_weighted": ragged,
        "one_weighted": keys[:, 1],
        "narrow": padded[:, :1],
    }
    flat_weights = generator.random(len(flat)).astype(np.float32)
    given = {
        "weighted": positive,
        "ragged_weighted": tf.RaggedTensor.from_row_lengths(flat_weights, lengths),
        "one_weighted": weights[:, 0],
    }

    class Weighted(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def call(self, inputs):
            return self.inner(inputs["keys"], weights=inputs["weights"])

    model = Weighted()
    batch = {"keys": inputs, "weights": given}
    loaded = served(model, tmp_path, signature=batch)
    tensors = tf.nest.map_structure(
        lambda x: x if isinstance(x, tf.RaggedTensor) else tf.constant(x), batch
    )
    expected = layer(inputs, weights=given, training=False)
    assert_same(expected, loaded.serve(tensors))
    if not stacked:
        # The row of a single key without a weight is copied unchanged.
        np.testing.assert_array_equal(expected["one"], loaded.serve(tensors)["one"])


def test_layer_export_leaves_layer_unchanged(tmp_path):
    layer = trained_layer()
    store, sizes = layer.store, layer.store.size("a")
    spec = tf.TensorSpec([None, 2], tf.int64)
    loaded = served(layer, tmp_path, signature=spec)
    keys = np.random.default_rng(0).integers(0, 100, (30, 2))
    outputs = loaded.signatures["serving_default"](inputs=tf.constant(keys))
    np.testing.assert_array_equal(outputs["outputs"], layer(keys))
    assert layer.store is store
    assert store.size("a") == sizes == 50
    assert loaded.serve(tf.zeros([0, 2], tf.int64)).shape == (0, 2, 4)


def test_empty_tables_are_exported(tmp_path):
    layer = trained_layer(seen=0)
    loaded = served(layer, tmp_path, signature=tf.TensorSpec([None, 2], tf.int64))
    keys = np.arange(8).reshape(4, 2)
    np.testing.assert_array_equal(loaded.serve(tf.constant(keys)), layer(keys))


def click_data(count=64):
    generator = np.random.default_rng(2)
    inputs = {
        "keys": generator.integers(0, 30, (count, 2)),
        "dense": generator.normal(size=(count, 3)).astype(np.float32),
    }
    return inputs, (inputs["keys"].sum(axis=1) % 2).astype(np.float32)


def trained_dlrm():
    keras.utils.set_random_seed(0)
    layer = EmbeddingCollection([Table("a", 4), Table("b", 4)], RULE)
    model = DLRM(layer, 3, bottom=[8, 4], top=[8, 1], dropout=0.2)
    model.compile("adam", "binary_crossentropy")
    inputs, labels = click_data()
    model.fit(inputs, labels, batch_size=16, epochs=2, verbose=0)
    return model


def test_click_model_exports_without_signature(tmp_path):
    model = trained_dlrm()
    loaded = served(model, tmp_path)
    inputs, _ = click_data()
    inputs["keys"] = inputs["keys"] * 2  # Some keys have no row.
    outputs = loaded.signatures["serving_default"](**{n: tf.constant(v) for n, v in inputs.items()})
    np.testing.assert_allclose(outputs["outputs"], model.predict(inputs, verbose=0), atol=1e-6)
    assert len(loaded.weights) == len(model.trainable_weights)
    assert not list(loaded.others)  # The export has no optimizer.
    # The model can still be trained.
    assert np.isfinite(model.fit(*click_data(), verbose=0).history["loss"][0])


def test_click_model_with_tables_of_different_dims_is_exported(tmp_path):
    layer = trained_layer(dims=(4, 2))
    model = DCNv2(layer, 0, deep=[4])
    loaded = served(model, tmp_path)
    keys = {"a": np.arange(40, 60), "b": np.arange(20)}
    outputs = loaded.signatures["serving_default"](
        keys_a=tf.constant(keys["a"]), keys_b=tf.constant(keys["b"])
    )
    np.testing.assert_allclose(outputs["outputs"], model({"keys": keys}), atol=1e-6)


def test_click_model_serves_layouts_that_it_was_trained_with(tmp_path):
    names = ("user", "padded", "tags", "words")
    model = DCNv2(EmbeddingCollection([Table(name, 4) for name in names], RULE), 0, deep=[4])
    model.compile("adam", "binary_crossentropy")
    count = 40
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 4, count)
    flat = generator.integers(0, 20, lengths.sum())
    keys = {
        "user": tf.constant(generator.integers(0, 9, count)),
        "padded": tf.constant(generator.integers(-1, 9, (count, 3))),
        "tags": tf.RaggedTensor.from_row_lengths(flat, lengths),
        "words": tf.RaggedTensor.from_row_lengths(tf.strings.as_string(flat), lengths),
    }
    data = tf.data.Dataset.from_tensor_slices(({"keys": keys}, generator.integers(0, 2, count)))
    model.fit(data.batch(16), epochs=3, verbose=0)
    one_key = {name: np.arange(2) for name in names}
    model({"keys": one_key})  # A call without training does not change the signature.
    loaded = served(model, tmp_path)
    named = flat_tensors({f"keys_{name}": part for name, part in keys.items()})
    outputs = loaded.signatures["serving_default"](**named)["outputs"]
    np.testing.assert_allclose(outputs, model({"keys": keys}), atol=1e-6)
    wider = {**keys, "padded": tf.pad(keys["padded"], [(0, 0), (0, 2)], constant_values=-1)}
    np.testing.assert_allclose(loaded.serve({"keys": wider}), outputs, atol=1e-6)


def test_custom_models_are_exported(tmp_path):
    layer = trained_layer()
    lookup = keras.layers.StringLookup(vocabulary=["red", "blue"])
    keys = keras.Input((2,), dtype="int64", name="keys")
    color = keras.Input((1,), dtype="string", name="color")
    hidden = keras.layers.Flatten()(layer(keys))
    hidden = keras.layers.Concatenate()([hidden, keras.ops.cast(lookup(color), "float32")])
    output = keras.layers.Dense(1)(keras.layers.BatchNormalization()(hidden))
    functional = keras.Model({"keys": keys, "color": color}, {"score": output})

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.towers = [functional]
            self.scale = tf.Variable(3.0)

        def call(self, inputs):
            return self.scale * self.towers[0](inputs)["score"]

    batch = {"keys": np.array([[1, 70], [49, 3]]), "color": np.array([["red"], ["green"]])}
    batch = {name: tf.constant(value) for name, value in batch.items()}
    loaded = served(functional, tmp_path / "functional")
    outputs = loaded.signatures["serving_default"](**batch)
    np.testing.assert_allclose(outputs["score"], functional(batch)["score"], atol=1e-6)
    own = Own()
    loaded = served(own, tmp_path / "own", signature=batch)
    np.testing.assert_allclose(loaded.serve(batch), own(batch), atol=1e-6)


BAGS = {
    "dense": tf.constant([1, 60, 3], tf.int64),
    "ragged": tf.ragged.constant([[1], [2, 70], []], dtype=tf.int64),
    "sparse": tf.sparse.from_dense(tf.constant([[1, 0], [2, 3], [0, 0]], tf.int64)),
    "text": tf.ragged.constant([["x"], [], ["y", "z"]]),
    "rows": tf.ragged.constant([[4, 5], [], [6]], dtype=tf.int64),
}
BAG_SPECS = {
    "dense": tf.TensorSpec([None], tf.int64),
    "ragged": tf.RaggedTensorSpec([None, None], tf.int64),
    "sparse": tf.SparseTensorSpec([None, None], tf.int64),
    "text": tf.RaggedTensorSpec([None, None], tf.string),
    "rows": tf.RaggedTensorSpec([None, None], tf.int64),
}


def symbolic(name):
    form, shape = BAGS[name], () if name == "dense" else (None,)
    options = {"ragged": isinstance(form, tf.RaggedTensor), "sparse": name == "sparse"}
    return keras.Input(shape, dtype=form.dtype.name, name=name, **options)


def flat_tensors(inputs):
    """Returns the inputs of the signature, by name."""
    flat = {}
    for name, value in inputs.items():
        if isinstance(value, tf.SparseTensor):
            flat |= {f"{name}_indices": value.indices, f"{name}_dense_shape": value.dense_shape}
            value = value.values
        elif isinstance(value, tf.RaggedTensor):
            splits = value.nested_row_splits
            flat |= {f"{name}_row_splits" + f"_{i}" * (i > 0): s for i, s in enumerate(splits)}
            value = value.flat_values
        flat[name] = value
    return flat


@pytest.mark.parametrize(
    ("kind", "signature"),
    [("functional", None), ("subclass", BAG_SPECS), ("subclass", BAGS)],
    ids=["functional", "specs", "example"],
)
def test_dictionaries_of_ragged_and_sparse_keys_are_exported(kind, signature, tmp_path):
    specs = [FeatureSpec(name, "a", None if name == "rows" else "mean") for name in BAGS]
    layer = EmbeddingCollection([Table("a", 4, initializer=initializers.Zeros())], RULE, specs)
    train(layer.store, "a", np.arange(50))
    if kind == "functional":
        inputs = {name: symbolic(name) for name in BAGS}
        model = keras.Model(inputs, layer(inputs))
    else:

        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.inner = layer

            def call(self, inputs):
                return self.inner(inputs)

        model = Own()
    loaded = served(model, tmp_path, signature=signature)
    expected = layer(BAGS)
    keys = layer.store.gather("a", BAGS["rows"].flat_values)[0]
    np.testing.assert_array_equal(expected["rows"].flat_values, keys)
    found = loaded.serve(BAGS)
    assert set(found) == set(BAGS)
    assert_same(flat_tensors(expected), flat_tensors(found))
    outputs = loaded.signatures["serving_default"](**flat_tensors(BAGS))
    assert_same(flat_tensors(expected), outputs)


def test_nested_ragged_keys_are_exported(tmp_path):
    layer = Embedding(None, 4, name="a")
    keys = tf.ragged.constant([[[1], [2, 3]], [], [[4]]], dtype=tf.int64)
    layer(keys, training=True)
    loaded = served(layer, tmp_path, signature=keys)
    outputs = loaded.signatures["serving_default"](**flat_tensors({"inputs": keys}))
    assert_same(flat_tensors({"outputs": layer(keys)}), outputs)
    longer = tf.ragged.constant([[], [[5, 6], [], [7]]], dtype=tf.int64)
    assert_same(layer(longer).flat_values, loaded.serve(longer).flat_values)


@pytest.mark.parametrize("by_keras", [False, True])
def test_tower_needs_only_its_features(by_keras, tmp_path):
    layer = trained_layer()
    tower = keras.Model(user := {"a": keras.Input((), dtype="int64", name="a")}, layer(user)["a"])
    keys = tf.range(60, dtype=tf.int64)
    if by_keras:
        tower.export(tmp_path / "1", verbose=False)
        loaded = tf.saved_model.load(str(tmp_path / "1"))
    else:
        loaded = served(tower, tmp_path, keys={"b": []})
        assert loaded.tables[1].keys.numpy().size == 0
    signature = loaded.signatures["serving_default"]
    assert list(signature.structured_input_signature[1]) == ["a"]
    (outputs,) = signature(a=keys).values()
    np.testing.assert_array_equal(outputs, tower({"a": keys}))


def test_layers_with_equal_table_names_are_exported(tmp_path):
    first, second = trained_layer(name="first"), trained_layer(seen=9, name="second")
    keys = keras.Input((2,), dtype="int64")
    model = keras.Model(keys, [first(keys), second(keys)])
    loaded = served(model, tmp_path, keys={"second/a": [3]})
    batch = tf.constant([[3, 3], [4, 4], [60, 60]], tf.int64)
    ours, theirs = model(batch), loaded.serve(batch)
    np.testing.assert_array_equal(theirs[0], ours[0])
    np.testing.assert_array_equal(theirs[1][0], ours[1][0])
    start = second.store.gather("a", tf.constant([60], tf.int64))[0]
    np.testing.assert_array_equal(theirs[1][2, 0], start[0])
    assert np.abs(theirs[1][1, 0] - ours[1][1, 0]).max() > 0
    outputs = loaded.signatures["serving_default"](inputs=batch)
    assert sorted(outputs) == ["outputs_0", "outputs_1"]


def test_unexported_keys_have_initial_rows(tmp_path):
    layer = trained_layer()
    hot = layer.store.hot_keys("a", 5)[0]
    loaded = served(
        layer,
        tmp_path,
        keys={"a": [*hot, 10**6]},  # The last key has no row.
        signature=tf.TensorSpec([None, 2], tf.int64),
    )
    keys = np.stack([np.arange(50)] * 2, axis=1)
    outputs = loaded.serve(tf.constant(keys)).numpy()
    fresh = trained_layer(seen=0)
    is_hot = np.isin(keys[:, 0], hot)
    assert is_hot.sum() == 5
    np.testing.assert_array_equal(outputs[is_hot, 0], layer(keys).numpy()[is_hot, 0])
    np.testing.assert_array_equal(outputs[~is_hot, 0], fresh(keys).numpy()[~is_hot, 0])
    np.testing.assert_array_equal(outputs[:, 1], layer(keys)[:, 1])


def test_export_includes_deferred_gradients(tmp_path):
    from slipstream_tf.ops.update_policy import UpdatePolicy

    layer = trained_layer()
    policy = UpdatePolicy(
        mode="defer", trigger="movement", movement=1e9, max_age=1000, max_rows=6400
    )
    layer.store.set_update_policy("a", policy)
    train(layer.store, "a", np.arange(20))
    assert layer.store.update_counts("a").deferred_now == 20
    loaded = served(layer, tmp_path, signature=tf.TensorSpec([None, 2], tf.int64))
    keys = np.stack([np.arange(50)] * 2, axis=1)
    np.testing.assert_array_equal(loaded.serve(tf.constant(keys)), layer(keys))
    assert layer.store.update_counts("a").deferred_now == 0


def environment_without_this_package(folder):
    """Makes a virtual environment with all installed packages except slipstream_tf.

    Returns:
        The path of its interpreter.
    """
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = sysconfig.get_path("purelib", "venv", vars={"base": str(folder)})
    for installed in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in os.scandir(installed):
            is_ours = "slipstream_tf" in entry.name or entry.name.endswith(".pth")
            target = os.path.join(packages, entry.name)
            if not is_ours and not os.path.exists(target):
                os.symlink(entry.path, target)
    return os.path.join(folder, "bin", "python")


CLEAN = """
try:
    import slipstream_tf
except ImportError:
    pass
else:
    raise SystemExit("slipstream_tf can be imported")
import numpy as np
import tensorflow as tf
batch = np.load("batch.npz")
batch = {name: tf.constant(batch[name]) for name in batch.files}
loaded = tf.saved_model.load("1")
outputs = loaded.signatures["serving_default"](**batch)["outputs"].numpy()
tf.compat.v1.disable_eager_execution()
with tf.compat.v1.Session(graph=tf.Graph()) as session:  # As a serving system does in C++.
    graph = tf.compat.v1.saved_model.load(session, ["serve"], "1")
    signature = graph.signature_def["serving_default"]
    fed = np.load("batch.npz")
    feed = {signature.inputs[name].name: fed[name] for name in fed.files}
    again = session.run(signature.outputs["outputs"].name, feed)
maps = open("/proc/self/maps").read()
assert "_slipstream_ops" not in maps, "the op library is loaded"
np.savez("outputs.npz", outputs=outputs, again=again)
"""


def test_export_loads_without_this_package(tmp_path):
    model = trained_dlrm()
    export.saved_model(model, tmp_path / "1")
    inputs, _ = click_data()
    inputs["keys"] = inputs["keys"] * 2
    np.savez(tmp_path / "batch.npz", **inputs)
    result = subprocess.run(
        [environment_without_this_package(tmp_path / "clean"), "-I", "-c", CLEAN],
        cwd=tmp_path,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    outputs = np.load(tmp_path / "outputs.npz")
    expected = model.predict(inputs, verbose=0)
    np.testing.assert_allclose(outputs["outputs"], expected, atol=1e-6)
    np.testing.assert_array_equal(outputs["again"], outputs["outputs"])


def test_inputs_have_names_that_tensorflow_accepts(tmp_path):
    given = {
        **{"_id": "inputs_id", "größe": "gr__e", "User": "User", "user": "user_2"},
        **{"User-ID": "User_ID", "user id": "user_id_2", "class": "inputs_class"},
        **{"self": "inputs_self", "inputs": "inputs", "价格": "inputs_2"},
        **{"ad": "ad", "ad_2": "ad_2"},
    }
    layer = EmbeddingCollection([Table("a", 4)], RULE, [FeatureSpec(name, "a") for name in given])
    train(layer.store, "a", np.arange(50))
    keys = {name: tf.constant([[i], [i + 1]], tf.int64) for i, name in enumerate(given)}
    loaded = served(layer, tmp_path, signature=keys)
    signature = loaded.signatures["serving_default"]
    assert set(signature.structured_input_signature[1]) == set(given.values())
    assert_same(layer(keys), loaded.serve(keys))
    found = signature(**{given[name]: values for name, values in keys.items()})
    for name, rows in layer(keys).items():
        assert_same(rows, found[name.replace("-", "_").replace(" ", "_")])


def test_names_of_input_tensors_are_unique():
    key = tf.TensorSpec([None], tf.int64)
    bag = tf.RaggedTensorSpec([None, None], tf.int64, 1)
    flat = flat_specs({"a": {"b": bag}, "a_b": key, "A_b_row_splits": key})
    assert list(flat) == ["A_b_row_splits", "a_b_2", "a_b_2_row_splits", "a_b"]
    assert all(spec.name == name for name, spec in flat.items())


def test_unsupported_export_raises(tmp_path):
    layer = trained_layer()
    spec = tf.TensorSpec([None, 2], tf.int64)
    with pytest.raises(ValueError, match=r"Invalid `model`.*EmbeddingCollection"):
        export.saved_model(keras.Sequential([keras.layers.Dense(1)]), tmp_path / "1")
    with pytest.raises(ValueError, match=r"Invalid `model`: 3 .*a Keras model"):
        export.saved_model(3, tmp_path / "1")
    with pytest.raises(ValueError, match=r"Invalid `keys`: \['x'\].*'a', 'b'"):
        export.saved_model(layer, tmp_path / "1", keys={"x": [1]}, signature=spec)
    with pytest.raises(ValueError, match=r"Invalid `keys`: 'float64 array of shape \[1\]'"):
        export.saved_model(layer, tmp_path / "1", keys={"a": [1.5]}, signature=spec)
    with pytest.raises(ValueError, match=r"Invalid `signature`: None.*TensorSpec"):
        export.saved_model(layer, tmp_path / "1")
    with pytest.raises(ValueError, match=r"Invalid `signature`: 'keys'"):
        export.saved_model(layer, tmp_path / "1", signature="keys")
    assert not (tmp_path / "1").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match=r"Invalid `path`: .*a new or empty folder"):
        export.saved_model(layer, tmp_path / "full", signature=spec)
    assert os.listdir(tmp_path / "full") == ["file"]

    class Traced(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = layer

        @tf.function(input_signature=[spec])
        def call(self, inputs):
            return self.inner(inputs)

    model = Traced()
    model(np.zeros((2, 2), np.int64))
    with pytest.raises(ValueError, match=r"SlipstreamEvaluationLookup.*tf.function"):
        export.saved_model(model, tmp_path / "1", signature=spec)
