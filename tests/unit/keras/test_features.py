"""Tests that all input forms of a feature train and serve alike."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import slipstream_tf as slip
from slipstream_tf import Table
from slipstream_tf.data.readers.hashing import hash_string, hash_strings
from slipstream_tf.keras.feature_layouts import resolve_features, resolve_tables
from slipstream_tf.ops.classifier import InputClassifier
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.text_keys import hash_texts
from slipstream_tf.sampling.classifier import skip_inputs

DIM = 3
# Items that users looked at: the first user none, the last user the same item twice.
BAGS = [[], [1], [2, 3], [5, 1, 7], [4, 4]]
TEXTS = [[f"item-{key}" for key in bag] for bag in BAGS]


def padded(bags, padding, dtype):
    width = max(map(len, bags))
    return np.array([[*bag, *[padding] * (width - len(bag))] for bag in bags], dtype)


def sparse(bags, dtype):
    """Returns a left-aligned sparse tensor, as `tf.io.parse_example` does."""
    at = [(row, column) for row, bag in enumerate(bags) for column in range(len(bag))]
    values = tf.constant([value for bag in bags for value in bag], dtype)
    return tf.SparseTensor(at, values, [len(bags), 4])


# Name -> (keys of BAGS in this form, padding key of the feature).
FORMS = {
    "padded": (padded(BAGS, -1, np.int64), -1),
    "padded by 0": (padded(BAGS, 0, np.int64), 0),
    "int32": (padded(BAGS, -1, np.int32), -1),
    "uint64": (padded(BAGS, 0, np.uint64), 0),
    "uint8": (padded(BAGS, 0, np.uint8), 0),
    "ragged": (tf.ragged.constant(BAGS, dtype=tf.int64), -1),
    "ragged int32": (tf.ragged.constant(BAGS, dtype=tf.int32), None),
    "ragged with padding": (
        tf.RaggedTensor.from_tensor(tf.constant(padded(BAGS, -1, np.int64))),
        -1,
    ),
    "sparse": (sparse(BAGS, tf.int64), -1),
    "texts": (padded(TEXTS, "", np.str_), -1),
    "ragged texts": (tf.ragged.constant(TEXTS, dtype=tf.string), None),
    "sparse texts": (sparse(TEXTS, tf.string), 7),
}
forms = pytest.mark.parametrize("form", FORMS)


def keys_of(form):
    """Returns the table keys of the bags in this form."""
    if "texts" not in form:
        return BAGS
    return [[hash_string(text.encode()) for text in bag] for bag in TEXTS]


def make_layer(combiner="mean", padding_key=-1, **kwargs):
    specs = [
        FeatureSpec("seen", "item", combiner, padding_key),
        FeatureSpec("item", "item"),
    ]
    initializer = slip.initializers.RandomNormal(0.0, 1.0, seed=1)
    tables = [slip.Table("item", DIM, initializer=initializer)]
    return slip.keras.EmbeddingCollection(tables, slip.optimizers.SGD(0.5), specs, **kwargs)


def features_of(form):
    """Returns a flat dictionary with embedding features and other features."""
    return {
        "seen": FORMS[form][0],
        "item": np.arange(len(BAGS)),
        "price": np.linspace(0.0, 1.0, len(BAGS), dtype=np.float32)[:, None],
        "country": np.array(["at"] * len(BAGS)),
    }


def rows_of(layer, keys):
    return layer.store.gather("item", np.asarray(keys, np.int64))[0].numpy()


def means(layer, bags):
    return [rows_of(layer, bag).mean(0) if bag else np.zeros(DIM) for bag in bags]


class Model(keras.Model):
    """Model that takes the whole feature dictionary."""

    def __init__(self, layer):
        super().__init__()
        self.embeddings = layer
        self.top = keras.layers.Dense(1)

    def call(self, inputs, training=None):
        vectors = self.embeddings(inputs, training=training)
        seen = vectors["seen"]
        if len(seen.shape) == 3:
            seen = tf.reduce_sum(seen, axis=1)
        price = tf.cast(inputs["price"], tf.float32)
        return self.top(tf.concat([seen, vectors["item"], price], axis=1))


@forms
def test_lookup_pools_bags(form):
    layer = make_layer(padding_key=FORMS[form][1])
    vectors = layer(features_of(form))
    np.testing.assert_allclose(vectors["seen"], means(layer, keys_of(form)), rtol=1e-6)
    assert layer.store.size("item") == 0


@forms
def test_training_allocates_rows_for_looked_up_keys_only(form):
    layer = make_layer(padding_key=FORMS[form][1])
    before = rows_of(layer, [1])
    with tf.GradientTape() as tape:
        vectors = layer(features_of(form), training=True)
        loss = tf.reduce_sum(vectors["seen"])
    tape.gradient(loss, layer.trainable_variables)
    keys = {key for bag in keys_of(form) for key in bag} | set(range(len(BAGS)))
    assert set(layer.store.export_table("item")["keys"].tolist()) == keys
    if "texts" not in form:
        # Key 1 is in a bag of one key, and in a bag of three keys whose mean passes on a third
        # of the gradient.
        np.testing.assert_allclose(rows_of(layer, [1]), before - 0.5 * (1 + 1 / 3), rtol=1e-5)


@forms
def test_fit_and_evaluate_work_through_apply(form):
    layer = make_layer(padding_key=FORMS[form][1])
    policy = slip.SkipExamples(score=slip.RowDrift())
    slipstream = slip.Slipstream(layer, [policy], window=slip.Window(steps=2, warmup=0.0))
    data = tf.data.Dataset.from_tensors((features_of(form), tf.ones([len(BAGS), 1]))).repeat(4)
    model = Model(layer)
    model.compile("sgd", "mse")
    train = slipstream.apply(data, batch_size=len(BAGS))
    model.fit(train, callbacks=[slipstream.callback()], verbose=0)
    keys = {key for bag in keys_of(form) for key in bag} | set(range(len(BAGS)))
    assert set(layer.store.export_table("item")["keys"].tolist()) == keys
    assert np.isfinite(model.evaluate(data, verbose=0))
    assert len(slipstream.tracker.reports) == 2


@forms
def test_classification_uses_same_keys(form):
    bags, padding_key = FORMS[form]
    specs = [FeatureSpec("seen", "item", None, padding_key)]
    classifier = InputClassifier(["item"])
    keys = sorted({key for bag in keys_of(form) for key in bag})
    drifts = {key: np.float32(number + 1) for number, key in enumerate(keys)}
    tables = np.zeros(len(keys), np.int32)
    classifier.set_drift(tables, np.array(keys), np.array(list(drifts.values())))
    classifier.configure("drift", 1.5)
    found = classifier.classify({"seen": bags, "price": np.zeros(5)}, specs)
    expected = [max((drifts[key] for key in bag), default=np.inf) for bag in keys_of(form)]
    assert found.score.numpy().tolist() == expected
    data = tf.data.Dataset.from_tensors(({"seen": bags, "place": tf.range(5)}, tf.zeros(5)))
    (kept, _), *_ = skip_inputs(data, classifier, specs, batch_size=3)
    assert kept["place"].numpy().tolist() == np.flatnonzero(np.array(expected) >= 1.5)[:3].tolist()


@pytest.mark.parametrize(
    ("form", "combiner"),
    [(form, None) for form in ("padded", "uint64", "ragged with padding", "sparse", "texts")]
    + [(form, "sqrtn") for form in ("padded by 0", "ragged with padding", "sparse texts")],
)
def test_served_model_gives_same_outputs(form, combiner, tmp_path):
    layer = make_layer(combiner, FORMS[form][1])
    model = Model(layer)
    features = {
        name: tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in features_of(form).items()
    }
    model(features, training=True)
    slip.export.saved_model(model, tmp_path / "1", signature=features)
    expected = model(features)
    served = tf.saved_model.load(str(tmp_path / "1"))
    np.testing.assert_allclose(served.serve(features), expected, rtol=1e-5, atol=1e-6)
    flat = {}
    for name, value in features.items():
        if isinstance(value, tf.RaggedTensor):
            flat |= {name: value.flat_values, f"{name}_row_splits": value.row_splits}
        elif isinstance(value, tf.SparseTensor):
            flat |= {name: value.values, f"{name}_indices": value.indices}
            flat[f"{name}_dense_shape"] = value.dense_shape
        else:
            flat[name] = value
    outputs = served.signatures["serving_default"](**flat)["outputs"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding_key", [-1, 5, None])
def test_padding_is_equal_in_every_layout(padding_key):
    """Regression test: only a matrix treated -1 as padding."""
    keys = np.array([-1, 5])
    specs = [FeatureSpec("x", "item", padding_key=padding_key)]
    ragged = tf.RaggedTensor.from_tensor(tf.constant(keys[:, None]))
    forms = [{"x": keys}, {"x": keys[:, None]}, keys[:, None], {"x": ragged}]
    made = sorted({-1, 5} - {padding_key})
    for form in forms:
        layer = slip.keras.EmbeddingCollection(
            [slip.Table("item", DIM)], slip.optimizers.SGD(0.1), specs
        )
        outputs = layer(form, training=True)
        rows = tf.reshape(outputs["x"] if isinstance(outputs, dict) else outputs, [2, DIM]).numpy()
        assert layer.store.export_table("item")["keys"].tolist() == made
        assert [bool(row.any()) for row in rows] == [key in made for key in keys]


def test_layer_padding_key_applies_to_features():
    layer = slip.keras.EmbeddingCollection(
        [slip.Table("a", DIM)], slip.optimizers.SGD(0.1), {"x": "a"}, padding_key=0
    )
    assert layer.specs == (FeatureSpec("x", "a", "sum", 0),)
    again = slip.keras.EmbeddingCollection.from_config(layer.get_config())
    assert again.specs == layer.specs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": [FeatureSpec("x", "a", padding_key=1.5)]}, "Invalid `padding_key`: 1.5"),
        (
            {"features": [FeatureSpec("x", "a")], "padding_key": 0},
            r"FeatureSpec\(..., padding_key=0\)",
        ),
        ({"padding_key": "x"}, "Invalid `padding_key`: 'x' for feature 'a'"),
        ({"features": [FeatureSpec("x", "a", "last")]}, "Invalid `combiner`: 'last'"),
    ],
)
def test_invalid_settings_raise(options, message):
    with pytest.raises(ValueError, match=message):
        slip.keras.EmbeddingCollection([slip.Table("a", DIM)], slip.optimizers.SGD(0.1), **options)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"seen": [[1], [2, 3]], "item": [1, 2]}, "'seen' of layer.*tf.ragged.constant"),
        ([np.array([1]), np.array([2])], "a list of 2 tensors.*a dictionary"),
        (
            {"sen": np.array([1]), "item": np.array([1])},
            r"missing features: 'seen' \(not 'sen'\?\)",
        ),
        ({"seen": np.array([1.0]), "item": np.array([1])}, "'float64' for feature 'seen'"),
        ({"seen": np.zeros((1, 2, 3), int), "item": np.array([1])}, "for feature 'seen'"),
        ({"seen": tf.sparse.from_dense([1, 2]), "item": np.array([1, 2])}, "SparseTensor"),
    ],
)
def test_invalid_keys_raise(inputs, message):
    with pytest.raises(ValueError, match=message):
        make_layer()(inputs)


@pytest.mark.parametrize("value", [[1, 2], (1, 2), np.array([1, 2])])
def test_lists_are_accepted_as_keys(value):
    layer = make_layer()
    np.testing.assert_array_equal(
        layer({"seen": value, "item": value})["seen"], rows_of(layer, [1, 2])
    )


def test_weights_of_other_kind_error_names_feature():
    layer = make_layer()
    inputs = {"seen": FORMS["sparse"][0], "item": np.arange(5)}
    weights = {"seen": tf.ragged.constant([[1.0]] * 5)}
    with pytest.raises(ValueError, match=r"'seen'.*a SparseTensor, like the keys"):
        layer(inputs, weights)
    with pytest.raises(ValueError, match=r"Invalid `weights`: \['sen'\]"):
        layer(inputs, {"sen": weights["seen"]})


RAGGED = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
SPARSE = tf.SparseTensor([[0, 0], [0, 1], [1, 0]], RAGGED.flat_values, [2, 2])


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    ("keys", "weights", "message"),
    [
        (
            RAGGED,
            tf.ragged.constant([[1.0], [2.0, 4.0]]),
            r"different row_splits\W+for feature \W+seen",
        ),
        (
            RAGGED,
            tf.ragged.constant([[1.0], [2.0], [4.0]]),
            r"different row_splits\W+for feature \W+seen",
        ),
        (RAGGED, tf.ragged.constant([[1.0, 2.0]]), r"different row_splits\W+for feature \W+seen"),
        (
            SPARSE,
            tf.SparseTensor([[0, 0], [1, 0], [1, 1]], [1.0, 2.0, 4.0], [2, 2]),
            r"different indices\W+for feature \W+seen",
        ),
        (
            SPARSE,
            tf.SparseTensor([[0, 0]], [1.0], [2, 2]),
            r"different indices\W+for feature \W+seen",
        ),
        (tf.constant([[1, 2, 3], [4, 5, 6]]), tf.ones([3, 2]), "weights of feature 'seen'"),
    ],
)
def test_weights_in_other_rows_than_keys_raise(keys, weights, message, in_graph):
    layer = make_layer("sum")

    def call(keys, weights):
        return layer({"seen": keys, "item": tf.constant([1, 2])}, {"seen": weights})["seen"]

    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        (tf.function(call) if in_graph else call)(keys, weights)


@pytest.mark.parametrize("keys", [RAGGED, SPARSE])
def test_weights_in_rows_of_keys_are_accepted(keys):
    """Weights made from the keys need no comparison."""
    layer, values = make_layer("sum"), tf.constant([1.0, 2.0, 4.0])
    layout = {"row_splits": keys.row_splits} if keys is RAGGED else {"indices": keys.indices}

    def call(keys, **other):
        weights = keys.with_values(values)
        if "row_splits" in other:
            weights = tf.RaggedTensor.from_row_splits(values, other["row_splits"])
        elif other:
            weights = tf.SparseTensor(other["indices"], values, keys.dense_shape)
        return layer({"seen": keys, "item": tf.constant([1, 2])}, {"seen": weights})["seen"]

    one, two, three = rows_of(layer, [1, 2, 3])
    for call_in_mode in (call, tf.function(call)):
        for other in ({}, layout):
            outputs = call_in_mode(keys, **other)
            np.testing.assert_allclose(outputs, [one + 2 * two, 4 * three], rtol=1e-5)
    graph = tf.function(call).get_concrete_function(tf.type_spec_from_value(keys)).graph
    assert b"Invalid `weights`" not in graph.as_graph_def().SerializeToString()


def test_sparse_keys_accept_weights():
    layer = make_layer("sum")
    keys = FORMS["sparse"][0]
    weights = keys.with_values(tf.range(1.0, 9.0))
    out = layer({"seen": keys, "item": np.arange(5)}, {"seen": weights})["seen"]
    expected = [2.0, 3.0] @ rows_of(layer, [2, 3])
    np.testing.assert_allclose(out[2], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stacked": True},
            r"Invalid `combiner`: None for features \['seen'\] of layer .* with stacked=True",
        ),
        ({"inputs": np.zeros((2, 2), int)}, r"\['seen'\] of layer .* with a key matrix"),
    ],
)
def test_single_tensor_output_requires_combiners(options, message):
    inputs = options.pop("inputs", None)
    with pytest.raises(ValueError, match=message):
        make_layer(None, **options)(inputs)


@pytest.mark.parametrize("model", ["DLRM", "DCNv2", "DeepFM"])
def test_models_with_pooled_features_require_combiners(model):
    message = rf"Invalid `combiner`: None for features \['seen'\] of a {model}"
    with pytest.raises(ValueError, match=message):
        getattr(slip.models, model)(make_layer(None), 0)


def test_sequence_model_refuses_combiner():
    message = r"Invalid `combiner`: \{'item': 'sum'\} for the features of a TBSM"
    with pytest.raises(ValueError, match=message):
        slip.models.TBSM(make_layer(None))


def test_missing_features_of_apply_raise():
    """The error names the missing feature and suggests `get_keys`."""
    slipstream = slip.Slipstream(make_layer())
    data = tf.data.Dataset.from_tensors(({"sen": [1], "item": [1], "price": [1.0]}, [1.0]))
    with pytest.raises(ValueError, match=r"get_keys=.*missing features: 'seen' \(not 'sen'\?\)"):
        slipstream.apply(data, batch_size=1)
    pair = tf.data.Dataset.from_tensors((([1], [1]), [1.0]))
    with pytest.raises(ValueError, match=r"a dictionary \{feature name: keys\}.*`get_keys`"):
        slipstream.apply(pair, batch_size=1)


def test_apply_accepts_bare_keys_of_single_feature():
    layer = slip.keras.Embedding(None, DIM)
    slipstream = slip.Slipstream(layer)
    data = tf.data.Dataset.from_tensors((tf.constant([[1, 2, 3]], tf.int64), [1.0]))
    (keys, _), *_ = slipstream.apply(data, batch_size=1)
    assert keys.numpy().tolist() == [[1, 2, 3]]


def test_functional_model_accepts_named_inputs():
    layer = make_layer(None)
    inputs = {
        "seen": keras.Input((None,), dtype="string", name="seen"),
        "item": keras.Input((), dtype="int64", name="item"),
        "price": keras.Input((1,), name="price"),
    }
    vectors = layer(inputs)
    assert vectors["seen"].shape == (None, None, DIM) and vectors["item"].shape == (None, DIM)
    seen = keras.layers.GRU(4)(vectors["seen"])
    joined = keras.layers.Concatenate()([seen, vectors["item"], inputs["price"]])
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    model.compile("sgd", "mse")
    features = {name: value for name, value in features_of("texts").items() if name in inputs}
    data = tf.data.Dataset.from_tensors((features, tf.ones([5, 1]))).repeat(2)
    slipstream = slip.Slipstream(layer, window=slip.Window(steps=1, warmup=0.0))
    model.fit(slipstream.apply(data, 5), callbacks=[slipstream.callback()], verbose=0)
    assert layer.store.size("item") == len({t for bag in TEXTS for t in bag}) + 5


def test_symbolic_sparse_and_ragged_inputs_are_accepted():
    layer = make_layer(None)
    item = keras.Input((), dtype="int64", name="item")
    for form, option in (("sparse", "sparse"), ("ragged", "ragged")):
        seen = keras.Input((None,), dtype="int64", name="seen", **{option: True})
        vectors = layer({"seen": seen, "item": item})
        assert vectors["seen"].ragged and vectors["seen"].shape == (None, None, DIM)
        fixed = keras.Input((4,), dtype="int64", **{option: True})  # Not the width of any row.
        assert layer({"seen": fixed, "item": item})["seen"].shape == (None, None, DIM)
        model = keras.Model([seen, item], vectors["seen"])
        given = FORMS[form][0]
        rows = model([given, tf.range(5, dtype=tf.int64)])
        np.testing.assert_allclose(rows.flat_values, rows_of(layer, list(itertools.chain(*BAGS))))


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("spec", [tf.SparseTensorSpec, tf.RaggedTensorSpec])
def test_outputs_keep_static_batch_size_of_sparse_and_ragged_keys(spec, batch):
    layer = make_layer("sum")
    item = tf.TensorSpec([batch], tf.int64)
    signature = {"seen": spec([batch, None], tf.int64), "item": item}
    lookup = tf.function(lambda inputs: layer(inputs, training=False))
    outputs = lookup.get_concrete_function(signature).structured_outputs
    assert outputs["seen"].shape.as_list() == [batch, DIM]


def test_sequential_model_keeps_int64_keys():
    """Regression test: in Keras's float32 Input, these two keys are equal."""
    layer = slip.keras.EmbeddingCollection([slip.Table("a", DIM)], slip.optimizers.SGD(0.1))
    model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    keys = (1 << 40) + np.arange(2)[:, None]
    model.fit(keys, np.ones((2, 1)), verbose=0)
    assert layer.store.export_table("a")["keys"].tolist() == keys.ravel().tolist()


