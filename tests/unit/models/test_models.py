"""Tests of DLRM, DCN-v2, DeepFM and FinalMLP: outputs, errors, precision, saving, training."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table, initializers, optimizers
from slipstream_tf.distributed import prefetch_keys
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.models import DLRM, MLP, DCNv2, DeepFM, FinalMLP
from slipstream_tf.models.interaction import pair_order
from slipstream_tf.telemetry.metrics import exact_auc

FIELDS = 3
DIM = 4
DENSE = 2


def make_embeddings(dims=(DIM,) * FIELDS, learning_rate=0.5, initializer=None, **kwargs):
    tables = [
        Table(f"t{i}", dim, initializer=initializer or initializers.RandomUniform(seed=i))
        for i, dim in enumerate(dims)
    ]
    rule = optimizers.Adagrad(learning_rate, initial_accumulator_value=0.0, epsilon=1e-8)
    return EmbeddingCollection(tables, rule, **kwargs)


def make_dlrm(dense=DENSE, embeddings=None, **kwargs):
    embeddings = embeddings or make_embeddings()
    return DLRM(embeddings, dense, **{"bottom": [8, DIM], "top": [8, 1], **kwargs})


def make_dcn(dense=DENSE, embeddings=None, **kwargs):
    return DCNv2(embeddings or make_embeddings(), dense, **{"deep": [8, 4], **kwargs})


def make_deepfm(dense=DENSE, embeddings=None, **kwargs):
    return DeepFM(embeddings or make_embeddings(), dense, **{"deep": [8, 4], **kwargs})


def make_final_mlp(dense=DENSE, embeddings=None, **kwargs):
    widths = kwargs.pop("deep", [8, 4])
    small = {"first": widths, "second": [*widths[:-1], 2 * widths[-1]], "heads": 2, "gate": 5}
    return FinalMLP(embeddings or make_embeddings(), dense, **{**small, **kwargs})


MODELS = {
    "dlrm": make_dlrm, "dcn": make_dcn, "deepfm": make_deepfm, "final_mlp": make_final_mlp,
}  # fmt: skip


def make_data(count=64, dense=DENSE):
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 9, (count, FIELDS))
    inputs = {"keys": keys}
    if dense:
        inputs["dense"] = generator.normal(size=(count, dense)).astype(np.float32)
    return inputs, (keys.sum(axis=1) % 2).astype(np.float32)


def relu(values):
    return np.maximum(values, 0)


def test_dlrm_equals_numpy():
    model = make_dlrm(returns_logits=True)
    inputs, _ = make_data()
    weights = [w.numpy() for w in [*model.bottom.weights, *model.top.weights]]
    bottom = relu(relu(inputs["dense"] @ weights[0] + weights[1]) @ weights[2] + weights[3])
    vectors = np.concatenate([bottom[:, None], model.embeddings(inputs["keys"]).numpy()], axis=1)
    dots = np.einsum("bid,bjd->bij", vectors, vectors)
    pairs = np.stack([dots[:, i, j] for i, j in pair_order(FIELDS + 1)], axis=1)
    hidden = relu(np.concatenate([bottom, pairs], axis=1) @ weights[4] + weights[5])
    expected = hidden @ weights[6] + weights[7]
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first_order", [True, False])
def test_dlrm_without_numbers_equals_numpy(first_order):
    model = make_dlrm(0, returns_logits=True, first_order=first_order)
    inputs, _ = make_data(dense=0)
    vectors = model.embeddings(inputs["keys"]).numpy()
    if first_order:
        vector = np.broadcast_to(model.vector, (len(vectors), 1, DIM))
        vectors = np.concatenate([vector, vectors], axis=1)
    assert (model.vector is not None) == first_order
    dots = np.einsum("bid,bjd->bij", vectors, vectors)
    pairs = np.stack([dots[:, i, j] for i, j in pair_order(vectors.shape[1])], axis=1)
    kernel, bias, last, last_bias = (weight.numpy() for weight in model.top.weights)
    expected = relu(pairs @ kernel + bias) @ last + last_bias
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-4, atol=1e-5)
    assert type(model).from_config(model.get_config()).first_order == first_order


@pytest.mark.parametrize("fields", [1, 2])
def test_dlrm_without_numbers_learns_effects_of_keys(fields):
    """The click rate is 0.7 if all keys are odd, otherwise 0.1."""
    aucs = {}
    random = np.random.default_rng(0)
    keys = random.integers(0, 200, (40_000, fields))
    labels = random.random(len(keys)) < np.where((keys % 2).all(axis=1), 0.7, 0.1)
    train, test = slice(0, 32_000), slice(32_000, None)
    for kind in (DLRM, DCNv2):
        keras.utils.set_random_seed(0)
        tables = [Table(f"t{i}", 16) for i in range(fields)]
        embeddings = EmbeddingCollection(tables, optimizers.Adagrad(0.05))
        widths = {"top": [64, 1]} if kind is DLRM else {"deep": [64]}
        model = kind(embeddings, 0, returns_logits=True, **widths)
        model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
        model.fit({"keys": keys[train]}, labels[train], batch_size=256, verbose=0)
        logits = model.predict({"keys": keys[test]}, batch_size=8_000, verbose=0)
        aucs[kind] = exact_auc(labels[test], logits[:, 0])
    assert aucs[DLRM] > aucs[DCNv2] - 0.01 > 0.75


def test_dcn_equals_numpy():
    model = make_dcn(cross_layers=1, deep=[], returns_logits=True)
    inputs, _ = make_data()
    vectors = model.embeddings(inputs["keys"]).numpy().reshape(-1, FIELDS * DIM)
    start = np.concatenate([inputs["dense"], vectors], axis=1)
    (cross,) = model.cross
    kernel, bias = (w.numpy() for w in cross.weights)
    head, head_bias = (w.numpy() for w in model.head.weights)
    expected = (start * (start @ kernel + bias) + start) @ head + head_bias
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense", [0, DENSE])
def test_deepfm_equals_numpy(dense):
    model = make_deepfm(dense, deep=[], returns_logits=True)
    inputs, _ = make_data(dense=dense)
    rows = model.embeddings(inputs["keys"]).numpy()
    weights, factors = rows[:, :, 0], rows[:, :, 1:]
    deep = factors.reshape(len(rows), -1)
    expected = weights.sum(axis=1, keepdims=True)
    if dense:
        numbers = inputs["dense"]
        expected = expected + numbers @ model.linear.weights[0].numpy()
        own = numbers[:, :, None] * model.factors.numpy()
        factors = np.concatenate([factors, own], axis=1)
        deep = np.concatenate([deep, numbers], axis=1)
    for i in range(factors.shape[1]):
        for j in range(i):
            expected = expected + (factors[:, i] * factors[:, j]).sum(axis=1, keepdims=True)
    kernel, bias = (w.numpy() for w in model.deep.weights)
    np.testing.assert_allclose(model(inputs), expected + deep @ kernel + bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dense", [0, DENSE])
def test_training_lowers_loss(name, dense):
    keras.utils.set_random_seed(0)
    model = MODELS[name](dense)
    inputs, labels = make_data(dense=dense)
    model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["AUC"])
    history = model.fit(inputs, labels, batch_size=16, epochs=15, verbose=0).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    outputs = model.predict(inputs, verbose=0)
    assert outputs.shape == (64, 1)
    assert outputs.dtype == np.float32
    assert ((outputs >= 0) & (outputs <= 1)).all()


@pytest.mark.parametrize("name", MODELS)
def test_dictionary_keys_give_same_output(name):
    model = MODELS[name]()
    inputs, _ = make_data()
    keys = {f"t{i}": inputs["keys"][:, i] for i in range(FIELDS)}
    np.testing.assert_allclose(
        model(inputs), model({"dense": inputs["dense"], "keys": keys}), rtol=1e-6
    )


def test_dcn_accepts_tables_of_different_dims():
    model = make_dcn(embeddings=make_embeddings((2, 4, 8)), rank=3)
    inputs, _ = make_data()
    keys = {f"t{i}": inputs["keys"][:, i] for i in range(FIELDS)}
    assert model({"dense": inputs["dense"], "keys": keys}).shape == (64, 1)


@pytest.mark.parametrize("name", MODELS)
def test_probabilities_equal_sigmoid_of_logits(name):
    keras.utils.set_random_seed(0)
    logits = MODELS[name](returns_logits=True)
    probabilities = MODELS[name]()
    probabilities.set_weights(logits.get_weights())
    inputs, _ = make_data()
    np.testing.assert_allclose(tf.sigmoid(logits(inputs)), probabilities(inputs), rtol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_same_seed_gives_same_model(name):
    results = []
    inputs, labels = make_data()
    for _ in range(2):
        keras.utils.set_random_seed(3)
        model = MODELS[name](dropout=0.3)
        model.compile(optimizer="adam", loss="binary_crossentropy")
        model.fit(inputs, labels, batch_size=16, verbose=0)
        results.append(model.predict(inputs, verbose=0))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_model_trains(name):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = MODELS[name]()
    finally:
        keras.config.set_dtype_policy("float32")
    inputs, labels = make_data()
    model.compile(optimizer="adam", loss="binary_crossentropy")
    model.fit(inputs, labels, batch_size=16, verbose=0)
    outputs = model.predict(inputs, verbose=0)
    assert outputs.dtype == np.float32
    assert len(np.unique(outputs)) > 32  # Logits in float32 have no ties.
    assert {weight.dtype for weight in model.trainable_weights} == {"float32"}
    assert model.embeddings(inputs["keys"]).dtype == tf.bfloat16


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_model_saves_and_loads(name, batch_norm, tmp_path):
    model = MODELS[name](dropout=0.2, batch_norm=batch_norm)
    inputs, labels = make_data()
    model.compile(optimizer="adam", loss="binary_crossentropy")
    model.fit(inputs, labels, batch_size=16, verbose=0)
    model.save(tmp_path / "x.keras")
    loaded = keras.models.load_model(tmp_path / "x.keras")
    assert type(loaded) is type(model)
    expected = model.predict(inputs, verbose=0)
    np.testing.assert_array_equal(loaded.predict(inputs, verbose=0), expected)
    model.save_weights(tmp_path / "x.weights.h5")
    fresh = MODELS[name](dropout=0.2, batch_norm=batch_norm)
    fresh.load_weights(tmp_path / "x.weights.h5")
    np.testing.assert_array_equal(fresh.predict(inputs, verbose=0), expected)
    json.dumps(model.get_config())


def test_batch_normalization_precedes_relu():
    mlp = MLP([3, 1], last_is_linear=True, batch_norm=True)
    inputs = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    mlp.build((None, 5))
    hidden, bias, scale, shift, mean, variance, last, last_bias = mlp.weights
    outputs = mlp(inputs, training=True)
    units = inputs @ hidden + bias
    normed = (units - np.mean(units, 0)) / np.sqrt(np.var(units, 0) + 1e-5) * scale + shift
    np.testing.assert_allclose(outputs, relu(normed) @ last + last_bias, rtol=1e-4, atol=1e-5)
    assert np.abs(mean).max() > 0 and np.abs(variance - 1.0).max() > 0
    again = (units - mean) / np.sqrt(variance + 1e-5)
    np.testing.assert_allclose(mlp(inputs), relu(again) @ last + last_bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_overfit_thousand_examples(name, batch_norm):
    """Each of the 1,000 examples has unique keys."""
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(1)
    keys = random.permutation(20**FIELDS)[:1000, None] // 20 ** np.arange(FIELDS) % 20
    dense = random.normal(size=(1000, DENSE)).astype(np.float32)
    labels = random.integers(0, 2, 1000).astype(np.float32)
    tables = [Table(f"t{i}", DIM) for i in range(FIELDS)]
    embeddings = EmbeddingCollection(tables, optimizers.Adam(0.03))
    widths = {"dlrm": {"top": [256, 128, 1]}}.get(name, {"deep": [256, 128]})
    model = MODELS[name](embeddings=embeddings, batch_norm=batch_norm, **widths)
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
    epochs = {"dlrm": 60}.get(name, 30)
    model.fit({"keys": keys, "dense": dense}, labels, batch_size=100, epochs=epochs, verbose=0)
    auc = keras.metrics.AUC()(labels, model.predict({"keys": keys, "dense": dense}, verbose=0))
    assert auc > 0.95


@pytest.mark.parametrize("name", MODELS)
def test_penalty_covers_all_matrices(name):
    model = MODELS[name](l2=0.5)
    gates = {id(vector) for vector in getattr(model, "gate_vectors", [])}
    weights = [w for w in model.trainable_weights if len(w.shape) >= 2]
    matrices = [w for w in weights if id(w) not in gates]
    expected = 0.5 * sum(float(np.square(w.numpy()).sum()) for w in matrices)
    inputs, labels = make_data()
    model(inputs)
    assert float(sum(model.losses)) == pytest.approx(expected, rel=1e-5)
    assert not MODELS[name]().losses
    again = type(model).from_config(model.get_config())
    assert again.l2 == 0.5 and len(again.losses) == len(model.losses)
    model.compile("sgd", "binary_crossentropy")
    assert model.evaluate(inputs, labels, verbose=0) > expected


@pytest.mark.parametrize("name", MODELS)
def test_initial_outputs_equal_base_rate(name):
    model = MODELS[name](embeddings=make_embeddings(initializer=initializers.Zeros()))
    dense = np.zeros((5, DENSE), np.float32)
    inputs = {"dense": dense, "keys": np.zeros((5, FIELDS), np.int64)}
    model.start_at(0.02)
    np.testing.assert_allclose(model(inputs), np.full((5, 1), 0.02), rtol=1e-5)
    for rate in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match="`base_rate`"):
            model.start_at(rate)


def test_final_mlp_equals_numpy():
    model = make_final_mlp()
    inputs, _ = make_data()
    vectors = np.reshape(model.embeddings(inputs["keys"]), [64, -1])
    features = np.concatenate([inputs["dense"], vectors], 1)
    ends = []
    for index, stream in enumerate(model.streams):
        vector = model.gate_vectors[index].numpy()
        openness = 2 / (1 + np.exp(-model.gate_mlps[index](vector).numpy()))
        assert openness.shape == (1, features.shape[1])
        ends.append(stream(features * openness).numpy())
    logits = np.concatenate(ends, 1) @ model.head.kernel.numpy() + model.head.bias.numpy()
    for head in range(2):
        first, second = ends[0][:, 2 * head : 2 * head + 2], ends[1][:, 4 * head : 4 * head + 4]
        logits += np.sum(first @ model.fusion.numpy()[head] * second, 1, keepdims=True)
    np.testing.assert_allclose(model(inputs), tf.sigmoid(logits), rtol=1e-4)
    assert not make_final_mlp(gate=0).gate_mlps
    with pytest.raises(ValueError, match=r"`second`: \[8, 5\].*multiple of heads=2"):
        make_final_mlp(second=[8, 5])


def test_stacked_dcn_feeds_cross_output_to_mlp():
    model = make_dcn(structure="stacked", deep=[7])
    assert model.head.kernel.shape == (7, 1)
    assert type(model).from_config(model.get_config()).structure == "stacked"
    inputs, _ = make_data()
    vectors = model.embeddings(inputs["keys"])
    features = np.concatenate([inputs["dense"], np.reshape(vectors, [len(vectors), -1])], 1)
    crossed = features
    for layer in model.cross:
        crossed = layer(features, crossed)
    expected = model.head(model.deep(crossed))
    np.testing.assert_allclose(model(inputs), tf.sigmoid(expected), rtol=1e-5)
    with pytest.raises(ValueError, match=r"`structure`: 'both'.*'parallel', 'stacked'"):
        make_dcn(structure="both")
    with pytest.raises(ValueError, match="`deep`"):
        make_dcn(structure="stacked", deep=[])


@pytest.mark.parametrize("name", MODELS)
def test_empty_batch_gives_empty_output(name):
    inputs, _ = make_data()
    assert MODELS[name]()({key: column[:0] for key, column in inputs.items()}).shape == (0, 1)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_applies_in_training_only(name):
    model = MODELS[name](dropout=0.5)
    inputs, _ = make_data()
    np.testing.assert_array_equal(model(inputs), model(inputs))
    assert np.abs(model(inputs, training=True) - model(inputs, training=True)).max() > 0


def test_next_keys_are_required_in_training_with_prefetch_only():
    inputs, labels = make_data()
    data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(16)
    ahead = make_dcn(embeddings=make_embeddings(prefetch=True))
    with pytest.raises(ValueError, match=r"'next_keys'.*prefetch_keys"):
        ahead(inputs, training=True)
    assert ahead(inputs).shape == (64, 1)
    losses = []
    for prefetch in (False, True):
        keras.utils.set_random_seed(0)
        model = make_dcn(embeddings=make_embeddings(prefetch=prefetch))
        model.compile("sgd", "binary_crossentropy")
        # Without prefetch the next keys are ignored.
        fitted = model.fit(prefetch_keys(data), shuffle=False, verbose=0)
        losses.append(fitted.history["loss"])
    assert losses[0] == losses[1]


def test_symbolic_call_has_output_shape():
    model = make_dlrm()
    inputs = {
        "dense": keras.Input((DENSE,)),
        "keys": keras.Input((FIELDS,), dtype="int64"),
    }
    assert keras.Model(inputs, model(inputs)).output_shape == (None, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_dlrm(bottom=[8, 5]), r"\[8, 5\] for DLRM. Expected a list that ends with 4"),
        (lambda: make_dlrm(bottom=[]), "Invalid `bottom`: \\[\\]"),
        (lambda: make_dlrm(bottom=16), "Invalid `bottom`: 16"),
        (lambda: make_dlrm(top=[8, 2]), "Invalid `top`: \\[8, 2\\]"),
        (lambda: make_dlrm(top=[0, 1]), "Invalid `top`: 0"),
        (lambda: make_dlrm(dropout=1.0), "Invalid `dropout`: 1.0"),
        (lambda: make_dlrm(batch_norm=2), "Invalid `batch_norm`: 2 for DLRM"),
        (lambda: make_dlrm(dense=-1), "Invalid `dense_features`: -1"),
        (lambda: make_dlrm(embeddings=make_embeddings((4, 4, 8))), "Invalid `dim`: "),
        (
            lambda: make_dlrm(dense=0, embeddings=make_embeddings((4,)), first_order=False),
            "at least two features",
        ),
        (lambda: make_dlrm(first_order=1), "Invalid `first_order`: 1 for DLRM"),
        (lambda: make_dlrm(dtype="mixed_float16"), "loss scaling"),
        (lambda: DLRM(keras.layers.Embedding(3, 4), 2), "Invalid `embeddings`"),
        (lambda: make_dcn(cross_layers=0), "Invalid `cross_layers`: 0"),
        (lambda: make_dcn(rank=14), "Invalid `rank`: 14 .*an integer < 14, the width of the input"),
        (lambda: make_dcn(deep=[-3]), "Invalid `deep`: -3"),
        (lambda: make_deepfm(deep=[0]), "Invalid `deep`: 0"),
        (lambda: make_deepfm(embeddings=make_embeddings((4, 4, 8))), "Invalid `dim`: "),
        (lambda: make_deepfm(embeddings=make_embeddings((1, 1))), "Invalid `dim`: 1 for DeepFM"),
        (lambda: MLP([]), "Invalid `widths`"),
    ],
)
def test_invalid_arguments_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"keys": np.zeros((2, FIELDS), np.int64)}, r"\['keys'\].*\['dense', 'keys'\]"),
        (np.zeros((2, FIELDS), np.int64), "a dictionary with"),
        (
            {"keys": np.zeros((2, FIELDS), np.int64), "dense": np.zeros((2, 3), np.float32)},
            r"Invalid `dense`: \(2, 3\).*\[batch, 2\]",
        ),
        (
            {"keys": np.zeros((2, 5), np.int64), "dense": np.zeros((2, 2), np.float32)},
            "one column per feature",
        ),
    ],
)
def test_invalid_inputs_raise(inputs, message):
    with pytest.raises(ValueError, match=message):
        make_dlrm()(inputs)
