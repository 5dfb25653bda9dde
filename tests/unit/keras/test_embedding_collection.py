"""Tests of `EmbeddingCollection`: outputs, errors, shapes, precision and configuration."""

from __future__ import annotations

import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf import Retention, Table, initializers, optimizers
from slipstream_tf.keras import EmbeddingCollection, FeatureSpec

COMBINERS = ("sum", "mean", "sqrtn")


def make_layer(dims=(4, 4), features=None, learning_rate=0.5, **kwargs):
    tables = [
        Table(name, dim, initializer=initializers.RandomUniform(seed=3))
        for name, dim in zip("ab", dims, strict=False)
    ]
    return EmbeddingCollection(tables, optimizers.SGD(learning_rate), features, **kwargs)


def rows_of(layer, table, keys):
    return np.asarray(layer.store.gather(table, tf.constant(keys, tf.int64))[0])


def pooled(rows, weights, combiner):
    """NumPy reference for one bag with rows [n, dim] and weights [n]."""
    total = (rows * weights[:, None]).sum(axis=0)
    if not len(rows) or combiner == "sum":
        return total
    norm = weights.sum() if combiner == "mean" else np.sqrt((weights**2).sum())
    return total / norm


def test_dictionary_returns_dictionary():
    layer = make_layer(dims=(4, 2))
    outputs = layer({"a": np.array([5, 6, 5]), "b": np.array([1, 2, 3])})
    assert list(outputs) == ["a", "b"]
    np.testing.assert_array_equal(outputs["a"], rows_of(layer, "a", [5, 6, 5]))
    np.testing.assert_array_equal(outputs["b"], rows_of(layer, "b", [1, 2, 3]))


def test_matrix_returns_tensor():
    layer = make_layer()
    outputs = layer(np.array([[5, 1], [6, 2]]))
    assert outputs.shape == (2, 2, 4)
    np.testing.assert_array_equal(outputs[:, 0], rows_of(layer, "a", [5, 6]))
    np.testing.assert_array_equal(outputs[:, 1], rows_of(layer, "b", [1, 2]))


def test_stacked_returns_tensor_for_dictionary():
    keys = np.array([[5, 1], [6, 2]])
    outputs = make_layer(stacked=True)({"b": keys[:, 1], "a": keys[:, 0]})
    np.testing.assert_array_equal(outputs, make_layer()(keys))


def test_int32_keys_and_large_int64_keys_stay_exact():
    layer = make_layer()
    big = (1 << 53) + np.array([0, 1], np.int64)  # The two keys are equal in float64.
    layer({"a": big, "b": np.array([1, 2], np.int32)}, training=True)
    assert sorted(layer.store.export_table("a")["keys"]) == sorted(big)
    assert sorted(layer.store.export_table("b")["keys"]) == [1, 2]


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_bags_equal_numpy(combiner, is_weighted, layout):
    layer = make_layer(features=[FeatureSpec("bag", "a", combiner)])
    bags = [[3, 4, 3], [], [7]]
    weights = [[0.5, 2.0, 1.5], [], [3.0]]
    if layout == "ragged":
        keys = tf.ragged.constant(bags, dtype=tf.int64, ragged_rank=1)
        given = tf.ragged.constant(weights, dtype=tf.float32, ragged_rank=1)
    else:
        keys = tf.ragged.constant(bags, dtype=tf.int64, ragged_rank=1).to_tensor(-1)
        given = tf.ragged.constant(weights, dtype=tf.float32, ragged_rank=1).to_tensor(9.0)
    outputs = layer({"bag": keys}, weights={"bag": given} if is_weighted else None)["bag"]
    expected = [
        pooled(
            rows_of(layer, "a", bag).reshape(-1, 4),
            np.array(weight if is_weighted else [1.0] * len(bag), np.float32),
            combiner,
        )
        for bag, weight in zip(bags, weights, strict=True)
    ]
    np.testing.assert_allclose(outputs, expected, rtol=1e-6, atol=1e-7)


def test_two_features_share_a_table():
    layer = make_layer(features={"seen": "a", "bought": "a"})
    before = rows_of(layer, "a", [1, 2])
    with tf.GradientTape() as tape:
        outputs = layer({"seen": np.array([1]), "bought": np.array([1])}, training=True)
        loss = tf.reduce_sum(outputs["seen"]) + 2 * tf.reduce_sum(outputs["bought"])
    tape.gradient(loss, layer.trainable_variables)
    assert layer.store.size("a") == 1
    assert layer.store.size("b") == 0
    np.testing.assert_allclose(rows_of(layer, "a", [1, 2]), before - [[1.5], [0]], rtol=1e-6)


