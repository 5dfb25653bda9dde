"""Tests that `LossFeedback` reports each example's loss once.

Training results stay the same.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table, initializers, optimizers
from slipstream_tf.keras import EmbeddingCollection, LossFeedback
from slipstream_tf.models import DCNv2

COUNT, BATCH = 52, 8


class Recorder:
    """Records (loss, label, skippable, weight) of each example in variables."""

    def __init__(self):
        self._rows = tf.Variable(tf.zeros([0, 4], tf.float64), shape=[None, 4], trainable=False)
        self.calls = tf.Variable(0, dtype=tf.int64, trainable=False)

    def __call__(self, features, losses, labels, weights):
        skippable = features.get("skippable") if isinstance(features, dict) else None
        assert losses.dtype == labels.dtype == tf.float32
        columns = [
            -tf.ones_like(losses) if column is None else column
            for column in (losses, labels, skippable, weights)
        ]
        reported = tf.stack([tf.cast(column, tf.float64) for column in columns], axis=1)
        self.calls.assign_add(1)
        self._rows.assign(tf.concat([self._rows, reported], axis=0))

    @property
    def rows(self):
        return self._rows.numpy()


class Linear(LossFeedback, keras.Model):
    """Model with one dense layer on features["dense"]."""

    def __init__(self, activation=None):
        super().__init__()
        self.dense = keras.layers.Dense(1, activation, kernel_initializer="ones")

    def call(self, inputs):
        return self.dense(inputs["dense"] if isinstance(inputs, dict) else inputs)


def data(with_weight=False, notes=True):
    generator = np.random.default_rng(0)
    features = {"dense": generator.normal(size=(COUNT, 3)).astype(np.float32)}
    if notes:
        features["skippable"] = np.arange(COUNT) % 3 == 0
    label = generator.integers(0, 2, COUNT).astype(np.float32)
    weight = [np.linspace(1, 2, COUNT).astype(np.float32)] if with_weight else []
    return features, label, *weight


def dataset(**options):
    return tf.data.Dataset.from_tensor_slices(data(**options)).batch(BATCH)


def compiled(model, loss=None, **options):
    loss = loss or keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False, **options)
    return model


def losses_of(labels, logits):
    logits = np.asarray(logits, np.float64).ravel()
    return np.logaddexp(0, logits) - labels * logits


HOW = [{}, {"run_eagerly": True}, {"steps_per_execution": 3}]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("with_weight", [False, True])
def test_every_trained_example_is_recorded_once_with_its_loss(how, with_weight):
    model, recorder = compiled(Linear(), **how), Recorder()
    model.optimizer.learning_rate = 0.0
    features, label, *weight = data(with_weight)
    expected = losses_of(label, model(features))
    model.observe_losses_with(recorder)
    model.fit(dataset(with_weight=with_weight), epochs=2, verbose=0)
    rows = recorder.rows
    # With multiple steps per execution, Keras 3.3 runs empty steps at the end of an epoch.
    assert recorder.calls == model.optimizer.iterations.numpy()
    assert len(rows) == 2 * COUNT
    np.testing.assert_allclose(rows[:, 0], np.tile(expected, 2), rtol=1e-5)
    np.testing.assert_array_equal(rows[:, 1], np.tile(label, 2))
    np.testing.assert_array_equal(rows[:, 2], np.tile(features["skippable"], 2))
    np.testing.assert_array_equal(rows[:, 3], np.tile(weight[0], 2) if weight else -1)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_evaluation_and_prediction_record_nothing(how):
    model, recorder = compiled(Linear(), **how), Recorder()
    model.observe_losses_with(recorder)
    model.evaluate(dataset(), verbose=0)
    model.predict(dataset(), verbose=0)
    assert int(recorder.calls.numpy()) == 0
    model.fit(dataset(), validation_data=dataset(), verbose=0)
    assert len(recorder.rows) == COUNT


@pytest.mark.parametrize("how", HOW, ids=str)
def test_recording_does_not_change_training(how):
    results = []
    for recorder in (None, Recorder()):
        keras.utils.set_random_seed(1)
        model = compiled(Linear("sigmoid"), "binary_crossentropy", **how)
        model.observe_losses_with(recorder)
        history = model.fit(dataset(with_weight=True), epochs=3, shuffle=False, verbose=0)
        results.append(([w.numpy() for w in model.weights], history.history["loss"]))
    (weights, losses), (told_weights, told_losses) = results
    assert losses == told_losses
    for one, other in zip(weights, told_weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_recorder_can_change_between_fits():
    model, first, second = compiled(Linear()), Recorder(), Recorder()
    for recorder, expected in ((None, (0, 0)), (first, (7, 0)), (second, (7, 7)), (None, (7, 7))):
        model.observe_losses_with(recorder)
        model.fit(dataset(), verbose=0)
        assert (int(first.calls.numpy()), int(second.calls.numpy())) == expected
    assert len(model.weights) == 2, "the recorder's variables are not the model's"


def test_features_without_notes_are_recorded_without_flags():
    for x in (data(notes=False)[0], data()[0]["dense"]):
        model, recorder = compiled(Linear()), Recorder()
        model.observe_losses_with(recorder)
        model.fit(x, data()[1], batch_size=BATCH, verbose=0)
        assert len(recorder.rows) == COUNT
        assert set(recorder.rows[:, 2]) == {-1.0}


LOSSES = [
    ("sigmoid", "binary_crossentropy"),
    ("sigmoid", "BinaryCrossentropy"),
    ("sigmoid", "bce"),
    ("sigmoid", keras.losses.binary_crossentropy),
    ("sigmoid", keras.losses.BinaryCrossentropy()),
    ("sigmoid", keras.losses.BinaryCrossentropy(label_smoothing=0.1)),
    (None, keras.losses.BinaryCrossentropy(from_logits=True)),
]


@pytest.mark.parametrize(("activation", "loss"), LOSSES)
def test_logits_and_probabilities_give_same_losses(activation, loss):
    model, recorder = compiled(Linear(activation), loss), Recorder()
    model.optimizer.learning_rate = 0.0
    features, label = data()
    model.observe_losses_with(recorder)
    model.fit(dataset(), verbose=0)
    expected = losses_of(label, features["dense"].sum(axis=1))
    np.testing.assert_allclose(recorder.rows[:, 0], expected, rtol=1e-4, atol=1e-6)


def test_saturated_predictions_have_finite_losses():
    for activation in ("sigmoid", None):
        loss = keras.losses.BinaryCrossentropy(from_logits=activation is None)
        model, recorder = compiled(Linear(activation), loss), Recorder()
        model.observe_losses_with(recorder)
        x = {"dense": np.array([[1000.0], [1000.0], [-1000.0]], np.float32)}
        model.train_on_batch(x, np.array([1.0, 0.0, 0.0], np.float32))
        right, wrong, also_right = recorder.rows[:, 0]
        assert 0 <= right < 1e-6 and 0 <= also_right < 1e-6 and 15 < wrong < np.inf


def click_model(returns_logits):
    embeddings = EmbeddingCollection(
        [Table("a", 4, initializer=initializers.RandomUniform(seed=1))], optimizers.SGD(0.1)
    )
    return DCNv2(embeddings, 2, deep=[4], returns_logits=returns_logits)


@pytest.mark.parametrize("returns_logits", [False, True])
def test_click_models_record_losses_and_ignore_notes(returns_logits):
    model, recorder = click_model(returns_logits), Recorder()
    compiled(model, keras.losses.BinaryCrossentropy(from_logits=returns_logits))
    generator = np.random.default_rng(0)
    x = {
        "keys": generator.integers(0, 9, (COUNT, 1)),
        "dense": generator.normal(size=(COUNT, 2)).astype(np.float32),
    }
    y = generator.integers(0, 2, COUNT).astype(np.float32)
    noted = {**x, "skippable": np.zeros(COUNT, bool)}
    np.testing.assert_array_equal(model(noted, training=True), model(x, training=True))
    logits = model(x).numpy().ravel()
    if not returns_logits:
        logits = np.log(logits / (1 - logits))
    model.observe_losses_with(recorder)
    model.fit(tf.data.Dataset.from_tensor_slices((noted, y)).batch(COUNT), verbose=0)
    np.testing.assert_allclose(recorder.rows[:, 0], losses_of(y, logits), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"Invalid `inputs`.*'ids'"):
        model({**x, "ids": np.arange(COUNT)})
