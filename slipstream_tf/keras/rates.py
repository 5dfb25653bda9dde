"""The tables' learning rates in `fit`: what they follow from its first moment on, and its logs."""

from typing import Any

import keras

from slipstream_tf import _compat
from slipstream_tf.tables.base import EmbeddingStore


class LearningRates(keras.callbacks.Callback):
    """Puts the tables' learning rates into the logs of `fit`; `slipstream.callback()` does so, too.

    Rates follow the dense optimizer without it: rows are scaled by its rate over what it was when
    training first saw it, at the first step. With it that is the rate that the optimizer has when
    `fit` is called, before any callback has changed it. Use it, before others, with a
    `keras.callbacks.LearningRateScheduler` that changes the rate at the first epoch already.
    """

    def set_model(self, model: Any) -> None:
        """Tells the tables of a model which optimizer they follow."""
        super().set_model(model)
        for store in _stores_in(model):
            store.follow(getattr(model, "optimizer", None))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the rates of the next update into `logs`."""
        for store in _stores_in(self.model):
            if logs is not None:
                logs.update(rates_of(store))


def rates_of(store: Any) -> dict[str, float]:
    """Returns the rates of a store's tables for logs.

    Returns:
        {"rows_learning_rate": rate} if the tables share one, else {"rows_learning_rate/<table>":
        rate}; empty if the rows are not the store's to update.
    """
    if not store.updates_rows:
        return {}
    if len(store.parts) == 1 and store.learning_rate is not None:
        return {"rows_learning_rate": store.learning_rate_of(store.tables[0].name)}
    names = [table.name for table in store.tables]
    return {f"rows_learning_rate/{name}": store.learning_rate_of(name) for name in names}


def _stores_in(model: Any) -> list[EmbeddingStore]:
    found = [getattr(layer, "store", None) for layer in _compat.layers_in(model)]
    return [store for store in found if isinstance(store, EmbeddingStore)]
