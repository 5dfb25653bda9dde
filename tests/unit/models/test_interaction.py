"""Tests of pairwise dot products and cross layers against NumPy."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.models.interaction import (
    TimeAttention,
    pair_order,
    pairwise_dots,
    sum_of_dots,
)


@pytest.mark.parametrize("count", range(2, 12))
def test_each_pair_occurs_once(count):
    pairs = [(i, j) for i in range(count) for j in range(i)]
    assert sorted(pair_order(count)) == pairs
    vectors = np.random.default_rng(count).normal(size=(3, count, 5)).astype(np.float32)
    dots = np.einsum("bid,bjd->bij", vectors, vectors)
    expected = np.stack([dots[:, i, j] for i, j in pair_order(count)], axis=1)
    np.testing.assert_allclose(pairwise_dots(tf.constant(vectors)), expected, rtol=1e-5, atol=1e-5)


def _gradient_in_a_graph_with_the_tape_outside(loss_of, vectors):
    with tf.GradientTape() as tape:
        tape.watch(vectors)
        loss = tf.function(loss_of)(vectors)
    return tape.gradient(loss, vectors)


def _gradient(loss_of, vectors):
    with tf.GradientTape() as tape:
        tape.watch(vectors)
        loss = loss_of(vectors)
    return tape.gradient(loss, vectors)


@pytest.mark.parametrize(
    "gradient",
    [
        _gradient,
        lambda *given: tf.function(_gradient)(*given),
        _gradient_in_a_graph_with_the_tape_outside,
    ],
    ids=["eager", "tape in graph", "tape outside of graph"],
)
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_gradient_of_dots_equals_reference(count, gradient):
    generator = np.random.default_rng(count)
    vectors = tf.constant(generator.normal(size=(2, count, 3)))
    pairs = pair_order(count)
    upstream = generator.normal(size=(2, len(pairs)))
    found = gradient(lambda v: tf.reduce_sum(pairwise_dots(v) * upstream), vectors)
    expected = np.zeros(vectors.shape)
    for index, (i, j) in enumerate(pairs):
        expected[:, i] += upstream[:, index, None] * vectors.numpy()[:, j]
        expected[:, j] += upstream[:, index, None] * vectors.numpy()[:, i]
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_graph_is_freed_with_its_function():
    def trace():
        step = tf.function(lambda vectors: _gradient(pairwise_dots, vectors))
        return weakref.ref(step.get_concrete_function(tf.TensorSpec((None, 4, 3))).graph)

    graph = trace()
    gc.collect()
    assert graph() is None


class Interactions(keras.Model):
    """Calls every interaction of rows."""

    def __init__(self, activation):
        super().__init__()
        self.embed = slip.keras.Embedding(None, 4, optimizer="adagrad", name="item")
        self.attention = TimeAttention()
        self.head = keras.layers.Dense(1, activation)

    def call(self, keys, training=False):
        rows = self.embed(keys, training=training)
        contexts = self.attention(rows[:, 0], rows[:, 1:])
        return self.head(tf.concat([pairwise_dots(rows), sum_of_dots(rows), contexts], axis=1))


def _train(activation):
    """Returns weak references to a trained model and its parts, and the handle of its table."""
    model = Interactions(activation)
    model.compile("adam", "mse")
    keys = tf.constant(np.arange(24).reshape(8, 3))
    model.fit(keys, tf.zeros(8), batch_size=4, verbose=0)

    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(keys, training=True))
        return tape.gradient(loss, model.trainable_variables)

    step(keys)
    traced = tf.function(step)
    traced(keys)
    parts = {"graph": traced.get_concrete_function(keys).graph}
    parts |= {"model": model, "layer": model.embed, "store": model.embed.store}
    return {name: weakref.ref(part) for name, part in parts.items()}, model.embed.store._handles[0]


@pytest.mark.parametrize(("activation", "kept"), [("relu", []), ("swish", ["graph"])])
def test_deleted_model_frees_its_tables(activation, kept):
    """Keras's `fit` and its "swish" keep their graphs, because they use `tf.custom_gradient`."""
    references, handle = _train(activation)
    gc.collect()
    assert [name for name, reference in references.items() if reference() is not None] == kept
    with pytest.raises(tf.errors.FailedPreconditionError, match="table 'item' was deleted"):
        slip.ops.table.step(handle)


def test_empty_batch_has_shape():
    assert pairwise_dots(tf.zeros((0, 4, 3))).shape == (0, 6)


def test_unknown_batch_size_keeps_static_width():
    function = tf.function(pairwise_dots, input_signature=[tf.TensorSpec((None, 5, 3))])
    assert function.get_concrete_function().structured_outputs.shape.as_list() == [None, 10]


def test_second_gradient_of_dots_equals_reference():
    count = 5
    vectors = tf.constant(np.random.default_rng(count).normal(size=(2, count, 3)))
    with tf.GradientTape() as outer:
        outer.watch(vectors)
        with tf.GradientTape() as inner:
            inner.watch(vectors)
            loss = tf.reduce_sum(tf.square(pairwise_dots(vectors)))
        first = tf.reduce_sum(inner.gradient(loss, vectors))
    # The gradient of d^2 for a dot product d of v_i and v_j is 2 d v_j and 2 d v_i.
    values = vectors.numpy()
    expected = np.zeros_like(values)
    for i, j in pair_order(count):
        a, b = values[:, i], values[:, j]
        dot, both = (a * b).sum(axis=1, keepdims=True), (a + b).sum(axis=1, keepdims=True)
        expected[:, i] += 2 * (b * both + dot)
        expected[:, j] += 2 * (a * both + dot)
    np.testing.assert_allclose(outer.gradient(first, vectors), expected, rtol=1e-10)


def test_forward_and_backward_use_two_matrix_products():
    @tf.function(input_signature=[tf.TensorSpec((None, 27, 16))])
    def both_passes(vectors):
        with tf.GradientTape() as tape:
            tape.watch(vectors)
            loss = tf.reduce_sum(tf.square(pairwise_dots(vectors)))
        return tape.gradient(loss, vectors)

    found = both_passes.get_concrete_function().graph.get_operations()
    kinds = [operation.type for operation in found]
    assert not {kind for kind in kinds if "Gather" in kind or "Scatter" in kind}
    assert "StridedSliceGrad" not in kinds
    assert sum(kind.startswith("BatchMatMul") for kind in kinds) == 2
