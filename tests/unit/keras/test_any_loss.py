"""Each input's own loss, of whatever Keras trains by: other losses, several outputs, own steps."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf.inputs.notes import add_notes
from slipstream_tf.keras import LossFeedback, Model, Sequential

COUNT, BATCH, CLASSES = 24, 8, 4


class Recorder:
    """Keeps losses, and weights where there are any, of all batches."""

    def __init__(self):
        self._losses = tf.Variable(tf.zeros([0]), shape=[None], trainable=False)
        self.weights = tf.Variable(tf.zeros([0]), shape=[None], trainable=False)
        self.labels = None

    def __call__(self, features, losses, labels, weights):
        assert "skippable" in features
        self.labels = labels
        self._losses.assign(tf.concat([self._losses, losses], 0))
        if weights is not None:
            self.weights.assign(tf.concat([self.weights, weights], 0))

    @property
    def losses(self):
        return self._losses.numpy()


def features():
    return np.random.default_rng(0).normal(size=(COUNT, 3)).astype(np.float32)


def network(units=1, activation=None, name="out"):
    inputs = keras.Input((3,), name="numbers")
    return inputs, keras.layers.Dense(units, activation, name=name)(inputs)


def told(model, labels, loss, weights=None, **compiled):
    """What a fit with a rate of 0 tells, and predictions."""
    recorder = Recorder()
    keras.utils.set_random_seed(1)
    model.compile(keras.optimizers.SGD(0.0), loss, jit_compile=False, **compiled)
    model.observe_losses_with(recorder)
    x = {"numbers": features(), "skippable": np.zeros(COUNT, bool)}
    element = (x, labels) if weights is None else (x, labels, weights)
    model.fit(tf.data.Dataset.from_tensor_slices(element).batch(BATCH), verbose=0)
    assert len(recorder.losses) == COUNT
    return recorder, model.predict(features(), verbose=0)


REAL = np.linspace(-1, 1, COUNT).astype(np.float32)
KINDS = np.arange(COUNT) % CLASSES
CLICKS = (np.arange(COUNT) % 3 == 0).astype(np.float32)


class Cubic(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return tf.abs(tf.cast(y_true, tf.float32) - y_pred[:, 0]) ** 3


def own_function(y_true, y_pred):
    return tf.reduce_max(tf.abs(y_true - y_pred), axis=-1)


def softmax_losses(predicted):
    return -np.log(predicted[np.arange(COUNT), KINDS])


@pytest.mark.parametrize(
    ("loss", "labels", "head", "expected"),
    [
        ("mse", REAL, (1,), lambda p: (p[:, 0] - REAL) ** 2),
        ("mae", REAL[:, None], (1,), lambda p: abs(p[:, 0] - REAL)),
        (Cubic(), REAL, (1,), lambda p: abs(p[:, 0] - REAL) ** 3),
        (Cubic(reduction="sum"), REAL, (1,), lambda p: abs(p[:, 0] - REAL) ** 3),
        (own_function, REAL[:, None], (1,), lambda p: abs(p[:, 0] - REAL)),
        ("sparse_categorical_crossentropy", KINDS, (CLASSES, "softmax"), softmax_losses),
        ("categorical_crossentropy", np.eye(CLASSES)[KINDS], (CLASSES, "softmax"), softmax_losses),
        (
            keras.losses.BinaryFocalCrossentropy(gamma=2.0), CLICKS, (1, "sigmoid"),
            lambda p: (1 - np.where(CLICKS, p[:, 0], 1 - p[:, 0])) ** 2
            * -np.log(np.where(CLICKS, p[:, 0], 1 - p[:, 0])),
        ),
        (
            "binary_crossentropy", np.stack([CLICKS, 1 - CLICKS], 1), (2, "sigmoid"),
            lambda p: -np.log(np.where(np.stack([CLICKS, 1 - CLICKS], 1), p, 1 - p)).mean(axis=1),
        ),
    ],
    # Not by an address, which differs from process to process.
    ids=lambda value: getattr(value, "__name__", type(value).__name__) if callable(value) else None,
)  # fmt: skip
def test_the_losses_are_those_that_the_model_trains_by(loss, labels, head, expected):
    recorder, predicted = told(Model(*network(*head)), labels, loss)
    np.testing.assert_allclose(recorder.losses, expected(predicted), rtol=2e-4, atol=1e-6)
    assert recorder.labels is None, "no clicks, no AUC"


@pytest.mark.parametrize("form", ["dict", "list"])
def test_the_losses_of_several_outputs_are_weighted_and_summed(form):
    inputs = keras.Input((3,), name="numbers")
    outputs = {
        "real": keras.layers.Dense(1, name="real")(inputs),
        "kind": keras.layers.Dense(CLASSES, "softmax", name="kind")(inputs),
    }
    loss = {"real": "mse", "kind": "sparse_categorical_crossentropy"}
    labels, weights = {"real": REAL, "kind": KINDS}, {"real": 0.5, "kind": 2.0}
    if form == "list":
        outputs, loss, weights = (list(part.values()) for part in (outputs, loss, weights))
        labels = tuple(labels.values())
    model = Model(inputs, outputs)
    recorder, predicted = told(model, labels, loss, loss_weights=weights)
    real, kind = predicted.values() if form == "dict" else predicted
    expected = 0.5 * (real[:, 0] - REAL) ** 2 + 2.0 * softmax_losses(kind)
    np.testing.assert_allclose(recorder.losses, expected, rtol=2e-4)
    names = {metric.name for metric in model.metrics}
    assert {"loss", "real_loss", "kind_loss"} <= names
    # Each output's loss is in its metric once.
    mean = float(model.get_metrics_result()["real_loss"])
    assert mean == pytest.approx(np.mean((real[:, 0] - REAL) ** 2), rel=1e-4)


def test_sample_weights_go_beside_the_losses_or_per_output_into_them():
    weights = np.linspace(1, 2, COUNT).astype(np.float32)
    recorder, predicted = told(Model(*network()), REAL, "mse", weights)
    np.testing.assert_allclose(recorder.losses, (predicted[:, 0] - REAL) ** 2, rtol=2e-4)
    np.testing.assert_array_equal(recorder.weights, weights)
    inputs, output = network(name="a")
    model = Model(inputs, {"a": output, "b": keras.layers.Dense(1, name="b")(inputs)})
    labels = {"a": REAL, "b": -REAL}
    per_output = {"a": weights, "b": np.zeros(COUNT, np.float32)}
    recorder, predicted = told(model, labels, "mse", per_output)
    expected = weights * (predicted["a"][:, 0] - REAL) ** 2
    np.testing.assert_allclose(recorder.losses, expected, rtol=2e-4)
    assert recorder.weights.numpy().size == 0


def test_values_per_position_are_averaged_over_an_input():
    inputs = keras.Input((3,), name="numbers")
    outputs = keras.layers.Reshape((3, 1))(keras.layers.Dense(3)(inputs))
    labels = np.stack([REAL, REAL, -REAL], axis=1)[:, :, None]
    recorder, predicted = told(Model(inputs, outputs), labels, "mse")
    expected = ((predicted - labels) ** 2).mean(axis=(1, 2))
    np.testing.assert_allclose(recorder.losses, expected, rtol=2e-4)


def test_a_loss_that_averages_over_the_batch_is_refused():
    with pytest.raises(ValueError, match=r"Invalid `loss`: 'mean_of_all'.*a value per input"):

        def mean_of_all(y_true, y_pred):
            return tf.reduce_mean((y_true - y_pred) ** 2)

        told(Model(*network()), REAL[:, None], mean_of_all)


def test_training_by_any_loss_is_the_same_to_the_bit():
    results = []
    for recorder in (None, Recorder()):
        keras.utils.set_random_seed(1)
        model = Model(*network(CLASSES, "softmax"))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        model.observe_losses_with(recorder)
        x = {"numbers": features(), "skippable": np.zeros(COUNT, bool)}
        history = model.fit(x, KINDS, epochs=3, shuffle=False, verbose=0)
        results.append((history.history["loss"], [w.numpy().tolist() for w in model.weights]))
    assert results[0] == results[1]


def noted():
    """Features that are no mapping, with what `Slipstream.apply` notes."""
    data = tf.data.Dataset.from_tensor_slices((features(), REAL)).batch(BATCH)
    return data.map(lambda x, y: (add_notes(x, skippable=y > 0), y))


class Subclassed(Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Model(*network()),
        lambda: Sequential([keras.layers.Dense(1)]),
        lambda: Sequential([keras.Input((3,)), keras.layers.Dense(1)]),
        Subclassed,
        lambda: type("Own", (Model,), {})(*network()),
        lambda: type("Own", (LossFeedback, keras.Model), {})(*network()),
    ],
    ids=["functional", "sequential", "built", "subclassed", "functional subclass", "mixin"],
)
def test_models_of_every_kind_see_the_features_without_notes(make):
    model, recorder = make(), Recorder()
    model.compile("sgd", "mse")
    model.observe_losses_with(recorder)
    model.fit(noted(), verbose=0, validation_data=noted())
    assert len(recorder.losses) == COUNT
    assert model.predict(features(), verbose=0).shape == (COUNT, 1)


def test_a_functional_model_leaves_the_base_class_as_it_is():
    bases = Model.__bases__
    assert isinstance(Model(*network()), Model)
    assert isinstance(type("Own", (Model,), {})(*network()), Model)
    assert Model.__bases__ == bases
    assert Subclassed()(features()).shape == (COUNT, 1)


def test_a_functional_model_is_saved_and_cloned(tmp_path):
    model = Model(*network())
    model.compile("sgd", "mse")
    model.save(tmp_path / "m.keras")
    for other in (keras.models.load_model(tmp_path / "m.keras"), keras.models.clone_model(model)):
        assert isinstance(other, Model) and other.count_params() == 4
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded(features()), model(features()))


def test_an_input_that_is_named_like_a_note_is_the_models():
    names = ("log_odds_offset", "shop")
    inputs = {name: keras.Input((), name=name, dtype="int64") for name in names}
    table = keras.layers.Embedding(100, 2)
    total = keras.layers.Concatenate()([table(inputs[name]) for name in names])
    model = Model(inputs, keras.layers.Dense(1)(total))
    x = {"log_odds_offset": np.arange(4), "shop": np.arange(4) + 50}
    np.testing.assert_array_equal(model({**x, "skippable": np.zeros(4, bool)}), model(x))


class OwnStep(Model):
    """A train_step as Keras's guide has it."""

    mode = "compute_loss"

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            if self.mode == "record":
                losses = (y - predicted[:, 0]) ** 2
                loss = tf.reduce_mean(losses)
            else:
                given = {} if self.mode == "without x" else {"x": x}
                loss = self.compute_loss(y=y, y_pred=predicted, **given)
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.mode == "record":
            self.record_losses(x, losses)
        elif self.mode == "twice":
            self.record_losses(x, (y - predicted[:, 0]) ** 2)
        elif self.mode == "two losses":
            self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("mode", ["compute_loss", "record", "two losses"])
def test_an_own_step_tells_its_losses(mode, eagerly):
    model, recorder = OwnStep(*network()), Recorder()
    model.mode = mode
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=eagerly)
    model.observe_losses_with(recorder)
    model.fit(noted(), verbose=0, validation_data=noted())
    expected = (model.predict(features(), verbose=0)[:, 0] - REAL) ** 2
    np.testing.assert_allclose(recorder.losses, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("twice", r"Invalid `losses`: 'a second time'.*compute_loss records them"),
        ("without x", r"Invalid `x`: None.*self\.compute_loss\(x=x"),
    ],
)
def test_misuse_in_an_own_step(mode, message):
    model = OwnStep(*network())
    model.mode = mode
    model.compile("sgd", "mse")
    model.observe_losses_with(Recorder())
    with pytest.raises(ValueError, match=message):
        model.fit(noted(), verbose=0)
