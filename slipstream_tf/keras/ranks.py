"""Makes the ranks of a job train one model in `model.fit`. In: the ranks. Out: equal weights.

And equal logs: what callbacks act on at an epoch's end is of all ranks.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from absl import logging

from slipstream_tf.distributed.agreement import require_same, require_same_rows
from slipstream_tf.distributed.comm import Communicator
from slipstream_tf.distributed.exchanged import ExchangedStore, ReplicatedStore
from slipstream_tf.distributed.gradients import flush_held
from slipstream_tf.errors import invalid
from slipstream_tf.keras.global_metrics import GlobalMetrics
from slipstream_tf.keras.loss_feedback import LossFeedback
from slipstream_tf.stores.variable import VariableStore


class RanksCallback(keras.callbacks.Callback):
    """Starts all ranks with the Keras weights of rank 0, and averages their gradients rightly.

    `Slipstream.callback` does the same; this is for a `fit` without an engine. Every rank must give
    `fit` as many batches as the others: see `distributed.even_ends`. With one rank, only what a
    `VariableStore` holds back is applied at the ends of epochs.

    Put it first among the callbacks. Those behind it see at an epoch's end

    - metrics of all ranks, of training and validation: EarlyStopping and ReduceLROnPlateau act
      alike on all ranks. They are what the metrics make of their states summed over the ranks.
      Metrics whose states are no sums stay each rank's own, with a warning (see `GlobalMetrics`),
      and so do the logs of batches, and logs that a `train_step` of the model's own makes of other
      things than `model.metrics`. A rank that does not validate sees what the others found;
    - rows without anything held back: ModelCheckpoint can save them on any rank. The validation
      came before that.

    Embedding rows are not broadcast. Those of replicated tables are compared when training begins
    (which takes the memory of a copy of the largest table): ranks that load rows must load the
    same, as `distributed.JobCheckpoints` does. Non-trainable state that depends on the batch
    (BatchNormalization) is each rank's own, and an empty batch spoils it.

    Args:
        comm: the ranks.
        store: whose held gradients are exchanged at the ends of epochs; None: there is none.
    """

    def __init__(self, comm: Communicator, store: Any = None) -> None:
        super().__init__()
        self._comm, self._store = comm, store
        self._metrics = GlobalMetrics(comm)
        self._is_training = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts weights, compares rows; refuses an optimizer that keeps gradients to a rank.

        Raises:
            ValueError: the optimizer is no `DistributedOptimizer` of these ranks; or the rows of
                replicated tables differ between ranks.
        """
        del logs
        comm, of_optimizer = self._comm, getattr(self.model.optimizer, "slipstream_comm", None)
        if comm.size == 1:
            if of_optimizer is not None and of_optimizer.size > 1:
                allowed = (
                    f"the optimizer's, of {of_optimizer.size} ranks (Slipstream(..., comm=comm))"
                )
                raise invalid("comm", "one process", "the callback of a fit", allowed)
            return
        if of_optimizer is not comm:
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
        if isinstance(self._store, ReplicatedStore):
            self._store.flush()
            require_same_rows(self._store, comm)
        elif isinstance(self._store, ExchangedStore):
            updates = {"num_updates": self._store.num_updates}
            require_same(comm, updates, "slipstream.updates", "the rows that ranks loaded")
        rate = self._store.learning_rate
        if rate is not None and hasattr(rate, "assign"):
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
        self._metrics.forget()
        self._is_training = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets a batch announced in the epoch before, whose data may have ended."""
        del epoch, logs
        self._forget_announced()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Remembers the metrics of training before those of the validation take their place."""
        del logs
        if self._is_training and self._comm.size > 1:
            self._metrics.keep_training_state(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the metrics of all ranks into `logs`; exchanges what ranks hold back."""
        del epoch
        if self._comm.size > 1:
            self._metrics.put_into({} if logs is None else logs, self.model)
        self._flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Exchanges what ranks hold back, so that all of them end with the same rows."""
        del logs
        self._is_training = False
        self._flush()
        self._forget_announced()

    def _flush(self) -> None:
        if isinstance(self._store, VariableStore):
            flush_held(self._store, self._store.optimizer or self.model.optimizer, self._comm)
        elif self._comm.size > 1:
            self._store.flush()

    def _forget_announced(self) -> None:
        if self._store.prefetches:
            self._store.forget_announced()