def tower():
    """Returns a Sequential model without an Input, whose other layers need its shape."""
    layer = slip.keras.Embedding(None, DIM, name="a")
    return keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(2)])


def test_functional_model_around_sequential_keeps_int64_keys():
    """The Sequential model is built by the shape of its input."""
    keys = (1 << 40) + np.arange(4).reshape(2, 2)
    inner, inputs = tower(), keras.Input((2,), dtype="int64")
    model = keras.Model(inputs, keras.layers.Dense(1)(inner(inputs)))
    model.compile("sgd", "mse")
    model.fit(keys, np.ones((2, 1)), verbose=0)
    layer = inner.layers[0]
    assert layer.store.export_table("a")["keys"].tolist() == keys.ravel().tolist()
    flat = tf.reshape(layer(keys), [2, -1])
    np.testing.assert_allclose(inner(keys), inner.layers[-1](flat), rtol=1e-6)


def test_sequential_model_built_by_shape_loads_weights(tmp_path):
    models = [tower(), tower()]
    for model in models:
        model.build((None, 3))
        assert len(model.layers[-1].weights) == 2
    keys = np.arange(6).reshape(2, 3)
    models[0].compile("sgd", "mse")
    models[0].fit(keys, np.ones((2, 2)), verbose=0)
    models[0].save_weights(tmp_path / "m.weights.h5")
    models[1].load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(models[1](keys), models[0](keys))