@pytest.mark.parametrize("is_training", [False, True])
def test_empty_batch_returns_empty_rows(is_training):
    layer = make_layer()
    with tf.GradientTape() as tape:
        outputs = layer(np.zeros((0, 2), np.int64), training=is_training)
        loss = tf.reduce_sum(outputs)
    assert outputs.shape == (0, 2, 4)
    tape.gradient(loss, layer.trainable_variables)
    assert layer.store.size("a") == 0


def test_empty_lists_are_accepted():
    outputs = make_layer()({"a": [], "b": ()}, training=True)
    assert {name: rows.shape for name, rows in outputs.items()} == {"a": (0, 4), "b": (0, 4)}


def test_nan_gradient_raises_and_updates_nothing():
    layer = make_layer()
    before = rows_of(layer, "a", [1, 2])
    factors = tf.constant([1.0, np.nan])[:, None]
    with tf.GradientTape() as tape:
        outputs = layer({"a": np.array([1, 2]), "b": np.array([1, 2])}, training=True)
        loss = tf.reduce_sum(outputs["a"] * factors)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"feature 0 \(table 'a'\).* nan"):
        tape.gradient(loss, layer.trainable_variables)
    np.testing.assert_array_equal(rows_of(layer, "a", [1, 2]), before)


TOWERS = {"query": "a", "item": "a", "history": "b"}


def make_towers(**kwargs):
    specs = [FeatureSpec(name, table) for name, table in TOWERS.items()]
    specs[2] = FeatureSpec("history", "b", combiner=None)
    return make_layer(features=specs, **kwargs)


@pytest.mark.parametrize("names", [["query"], ["item", "history"], ["history", "query"]])
def test_some_features_return_these_features(names):
    layer = make_towers()
    keys = {"query": [5, 6], "item": [[7, 8], [9, -1]], "history": [[1, 2, -1], [3, -1, -1]]}
    inputs = {name: np.array(keys[name]) for name in names}
    inputs["price"] = np.ones(2)  # Not a feature.
    every = layer({name: np.array(value) for name, value in keys.items()})
    outputs = layer(inputs)
    assert list(outputs) == [name for name in TOWERS if name in names]
    for name, rows in outputs.items():
        np.testing.assert_array_equal(rows, every[name])
    # Keras infers the same structure from shapes.
    shapes = {name: (2, *np.shape(keys[name])[1:]) for name in names}
    expected = {name: tuple(rows.shape) for name, rows in outputs.items()}
    assert layer.compute_output_shape(shapes) == expected
    symbolic = {name: keras.Input(shape[1:], dtype="int64") for name, shape in shapes.items()}
    found = layer({**symbolic, "price": keras.Input(())})
    assert {name: part.shape[1:] for name, part in found.items()} == {
        name: shape[1:] for name, shape in expected.items()
    }
    masks = layer.compute_mask({name: tf.constant(keys[name]) for name in names})
    assert set(masks) == set(names)
    if "history" in names:
        np.testing.assert_array_equal(masks["history"], np.array(keys["history"]) != -1)


@pytest.mark.parametrize("apply", ["backward", "step"])
def test_towers_train_the_same_rows_as_one_call(apply):
    def trained(calls):
        layer = make_towers(apply=apply)
        optimizer = slip.keras.CombinedOptimizer(keras.optimizers.SGD(0.5))
        with tf.GradientTape() as tape:
            outputs = {}
            for names in calls:
                outputs |= layer({name: keys[name] for name in names}, training=True)
            loss = tf.reduce_sum(outputs["query"] * outputs["item"])
            loss += tf.reduce_sum(outputs["history"])
        gradients = tape.gradient(loss, layer.trainable_variables)
        if apply == "step":
            optimizer.apply(gradients, layer.trainable_variables)
        assert layer.store.size("a") == 4
        return [rows_of(layer, table, np.arange(10)) for table in "ab"]

    keys = {"query": np.array([5, 6]), "item": np.array([[7, 5], [9, 9]])}
    keys["history"] = np.array([[1, 2], [1, -1]])
    one = trained([["query", "item", "history"]])
    two = trained([["query"], ["item", "history"]])
    assert np.abs(one[1] - rows_of(make_towers(), "b", np.arange(10))).max() == 1.0
    for expected, found in zip(one, two, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_sharded_tower_prefetches_its_features(run_as_ranks):
    """Results are bitwise identical to training without prefetching."""

    def program(comm, prefetch):
        layer = make_towers(comm=comm, placement="sharded", prefetch=prefetch)
        batches = [np.array([1, 2]), np.array([2, 3]) + comm.rank, None]
        for keys, later in itertools.pairwise(batches):
            ahead = {"query": later} if prefetch and later is not None else None
            with tf.GradientTape() as tape:
                rows = layer({"query": keys}, training=True, next_inputs=ahead)["query"]
                loss = tf.reduce_sum(rows)
            tape.gradient(loss, layer.trainable_variables)
        return layer({"item": np.arange(8)}, training=False)["item"].numpy()

    plain = run_as_ranks(2, lambda comm: program(comm, False))
    ahead = run_as_ranks(2, lambda comm: program(comm, True))
    np.testing.assert_array_equal(ahead, plain)
    assert np.abs(plain[0] - rows_of(make_towers(), "a", np.arange(8))).max() > 0


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "missing features: 'query', 'item', 'history'"),
        ({"user": [1]}, r"missing features: 'query' \(not 'user'\?\), 'item', 'history'"),
        ({"query": [1], "itm": [1]}, r"missing features: 'item' \(not 'itm'\?\)\."),
        ({"query": [1], "Items": [1]}, r"missing features: 'item' \(not 'Items'\?\)\."),
    ],
)
def test_misspelled_features_raise(inputs, message):
    with pytest.raises(ValueError, match=message):
        make_towers()({name: np.array(keys) for name, keys in inputs.items()})


