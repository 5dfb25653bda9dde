"""Tests of callbacks: metrics over all ranks, and access to other callbacks."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import keras
import numpy as np
import pytest
from absl import logging

import slipstream_tf as slip
from slipstream_tf.keras.callbacks import SeesOtherCallbacks
from slipstream_tf.keras.global_metrics import GlobalMetrics


class Model:
    """Minimal Keras model that returns each metric's value."""

    def __init__(self, *metrics):
        self.metrics = list(metrics)

    def get_metrics_result(self):
        return {metric.name: metric.result() for metric in self.metrics}


class Largest(keras.metrics.Metric):
    """Metric that starts at -1 and therefore cannot be summed."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def reset_state(self):
        self.value.assign(-1.0)

    def update_state(self, value):
        self.value.assign(np.maximum(self.value.numpy(), value))

    def result(self):
        return self.value


class Averaged(Largest):
    """Metric with a variable that declares "mean" as its aggregation."""

    def __init__(self):
        keras.metrics.Metric.__init__(self, name="averaged")
        self.value = self.add_variable((), "zeros", aggregation="mean", name="value")

    def reset_state(self):
        self.value.assign(0.0)


def local_logs(model, prefix=""):
    return {prefix + k: float(v) for k, v in model.get_metrics_result().items()}


def test_means_and_confusion_counts_cover_all_examples(run_as_ranks):
    random = np.random.default_rng(0)
    labels, predictions = random.integers(0, 2, 60), random.random(60).astype(np.float32)
    parts = [slice(0, 7), slice(7, 60), slice(60, 60)]

    def filled(part):
        model = Model(keras.metrics.Mean("loss"), keras.metrics.AUC(name="auc"))
        if predictions[part].size:
            model.metrics[0].update_state(predictions[part])
            model.metrics[1].update_state(labels[part], predictions[part])
        return model

    def program(comm):
        model, metrics = filled(parts[comm.rank]), GlobalMetrics(comm)
        before = [v.numpy() for m in model.metrics for v in m.variables]
        logs = {**local_logs(model), "own": 3.0}
        metrics.put_into(logs, model)
        after = [v.numpy() for m in model.metrics for v in m.variables]
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(new, old)
        return logs

    wanted = local_logs(filled(slice(None)))
    for logs in run_as_ranks(3, program):
        assert logs == pytest.approx({**wanted, "own": 3.0}, rel=1e-6)
        assert isinstance(logs["auc"], float)


def test_training_and_validation_logs_are_separate(run_as_ranks):
    def program(comm):
        model, metrics = Model(keras.metrics.Mean("loss")), GlobalMetrics(comm)
        (loss,) = model.metrics
        loss.update_state([1.0, 2.0] if comm.rank else [6.0])
        logs = local_logs(model)
        epochs = []
        if comm.rank == 0:  # Rank 1 does not validate.
            metrics.keep_training_state(model)
            loss.reset_state()
            loss.update_state([0.5, 1.5])
            logs.update(local_logs(model, "val_"))
        metrics.put_into(logs, model)
        epochs.append(logs)
        loss.reset_state()
        loss.update_state([comm.rank])
        metrics.put_into(logs := local_logs(model), model)
        return [*epochs, logs]

    for first, second in run_as_ranks(2, program):
        assert first == {"loss": 3.0, "val_loss": 1.0}
        assert second == {"loss": 0.5}, "no validation in this epoch"


def test_metrics_that_are_not_sums_are_kept_with_one_warning(run_as_ranks, monkeypatch):
    reported = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: reported.append(text % values))

    def program(comm):
        model = Model(keras.metrics.Mean("loss"), Largest(), Averaged())
        for metric in model.metrics:
            metric.update_state(float(comm.rank))
        metrics, logs = GlobalMetrics(comm), local_logs(model)
        metrics.put_into(logs, model)
        metrics.put_into(logs, model)
        return logs

    for rank, logs in enumerate(run_as_ranks(2, program)):
        assert logs == {"loss": 0.5, "largest": float(rank), "averaged": float(rank)}
    assert len(reported) == 2 and "['largest', 'averaged'] cannot be summed" in reported[0]


def test_logs_of_custom_train_step_are_kept(run_as_ranks):
    def program(comm):
        model = Model(keras.metrics.Mean("loss"))
        model.metrics[0].update_state(float(comm.rank))
        logs = {"mine": float(comm.rank)}
        GlobalMetrics(comm).put_into(logs, model)
        return logs

    assert run_as_ranks(2, program) == [{"mine": 0.0}, {"mine": 1.0}]


def test_ranks_with_different_metrics_keep_local_values(run_as_ranks, monkeypatch):
    reported = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: reported.append(text % values))

    def program(comm):
        model = Model(keras.metrics.Mean("loss"), *([Largest()] if comm.rank else []))
        logs = {"loss": float(comm.rank)}
        GlobalMetrics(comm).put_into(logs, model)
        return logs

    assert run_as_ranks(2, program) == [{"loss": 0.0}, {"loss": 1.0}]
    assert "different metrics" in reported[0]


class CallbackLister(SeesOtherCallbacks):
    """Requests the other callbacks when `fit` begins, optionally in a thread."""

    def __init__(self, is_in_thread: bool = False) -> None:
        super().__init__()
        self.is_in_thread, self.found = is_in_thread, []

    def on_train_begin(self, logs: Any = None) -> None:
        if self.is_in_thread:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                self.found = pool.submit(self.other_callbacks).result()
        else:
            self.found = self.other_callbacks()


def fit(callbacks: Any) -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=0, callbacks=callbacks)


def own(found: list[Any]) -> list[Any]:
    """Removes the callbacks that Keras adds."""
    return [callback for callback in found if not isinstance(callback, keras.callbacks.History)]


def test_other_callbacks_are_listed_in_order() -> None:
    first, asks, last = (
        keras.callbacks.Callback(),
        CallbackLister(),
        keras.callbacks.TerminateOnNaN(),
    )
    fit([first, [asks, last]])
    assert own(asks.found) == [first, asks, last]


def test_callbacks_of_earlier_fit_are_not_listed() -> None:
    asks, before, now = CallbackLister(), keras.callbacks.Callback(), keras.callbacks.Callback()
    kept = [asks, before]
    fit(kept)
    assert own(asks.found) == [asks, before]
    fit([asks, now])
    assert own(asks.found) == [asks, now]


def test_single_callback_lists_itself_only_during_fit() -> None:
    asks = CallbackLister()
    assert asks.other_callbacks() == []
    fit(asks)
    assert own(asks.found) == [asks]


def test_callbacks_are_listed_from_other_thread() -> None:
    asks, other = CallbackLister(is_in_thread=True), keras.callbacks.Callback()
    fit([other, asks])
    assert own(asks.found) == [other, asks]


def test_nested_callback_list_is_flattened() -> None:
    first, asks = keras.callbacks.Callback(), CallbackLister()
    inner = keras.callbacks.CallbackList([asks])
    fit([first, inner])
    assert own(asks.found) == [first, inner, asks]


def test_callbacks_print_what_they_belong_to() -> None:
    layer = slip.keras.Embedding(10, 4, name="item")
    slipstream = slip.Slipstream(layer, slip.MaskGradients(0.5))
    store = "<NativeStore with tables ['item']>"
    policies = [slip.MaskGradients(0.5)]
    assert repr(slipstream) == f"<Slipstream with policies {policies} for {store}>"
    assert repr(slipstream.callback()) == f"<SaturationCallback of {slipstream!r}>"
    ranks = slip.keras.RanksCallback(slip.distributed.init(), layer.store)
    assert repr(ranks) == f"<RanksCallback on rank 0 of 1 for {store}>"
    rates = slip.keras.LearningRates()
    assert repr(rates) == "<LearningRates of no model>"
    rates.set_model(keras.Sequential([layer], name="clicks"))
    assert repr(rates) == "<LearningRates of model 'clicks'>"