def test_keys_that_keras_rounds_to_floats_raise():
    """An outer Sequential model without an Input declares float32."""
    model = keras.Sequential([tower(), keras.layers.Dense(1)])
    keys = np.array([[1, 1 << 24]])
    np.testing.assert_allclose(
        model.predict(keys, verbose=0), model.layers[1](model.layers[0](keys))
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Invalid `keys`: \W*rounded float32"):
        model.predict(keys + 1, verbose=0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (np.array([["a", "b"]]), "Invalid `dtype`: 'int64' for text keys of layer 'a'"),
        (np.array([[0.5, 1.0]]), None),
    ],
)
def test_sequential_model_without_input_casts_keys(keys, message):
    """Keras casts the inputs to int64 before the layer receives them."""
    model = tower()
    if message is None:
        np.testing.assert_array_equal(model.predict(keys, verbose=0), model(np.array([[0, 1]])))
        return
    with pytest.raises(ValueError, match=message):
        model.predict(tf.constant(keys), verbose=0)


def test_float_keys_raise_in_each_kind_of_call():
    layer = slip.keras.Embedding(None, DIM, name="a")
    message = r"float32' for layer 'a'.*keras.Input\(..., dtype='int64'\)"
    calls = [layer, tf.function(layer), tf.function(lambda keys: layer(keys, training=True))]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(tf.constant([1.0]))
    with pytest.raises(ValueError, match=message):
        layer(keras.Input((3,)))
    # Keras uses such tensors to infer shapes.
    assert layer(keras.KerasTensor((None, 3))).shape == (None, 3, DIM)


