"""keras.callbacks.AmongOthers: what a callback can tell of the others in its `fit`."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import keras
import numpy as np

from slipstream_tf.keras.callbacks import AmongOthers


class Asks(AmongOthers):
    """Asks when a `fit` begins, from a thread if it is told to."""

    def __init__(self, is_in_thread: bool = False) -> None:
        super().__init__()
        self.is_in_thread, self.found = is_in_thread, []

    def on_train_begin(self, logs: Any = None) -> None:
        if self.is_in_thread:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                self.found = pool.submit(self.beside).result()
        else:
            self.found = self.beside()


def fit(callbacks: Any) -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=0, callbacks=callbacks)


def own(found: list[Any]) -> list[Any]:
    """Without those that Keras adds."""
    return [callback for callback in found if not isinstance(callback, keras.callbacks.History)]


def test_callbacks_of_the_same_fit_in_their_order() -> None:
    first, asks, last = keras.callbacks.Callback(), Asks(), keras.callbacks.TerminateOnNaN()
    fit([first, [asks, last]])
    assert own(asks.found) == [first, asks, last]


def test_those_of_another_fit_are_not_beside() -> None:
    asks, before, now = Asks(), keras.callbacks.Callback(), keras.callbacks.Callback()
    kept = [asks, before]
    fit(kept)
    assert own(asks.found) == [asks, before]
    fit([asks, now])
    assert own(asks.found) == [asks, now]


def test_alone_and_before_a_fit() -> None:
    asks = Asks()
    assert asks.beside() == []
    fit(asks)
    assert own(asks.found) == [asks]


def test_whoever_asks_is_told_the_same() -> None:
    asks, other = Asks(is_in_thread=True), keras.callbacks.Callback()
    fit([other, asks])
    assert own(asks.found) == [other, asks]


def test_a_list_of_keras_s_own_within_another() -> None:
    first, asks = keras.callbacks.Callback(), Asks()
    inner = keras.callbacks.CallbackList([asks])
    fit([first, inner])
    assert own(asks.found) == [first, inner, asks]
