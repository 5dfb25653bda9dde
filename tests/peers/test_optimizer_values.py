"""Tests that rows and slots follow the published update rules.

The formulas are computed in float64 from the gradients of a weighted sum. They are the rules of
Duchi et al. (JMLR 2011, Adagrad), Kingma and Ba (ICLR 2015, Adam), Loshchilov and Hutter (ICLR
2019, AdamW) and McMahan et al. (KDD 2013, FTRL), in the parametrization of Keras, for the rows of a
batch only. Keys repeat within a batch, and no batch contains all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip

ROWS, DIM = 6, 5
BATCHES = np.array([[0, 1, 2, 1], [1, 3, 3, 3], [0, 4, 2, 4], [5, 5, 1, 0], [2, 0, 1, 3]])
RATE = 0.05

Update = Callable[[np.ndarray, list[np.ndarray], np.ndarray, int], np.ndarray]


def sgd(row: np.ndarray, slots: list[np.ndarray], gradient: np.ndarray, step: int) -> np.ndarray:
    return row - RATE * gradient


def momentum(mu: float, nesterov: bool) -> Update:
    def update(row: Any, slots: Any, gradient: Any, step: int) -> Any:
        slots[0] = mu * slots[0] - RATE * gradient
        return row + (mu * slots[0] - RATE * gradient if nesterov else slots[0])

    return update


def adagrad(epsilon: float, by_row: bool = False) -> Update:
    def update(row: Any, slots: Any, gradient: Any, step: int) -> Any:
        square = gradient**2
        slots[0] = slots[0] + (square.mean(keepdims=True) if by_row else square)
        return row - RATE * gradient / np.sqrt(slots[0] + epsilon)

    return update


def adam(
    beta_1: float, beta_2: float, epsilon: float, decay: float = 0.0, by_row: bool = False
) -> Update:
    def update(row: Any, slots: Any, gradient: Any, step: int) -> Any:
        square = (gradient**2).mean(keepdims=True) if by_row else gradient**2
        slots[0] = beta_1 * slots[0] + (1 - beta_1) * gradient
        slots[1] = beta_2 * slots[1] + (1 - beta_2) * square
        rate = RATE * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
        return row - RATE * decay * row - rate * slots[0] / (np.sqrt(slots[1]) + epsilon)

    return update


def ftrl(l1: float, l2: float, shrinkage: float, beta: float) -> Update:
    def update(row: Any, slots: Any, gradient: Any, step: int) -> Any:
        root, squares = np.sqrt(slots[0]), slots[0] + gradient**2
        shrunk = gradient + 2 * shrinkage * row
        slots[1] = slots[1] + shrunk - (np.sqrt(squares) - root) / RATE * row
        slots[0] = squares
        curvature = (beta + np.sqrt(squares)) / RATE + 2 * l2
        beyond = np.abs(slots[1]) > l1
        return np.where(beyond, (np.sign(slots[1]) * l1 - slots[1]) / curvature, 0.0)

    return update


OF_ADAM = {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3}
OF_FTRL = {
    "l1_regularization_strength": 0.3,
    "l2_regularization_strength": 0.2,
    "l2_shrinkage_regularization_strength": 0.1,
    "beta": 0.5,
}
CASES = {
    "SGD": (slip.optimizers.SGD(RATE), sgd, []),
    "momentum": (slip.optimizers.SGD(RATE, momentum=0.7), momentum(0.7, False), [DIM]),
    "Nesterov": (
        slip.optimizers.SGD(RATE, momentum=0.7, nesterov=True),
        momentum(0.7, True),
        [DIM],
    ),
    "Adagrad": (slip.optimizers.Adagrad(RATE, 0.1, 1e-3), adagrad(1e-3), [DIM]),
    "RowWiseAdagrad": (slip.optimizers.RowWiseAdagrad(RATE, 0.1, 1e-3), adagrad(1e-3, True), [1]),
    "Adam": (slip.optimizers.Adam(RATE, **OF_ADAM), adam(**OF_ADAM), [DIM, DIM]),
    "AdamW": (
        slip.optimizers.AdamW(RATE, **OF_ADAM, weight_decay=0.4),
        adam(**OF_ADAM, decay=0.4),
        [DIM, DIM],
    ),
    "RowWiseAdam": (
        slip.optimizers.RowWiseAdam(RATE, **OF_ADAM),
        adam(**OF_ADAM, by_row=True),
        [DIM, 1],
    ),
    "Ftrl": (
        slip.optimizers.Ftrl(RATE, initial_accumulator_value=0.1, **OF_FTRL),
        ftrl(0.3, 0.2, 0.1, 0.5),
        [DIM, DIM],
    ),
}
FIRST_SLOT = {"Adagrad": 0.1, "RowWiseAdagrad": 0.1, "Ftrl": 0.1}


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("name", CASES)
def test_rows_and_slots_follow_update_rule(name: str, is_traced: bool) -> None:
    optimizer, update, sizes = CASES[name]
    random = np.random.default_rng(7)
    rows = 0.5 * random.normal(size=(ROWS, DIM)).astype(np.float32)
    factors = random.normal(size=(*BATCHES.shape, DIM)).astype(np.float32)
    layer = slip.keras.Embedding(ROWS, DIM, embeddings_initializer=rows, optimizer=optimizer)

    def step(keys: tf.Tensor, factor: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(factor * layer(keys, training=True))
        tape.gradient(loss, layer.trainable_variables)

    train = tf.function(step) if is_traced else step
    expected = rows.astype(np.float64)
    slots = [[np.full(size, 0.0) for size in sizes] for _ in range(ROWS)]
    for own in slots if name in FIRST_SLOT else ():
        own[0] += FIRST_SLOT[name]
    for number, (keys, factor) in enumerate(zip(BATCHES, factors, strict=True), 1):
        train(tf.constant(keys), tf.constant(factor))
        for key in np.unique(keys):
            gradient = factor[keys == key].astype(np.float64).sum(axis=0)
            expected[key] = update(expected[key], slots[key], gradient, number)
        found = layer.store.export_table("embedding")
        # Every step, so that errors cannot cancel.
        np.testing.assert_allclose(found["rows"], expected, rtol=0, atol=1e-6)
        joined = np.array([np.concatenate([*own, []]) for own in slots])
        np.testing.assert_allclose(found["slots"], joined, rtol=1e-6, atol=2e-6)
    assert np.abs(expected - rows).max() > 0.05
    assert name != "Ftrl" or (expected == 0).any()
