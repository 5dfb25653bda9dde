"""Counts the steps of `model.fit` for the saturation engine. In: batch ends. Out: window ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from slipstream_tf.keras.slipstream import Slipstream


class SaturationCallback(keras.callbacks.Callback):
    """Ends the engine's windows while `model.fit` runs; `evaluate` and `predict` don't count.

    With `steps_per_execution` above 1 a window ends with the execution in which it gets full.

    Args:
        slipstream: whose steps are counted.
    """

    def __init__(self, slipstream: Slipstream) -> None:
        super().__init__()
        self._slipstream = slipstream
        self._iterations = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses a model with a LossScaleOptimizer, whose gradients are not the loss's."""
        del logs
        if isinstance(self.model.optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "Invalid `optimizer`: LossScaleOptimizer. The embedding tables would be updated "
                "with scaled gradients. Use float32 or mixed_bfloat16 without loss scaling."
            )
        self._iterations = int(self.model.optimizer.iterations.numpy())

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of one execution of the train function."""
        del batch, logs
        if self.model.steps_per_execution == 1:
            self._slipstream.step()
        else:
            self._count_iterations()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of a last, shorter execution, whose end Keras may not tell."""
        del epoch, logs
        if self.model.steps_per_execution > 1:
            self._count_iterations()

    def _count_iterations(self) -> None:
        # What `batch` means with several steps per execution changed between versions of Keras.
        iterations = int(self.model.optimizer.iterations.numpy())
        self._slipstream.step(iterations - self._iterations)
        self._iterations = iterations