def test_stacked_outputs_and_click_models_require_all_features():
    keys = {"a": np.array([1])}
    with pytest.raises(ValueError, match=r"for layer .*missing features: 'b'"):
        make_layer(stacked=True)(keys)
    with pytest.raises(ValueError, match=r"for model .*missing features: 'b'"):
        slip.models.DCNv2(make_layer(), 0, deep=[4])({"keys": keys})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"a": np.array([1.0]), "b": np.array([1])}, "'float64' for feature 'a'"),
        (np.zeros((2, 2), np.float32), "Invalid `keys`: 'float32'"),
        (np.zeros((2, 3), np.int64), r"\[batch, 2\]"),
        ([], r"Invalid `keys`.*\[batch, 2\]"),
        ({"a": np.zeros((1, 2, 3), np.int64), "b": np.array([1])}, "for feature 'a'"),
    ],
)
def test_invalid_inputs_raise(inputs, message):
    with pytest.raises(ValueError, match=message):
        make_layer()(inputs)


def test_different_batch_sizes_raise():
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature 'b' has 1 examples"):
        make_layer()({"a": np.array([1, 2]), "b": np.array([1])})


@pytest.mark.parametrize("cause", ["stacked", "matrix"])
def test_stacking_different_dims_raises(cause):
    with pytest.raises(ValueError, match=r"Invalid `dim`: \{'a': 4, 'b': 8\}.*as a dictionary"):
        make_layer(dims=(4, 8), stacked=cause == "stacked")(np.zeros((1, 2), np.int64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": keras.optimizers.Adam()}, "Invalid `optimizer`: 'keras.optimizers.Adam'"),
        ({"store": "cloud"}, "Invalid `store`: 'cloud'"),
        ({"dtype": "mixed_float16"}, "Invalid `dtype policy`: 'mixed_float16'.*mixed_bfloat16"),
        ({"tables": []}, r"Invalid `tables`: \[\] for EmbeddingCollection"),
        ({"tables": None}, r"Invalid `tables`: \[None\].*at least one slipstream_tf\.Table"),
        ({"size": 3}, "size"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    arguments = {"tables": [Table("a", 4)], "optimizer": optimizers.SGD(), **arguments}
    with pytest.raises((ValueError, TypeError), match=message):
        EmbeddingCollection(**arguments)


def test_global_float16_policy_raises():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.raises(ValueError, match="loss scaling"):
            make_layer(dtype="float32")
    finally:
        keras.config.set_dtype_policy("float32")


def test_bfloat16_policy_keeps_float32_rows():
    layer = make_layer(dtype="mixed_bfloat16")
    before = rows_of(layer, "a", [1])
    with tf.GradientTape() as tape:
        outputs = layer({"a": np.array([1, 1]), "b": np.array([1, 1])}, training=True)
        loss = tf.reduce_sum(tf.cast(outputs["a"], tf.float32))
    assert outputs["a"].dtype == tf.bfloat16
    gradients = tape.gradient(loss, layer.trainable_variables)
    assert [gradient.dtype for gradient in gradients] == [tf.float32]
    np.testing.assert_allclose(rows_of(layer, "a", [1]), before - 1.0, rtol=1e-6)


def test_symbolic_shapes_and_dtype():
    matrix = make_layer(dtype="mixed_bfloat16")(keras.Input((2,), dtype="int64"))
    assert matrix.shape == (None, 2, 4)
    assert matrix.dtype == "bfloat16"
    inputs = {
        "a": keras.Input((), dtype="int64"),
        "b": keras.Input((5,), dtype="int32"),
    }
    outputs = make_layer(dims=(4, 8))(inputs)
    assert {name: output.shape for name, output in outputs.items()} == {
        "a": (None, 4),
        "b": (None, 8),
    }
    assert make_layer().compute_output_shape((7, 2)) == (7, 2, 4)
    assert make_layer().compute_output_shape({"a": (7,), "b": (7,)}) == {"a": (7, 4), "b": (7, 4)}


@pytest.mark.parametrize(
    ("make_inputs", "message"),
    [
        (lambda: keras.Input((2,)), "Invalid `dtype`: 'float32'"),
        (lambda: keras.Input((3,), dtype="int64"), r"\[batch, 2\]"),
        (lambda: {"c": keras.Input((), dtype="int64")}, "missing features: 'a', 'b'"),
    ],
)
def test_invalid_symbolic_inputs_raise(make_inputs, message):
    with pytest.raises(ValueError, match=message):
        make_layer()(make_inputs())


def test_config_round_trip():
    layer = EmbeddingCollection(
        [
            Table(
                "a", 4, None, "mean", initializers.RandomNormal(0.5, 0.1, 9), Retention(64, "lru")
            ),
            Table("b", 8),
        ],
        optimizers.Adam(0.1, beta_1=0.5),
        features=[FeatureSpec("x", "a", "sqrtn"), FeatureSpec("y", "b")],
        name="tables",
        dtype="mixed_bfloat16",
    )
    config = json.loads(json.dumps(layer.get_config()))
    copy = EmbeddingCollection.from_config(config)
    assert copy.get_config() == layer.get_config()
    assert copy.tables == layer.tables
    assert copy.specs == layer.specs
    assert copy.store.optimizer == layer.store.optimizer
    assert copy.dtype_policy.compute_dtype == "bfloat16"
    revived = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert revived.get_config() == layer.get_config()


def test_custom_store_is_used():
    layer = make_layer()
    twin = EmbeddingCollection(layer.tables, optimizers.SGD(0.5), store=layer.store)
    twin(np.array([[1, 2]]), training=True)
    assert layer.store.size("a") == 1
    with pytest.raises(ValueError, match="get_config"):
        twin.get_config()
    with pytest.raises(ValueError, match=r"a store of the tables \['c'\] of the layer"):
        EmbeddingCollection([Table("c", 4)], optimizers.SGD(0.5), store=layer.store)


def test_learning_rate_is_read_in_every_update():
    layer = make_layer(learning_rate=0.5)
    layer.learning_rate = 0.25
    before = rows_of(layer, "a", [1])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(np.array([[1, 1]]), training=True))
    tape.gradient(loss, layer.trainable_variables)
    assert float(layer.learning_rate) == 0.25
    np.testing.assert_allclose(rows_of(layer, "a", [1]), before - 0.25, rtol=1e-6)


def test_only_weight_is_anchor():
    layer = make_layer()
    assert [weight.path.split("/")[-1] for weight in layer.trainable_weights] == ["update_anchor"]
    layer.trainable = False
    assert layer.trainable_weights == []


def test_next_inputs_have_no_effect_in_single_process():
    keys, next_keys = np.array([[5, 1], [6, 2]]), np.array([[7, 1]])
    outputs = make_layer(prefetch=True)(keys, training=True, next_inputs=next_keys)
    np.testing.assert_array_equal(outputs, make_layer()(keys, training=True))
    symbolic = keras.Input((2,), dtype="int64"), keras.Input((2,), dtype="int64")
    tensor = make_layer(prefetch=True)(symbolic[0], next_inputs=symbolic[1])
    assert keras.Model(symbolic, tensor).output_shape == (None, 2, 4)


def test_next_inputs_require_prefetch():
    keys = np.array([[5, 1]])
    with pytest.raises(ValueError, match=r"Invalid `prefetch`: False .*prefetch=True"):
        make_layer()(keys, training=True, next_inputs=keys)
    store = make_layer().store
    tables = [Table(name, 4, initializer=initializers.RandomUniform(seed=3)) for name in "ab"]
    with pytest.raises(
        ValueError, match=r"Invalid `store`.*ShardedStore that was created with prefetch=True"
    ):
        EmbeddingCollection(tables, optimizers.SGD(0.5), store=store, prefetch=True)
