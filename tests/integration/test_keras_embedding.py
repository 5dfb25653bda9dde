"""`EmbeddingCollection` trains like `keras.layers.Embedding`, with one update per step."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table, initializers, optimizers
from slipstream_tf.keras import CombinedOptimizer, EmbeddingCollection

VOCABULARY = 12
DIM = 4
FIELDS = 2
BATCH_SIZE = 16
STEPS = 6
LEARNING_RATE = 0.3


class Net(keras.Model):
    """One of the two embedding layers below a dense layer.

    `embed` maps keys [batch, 2] to rows [batch, 2, dim].
    """

    def __init__(self, embedding, embed=None):
        super().__init__()
        self.embedding = embedding
        self.embed = embed
        self.head = keras.layers.Dense(1)
        self.head.build((None, FIELDS * DIM))

    def call(self, inputs, training=None):
        if self.embed is not None:
            vectors = self.embed(inputs)
        else:
            vectors = self.embedding(inputs, training=training)
        return self.head(tf.reshape(vectors, [-1, FIELDS * DIM]))


def collection(optimizer=None, **kwargs):
    tables = [
        Table(name, DIM, initializer=initializers.RandomUniform(seed=seed))
        for seed, name in enumerate("ab")
    ]
    return EmbeddingCollection(tables, optimizer or optimizers.SGD(LEARNING_RATE), **kwargs)


def rows_of(layer, table, keys=range(VOCABULARY)):
    return np.asarray(layer.store.gather(table, tf.constant(list(keys), tf.int64))[0])


def updates(layer):
    return int(layer.store.export_table("a")["steps"][0])


def state(layer):
    return [layer.store.export_table(table.name) for table in layer.tables]


def assert_same_state(first, second):
    for one, other in zip(first, second, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def data(seed=0):
    generator = np.random.default_rng(seed)
    # Contains many duplicates.
    keys = generator.integers(0, VOCABULARY, (STEPS * BATCH_SIZE, FIELDS))
    return keys, generator.normal(size=(len(keys), 1)).astype(np.float32)


def train_with_fit(net, optimizer, keys, labels):
    net.compile(optimizer=optimizer, loss="mse")
    net.fit(keys, labels, batch_size=BATCH_SIZE, shuffle=False, verbose=0)


def train_by_hand(net, optimizer, keys, labels, wrap):
    loss_of = keras.losses.MeanSquaredError()

    def step(batch_keys, batch_labels):
        with tf.GradientTape() as tape:
            loss = loss_of(batch_labels, net(batch_keys, training=True))
        variables = net.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    optimizer.build(net.trainable_variables)
    step = wrap(step)
    for begin in range(0, len(keys), BATCH_SIZE):
        chosen = slice(begin, begin + BATCH_SIZE)
        step(tf.constant(keys[chosen]), tf.constant(labels[chosen]))


TRAINERS = {
    "fit": train_with_fit,
    "tf.function": lambda *arguments: train_by_hand(*arguments, wrap=tf.function),
    "eager": lambda *arguments: train_by_hand(*arguments, wrap=lambda step: step),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_rows_equal_keras_embedding(trainer):
    keys, labels = data()
    ours = collection()
    # One Keras table holds both fields. The keys of field b are shifted.
    theirs = keras.layers.Embedding(FIELDS * VOCABULARY, DIM)
    theirs.build()
    theirs.set_weights([np.concatenate([rows_of(ours, "a"), rows_of(ours, "b")])])
    our_net = Net(ours)
    their_net = Net(theirs, lambda batch: theirs(batch + tf.constant([0, VOCABULARY], tf.int64)))
    their_net.head.set_weights(our_net.head.get_weights())
    for net in (our_net, their_net):
        TRAINERS[trainer](net, keras.optimizers.SGD(LEARNING_RATE), keys, labels)
    assert updates(ours) == STEPS
    expected = theirs.get_weights()[0]
    start = np.concatenate([rows_of(collection(), "a"), rows_of(collection(), "b")])
    assert np.abs(expected - start).max() > 1e-2
    np.testing.assert_allclose(rows_of(ours, "a"), expected[:VOCABULARY], rtol=0, atol=1e-6)
    np.testing.assert_allclose(rows_of(ours, "b"), expected[VOCABULARY:], rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        our_net.head.get_weights()[0], their_net.head.get_weights()[0], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("apply", "optimizer"),
    [
        ("backward", keras.optimizers.SGD(0.1, momentum=0.9)),
        ("backward", keras.optimizers.Adam(0.1)),
        ("backward", keras.optimizers.AdamW(0.1, weight_decay=0.1)),
        ("step", keras.optimizers.Adam(0.1, clipnorm=1.0)),
        ("step", keras.optimizers.Adagrad(0.1, global_clipnorm=1.0)),
        ("step", keras.optimizers.Lion(0.1, weight_decay=0.1, clipvalue=0.5)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_fit_applies_one_update_per_step(apply, optimizer, steps_per_execution):
    """The update must not be pruned from the graph.

    TensorFlow once removed it in `fit` with Adam, because it folded a gradient of constant 0.
    """
    optimizer = type(optimizer).from_config(optimizer.get_config())
    if apply == "step":
        optimizer = CombinedOptimizer(optimizer)
    optimizer.exclude_from_weight_decay(var_names=["_anchor"])
    keys, labels = data()
    net = Net(collection(apply=apply))
    net.compile(optimizer=optimizer, loss="mse", steps_per_execution=steps_per_execution)
    net.fit(keys, labels, batch_size=BATCH_SIZE, verbose=0, epochs=2)
    assert updates(net.embedding) == 2 * STEPS
    assert all(float(anchor) == 0.0 for anchor in net.embedding.trainable_weights)


def test_fit_trains_functional_model():
    keys, labels = data()
    layer = collection()
    inputs = keras.Input((FIELDS,), dtype="int64")
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs))))
    model.compile(optimizer="adam", loss="mse")
    model.fit(keys, labels, batch_size=BATCH_SIZE, verbose=0)
    assert updates(layer) == STEPS


def test_fit_trains_ragged_features():
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 4, 32)
    bags = tf.RaggedTensor.from_row_lengths(generator.integers(0, 9, lengths.sum()), lengths)
    dataset = tf.data.Dataset.from_tensor_slices(
        ({"a": tf.range(32, dtype=tf.int64), "b": bags}, tf.ones((32, 1)))
    ).batch(8)

    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = collection()
            self.head = keras.layers.Dense(1)

        def call(self, inputs, training=None):
            vectors = self.embedding(inputs, training=training)
            return self.head(tf.concat([vectors["a"], vectors["b"]], axis=1))

    model = Pair()
    model.compile(optimizer="adam", loss="mse")
    model.fit(dataset, verbose=0)
    assert updates(model.embedding) == 4
    assert model.embedding.store.size("b") == len(np.unique(bags.flat_values))


def test_evaluate_and_predict_change_nothing():
    keys, labels = data()
    net = Net(collection())
    train_with_fit(net, "adam", keys, labels)
    before = state(net.embedding)
    net.evaluate(keys + 100, labels, verbose=0)
    net.predict(keys + 100, verbose=0)
    assert_same_state(before, state(net.embedding))


def test_frozen_layer_updates_and_allocates_no_rows():
    keys, labels = data()
    net = Net(collection())
    train_with_fit(net, "adam", keys, labels)
    net.embedding.trainable = False
    before = state(net.embedding)
    head = net.head.get_weights()[0]
    train_with_fit(net, "adam", keys + 100, labels)
    assert_same_state(before, state(net.embedding))
    assert np.abs(net.head.get_weights()[0] - head).max() > 0


def test_call_without_tape_allocates_and_counts_rows_only():
    layer = collection()
    before = rows_of(layer, "a")
    layer(np.array([[1, 2], [1, 3]]), training=True)
    exported = layer.store.export_table("a")
    assert list(exported["keys"]) == [1]
    assert list(exported["counts"]) == [2.0]
    assert updates(layer) == 0
    np.testing.assert_array_equal(rows_of(layer, "a"), before)


def test_gradients_equal_mean_loss_gradients():
    layer = collection()
    before = rows_of(layer, "a", [1])
    with tf.GradientTape() as tape:
        vectors = layer(np.array([[1, 2], [3, 2], [4, 2], [5, 2]]), training=True)
        loss = tf.reduce_mean(tf.reduce_sum(vectors[:, 0], axis=1))
    tape.gradient(loss, layer.trainable_variables)
    np.testing.assert_allclose(rows_of(layer, "a", [1]), before - LEARNING_RATE / 4, rtol=1e-6)


def test_jit_compile_falls_back_with_a_warning():
    keys, labels = data()
    net = Net(collection())
    with pytest.warns(UserWarning, match="jit_compile"):
        net.compile(optimizer="sgd", loss="mse", jit_compile=True)
    net.fit(keys, labels, batch_size=BATCH_SIZE, verbose=0)
    assert updates(net.embedding) == STEPS


def test_nan_loss_stops_fit_and_keeps_rows():
    keys, labels = data()
    labels[:] = np.nan
    net = Net(collection())
    start = rows_of(net.embedding, "a")
    net.compile(optimizer="sgd", loss="mse")
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"table 'a'.*is -?nan .*expected finite"
    ):
        net.fit(keys, labels, batch_size=BATCH_SIZE, verbose=0)
    np.testing.assert_array_equal(rows_of(net.embedding, "a"), start)


def test_same_seed_gives_same_rows():
    keys, labels = data()
    states = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        net = Net(collection(optimizers.Adagrad(0.1)))
        train_with_fit(net, "adam", keys, labels)
        states.append(state(net.embedding))
    assert_same_state(*states)


def test_forward_pass_in_separate_function_updates_rows():
    """The update must run with separate forward and backward graphs."""
    layer = collection()
    before = rows_of(layer, "a", [1])
    forward = tf.function(lambda keys: layer(keys, training=True))
    for step in (1, 2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward(tf.constant([[1, 2]], tf.int64)))
        tape.gradient(loss, layer.trainable_variables)
        assert updates(layer) == step
    np.testing.assert_allclose(rows_of(layer, "a", [1]), before - 2 * LEARNING_RATE, rtol=1e-5)
