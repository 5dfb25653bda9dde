"""Makes the ranks of a job train one model in `model.fit`. In: the ranks. Out: equal weights."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from absl import logging

from slipstream_tf.distributed.comm import Communicator
from slipstream_tf.errors import invalid
from slipstream_tf.keras.loss_feedback import LossFeedback


class RanksCallback(keras.callbacks.Callback):
    """Starts all ranks with the Keras weights of rank 0, and averages their gradients rightly.

    `Slipstream.callback` does the same; this is for a `fit` without an engine. Every rank must give
    `fit` as many batches as the others: see `distributed.even_ends`. With one rank nothing is done.

    Embedding rows are neither broadcast nor compared: ranks that load rows must load the same
    (`distributed.JobCheckpoints` does). Metrics in Keras's logs are each rank's own: a callback
    that acts on them (EarlyStopping, ReduceLROnPlateau) acts differently on each rank, and one that
    saves rows on one rank fails while gradients are held back. Non-trainable state that depends on
    the batch (BatchNormalization) is each rank's own, too, and an empty batch spoils it.

    Args:
        comm: the ranks.
        store: whose held gradients are exchanged when training ends; None: there is none.
    """

    def __init__(self, comm: Communicator, store: Any = None) -> None:
        super().__init__()
        self._comm, self._store = comm, store

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts weights; refuses an optimizer that would keep gradients to this rank."""
        del logs
        comm = self._comm
        if comm.size == 1:
            return
        if getattr(self.model.optimizer, "slipstream_comm", None) is not comm:
            raise invalid(
                "optimizer",
                type(self.model.optimizer).__name__,
                f"a fit on {comm.size} ranks",
                "slipstream_tf.distributed.DistributedOptimizer(optimizer, comm) with the store's "
                "comm, which averages gradients over the ranks",
            )
        for index, variable in enumerate(self.model.variables):
            value = variable.value
            if value.dtype.is_floating:
                name = f"slipstream.weights.{index}"
                variable.assign(comm.broadcast(value, 0, "dense", name))
        rate = getattr(self._store, "learning_rate", None)
        if rate is not None:
            name = "slipstream.rows_learning_rate"
            rate.assign(comm.broadcast(tf.convert_to_tensor(rate), 0, "control", name))
        if isinstance(self.model, LossFeedback):
            self.model.train_with(comm)
        else:
            logging.warning(
                "%s is no slipstream_tf.keras.LossFeedback: where the ranks' batches differ in "
                "size, inputs of small ones get more weight, and an empty one has no loss. Use "
                "slipstream_tf.distributed.scale_loss in its compute_loss.",
                type(self.model).__name__,
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets a batch announced in the epoch before, whose data may have ended."""
        del epoch, logs
        self._forget_announced()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Exchanges what ranks hold back, so that all of them end with the same rows."""
        del logs
        if self._comm.size > 1 and hasattr(self._store, "flush"):
            self._store.flush()
        self._forget_announced()

    def _forget_announced(self) -> None:
        if getattr(self._store, "prefetches", False):
            self._store.forget_announced()
