"""Counts the steps of `model.fit` for the saturation engine. In: batch ends. Out: window ends."""

from __future__ import annotations

import os
from typing import Any, Protocol

import keras
from absl import logging

from slipstream_tf._compat import callbacks_beside
from slipstream_tf.config import SaturationConfig
from slipstream_tf.distributed.comm import Communicator
from slipstream_tf.keras.loss_feedback import LossFeedback, Recorder
from slipstream_tf.keras.ranks import RanksCallback
from slipstream_tf.saturation.report import WindowReport
from slipstream_tf.telemetry.tensorboard import WindowWriter


class Engine(Protocol):
    """What the callback needs of a `Slipstream`, which makes it."""

    @property
    def config(self) -> SaturationConfig:
        """The settings."""
        ...

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        ...

    @property
    def store(self) -> Any:
        """The store whose tables are tracked."""
        ...

    @property
    def needs_losses(self) -> bool:
        """Whether the settings need the inputs' losses."""
        ...

    @property
    def record_losses(self) -> Recorder:
        """Takes in the losses of a training step."""
        ...

    def back_up(self, is_backed_up: bool) -> None:
        """Says whether weight files have the engine's state, too."""
        ...

    def plan_epochs(self, epochs: int) -> None:
        """Tells of passes over the data to come."""
        ...

    def step(self, steps: int) -> WindowReport | None:
        """Counts trained steps; returns the report of a window that ended."""
        ...


class SaturationCallback(keras.callbacks.Callback):
    """Ends the engine's windows while `model.fit` runs; `evaluate` and `predict` don't count.

    With `steps_per_execution` above 1 a window ends with the execution in which it gets full. With
    several ranks it does what `RanksCallback` does; put it first. What a
    `keras.callbacks.BackupAndRestore` beside it backs up has the engine's state, too (one process).

    Args:
        slipstream: whose steps are counted.
        log_dir: folder for TensorBoard, which gets scalars and a histogram for each window, in its
            sub-folder "slipstream" (`telemetry.tensorboard.WindowWriter`). None: that of the
            `keras.callbacks.TensorBoard` beside this one, if there is one. Rank 0 writes.
    """

    def __init__(self, slipstream: Engine, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._slipstream = slipstream
        self._ranks = RanksCallback(slipstream.comm, slipstream.store)
        self._iterations = 0
        self._log_dir = log_dir
        self._writer: WindowWriter | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses a LossScaleOptimizer, whose gradients are not the loss's; connects losses."""
        if isinstance(self.model.optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "Invalid `optimizer`: LossScaleOptimizer. The embedding tables would be updated "
                "with scaled gradients. Use float32 or mixed_bfloat16 without loss scaling."
            )
        self._open_writer()
        self._ranks.set_model(self.model)
        self._ranks.on_train_begin(logs)
        config = self._slipstream.config
        others = callbacks_beside(self)
        backups = [c for c in others if isinstance(c, keras.callbacks.BackupAndRestore)]
        self._slipstream.back_up(bool(backups))
        epochs = self.params.get("epochs", 1)
        self._slipstream.plan_epochs(epochs)
        if epochs > 1 and config.skips_some_inputs:
            logging.warning(
                "model.fit(epochs=%d) with skipped inputs: Keras holds later epochs to the number "
                "of batches of the first, so that inputs of an epoch that skips less are left out. "
                "Use slipstream.apply(data.repeat(%d), ...) and epochs=1.",
                epochs,
                epochs,
            )
        if isinstance(self.model, LossFeedback):
            needs_losses = self._slipstream.needs_losses
            self.model.observe_losses_with(self._slipstream.record_losses if needs_losses else None)
        elif self._slipstream.needs_losses:
            logging.warning(
                "The saturation engine needs the inputs' losses (score, guard, budget or estimate "
                "of cost), but %s "
                "does not tell them: make it a slipstream_tf.keras.LossFeedback, or call "
                "slipstream.record_losses in its train_step. Until then %s.",
                type(self.model).__name__,
                "nothing is skipped" if config.skips_by_losses else "nothing is told of them",
            )

    def _open_writer(self) -> None:
        if self._writer is not None or self._slipstream.comm.rank:
            return
        folder = self._log_dir
        for other in callbacks_beside(self) if folder is None else ():
            if isinstance(other, keras.callbacks.TensorBoard):
                folder = other.log_dir
        if folder is not None:
            self._writer = WindowWriter(folder)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """See `RanksCallback`."""
        self._ranks.on_test_begin(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Exchanges what ranks hold back, so that all of them end with the same rows."""
        self._ranks.on_train_end(logs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets a batch announced in the epoch before, whose data may have ended."""
        # Here, not as training begins: a BackupAndRestore behind this one sets them then.
        self._iterations = int(self.model.optimizer.iterations.numpy())
        self._ranks.on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of one execution of the train function."""
        del batch, logs
        if self.model.steps_per_execution == 1:
            self._step(1)
        else:
            self._count_iterations()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of a last, shorter execution, whose end Keras may not tell.

        Then does what `RanksCallback` does: callbacks behind this one see metrics of all ranks.
        """
        if self.model.steps_per_execution > 1:
            self._count_iterations()
        self._ranks.on_epoch_end(epoch, logs)

    def _count_iterations(self) -> None:
        # What `batch` means with several steps per execution changed between versions of Keras.
        iterations = int(self.model.optimizer.iterations.numpy())
        self._step(iterations - self._iterations)
        self._iterations = iterations

    def _step(self, steps: int) -> None:
        report = self._slipstream.step(steps)
        if report is not None and self._writer is not None:
            self._writer.write(report)
