"""Tests that each update rule matches its Keras optimizer."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from all_rules import train
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_tf import optimizers

STEPS = 20


def numbers(low, high):
    return st.floats(low, high, width=32, allow_subnormal=False)


# Rows stay below about 1. Next to larger rows, float32 cannot resolve 1e-6 over 20 steps, and with
# a learning rate of 0.5 neither can the float32 bias correction of Keras.
RATE = numbers(2**-10, 2**-5)
BETAS = {"beta_1": numbers(0.0, 0.9375), "beta_2": numbers(0.5, 0.9990234375)}
MOMENTUM = {"momentum": numbers(0.0625, 0.9375), "nesterov": st.booleans()}
SUM = {"initial_accumulator_value": numbers(2**-7, 1.0)}
FTRL = {
    **SUM,
    "learning_rate_power": st.sampled_from([-0.5, -0.25, -0.75]),
    "l1_regularization_strength": numbers(0.0, 0.5),
    "l2_regularization_strength": numbers(0.0, 1.0),
    "l2_shrinkage_regularization_strength": numbers(0.0, 0.125),
    "beta": numbers(0.0, 1.0),
}
RULES = {
    "SGD": {},
    "SGD with momentum": MOMENTUM,
    "Adagrad": {**SUM, "epsilon": numbers(2**-20, 2**-7)},
    "Adam": {**BETAS, "epsilon": numbers(2**-20, 2**-7)},
    "Ftrl": FTRL,
}


def dense(optimizer, rows, batches, gradients):
    """Trains a Keras variable on the dense gradients."""
    variable = keras.Variable(rows)
    for keys, gradient in zip(batches, gradients, strict=True):
        summed = np.zeros_like(rows)
        np.add.at(summed, keys, gradient)
        optimizer.apply([summed], [variable])
    return variable.numpy()


@st.composite
def cases(draw, drawn):
    """Draws settings, rows, and batches that contain every key at least once."""
    dim, count = draw(st.sampled_from([1, 3, 4, 7, 8, 16, 17, 32, 64])), draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = (0.1 * random.normal(size=(count, dim))).astype(np.float32)
    batches, gradients = [], []
    for _ in range(STEPS):
        keys = random.permutation([*range(count), *random.integers(0, count, 3)])
        batches.append(keys.astype(np.int64))
        size = 10.0 ** random.uniform(-3, 0.5)
        gradients.append((size * random.normal(size=(keys.size, dim))).astype(np.float32))
    chosen = {name: draw(strategy) for name, strategy in drawn.items()}
    return {"learning_rate": draw(RATE), **chosen}, rows, batches, gradients


@pytest.mark.parametrize("name", RULES)
def test_training_all_rows_equals_keras(name):
    @settings(max_examples=25)
    @given(cases(RULES[name]))
    def check(case):
        chosen, rows, batches, gradients = case
        kind = name.split()[0]
        ours = train(getattr(optimizers, kind)(**chosen), rows, batches, gradients)
        theirs = dense(getattr(keras.optimizers, kind)(**chosen), rows, batches, gradients)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=str(chosen))

    check()


DECAYED = {**BETAS, "epsilon": numbers(2**-20, 2**-7), "weight_decay": numbers(2**-10, 0.5)}
OF_ROWS = {"l2": numbers(2**-10, 0.25), "clip_norm": numbers(2**-4, 4.0)}


@settings(max_examples=25)
@given(cases(DECAYED))
def test_adamw_equals_keras(case):
    chosen, *given_ = case
    ours = train(optimizers.AdamW(**chosen), *given_)
    theirs = dense(keras.optimizers.AdamW(**chosen), *given_)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=str(chosen))


@settings(max_examples=25)
@given(cases(OF_ROWS))
def test_penalty_and_clipping_equal_keras(case):
    """The reference has one variable per row, because `clipnorm` is per variable."""
    chosen, rows, batches, gradients = case
    rate = chosen["learning_rate"]
    ours = train(optimizers.SGD(**chosen), rows, batches, gradients)
    theirs = []
    for key, row in enumerate(rows):
        variable = keras.Variable(row)
        optimizer = keras.optimizers.SGD(rate, clipnorm=chosen["clip_norm"])
        penalty = keras.regularizers.L2(chosen["l2"])
        for keys, gradient in zip(batches, gradients, strict=True):
            with tf.GradientTape() as tape:
                loss = penalty(variable.value)
            own = gradient[keys == key].astype(np.float64).sum(axis=0)
            optimizer.apply([tape.gradient(loss, variable.value) + own], [variable])
        theirs.append(variable.numpy())
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=str(chosen))


@settings(max_examples=10)
@given(cases({"clip_value": numbers(2**-4, 1.0)}))
def test_clipping_by_value_equals_keras(case):
    chosen, *given_ = case
    ours = train(optimizers.Adagrad(**chosen, initial_accumulator_value=0.1, epsilon=1e-7), *given_)
    keras_ = {"learning_rate": chosen["learning_rate"], "clipvalue": chosen["clip_value"]}
    theirs = dense(keras.optimizers.Adagrad(**keras_), *given_)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=str(chosen))


@settings(max_examples=10)
@given(cases({"max_norm": numbers(0.25, 2.0)}))
def test_max_norm_equals_keras_constraint(case):
    chosen, *given_ = case
    ours = train(optimizers.SGD(**chosen), *given_)
    assert (np.linalg.norm(ours, axis=1) <= chosen["max_norm"] * (1 + 1e-6)).all()
    bound = keras.constraints.MaxNorm(chosen["max_norm"], axis=1)
    rows, batches, gradients = given_
    for keys, gradient in zip(batches, gradients, strict=True):
        rows = rows.copy()
        np.add.at(rows, keys, -chosen["learning_rate"] * gradient)
        rows = bound(rows).numpy()
    np.testing.assert_allclose(ours, rows, rtol=1e-4, atol=1e-5, err_msg=str(chosen))
