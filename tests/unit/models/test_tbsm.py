"""Tests of TBSM: outputs, sequences of different lengths, errors, saving and training."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import (
    RowDrift,
    SkipExamples,
    Table,
    Window,
    export,
    initializers,
    optimizers,
)
from slipstream_tf.distributed import prefetch_keys
from slipstream_tf.keras import EmbeddingCollection, Slipstream
from slipstream_tf.models import TBSM
from slipstream_tf.models.interaction import TimeAttention, pair_order

DIM = 4
STEPS = 5


def make_layer(features=("user", "item"), combiner=None, **kwargs):
    tables = [
        Table(name, DIM, combiner=combiner, initializer=initializers.RandomUniform(seed=i))
        for i, name in enumerate(features)
    ]
    rule = optimizers.Adagrad(0.2, initial_accumulator_value=0.0, epsilon=1e-8)
    return EmbeddingCollection(tables, rule, **kwargs)


def make_model(dense=0, features=("user", "item"), prefetch=False, **kwargs):
    small = {"bottom": [DIM], "step": [8, 6], "heads": 2, "top": [8, 1]}
    return TBSM(make_layer(features, prefetch=prefetch), dense, **{**small, **kwargs})


def make_data(count=32, dense=0, features=("user", "item")):
    """Makes sequences of 1 to STEPS steps with padding at the front."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, STEPS + 1, count)
    is_present = np.arange(STEPS) >= STEPS - lengths[:, None]
    keys = {
        f: np.where(is_present, generator.integers(0, 9, is_present.shape), -1) for f in features
    }
    inputs = {"keys": keys}
    if dense:
        inputs["dense"] = generator.normal(size=(count, STEPS, dense)).astype(np.float32)
    return inputs, (keys["item"][:, -1] % 2).astype(np.float32)


def mlp(values, layers, last_is_linear):
    weights = [w.numpy() for w in layers.weights]
    for index in range(0, len(weights), 2):
        values = values @ weights[index] + weights[index + 1]
        if index + 2 < len(weights) or not last_is_linear:
            values = np.maximum(values, 0)
    return values


def reference(model, inputs):
    """Computes TBSM in NumPy, one example and one step at a time."""
    keys = inputs["keys"]
    outputs = []
    for i in range(len(next(iter(keys.values())))):
        vectors = []
        for t in range(STEPS):
            step = [keys[name][i, t] for name in keys]
            if all(key == -1 for key in step):
                continue
            rows = [
                np.zeros(DIM) if key == -1 else model.embeddings.store.gather(name, [key])[0][0]
                for name, key in zip(keys, step, strict=True)
            ]
            if "dense" in inputs:
                rows.insert(0, mlp(inputs["dense"][i, t], model.bottom, False))
            rows = np.stack(rows)
            dots = [rows[a] @ rows[b] for a, b in pair_order(len(rows))] if len(rows) > 1 else []
            z = mlp(np.concatenate([rows.reshape(-1), dots]), model.step, True)
            vectors.append(z / np.linalg.norm(z))
        scored, history = vectors[-1], vectors[:-1]
        parts = [scored]
        for metric in model.attention.metric.numpy():
            query = metric.T @ metric @ scored
            parts.append(sum(((z @ query) * z for z in history), np.zeros_like(scored)))
        outputs.append(mlp(np.concatenate(parts), model.top, True))
    return np.stack(outputs)


@pytest.mark.parametrize("dense", [0, 3])
@pytest.mark.parametrize("features", [("user", "item"), ("item",)])
def test_output_equals_numpy(dense, features):
    # With some initial weights, ReLU sets all values of a step to 0.
    keras.utils.set_random_seed(0)
    model = make_model(dense, features, returns_logits=True)
    inputs, _ = make_data(dense=dense, features=features)
    inputs["keys"][features[0]][3, :-1] = -1
    outputs = model(inputs)
    assert outputs.shape == (32, 1)
    np.testing.assert_allclose(outputs, reference(model, inputs), rtol=1e-4, atol=1e-5)


class StepsAsBags(TBSM):
    """Looks up a bag of one key per step as a reference."""

    takes_sequences = False

    def look_up(self, keys, inputs, training):
        bags = {name: tf.reshape(part, [-1, 1]) for name, part in keys.items()}
        vectors = super().look_up(bags, inputs, training)
        return [tf.reshape(vector, [-1, STEPS, DIM]) for vector in vectors]


