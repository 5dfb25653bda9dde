"""Tests of DIN: outputs, histories of different lengths, errors, saving and training."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import FeatureSpec, Table, export, initializers, optimizers
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.models import DIN

DIM, STEPS = 4, 5
HISTORY = {"clicked": "item", "bought": "kind"}


def make_layer(**kwargs):
    tables = [
        Table(name, DIM, initializer=initializers.RandomUniform(seed=i))
        for i, name in enumerate(("user", "item", "kind"))
    ]
    features = [
        *(FeatureSpec(name, name, "sum") for name in ("user", "item", "kind")),
        FeatureSpec("clicked", "item", None, padding_key=-1),
        FeatureSpec("bought", "kind", None, padding_key=-1),
    ]
    return EmbeddingCollection(tables, optimizers.Adam(0.03), features=features, **kwargs)


def make_model(dense=0, **kwargs):
    small = {"history": HISTORY, "attention": [6], "deep": [8]}
    return DIN(make_layer(), dense, **{**small, **kwargs})


def make_data(count=32, dense=0, keys=9):
    """Makes histories of 0 to STEPS steps with padding at the end."""
    random = np.random.default_rng(0)
    lengths = random.integers(0, STEPS + 1, count)
    is_present = np.arange(STEPS) < lengths[:, None]
    features = {name: random.integers(0, keys, count) for name in ("user", "item", "kind")}
    for name in HISTORY:
        features[name] = np.where(is_present, random.integers(0, keys, is_present.shape), -1)
    inputs = {"keys": features}
    if dense:
        inputs["dense"] = random.normal(size=(count, dense)).astype(np.float32)
    return inputs, random.integers(0, 2, count).astype(np.float32)


def mlp(values, layers):
    weights = [w.numpy() for w in layers.weights]
    for index in range(0, len(weights), 2):
        values = values @ weights[index] + weights[index + 1]
        if index + 2 < len(weights):
            values = np.maximum(values, 0)
    return values


def reference(model, inputs):
    """Computes DIN in NumPy, one example and one step at a time."""
    keys, outputs = inputs["keys"], []
    gather = model.embeddings.store.gather
    for i in range(len(keys["user"])):
        own = {
            name: gather(name, [keys[name][i]])[0][0].numpy() for name in ("user", "item", "kind")
        }
        target = np.concatenate([own[name] for name in HISTORY.values()])
        interest = np.zeros(2 * DIM)
        for t in range(STEPS):
            if keys["clicked"][i, t] == -1:
                continue
            step = np.concatenate(
                [gather(own, [keys[name][i, t]])[0][0] for name, own in HISTORY.items()]
            )
            compared = np.concatenate([step, target, step - target, step * target])
            interest += mlp(compared, model.attention) * step
        parts = [interest, *own.values()]
        if "dense" in inputs:
            parts.insert(0, inputs["dense"][i])
        outputs.append(1 / (1 + np.exp(-mlp(np.concatenate(parts), model.deep))))
    return np.array(outputs)


@pytest.mark.parametrize("dense", [0, 3])
def test_outputs_equal_numpy(dense):
    model = make_model(dense)
    inputs, _ = make_data(dense=dense)
    np.testing.assert_allclose(model(inputs), reference(model, inputs), rtol=1e-4, atol=1e-6)


def test_ragged_histories_equal_padded_histories():
    model = make_model()
    inputs, _ = make_data()
    ragged = {
        name: tf.RaggedTensor.from_tensor(part, padding=-1) if name in HISTORY else part
        for name, part in inputs["keys"].items()
    }
    np.testing.assert_allclose(model({"keys": ragged}), model(inputs), rtol=1e-5)
    assert isinstance(model.input_signature()["keys"]["clicked"], tf.TensorSpec)
    model({"keys": ragged}, training=True)
    assert isinstance(model.input_signature()["keys"]["clicked"], tf.RaggedTensorSpec)
    wider = {
        name: np.pad(part, [(0, 0), (0, 2)], constant_values=-1) if name in HISTORY else part
        for name, part in inputs["keys"].items()
    }
    np.testing.assert_allclose(model({"keys": wider}), model(inputs), rtol=1e-5)


def test_model_overfits_thousand_examples():
    keras.utils.set_random_seed(0)
    inputs, labels = make_data(1000, keys=40)
    model = make_model(attention=[16], deep=[128, 64], batch_norm=True)
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["AUC"])
    model.fit(inputs, labels, batch_size=100, epochs=40, verbose=0)
    assert model.evaluate(inputs, labels, verbose=0)[1] > 0.95


def test_model_saves_and_serves(tmp_path):
    model = make_model(2, l2=0.01, returns_logits=True)
    inputs, labels = make_data(dense=2)
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    model.fit(inputs, labels, verbose=0)
    again = DIN.from_config(model.get_config())
    assert again.targets == HISTORY and again.deep_widths == (8,) and again.l2 == 0.01
    export.saved_model(model, tmp_path / "served")
    served = tf.saved_model.load(tmp_path / "served")
    tensors = tf.nest.map_structure(tf.convert_to_tensor, inputs)
    np.testing.assert_allclose(served.serve(tensors), model(inputs), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "history", [None, {}, {"clicked": "item"}, {**HISTORY, "bought": "clicked"}, {"user": "item"}]
)
def test_invalid_histories_raise(history):
    with pytest.raises(ValueError, match=r"`history`.*\['bought', 'clicked'\], to a feature"):
        make_model(history=history)


def test_errors_name_invalid_argument():
    with pytest.raises(ValueError, match="`attention`"):
        make_model(attention=[])
    with pytest.raises(ValueError, match="`keys`"):
        make_model()({"keys": np.zeros((3, 5), np.int64)})
