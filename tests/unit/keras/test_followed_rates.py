"""Tests that table learning rates follow the dense layers in `fit`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table, distributed, initializers, optimizers
from slipstream_tf.keras import CombinedOptimizer, EmbeddingCollection, LearningRates
from slipstream_tf.keras.callbacks import RanksCallback

schedules = keras.optimizers.schedules
KEYS = np.zeros((8, 1), np.int64)
LABELS = np.zeros((8, 1), np.float32)


def mean_output(_: Any, outputs: Any) -> Any:
    return tf.reduce_mean(outputs)


def make(
    dense: Any, rule: Any = None, apply: str = "backward", **compile_arguments: Any
) -> tuple[keras.Model, EmbeddingCollection]:
    """Returns a model that moves its row by the rate per step.

    The loss is the mean output.
    """
    table = Table("t", 1, initializer=initializers.Zeros())
    layer = EmbeddingCollection([table], rule or optimizers.SGD(0.5), name="tables", apply=apply)
    inputs = keras.Input((1,), dtype="int64")
    # The optimizer needs at least one dense weight.
    outputs = keras.layers.Dense(1, kernel_initializer="zeros")(layer(inputs)[:, 0])
    model = keras.Model(inputs, outputs + layer(inputs)[:, 0])
    model.compile(dense, mean_output, **compile_arguments)
    return model, layer


def fit(model: keras.Model, epochs: int = 1, callbacks: Any = (), **arguments: Any) -> Any:
    arguments = {"batch_size": 8, "verbose": 0, **arguments}
    return model.fit(KEYS, LABELS, epochs=epochs, callbacks=list(callbacks), **arguments)


def rate(layer: EmbeddingCollection) -> float:
    return layer.store.learning_rate_of("t")


@pytest.mark.parametrize("arguments", [{}, {"run_eagerly": True}, {"apply": "step"}])
def test_learning_rate_scheduler_changes_row_rate(arguments: Any) -> None:
    dense = keras.optimizers.SGD(0.25)
    model, layer = make(CombinedOptimizer(dense) if "apply" in arguments else dense, **arguments)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.25 / 2**epoch)
    moved = []
    record = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: moved.append(float(layer.store.gather("t", [0])[0][0, 0]))
    )
    fit(model, 3, [scheduler, record])
    assert rate(layer) == 0.125
    assert float(layer.learning_rate) == 0.5
    # The dense kernel is 0 in the first step, therefore the row moves by exactly the rate.
    assert moved[0] == -0.5 and moved[0] > moved[1] > moved[2]


def test_reduce_lr_on_plateau_changes_row_rate() -> None:
    model, layer = make(keras.optimizers.SGD(0.25))
    plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1e9)
    fit(model, 3, [plateau])
    assert float(model.optimizer.learning_rate) == 0.0625 and rate(layer) == 0.125


@pytest.mark.parametrize("arguments", [{}, {"steps_per_execution": 2}])
def test_dense_schedule_changes_row_rate(arguments: Any) -> None:
    steps = schedules.PiecewiseConstantDecay([1, 2], [0.25, 0.125, 0.0625])
    model, layer = make(keras.optimizers.SGD(steps), **arguments)
    fit(model, batch_size=4)
    assert rate(layer) == 0.25
    fit(model)
    assert rate(layer) == 0.125


@pytest.mark.parametrize("dense", [0.25, 0.0])
def test_rows_are_bitwise_equal_at_constant_rate(dense: float) -> None:
    rows = []
    for follow in (True, False):
        model, layer = make(
            keras.optimizers.SGD(dense), optimizers.Adagrad(0.3, 0.0, 1e-10, follow=follow)
        )
        fit(model, 3)
        rows.append(layer.store.export_table("t")["rows"])
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("own", ["no follow", "schedule", "variable"])
def test_fixed_rates_do_not_follow_dense_rate(own: str) -> None:
    rules: dict[str, Any] = {
        "no follow": optimizers.SGD(0.5, follow=False),
        "schedule": optimizers.SGD(schedules.ExponentialDecay(0.5, 1, 1.0)),
        "variable": optimizers.SGD(tf.Variable(0.5)),
    }
    model, layer = make(keras.optimizers.SGD(0.25), rules[own])
    fit(model, 2, [keras.callbacks.LearningRateScheduler(lambda epoch: 0.25 / 2**epoch)])
    assert rate(layer) == 0.5


def test_dense_rate_variable_can_be_row_rate() -> None:
    dense = keras.optimizers.SGD(0.25)
    model, layer = make(dense, optimizers.SGD(dense.learning_rate))
    dense.learning_rate = 0.125
    fit(model)
    assert rate(layer) == 0.125
    assert layer.store.gather("t", [0])[0].numpy() == -0.125


def test_warmup_rises_to_table_rate() -> None:
    steps = schedules.CosineDecay(0.0, 100, warmup_target=0.25, warmup_steps=2)
    model, layer = make(keras.optimizers.SGD(steps))
    fit(model)
    assert rate(layer) == 0.25  # Halfway through the warm-up.
    fit(model)
    assert rate(layer) == 0.5


def test_schedule_starting_at_zero_raises() -> None:
    model, _ = make(keras.optimizers.SGD(schedules.PolynomialDecay(0.0, 10, 0.5)))
    with pytest.raises(ValueError, match=r"`learning_rate`: 0.0 for the tables that follow Poly"):
        fit(model)


@pytest.mark.parametrize("dense", [0.0, 1e-7])
def test_large_jump_of_dense_rate_raises(dense: float) -> None:
    model, layer = make(keras.optimizers.SGD(dense))
    fit(model)
    before = layer.table("t").read([0]).tolist()
    model.optimizer.learning_rate = 1e-3
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"more than 10 times.*follow=False"):
        fit(model)
    assert layer.table("t").read([0]).tolist() == before


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, "fast"])
def test_assigned_rate_must_be_number(wrong: Any) -> None:
    _, layer = make(keras.optimizers.SGD(0.25))
    table = layer.table("t")
    with pytest.raises(ValueError, match=r"`learning_rate`.*table 't'"):
        table.learning_rate = wrong
    with pytest.raises(ValueError, match=r"`learning_rate`.*layer 'tables'"):
        layer.learning_rate = wrong
    layer.learning_rate = tf.constant(0.125)
    assert rate(layer) == 0.125


def test_models_sharing_table_follow_their_optimizers() -> None:
    model, layer = make(keras.optimizers.SGD(0.25))
    other = keras.Model(model.inputs, layer(model.inputs[0])[:, 0])
    other.compile(keras.optimizers.SGD(4.0), mean_output)
    fit(model)
    fit(other)
    assert rate(layer) == 0.5
    model.optimizer.learning_rate = 0.125
    start = float(layer.store.gather("t", [0])[0][0, 0])
    fit(other)
    assert float(layer.store.gather("t", [0])[0][0, 0]) == start - 0.5
    logs = fit(model, 1, [LearningRates()]).history
    assert logs["rows_learning_rate"] == [0.25]


def test_recompile_resets_reference_rate() -> None:
    model, layer = make(keras.optimizers.SGD(0.25))
    fit(model)
    model.compile(keras.optimizers.SGD(1.0), mean_output)
    fit(model)
    assert rate(layer) == 0.5
    model.optimizer.learning_rate = 0.5
    fit(model)
    assert rate(layer) == 0.25
    layer.store.rates.assign(0, 1.0)
    assert rate(layer) == 1.0 and float(layer.learning_rate) == 2.0


def test_reference_rate_is_saved_and_restored(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        keras.Variable, "__int__", None, raising=False
    )  # Keras 3.3 does not define it.
    model, layer = make(keras.optimizers.SGD(0.25))
    fit(model)
    model.optimizer.learning_rate = 0.125
    path = str(tmp_path / "model.keras")
    model.save(path)
    again = keras.models.load_model(path, custom_objects={"mean_output": mean_output})
    for trained in (model, again):
        fit(trained)
        assert rate(trained.get_layer("tables")) == 0.25
    # Rows loaded into a model with a new optimizer follow the new rate.
    fresh, other = make(keras.optimizers.SGD(0.0625))
    other.load_own_variables(_saved(layer))
    fit(fresh)
    assert rate(other) == 0.5


def _saved(layer: EmbeddingCollection) -> dict[str, Any]:
    found: dict[str, Any] = {}
    layer.save_own_variables(found)
    return found


@pytest.mark.parametrize("kind", ["LearningRates", "RanksCallback"])
def test_logs_contain_row_rate_changed_in_first_epoch(kind: str) -> None:
    model, layer = make(keras.optimizers.SGD(0.25))
    ours = LearningRates() if kind == "LearningRates" else None
    ours = ours or RanksCallback(distributed.SingleProcess(), layer.store)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.0625 * (epoch + 1))
    history = fit(model, 2, [scheduler, ours])
    assert history.history["rows_learning_rate"] == [0.125, 0.25]


def test_logs_contain_rate_of_each_table() -> None:
    tables = [Table("a", 1, "adagrad"), Table("b", 1, optimizers.SGD(0.5))]
    layer = EmbeddingCollection(tables, name="tables")
    inputs = keras.Input((2,), dtype="int64")
    model = keras.Model(inputs, keras.layers.Flatten()(layer(inputs)))
    model.compile("sgd", mean_output)
    keys = np.zeros((4, 2), np.int64)
    history = model.fit(keys, keys, verbose=0, callbacks=[LearningRates()]).history
    assert history["rows_learning_rate/b"] == [0.5]
    assert layer.learning_rate is None
    with pytest.raises(ValueError, match=r"`learning_rate`: 0.1 for layer 'tables'.*table\(name\)"):
        layer.learning_rate = 0.1