def test_shape_inference_creates_no_rows_and_needs_no_training_argument():
    layer = make_layer(None)

    class Outer(keras.layers.Layer):
        def call(self, keys):
            with tf.GradientTape():
                return layer({"seen": keys, "item": keys[:, 0]})

    for dtype in ("float32", "int64", "string"):
        outputs = Outer()(keras.KerasTensor((None, 2), dtype))
        shapes = {name: tensor.shape for name, tensor in outputs.items()}
        assert shapes == {"seen": (None, 2, DIM), "item": (None, DIM)}
    assert layer.store.size("item") == 0


def test_function_traced_by_shape_looks_up_current_rows():
    """TensorFlow reuses a trace that was made while Keras inferred shapes."""

    class Traced(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.top = (
                slip.keras.Embedding(None, DIM, name="a"),
                keras.layers.Dense(1),
            )

        @tf.function
        def call(self, keys, training=False):
            return self.top(self.embedding(keys, training=training))

    model, keys = Traced(), np.array([[1, 2]])
    model(keys)
    model.embedding.table("a").write([1, 2], np.ones((2, DIM)))
    np.testing.assert_allclose(model(keys), model.top(np.ones((1, 2, DIM))), rtol=1e-6)


@settings(max_examples=50)
@given(texts=st.lists(st.binary(max_size=300), max_size=6))
def test_strings_are_hashed_like_readers(texts):
    expected = hash_strings(pa.array(texts, pa.binary()))
    assert hash_texts(tf.constant(texts, tf.string)).numpy().tolist() == expected.tolist()


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 256, 257])
def test_strings_of_whole_hash_blocks_are_hashed(length):
    text = b"\xff" * length
    assert hash_texts(tf.constant([text, b""])).numpy()[0] == hash_string(text)


