"""Tests of optimizers, initializers and numbers in the notations that Keras accepts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table, initializers, optimizers
from slipstream_tf._utils.errors import MAX_SHOWN, invalid, shown


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        ("adagrad", optimizers.Adagrad()),
        ("SGD", optimizers.SGD()),
        ("rowwise_adagrad", optimizers.RowWiseAdagrad()),
        ("RowWiseAdagrad", optimizers.RowWiseAdagrad()),
        (keras.optimizers.SGD(0.5), optimizers.SGD(0.5)),
        (keras.optimizers.Adagrad(0.25, 0.5, 1e-3), optimizers.Adagrad(0.25, 0.5, 1e-3)),
        (optimizers.Adam(0.5), optimizers.Adam(0.5)),
    ],
)
def test_optimizers_are_accepted_by_name_and_from_keras(identifier: Any, expected: Any) -> None:
    assert optimizers.get(identifier) == expected
    assert Table("t", 2, optimizer=identifier).optimizer == expected


@pytest.mark.parametrize(
    ("identifier", "message"),
    [
        (keras.optimizers.Adam(), r"keras.optimizers.Adam.*Expected slipstream_tf.optimizers.SGD"),
        (keras.optimizers.SGD(0.1, momentum=0.9), r"`momentum`: 0.9"),
        (keras.optimizers.Adagrad(0.1, clipnorm=1.0), r"`clipnorm`: 1.0"),
        ("rmsprop", r"'rmsprop'.*Adagrad"),
        (3, r"`optimizer`: 3"),
    ],
)
def test_unsupported_optimizers_raise(identifier: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizers.get(identifier)


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        ("zeros", initializers.Zeros()),
        ("Zeros", initializers.Zeros()),
        ("ones", initializers.Constant(1.0)),
        ("uniform", initializers.RandomUniform()),
        ("random_normal", initializers.RandomNormal()),
        ("TruncatedNormal", initializers.TruncatedNormal()),
        (
            keras.initializers.TruncatedNormal(0.5, 0.1, 3),
            initializers.TruncatedNormal(0.5, 0.1, 3),
        ),
        (keras.initializers.Zeros(), initializers.Zeros()),
        (keras.initializers.Ones(), initializers.Constant(1.0)),
        (keras.initializers.Constant(0.5), initializers.Constant(0.5)),
        (keras.initializers.RandomUniform(-1.0, 1.0, 7), initializers.RandomUniform(-1.0, 1.0, 7)),
        (keras.initializers.RandomNormal(0.5, 0.1), initializers.RandomNormal(0.5, 0.1)),
    ],
)
def test_initializers_are_accepted_by_name_and_from_keras(identifier: Any, expected: Any) -> None:
    assert Table("t", 2, initializer=identifier).initializer == expected


@pytest.mark.parametrize(
    "identifier",
    [
        *("glorot_uniform", keras.initializers.GlorotUniform(), keras.initializers.Orthogonal()),
        *(None, 0.5),
        *(keras.initializers.Constant(np.zeros(3)), np.zeros((3, 2)), lambda shape: np.ones(shape)),
    ],
)
def test_unsupported_initializers_raise(identifier: Any) -> None:
    with pytest.raises(ValueError, match=r"RandomUniform.*matrix.*slip.tables.from_embedding"):
        initializers.get(identifier)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros((50_000, 100)), "float64 ndarray of shape (50000, 100)"),
        (tf.zeros([2, 3]), "float32 EagerTensor of shape (2, 3)"),
        (np.int64(3), repr(np.int64(3))),
        (["a", None, 1.5], "['a', None, 1.5]"),
        ({"b": 1}, "{'b': 1}"),
    ],
)
def test_short_values_are_shown_in_errors(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    "value",
    [
        *(
            "/folder/" + "d" * 5000 + "/file.parquet",
            [[0.5] * 5000] * 5000,
            dict.fromkeys(range(999)),
        ),
        *([np.zeros((50_000, 100))], 10**3000, range(1 << 60), {"rows": [[[[[["x" * 999]]]]]]}),
    ],
)
def test_long_values_are_cut_in_errors(value: Any) -> None:
    text = shown(value)
    assert len(text) <= MAX_SHOWN
    assert str(invalid("a", value, "b", "c")) == f"Invalid `a`: {text} for b. Expected c."
    if isinstance(value, str):
        assert text.startswith("'/folder/d") and text.endswith("d/file.parquet'")


def test_numpy_numbers_become_python_numbers() -> None:
    rule = optimizers.Adagrad(np.float32(0.5), np.float64(0.25), np.float32(0.125))
    table = Table("t", np.int32(4), rule, initializer=initializers.Constant(np.float32(0.5)))
    config = table.get_config()
    assert type(config["dim"]) is int
    for values in (config["optimizer"]["config"], config["initializer"]["config"]):
        assert all(type(value) in (float, bool, str, type(None)) for value in values.values())
    assert Table.from_config(config) == table


@pytest.mark.parametrize(
    "rate", ["x", True, -1.0, float("nan"), None, tf.Variable(3), tf.Variable([0.1]), [0.1]]
)
def test_invalid_rates_raise(rate: Any) -> None:
    with pytest.raises(ValueError, match="`learning_rate`"):
        optimizers.SGD(rate)


def test_schedules_and_variables_are_serialized() -> None:
    schedule = keras.optimizers.schedules.CosineDecay(0.5, 100)
    rule = optimizers.Adagrad(schedule, 0.0, 1e-10, follow=False)
    again: Any = optimizers.get(optimizers.serialize(rule))
    assert again.learning_rate.get_config() == schedule.get_config()
    assert (again.epsilon, again.follow) == (1e-10, False)
    config = optimizers.serialize(optimizers.SGD(tf.Variable(0.5)))
    assert config["config"]["learning_rate"] == 0.5
    with pytest.raises(ValueError, match="`follow`: 1"):
        optimizers.SGD(0.1, follow=1)  # type: ignore[arg-type]
