"""Callbacks of `model.fit`: that ranks train one model, and that the engine's windows end.

In: the ranks, an engine, batch ends. Out: equal weights, and logs of all ranks; window ends.
"""

import os
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf._utils.agreement import gather_json, require_same, require_same_rows
from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.errors import invalid
from slipstream_tf.distributed.exchanged import ExchangedStore, ReplicatedStore
from slipstream_tf.distributed.optimizer import flush_deferred
from slipstream_tf.keras.among_others import AmongOthers
from slipstream_tf.keras.contract import refuse_scaled_gradients
from slipstream_tf.keras.loss_feedback import LossFeedback
from slipstream_tf.keras.misuse import require_fit
from slipstream_tf.keras.rates import rates_of
from slipstream_tf.sampling.passes import EpochWatch
from slipstream_tf.tables.base import TrackedStore
from slipstream_tf.tables.variable import VariableStore
from slipstream_tf.telemetry.tensorboard import WindowWriter

State = list[np.ndarray]


class GlobalMetrics:
    """Puts the metrics of all ranks into an epoch's logs.

    A metric's state is a sum over examples (of losses and weights, of true positives, ...). The
    states of the ranks are summed; what the metrics make of the sums is their value over the
    examples of all.

    Left alone, with a warning, are metrics whose state is no sum: of which Keras itself would not
    sum the variables over replicas (`aggregation` of `add_variable`), or whose variables are no
    numbers, or do not start at 0.
    """

    def __init__(self, comm: Communicator):
        """Takes the ranks."""
        self._comm = comm
        self._trained: State | None = None
        self._has_warned = False

    def keep_training_state(self, model: Any) -> None:
        """Remembers the state after an epoch's last step; Keras evaluates with the same metrics.

        Args:
            model: a Keras model, about to be evaluated in `fit`.
        """
        self._trained = _state_of(model)

    def forget(self) -> None:
        """Drops what a `fit` that broke off has left."""
        self._trained = None

    def put_into(self, logs: dict[str, Any], model: Any) -> None:
        """Replaces this rank's values by those of all ranks; a collective.

        A rank that did not evaluate gets the others' values, too.

        Args:
            logs: of an epoch that has ended; changed in place.
            model: a Keras model; its metrics keep their state.
        """
        now, trained = _state_of(model), self._trained
        self._trained = None
        metrics = list(_metrics_of(model))
        layout = [[m.name, [list(v.shape) for v in m.variables]] for m in metrics]
        gathered = gather_json(self._comm, [trained is not None, layout], "slipstream.metrics")
        if any(other != layout for _, other in gathered):
            self._warn("The ranks' models have different metrics")
            return
        others = [metric for metric in metrics if not _is_sum(metric)]
        if others:
            self._warn(f"The states of the metrics {[m.name for m in others]} are no sums")
        self._replace(logs, "", model, others, now if trained is None else trained)
        if any(has_evaluated for has_evaluated, _ in gathered):
            own = [np.zeros_like(part) for part in now] if trained is None else now
            self._replace(logs, "val_", model, others, own)
        _assign(model, now)

    def _replace(
        self, logs: dict[str, Any], prefix: str, model: Any, others: list[Any], own: State
    ) -> None:
        """Puts in the values of the metrics that are not among `others`."""
        is_sum = [m not in others for m in _metrics_of(model) for _ in m.variables]
        parts = [part for part, sums in zip(own, is_sum, strict=True) if sums]
        flat = np.concatenate([np.zeros(0), *(np.ravel(part) for part in parts)])
        with tf.device("CPU:0"):
            name = f"slipstream.metrics.{prefix or 'train'}"
            total = self._comm.sum(tf.constant(flat, tf.float64), "control", name).numpy()
        pieces = iter(np.split(total, np.cumsum([part.size for part in parts])))
        totals = [
            next(pieces).reshape(part.shape).astype(part.dtype) if sums else part
            for part, sums in zip(own, is_sum, strict=True)
        ]
        _assign(model, totals)
        results = {
            prefix + key: _number(value) for key, value in model.get_metrics_result().items()
        }
        is_absent = not any(key.startswith(prefix) for key in logs)
        # Else a train_step of the model's own made the logs, of what is not known here.
        if is_absent or all(key in logs for key in results):
            alone = {prefix + metric.name for metric in others}
            logs.update({key: value for key, value in results.items() if key not in alone})

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logging.warning(
                "%s: they stay each rank's own in the logs, and callbacks that act on them may act "
                "differently on each rank.",
                reason,
            )


def _metrics_of(model: Any) -> Iterator[Any]:
    """Yields each metric once, those of `compile` one by one."""
    seen = set()
    for metric in model.metrics:
        inner = getattr(metric, "metrics", None)
        for single in inner if isinstance(inner, list) else [metric]:
            if id(single) not in seen:
                seen.add(id(single))
                yield single


def _state_of(model: Any) -> State:
    return [np.array(tf.convert_to_tensor(v)) for m in _metrics_of(model) for v in m.variables]


def _assign(model: Any, state: State) -> None:
    variables = [variable for metric in _metrics_of(model) for variable in metric.variables]
    for variable, value in zip(variables, state, strict=True):
        variable.assign(value)


def _is_sum(metric: Any) -> bool:
    """Whether a metric's state is a sum over examples; resets the metric to see where it starts."""
    metric.reset_state()
    for variable in metric.variables:
        # Old releases of Keras 3 do not say, and sum all.
        if getattr(variable, "aggregation", "sum") != "sum":
            return False
        value = np.array(tf.convert_to_tensor(variable))
        if value.dtype.kind not in "fiu" or value.any():
            return False
    return True


def _number(value: Any) -> Any:
    array = np.asarray(tf.convert_to_tensor(value))
    return array.item() if array.ndim == 0 else array


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
        needs_losses = self.slipstream.needs_losses
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
