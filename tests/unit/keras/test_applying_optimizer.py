"""Tests that layers learn of the optimizer that applies their gradients."""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf import optimizers

KEYS = np.random.default_rng(0).integers(0, 50, 320)
LABELS = (KEYS % 2).astype(np.float32)
STEPS = 10
DECAY = keras.optimizers.schedules.PiecewiseConstantDecay([4], [0.1, 0.001])
WARMUP = keras.optimizers.schedules.CosineDecay(0.0, 100, warmup_target=0.1, warmup_steps=5)
REFUSED = {
    "clipnorm": {"clipnorm": 1.0},
    "global_clipnorm": {"global_clipnorm": 1.0},
    "use_ema": {"use_ema": True},
    "weight_decay": {"weight_decay": 0.1},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "loss_scale_factor": {"loss_scale_factor": 8.0},
}


def make_layer(name="item", **kwargs):
    return slip.keras.Embedding(None, 4, optimizer=optimizers.SGD(0.5), name=name, **kwargs)


def rows_of(layer):
    return np.asarray(layer.table(layer.name).read(np.arange(50)))


class OwnStep(keras.Model):
    """Calls its layer in `train_step`, with one optimizer for all or a second one for rows."""

    def __init__(self, layer, of_rows=None):
        super().__init__()
        self.embed, self.head, self.of_rows = layer, keras.layers.Dense(1), of_rows

    def call(self, keys, training=False):
        return self.head(self.embed(keys, training=training))[:, 0]

    def train_step(self, data):
        keys, labels = data
        with tf.GradientTape() as tape:
            rows = self.embed(keys, training=True)
            loss = tf.reduce_mean((self.head(rows)[:, 0] - labels) ** 2)
        of_rows = self.of_rows or self.optimizer
        rows, dense = self.embed.trainable_variables, self.head.trainable_variables
        gradients = tape.gradient(loss, rows + dense)
        if of_rows is self.optimizer:
            self.optimizer.apply(gradients, rows + dense)
        else:
            of_rows.apply(gradients[: len(rows)], rows)
            self.optimizer.apply(gradients[len(rows) :], dense)
        return {"loss": loss}