def test_empty_string_is_key_without_padding_key():
    specs = [FeatureSpec("x", "t", padding_key=None)]
    packed = pack({"x": np.array(["", "a"])}, specs)
    assert packed.of(0)[0].numpy().tolist() == hash_strings(pa.array(["", "a"])).tolist()
    assert packed.is_key(0) is None


TABLES = (Table("user", 4), Table("item", 4, combiner="mean"))


def test_default_is_one_feature_per_table():
    assert resolve_features(None, TABLES) == (
        FeatureSpec("user", "user", "sum"),
        FeatureSpec("item", "item", "mean"),
    )


def test_dictionary_features_use_combiner_of_table():
    specs = resolve_features({"seen": "item", "bought": "item"}, TABLES)
    assert specs == (FeatureSpec("seen", "item", "mean"), FeatureSpec("bought", "item", "mean"))


def test_specs_keep_their_combiner():
    spec = FeatureSpec("seen", "item", "sqrtn")
    assert resolve_features([spec], TABLES) == (spec,)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"x": "shop"}, "Invalid `table`: 'shop' for feature 'x'. Expected one of the tables"),
        ([FeatureSpec("x", "shop")], "Invalid `table`: 'shop' for feature 'x'"),
        ([FeatureSpec("x", "user", "max")], "Invalid `combiner`: 'max' for feature 'x'"),
        (
            [FeatureSpec("x", "user"), FeatureSpec("x", "item")],
            "'x' .*a unique name for each feature",
        ),
        ([FeatureSpec("", "user")], "non-empty strings as feature names"),
        (["user"], "Invalid `features`: \\['user'\\]"),
        ([], "Invalid `features`"),
        (7, "Invalid `features`: \\[7\\]"),
    ],
)
def test_invalid_features_raise(features, message):
    with pytest.raises(ValueError, match=message):
        resolve_features(features, TABLES)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "Invalid `tables`: \\[\\]"),
        (None, "Invalid `tables`: \\[None\\]"),
        ([Table("a", 2), Table("a", 3)], "Invalid `tables`: \\['a'\\]"),
        (["a"], "Invalid `tables`: \\['a'\\]"),
    ],
)
def test_invalid_tables_raise(tables, message):
    with pytest.raises(ValueError, match=message):
        resolve_tables(tables)


def test_single_table_needs_no_list():
    assert resolve_tables(TABLES[0]) == (TABLES[0],)
