"""Callbacks of `model.fit`: ranks train one model, windows end, rates follow, jobs commit.

In: the ranks, an engine, batch ends. Out: equal weights, logs of all ranks, window ends.
"""

import os
import sys
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from slipstream_tf import _compat
from slipstream_tf._utils.agreement import require_same, require_same_rows
from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.errors import invalid
from slipstream_tf.distributed.elastic import ElasticState
from slipstream_tf.distributed.exchanged import ExchangedStore, ReplicatedStore
from slipstream_tf.distributed.optimizer import flush_deferred
from slipstream_tf.keras.contract import refuse_scaled_gradients
from slipstream_tf.keras.global_metrics import GlobalMetrics
from slipstream_tf.keras.loss_feedback import LossFeedback
from slipstream_tf.keras.misuse import require_fit
from slipstream_tf.sampling.passes import EpochWatch
from slipstream_tf.tables.base import EmbeddingStore, TrackedStore
from slipstream_tf.tables.variable import VariableStore
from slipstream_tf.telemetry.tensorboard import WindowWriter


class LearningRates(keras.callbacks.Callback):
    """Puts the tables' learning rates into the logs of `fit`; `slipstream.callback()` does so, too.

    Rates follow the dense optimizer without it: rows are scaled by its rate over what it was when
    training first saw it, at the first step. With it that is the rate that the optimizer has when
    `fit` is called, before any callback has changed it. Use it, before others, with a
    `keras.callbacks.LearningRateScheduler` that changes the rate at the first epoch already.
    """

    def set_model(self, model: Any) -> None:
        """Lets the tables of a model follow its optimizer."""
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