class InLoss(slip.keras.Model):
    """Calls its second layer in `compute_loss`, as a retrieval model does."""

    def __init__(self):
        super().__init__()
        self.query, self.item = make_layer("query"), make_layer("item")

    def call(self, keys, training=False):
        return self.query(keys, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        items = self.item(y, training=training)
        return tf.reduce_mean(tf.reduce_sum(y_pred * items, -1))


def fit(model, optimizer, labels=LABELS):
    model.compile(optimizer)
    model.fit(KEYS, labels, batch_size=32, shuffle=False, verbose=0)
    return model


def test_layer_in_compute_loss_follows_schedule():
    model = fit(InLoss(), keras.optimizers.SGD(DECAY), KEYS)
    for layer in (model.query, model.item):
        np.testing.assert_allclose(layer.table(layer.name).learning_rate, 0.005, rtol=1e-6)


@pytest.mark.parametrize("where", ["train_step", "second optimizer"])
@pytest.mark.parametrize("schedule", [DECAY, WARMUP], ids=["decay", "warmup"])
def test_layer_in_train_step_follows_schedule_exactly(schedule, where):
    """The reference knows its optimizer from the start."""
    models = []
    for is_known in (True, False):
        keras.utils.set_random_seed(1)
        optimizer, layer = (
            keras.optimizers.SGD(schedule),
            make_layer(embeddings_initializer=slip.initializers.RandomUniform(seed=1)),
        )
        if is_known:
            slip.keras.connect(layer, optimizer)
        model = OwnStep(layer, optimizer if where == "second optimizer" else None)
        models.append(fit(model, optimizer if where == "train_step" else "sgd"))
    np.testing.assert_array_equal(*(rows_of(model.embed) for model in models))
    rates = [model.embed.table("item").learning_rate for model in models]
    assert rates[0] == rates[1]
    np.testing.assert_allclose(rates[0], 5.0 * float(schedule(STEPS)), rtol=1e-6)


@pytest.mark.parametrize("settings", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("where", ["train_step", "second optimizer"])
def test_settings_that_miss_rows_are_refused_before_rows_change(where, settings):
    layer = make_layer()
    optimizer = keras.optimizers.SGD(0.1, **settings)
    model = OwnStep(layer, optimizer if where == "second optimizer" else None)
    start = rows_of(layer)
    with pytest.raises(ValueError, match=f"Invalid `{next(iter(settings))}`"):
        fit(model, optimizer if where == "train_step" else "sgd")
    np.testing.assert_array_equal(rows_of(layer), start)


def test_loss_scaling_is_refused_before_rows_change():
    layer = make_layer()
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    start = rows_of(layer)
    with pytest.raises(ValueError, match="Invalid `optimizer`: 'LossScaleOptimizer'"):
        fit(OwnStep(layer), scaled)
    np.testing.assert_array_equal(rows_of(layer), start)


def test_settings_of_the_other_optimizer_are_allowed():
    """The optimizer of `compile` may clip, because another one applies the gradients of rows."""
    layer = make_layer()
    start = rows_of(layer)
    fit(OwnStep(layer, keras.optimizers.SGD(0.1)), keras.optimizers.Adam(global_clipnorm=1.0))
    assert (rows_of(layer) != start).any()


def test_combined_optimizer_in_train_step_clips_rows():
    clipped = slip.keras.CombinedOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=1e-9))
    layer = make_layer(apply="step")
    start = rows_of(layer)
    fit(OwnStep(layer), clipped)
    np.testing.assert_allclose(rows_of(layer), start, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("SGD", {}), ("Adam", {}), ("Adagrad", {}), ("Adam", {"clipnorm": 1.0})],
    ids=str,
)
@pytest.mark.parametrize("where", ["train_step", "second optimizer", "eager loop", "graph loop"])
def test_plain_optimizer_is_refused_for_step(where, name, settings):
    optimizer = getattr(keras.optimizers, name)(**settings)
    layer = make_layer(apply="step")
    start = rows_of(layer)
    with pytest.raises(ValueError, match=r"Expected slip\.keras\.CombinedOptimizer\(optimizer\)"):
        if where == "train_step":
            fit(OwnStep(layer), optimizer)
        elif where == "second optimizer":
            fit(OwnStep(layer, optimizer), "adam")
        elif where == "eager loop":
            train_eagerly(layer, optimizer)
        else:
            tf.function(train_eagerly)(layer, optimizer)
    np.testing.assert_array_equal(rows_of(layer), start)


def test_plain_optimizer_is_refused_for_clipped_row_gradients():
    layer = make_layer(apply="step")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(KEYS, training=True))
    (gradient,) = tape.gradient(loss, layer.trainable_variables)
    clipped = tf.IndexedSlices(tf.clip_by_value(gradient.values, -1, 1), gradient.indices)
    with pytest.raises(ValueError, match=r"Expected slip\.keras\.CombinedOptimizer\(optimizer\)"):
        keras.optimizers.SGD(0.1).apply([clipped], layer.trainable_variables)


def test_combined_optimizer_in_loop_names_mode_of_layer():
    optimizer = slip.keras.CombinedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="Pass apply='step' to the layer"):
        train_eagerly(make_layer(), optimizer)


def train_eagerly(layer, optimizer):
    for part in np.split(KEYS, STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(part, training=True))
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)


def test_eager_loop_refuses_warmup_until_connected():
    optimizer = keras.optimizers.SGD(WARMUP)
    with pytest.raises(ValueError, match=r"Call slip\.keras\.connect\(layers, optimizer\)"):
        train_eagerly(make_layer(), optimizer)
    layer, optimizer = make_layer(), keras.optimizers.SGD(WARMUP)
    start = rows_of(layer)
    slip.keras.connect(layer, optimizer)
    train_eagerly(layer, optimizer)
    used = [float(WARMUP(step)) / 0.1 * 0.5 for step in range(STEPS)]
    counts = [np.bincount(part, minlength=50) for part in np.split(KEYS, STEPS)]
    moved = sum(rate * count for rate, count in zip(used, counts, strict=True))
    np.testing.assert_allclose(start - rows_of(layer), np.tile(moved[:, None], 4), atol=1e-5)


