"""What a run does by its validation part: it stops, and steps become shorter. Over Keras's own.

In: the steps of training, and how good the model is on the validation part. Out: the entry
"validation" of metrics.json; the weights and rows of the best measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import keras

from slipstream_tf.cli.callbacks import StepCount
from slipstream_tf.cli.flag_set import RunError
from slipstream_tf.cli.settings import Settings
from slipstream_tf.telemetry.metrics import ClickMetrics

_MONITORED = "val_auc"
# What counts as better; a sum over other threads may differ by less.
_LEAST_GAIN = 1e-6


class Validation(keras.callbacks.Callback):
    """Measures the validation part every so many steps, and once more at the end of training.

    `keras.callbacks.EarlyStopping` and `ReduceLROnPlateau` see a measurement as an epoch's end.
    Rows' rates follow the dense layers'.

    Args:
        count: of the steps.
        settings: `early_stopping` and `plateau_factor`.
        measure: measures the model on the validation part, with all deferred gradients applied;
            with several ranks a collective, whose result all have.
        every: steps between measurements.
        left_out: called with the seconds that a measurement took.

    Attributes:
        measured: step and quality of each measurement.
        best_step: the step whose weights and rows training ends with.
    """

    def __init__(
        self,
        count: StepCount,
        settings: Settings,
        measure: Callable[[], ClickMetrics],
        every: int,
        left_out: Callable[[float], None],
    ) -> None:
        super().__init__()
        self._measure, self._every, self._left_out = measure, every, left_out
        self._count = count
        self.measured: list[dict[str, Any]] = []
        common: dict[str, Any] = {"mode": "max", "min_delta": _LEAST_GAIN}
        self._stopper = keras.callbacks.EarlyStopping(
            _MONITORED, patience=settings.early_stopping, restore_best_weights=True, **common
        )
        # In this order: a step that ends training needs no other rate.
        self._parts = [self._stopper]
        if settings.plateau_factor < 1.0:
            self._parts.append(
                keras.callbacks.ReduceLROnPlateau(
                    _MONITORED, settings.plateau_factor, patience=1, **common
                )
            )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to watch."""
        for part in self._parts:
            part.set_model(self.model)
            part.on_train_begin()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Measures, where it is time to."""
        if self._count.steps % self._every == 0:
            self._validate()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Measures where training ended; the run is one epoch."""
        if not self.measured or self.measured[-1]["step"] != self._count.steps:
            self._validate()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Brings back the best weights and rows."""
        start = time.perf_counter()
        for part in self._parts:
            part.on_train_end()
        self._left_out(time.perf_counter() - start)

    @property
    def best_step(self) -> int:
        return int(self.measured[self._stopper.best_epoch]["step"])

    def _validate(self) -> None:
        start = time.perf_counter()
        quality = self._measure()
        if math.isnan(quality.auc):
            raise RunError(
                f"The validation part has {quality.clicks:,} clicks in {quality.examples:,} "
                "examples: there is no AUC to stop by. Allowed: examples of both kinds."
            )
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self.measured.append(
            {"step": self._count.steps, "learning_rate": rate, **quality.to_dict()}
        )
        for part in self._parts:
            part.on_epoch_end(len(self.measured) - 1, {_MONITORED: quality.auc})
        self._left_out(time.perf_counter() - start)