def test_rows_equal_single_key_bags():
    inputs, labels = make_data(64, dense=3)
    results = []
    for kind, combiner in ((TBSM, None), (StepsAsBags, "sum"), (StepsAsBags, "mean")):
        keras.utils.set_random_seed(0)
        model = kind(make_layer(combiner=combiner), 3, [DIM], [8, 6], 2, [8, 1])
        model.compile("adam", "binary_crossentropy")
        model.fit(inputs, labels, batch_size=16, epochs=2, shuffle=False, verbose=0)
        store = model.embeddings.store
        rows = [part for name in ("user", "item") for part in store.export_table(name).values()]
        results.append([model(inputs), *rows, *model.trainable_weights])
    for before in results[1:]:
        for now, then in zip(results[0], before, strict=True):
            np.testing.assert_array_equal(now, then)


def test_position_of_padding_does_not_matter():
    model = make_model()
    inputs, _ = make_data()
    front = inputs["keys"]
    behind = {
        name: np.stack([[*k[k >= 0], *k[k < 0]] for k in part]) for name, part in front.items()
    }
    ragged = {
        name: tf.ragged.constant([list(k[k >= 0]) for k in part], dtype=tf.int64)
        for name, part in front.items()
    }
    wide = {name: np.pad(k, [(0, 0), (3, 2)], constant_values=-1) for name, k in front.items()}
    expected = model(inputs)
    for keys in (behind, ragged, wide):
        np.testing.assert_allclose(model({"keys": keys}), expected, rtol=1e-5, atol=1e-6)


def test_example_without_history_has_prediction():
    model = make_model()
    keys = {name: np.full((2, 3), -1) for name in ("user", "item")}
    outputs = model({"keys": keys}).numpy()
    assert np.isfinite(outputs).all()
    assert outputs[0] == outputs[1]
    model.compile("sgd", "binary_crossentropy")
    model.fit({"keys": keys}, np.zeros(2), verbose=0)
    assert model.embeddings.store.size("item") == 0
    assert np.isfinite(model.get_weights()[0]).all()


def test_gradients_reach_rows_of_all_steps_except_padding():
    keras.utils.set_random_seed(0)
    model = make_model()
    inputs, labels = make_data()
    before = model.embeddings.store.gather("item", np.arange(9))[0].numpy()
    model.compile("sgd", "binary_crossentropy")
    model.fit(inputs, labels, batch_size=32, verbose=0)
    keys, _ = model.embeddings.store.hot_keys("item", 100)
    assert set(keys) == set(np.unique(inputs["keys"]["item"])) - {-1}
    after = model.embeddings.store.gather("item", np.arange(9))[0].numpy()
    assert (np.abs(after - before).max(axis=1) > 0).all()
    # A key that occurs only in the history is trained, too.
    alone = make_model()
    alone.compile("sgd", "binary_crossentropy")
    keys = {"user": np.array([[1, 1]]), "item": np.array([[5, 6]])}
    start = alone.embeddings.store.gather("item", [5])[0].numpy()
    alone.fit({"keys": keys}, np.ones(1), verbose=0)
    assert np.abs(alone.embeddings.store.gather("item", [5])[0] - start).max() > 0


def test_model_learns_from_history():
    """A click depends on the whole history, not on a single step."""
    keras.utils.set_random_seed(1)
    generator = np.random.default_rng(0)
    items = generator.integers(0, 12, (1024, STEPS))
    is_seen = generator.random(1024) < 0.5
    for row, seen in zip(items, is_seen, strict=True):
        others = np.setdiff1d(np.arange(12), row[:-1])
        row[-1] = row[0] if seen else generator.choice(others)
    labels = (items[:, :-1] == items[:, -1:]).any(axis=1).astype(np.float32)
    model = make_model(features=("item",), step=[32, 16], top=[32, 1])
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["AUC"])
    train, test = slice(0, 768), slice(768, None)
    model.fit({"keys": {"item": items[train]}}, labels[train], epochs=25, verbose=0)
    _, auc = model.evaluate({"keys": {"item": items[test]}}, labels[test], verbose=0)
    assert auc > 0.85


def test_same_seed_gives_same_model():
    inputs, labels = make_data()
    results = []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        model = make_model(dropout=0.3)
        model.compile("adam", "binary_crossentropy")
        model.fit(inputs, labels, batch_size=16, verbose=0)
        results.append(model.predict(inputs, verbose=0))
    np.testing.assert_array_equal(*results)


def test_bfloat16_model_trains():
    model = make_model(2, dtype="mixed_bfloat16")
    inputs, labels = make_data(dense=2)
    model.compile("adam", "binary_crossentropy")
    model.fit(inputs, labels, verbose=0)
    assert model.predict(inputs, verbose=0).dtype == np.float32
    assert {weight.dtype for weight in model.trainable_weights} == {"float32"}