def test_connect_requires_an_embedding_layer():
    with pytest.raises(ValueError, match=r"Invalid `layers`.*at least one slip\.keras layer"):
        slip.keras.connect(keras.layers.Dense(1), keras.optimizers.SGD())


def train_in_graph():
    """Trains a layer in a graph that outlives it, and returns the handle of its table."""
    layer = make_layer()

    @tf.function
    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.silu(layer(keys, training=True)))
        return tape.gradient(loss, layer.trainable_variables)

    step(tf.constant([1, 2]))
    return layer.store._handles[0]


def test_graph_does_not_keep_rows_of_deleted_layer():
    """TensorFlow keeps the graph of every `tf.custom_gradient`, such as `tf.nn.silu`."""
    handle = train_in_graph()
    gc.collect()
    with pytest.raises(tf.errors.FailedPreconditionError, match="table 'item' was deleted"):
        slip.ops.table.step(handle)


def one_step(layer, optimizer, keys):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(keys, training=True))
    optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)


@pytest.mark.parametrize("as_function", [False, True], ids=["eager", "graph"])
def test_two_optimizers_with_schedules_are_exact_with_step(as_function):
    layer = make_layer(apply="step", embeddings_initializer="zeros")
    given = [
        slip.keras.CombinedOptimizer(keras.optimizers.SGD(rate))
        for rate in (0.1, keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.1, 0.01]))
    ]
    steps = []
    for key, optimizer in enumerate(given):
        optimizer.build(layer.trainable_variables)

        def step(key=key, optimizer=optimizer):
            one_step(layer, optimizer, tf.constant([key]))

        steps.append(tf.function(step) if as_function else step)
    for _ in range(3):
        for step in steps:
            step()
    moved = np.asarray(layer.table("item").read([0, 1]))[:, 0]
    np.testing.assert_allclose(moved, [-1.5, -0.5 - 2 * 0.05], rtol=1e-5)


@pytest.mark.parametrize("as_function", [False, True], ids=["eager", "graph"])
def test_second_optimizer_with_schedule_is_refused_with_backward(as_function):
    layer = make_layer()
    first, second = keras.optimizers.SGD(0.1), keras.optimizers.SGD(DECAY)
    for optimizer in (first, second):
        optimizer.build(layer.trainable_variables)

    def both():
        one_step(layer, first, tf.constant([1]))
        one_step(layer, second, tf.constant([2]))

    with pytest.raises(ValueError, match=r"multiple optimizers.*slip\.keras\.connect"):
        (tf.function(both) if as_function else both)()


def test_next_optimizer_is_connected_between_phases():
    layer = make_layer(embeddings_initializer="zeros")
    ended = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.1, 0.0])
    first, second = keras.optimizers.SGD(ended), keras.optimizers.SGD(0.1)
    for _ in range(2):
        one_step(layer, first, tf.constant([1]))
    slip.keras.connect(layer, second)
    one_step(layer, second, tf.constant([2]))
    np.testing.assert_allclose(np.asarray(layer.table("item").read([1, 2]))[:, 0], [-0.5, -0.5])


@pytest.mark.parametrize("rate", [DECAY, 0.1], ids=["schedule", "constant"])
def test_multi_optimizer_with_function_that_creates_optimizers(rate):
    def choose(variable):
        return keras.optimizers.SGD(rate if "anchor" in variable.path else 0.1)

    keys = keras.Input((), dtype="int64")
    layer = make_layer()
    model = keras.Model(keys, keras.layers.Dense(1)(layer(keys)))
    model.compile(keras.optimizers.MultiOptimizer(choose), "mse")
    model.fit(KEYS, LABELS, batch_size=32, verbose=0)
    want = 0.005 if rate is DECAY else 0.5
    np.testing.assert_allclose(layer.table("item").learning_rate, want, rtol=1e-6)


def test_tables_are_released_while_a_graph_is_built():
    handle = train_in_graph()
    with tf.Graph().as_default():
        gc.collect()
    with pytest.raises(tf.errors.FailedPreconditionError, match="table 'item' was deleted"):
        slip.ops.table.step(handle)
