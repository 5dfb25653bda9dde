"""Tests of recorded losses: models, notes in features, custom losses and steps."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.keras import LossFeedback, Model, Sequential
from slipstream_tf.sampling.notes import add_notes

COUNT, BATCH = 24, 8


class Recorder:
    """Records the losses of all batches."""

    def __init__(self):
        self._losses = tf.Variable(tf.zeros([0]), shape=[None], trainable=False)

    def __call__(self, features, losses, labels, weights):
        assert "skippable" in features and weights is None
        self._losses.assign(tf.concat([self._losses, losses], 0))

    @property
    def losses(self):
        return self._losses.numpy()


def features():
    return np.random.default_rng(0).normal(size=(COUNT, 3)).astype(np.float32)


CLICKS = (np.arange(COUNT) % 3 == 0).astype(np.float32)


def network(units=1, activation="sigmoid", name="out"):
    inputs = keras.Input((3,), name="numbers")
    return inputs, keras.layers.Dense(units, activation, name=name)(inputs)


def losses_of(model):
    predicted = model.predict(features(), verbose=0)[:, 0]
    return -np.log(np.where(CLICKS, predicted, 1 - predicted))


def of_two_outputs():
    inputs, output = network(name="a")
    return Model(inputs, {"a": output, "b": keras.layers.Dense(1, name="b")(inputs)})


BOTH = np.stack([CLICKS, 1 - CLICKS], 1)
OTHERS = [
    (lambda: Model(*network()), "mse", CLICKS),
    (lambda: Model(*network()), keras.losses.BinaryFocalCrossentropy(gamma=2.0), CLICKS),
    (lambda: Model(*network(2)), "binary_crossentropy", BOTH),
    (of_two_outputs, "binary_crossentropy", {"a": CLICKS, "b": CLICKS}),
]
IDS = ["mse", "focal", "two labels", "two outputs"]


def fit_other(model, loss, labels, recorder):
    model.compile("sgd", loss)
    model.observe_losses_with(recorder)
    model.fit({"numbers": features(), "skippable": np.zeros(COUNT, bool)}, labels, verbose=0)


@pytest.mark.parametrize(("make", "loss", "labels"), OTHERS, ids=IDS)
def test_recording_other_losses_or_multiple_outputs_raises(make, loss, labels):
    with pytest.raises(ValueError, match=r"Invalid `loss`: .*binary cross-entropy with one output"):
        fit_other(make(), loss, labels, Recorder())


@pytest.mark.parametrize(("make", "loss", "labels"), OTHERS, ids=IDS)
def test_other_losses_and_multiple_outputs_train_without_recorder(make, loss, labels):
    fit_other(make(), loss, labels, None)


def noted():
    """Returns features that are no dictionary, with the notes of `Slipstream.apply`."""
    data = tf.data.Dataset.from_tensor_slices((features(), CLICKS)).batch(BATCH)
    return data.map(lambda x, y: (add_notes(x, skippable=y > 0), y))


class Subclassed(Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, "sigmoid")

    def call(self, inputs):
        return self.dense(inputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Model(*network()),
        lambda: Sequential([keras.layers.Dense(1, "sigmoid")]),
        lambda: Sequential([keras.Input((3,)), keras.layers.Dense(1, "sigmoid")]),
        Subclassed,
        lambda: type("Own", (Model,), {})(*network()),
        lambda: type("Own", (LossFeedback, keras.Model), {})(*network()),
    ],
    ids=["functional", "sequential", "built", "subclassed", "functional subclass", "mixin"],
)
def test_models_receive_features_without_notes(make):
    model, recorder = make(), Recorder()
    model.compile("sgd", "binary_crossentropy")
    model.observe_losses_with(recorder)
    model.fit(noted(), verbose=0, validation_data=noted())
    assert len(recorder.losses) == COUNT
    assert model.predict(features(), verbose=0).shape == (COUNT, 1)


def test_functional_model_does_not_change_base_class():
    bases = Model.__bases__
    assert isinstance(Model(*network()), Model)
    assert isinstance(type("Own", (Model,), {})(*network()), Model)
    assert Model.__bases__ == bases
    assert Subclassed()(features()).shape == (COUNT, 1)


def test_functional_model_can_be_saved_and_cloned(tmp_path):
    model = Model(*network())
    model.compile("sgd", "mse")
    model.save(tmp_path / "m.keras")
    for other in (keras.models.load_model(tmp_path / "m.keras"), keras.models.clone_model(model)):
        assert isinstance(other, Model) and other.count_params() == 4
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded(features()), model(features()))


def test_input_named_like_note_is_passed_to_model():
    names = ("log_odds_offset", "shop")
    inputs = {name: keras.Input((), name=name, dtype="int64") for name in names}
    table = keras.layers.Embedding(100, 2)
    total = keras.layers.Concatenate()([table(inputs[name]) for name in names])
    model = Model(inputs, keras.layers.Dense(1)(total))
    x = {"log_odds_offset": np.arange(4), "shop": np.arange(4) + 50}
    np.testing.assert_array_equal(model({**x, "skippable": np.zeros(4, bool)}), model(x))


class OwnStep(Model):
    """Model with a train_step as in the Keras guide."""

    mode = "compute_loss"

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            if self.mode == "record":
                losses = keras.losses.binary_crossentropy(y[:, None], predicted)
                loss = tf.reduce_mean(losses)
            else:
                given = {} if self.mode == "without x" else {"x": x}
                loss = self.compute_loss(y=y, y_pred=predicted, **given)
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.mode == "record":
            self.record_losses(x, losses, y)
        elif self.mode == "twice":
            self.record_losses(x, keras.losses.binary_crossentropy(y[:, None], predicted), y)
        elif self.mode == "two losses":
            self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("mode", ["compute_loss", "record", "two losses"])
def test_custom_step_records_losses(mode, eagerly):
    model, recorder = OwnStep(*network()), Recorder()
    model.mode = mode
    model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", run_eagerly=eagerly)
    model.observe_losses_with(recorder)
    model.fit(noted(), verbose=0, validation_data=noted())
    np.testing.assert_allclose(recorder.losses, losses_of(model), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("twice", r"Invalid `losses`: 'losses of a recorded batch'.*one call per batch"),
        ("without x", r"Invalid `x`: None.*self\.compute_loss\(x=x"),
    ],
)
def test_misuse_in_custom_step_raises(mode, message):
    model = OwnStep(*network())
    model.mode = mode
    model.compile("sgd", "binary_crossentropy")
    model.observe_losses_with(Recorder())
    with pytest.raises(ValueError, match=message):
        model.fit(noted(), verbose=0)