def test_model_saves_loads_and_exports(tmp_path):
    model = make_model(3, dropout=0.2)
    inputs, labels = make_data(dense=3)
    model.compile("adam", "binary_crossentropy")
    model.fit(inputs, labels, batch_size=16, verbose=0)
    expected = model.predict(inputs, verbose=0)
    model.save(tmp_path / "x.keras")
    loaded = keras.models.load_model(tmp_path / "x.keras")
    np.testing.assert_array_equal(loaded.predict(inputs, verbose=0), expected)
    json.dumps(model.get_config())
    export.saved_model(model, tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"]
    outputs = served(
        dense=tf.constant(inputs["dense"]),
        **{f"keys_{name}": tf.constant(keys) for name, keys in inputs["keys"].items()},
    )
    np.testing.assert_allclose(outputs["outputs"], expected, atol=1e-6)


@pytest.mark.parametrize("form", ["padded", "ragged"])
def test_next_keys_contain_sequences(form):
    inputs, labels = make_data()
    if form == "ragged":
        inputs["keys"] = {
            name: tf.RaggedTensor.from_tensor(keys[:, ::-1], padding=-1)
            for name, keys in inputs["keys"].items()
        }
    data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(16)
    losses = []
    for prefetch in (False, True):
        keras.utils.set_random_seed(0)
        model = make_model(prefetch=prefetch)
        model.compile("sgd", "binary_crossentropy")
        losses.append(model.fit(prefetch_keys(data), shuffle=False, verbose=0).history["loss"])
    assert losses[0] == losses[1]


def test_engine_treats_sequence_as_bag():
    inputs, labels = make_data(640)
    data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(16, drop_remainder=True)
    model = make_model()
    model.embeddings.learning_rate = 0.001
    model.compile("sgd", "binary_crossentropy")
    policy = SkipExamples(RowDrift(alpha=0.6), fraction=0.5)
    slipstream = Slipstream(model.embeddings, policy, Window(5, warmup=10))
    trained = slipstream.apply(data)
    model.fit(trained, callbacks=[slipstream.callback()], shuffle=False, verbose=0)
    slipstream.end_window()
    savings = slipstream.report()
    assert savings.examples_seen == 640
    assert 0 < savings.examples_skipped < 480


def test_attention_covers_all_steps_without_mask():
    attention = TimeAttention(3)
    scored, steps = np.eye(2, dtype=np.float32), np.ones((2, 4, 2), np.float32)
    outputs = attention(scored, steps)
    assert outputs.shape == (2, 6)
    everything = np.ones((2, 4), bool)
    np.testing.assert_allclose(outputs, attention(scored, steps, everything), rtol=1e-6)
    assert not attention(scored, steps, ~everything).numpy().any()
    assert attention.get_config()["heads"] == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_model(1, bottom=[5]), "ends with 4, the dimension"),
        (
            lambda: TBSM(make_layer(combiner="mean")),
            r"Invalid `combiner`: \{'user': 'mean', 'item': 'mean'\}.*TBSM\. Expected None.*"
            r"Table\(name, dim, combiner=None\)",
        ),
        (
            lambda: TBSM(make_layer(padding_key=0)),
            r"Invalid `padding_key`: \{'user': 0, 'item': 0\} for TBSM",
        ),
        (lambda: make_model(top=[8, 2]), r"Invalid `top`: \[8, 2\]"),
        (lambda: make_model(step=[]), r"Invalid `step`: \[\]"),
        (lambda: make_model(heads=0), "Invalid `heads`: 0"),
        (lambda: make_model(dropout=1.0), "Invalid `dropout`: 1.0"),
        (lambda: make_model()({"keys": np.zeros((2, 2), np.int64)}), "a dictionary {feature"),
        (
            lambda: make_model()({"keys": {n: np.zeros(2, np.int64) for n in ("user", "item")}}),
            r"feature 'user'.*\[batch, steps\]",
        ),
        (
            lambda: make_model(1)(
                {"keys": make_data(2)[0]["keys"], "dense": np.zeros((2, 1), np.float32)}
            ),
            r"Invalid `dense`: \(2, 1\).*\[batch, steps, 1\]",
        ),
    ],
)
def test_invalid_arguments_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_model_overfits_thousand_examples():
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    keys = {name: random.integers(0, 40, (1000, STEPS)) for name in ("user", "item")}
    labels = random.integers(0, 2, 1000).astype(np.float32)
    tables = [Table(name, DIM, combiner=None) for name in keys]
    layer = EmbeddingCollection(tables, optimizers.Adam(0.03))
    model = TBSM(layer, 0, step=[32, 16], heads=2, top=[128, 64, 1])
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
    model.fit({"keys": keys}, labels, batch_size=100, epochs=30, verbose=0)
    assert keras.metrics.AUC()(labels, model.predict({"keys": keys}, verbose=0)) > 0.95