class AmongOthers(keras.callbacks.Callback):
    """A callback that finds the other callbacks of its `fit`.

    Keras 3 does not report them. But Keras's list of all callbacks sets the parameters, and a `fit`
    gives its callbacks one dictionary of parameters, which no other `fit` has.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lists: list[list[Any]] = []

    def set_params(self, params: dict[str, Any]) -> None:
        """Stores the parameters, and the lists that set them."""
        super().set_params(params)
        self._lists = _lists_that_call()

    def beside(self) -> list[Any]:
        """Returns the callbacks of the `fit` that this was last given to, itself included.

        They are in order; there are none before the first `fit`.
        """
        members = [member for found in self._lists for member in found]
        found = {
            id(member): member
            for member in members
            if isinstance(member, keras.callbacks.Callback) and member.params is self.params
        }
        return list(found.values())


def _lists_that_call() -> list[list[Any]]:
    """The callbacks of each list whose method is being run by this thread, the outer ones first."""
    found: list[list[Any]] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            found.insert(0, owner.callbacks)
        frame = frame.f_back
    return found


class RanksCallback(AmongOthers):
    """Starts all ranks with the Keras weights of rank 0, and averages their gradients rightly.

    `Slipstream.callback` does the same; this is for a `fit` without an engine. Every rank must give
    `fit` as many batches as the others: see `distributed.even_ends`. With one rank, only what a
    `VariableStore` defers is applied at the ends of epochs.

    Put it first among the callbacks. Those behind it see at an epoch's end

    - metrics of all ranks, of training and validation: EarlyStopping and ReduceLROnPlateau act
      alike on all ranks. They are what the metrics make of their states summed over the ranks.
      Metrics whose states are no sums stay each rank's own, with a warning (see `GlobalMetrics`),
      and so do the logs of batches, and logs that a `train_step` of the model's own makes of other
      things than `model.metrics`. A rank that does not validate sees what the others found;
    - rows without deferred gradients: ModelCheckpoint can save them on any rank. The validation
      came before that.

    Embedding rows are not broadcast. Those of replicated tables are compared when training begins
    (which takes the memory of a copy of the largest table): ranks that load rows must load the
    same, as `distributed.JobCheckpoints` does. Non-trainable state that depends on the batch
    (BatchNormalization) is each rank's own, and an empty batch spoils it.

    Args:
        comm: the ranks.
        store: whose rows are compared, and whose deferred gradients are exchanged at the ends of
            epochs.

    Raises:
        ValueError: `comm` is None, or `store` is no store, such as a layer.
    """

    def __init__(self, comm: Communicator, store: Any) -> None:
        super().__init__()
        if not isinstance(store, TrackedStore):
            allowed = "a store: embeddings.store of the layer, or a tables.VariableStore"
            raise invalid("store", store, type(self).__name__, allowed)
        if comm is None:
            allowed = "distributed.init(), of one process, too"
            raise invalid("comm", None, type(self).__name__, allowed)
        self._comm = comm
        self._store: Any = store
        self._metrics = GlobalMetrics(comm)
        self._is_training = False

    def set_model(self, model: Any) -> None:
        """Tells the tables which optimizer they follow, before a callback changes its rate."""
        super().set_model(model)
        self._store.follow(getattr(model, "optimizer", None))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts weights, compares rows; refuses an optimizer that keeps gradients to a rank.

        Raises:
            ValueError: the optimizer is no `DistributedOptimizer` of these ranks; or the rows of
                replicated tables differ between ranks.
        """
        comm, of_optimizer = self._comm, getattr(self.model.optimizer, "slipstream_comm", None)
        if comm.size == 1:
            if of_optimizer is not None and of_optimizer.size > 1:
                ranks = f"{of_optimizer.size} ranks"
                allowed = f"the optimizer's, of {ranks} (Slipstream(..., comm=comm))"
                raise invalid("comm", "one process", "the callback of a fit", allowed)
            return
        if of_optimizer is not comm:
            allowed = (
                "slipstream_tf.distributed.DistributedOptimizer(optimizer, comm) with the store's "
                "comm, which averages gradients over the ranks"
            )
            name = type(self.model.optimizer).__name__
            raise invalid("optimizer", name, f"a fit on {comm.size} ranks", allowed)
        for index, variable in enumerate(self.model.variables):
            value = variable.value
            if value.dtype.is_floating:
                name = f"slipstream.weights.{index}"
                variable.assign(comm.broadcast(value, 0, "dense", name))
        for store in self._store.parts:
            if isinstance(store, ReplicatedStore):
                store.flush()
                require_same_rows(store, comm)
            elif isinstance(store, ExchangedStore):
                updates = {"num_updates": store.num_updates}
                require_same(comm, updates, "slipstream.updates", "the rows that ranks loaded")
        for index, rate in enumerate(self._store.rate_variables):
            name = f"slipstream.rows_learning_rate.{index}"
            rate.assign(comm.broadcast(tf.convert_to_tensor(rate), 0, "control", name))
        if isinstance(self.model, LossFeedback):
            self.model.train_with(comm)
        else:
            logging.warning(
                "%s is no slipstream_tf.keras.LossFeedback: where the ranks' batches differ in "
                "size, examples of small ones get more weight, and an empty one has no loss. Use "
                "slipstream_tf.distributed.scale_loss in its compute_loss.",
                type(self.model).__name__,
            )
        self._metrics.forget()
        self._is_training = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets a batch announced in the epoch before, whose data may have ended."""
        self._forget_announced()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Remembers the metrics of training before those of the validation take their place."""
        if self._is_training and self._comm.size > 1:
            self._metrics.keep_training_state(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts all ranks' metrics and the rows' rates into `logs`; exchanges deferred gradients."""
        logs = {} if logs is None else logs
        if self._comm.size > 1:
            self._metrics.put_into(logs, self.model)
        logs.update(rates_of(self._store))
        self._flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Exchanges deferred gradients, so that all ranks end with the same rows."""
        self._is_training = False
        self._flush()
        self._forget_announced()

    def _flush(self) -> None:
        if isinstance(self._store, VariableStore):
            flush_deferred(self._store, self._store.optimizer or self.model.optimizer, self._comm)
        elif self._comm.size > 1:
            self._store.flush()

    def _forget_announced(self) -> None:
        if self._store.prefetches:
            self._store.forget_announced()


class SaturationCallback(RanksCallback):
    """Ends the engine's windows while `model.fit` runs; `evaluate` and `predict` don't count.

    With `steps_per_execution` above 1 a window ends with the execution in which it gets full. With
    several ranks it does what `RanksCallback` does; put it first. What a
    `keras.callbacks.BackupAndRestore` beside it backs up has the engine's state, too (one process).

    Args:
        slipstream: a `Slipstream`, whose steps are counted.
        log_dir: folder for TensorBoard, which gets scalars and a histogram for each window, in its
            sub-folder "slipstream" (`telemetry.tensorboard.WindowWriter`). None: that of the
            `keras.callbacks.TensorBoard` beside this one, if there is one. Rank 0 writes.
    """

    def __init__(self, slipstream: Any, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__(slipstream.comm, slipstream.store)
        self.slipstream = slipstream
        self._iterations = 0
        self._watch = EpochWatch()
        self._fit: Any = None
        self._steps: int | None = None
        self._epochs, self._steps_in_epoch = 1, 0
        self._is_planned = self._is_first_epoch = True
        self._log_dir = log_dir
        self._writer: WindowWriter | None = None

    def __call__(self, log_dir: str | os.PathLike[str] | None = None) -> "SaturationCallback":
        """Returns a callback of the same engine that writes into a folder."""
        return SaturationCallback(self.slipstream, log_dir)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes that what is read now is validation data."""
        self.slipstream.is_validating = True
        super().on_test_begin(logs)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Notes that training goes on."""
        self.slipstream.is_validating = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses what does not fit together; connects losses, plans the steps."""
        self.slipstream.is_validating = False
        refuse_scaled_gradients(self.model.optimizer, self.slipstream.settings.policies)
        others = self.beside()
        if self._fit is self.params:
            raise invalid("callbacks", "one callback twice", "fit", "each callback once")
        self._fit = self.params
        engines = [c.slipstream for c in others if isinstance(c, SaturationCallback)]
        require_fit(self.slipstream, self.model, engines)
        self._open_writer()
        super().on_train_begin(logs)
        backups = [c for c in others if isinstance(c, keras.callbacks.BackupAndRestore)]
        self.slipstream.back_up(bool(backups))
        self._begin_epochs()
        needs_losses = self.slipstream.settings.needs_losses
        if isinstance(self.model, LossFeedback):
            self.model.observe_losses_with(self.slipstream.record_losses if needs_losses else None)
            thins = self.slipstream.settings.thins_in_step
            self.model.thin_batches_with(self.slipstream.thin if thins else None)

    def _begin_epochs(self) -> None:
        """Tells the engine how long training is, as far as Keras knows."""
        self._steps = self.params.get("steps")
        self._epochs = self.params.get("epochs", 1)
        self._is_planned = self.slipstream.plan.add_epochs(self._epochs, self._steps)
        self._is_first_epoch = True
        steps_are_given = self._steps is not None and self._steps != self.slipstream.most_batches
        self._watch.begin_fit(steps_are_given)

    def _open_writer(self) -> None:
        if self._writer is not None or self._comm.rank:
            return
        folder = self._log_dir
        for other in self.beside() if folder is None else ():
            if isinstance(other, keras.callbacks.TensorBoard):
                folder = other.log_dir
        if folder is not None:
            self._writer = WindowWriter(folder)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets a batch announced in the epoch before, whose data may have ended."""
        self._steps_in_epoch = 0
        self._watch.begin_epoch()
        if self._is_first_epoch and epoch:
            # `fit(initial_epoch=...)`: those before were of another `fit`.
            self.slipstream.plan.leave_out_epochs(epoch)
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where an execution of several steps begins."""
        # Each time: a BackupAndRestore behind this one, or a loop that goes on, sets them late.
        if self.model.steps_per_execution > 1:
            self._iterations = int(self.model.optimizer.iterations.numpy())

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of one execution of the train function."""
        self._watch.count()
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
        self._watch.end_epoch(epoch, self._steps is not None)
        if self._is_first_epoch and not self._is_planned and self._epochs > epoch + 1:
            # No step was skipped yet: the data are as long as this epoch was.
            self.slipstream.plan.add_epochs(self._epochs - epoch, self._steps_in_epoch)
        self._is_first_epoch = False
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the watch over epochs; then does what `RanksCallback` does."""
        self._watch.end_fit()
        if isinstance(self.model, LossFeedback):
            # What is trained without this callback is not thinned.
            self.model.thin_batches_with(None)
        super().on_train_end(logs)

    def _count_iterations(self) -> None:
        # What `batch` means with several steps per execution changed between versions of Keras.
        iterations = int(self.model.optimizer.iterations.numpy())
        self._step(iterations - self._iterations)
        self._iterations = iterations

    def _step(self, steps: int) -> None:
        self._steps_in_epoch += steps
        report = self.slipstream.step(steps)
        if report is not None and self._writer is not None:
            self._writer.write(report)


class ElasticCallback(keras.callbacks.Callback):
    """Counts the steps of `fit` for an `ElasticState`, which commits at intervals; put it last.

    Args:
        state: of the training, restored.
    """

    def __init__(self, state: ElasticState) -> None:
        super().__init__()
        self._state, self._before = state, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Notes where the optimizer's steps begin."""
        self._before = int(self.model.optimizer.iterations)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the steps of an execution."""
        now = self._before + 1
        if self.model.steps_per_execution > 1:
            now = int(self.model.optimizer.iterations)
        steps, self._before = now - self._before, now
        self._state.after_step(steps)
