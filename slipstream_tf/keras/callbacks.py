"""Callbacks of `model.fit` for ranks, windows, learning rates and elastic training."""

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
    """Logs the learning rates of the tables after each epoch.

    In `fit`, the rates of the tables follow the optimizer of the dense layers with or without this
    callback: they are multiplied by the current dense rate divided by the initial dense rate.
    Without this callback, the initial rate is the rate at the first training step. With it, the
    initial rate is the rate when `fit` is called, before other callbacks change it. Put it before a
    `keras.callbacks.LearningRateScheduler` that changes the rate in the first epoch.
    `slipstream.callback()` does the same.

    Example:

    >>> model = slip.keras.Sequential(
    ...     [slip.keras.Embedding(10, 2), keras.layers.Flatten(), keras.layers.Dense(1, "sigmoid")]
    ... )
    >>> model.compile("adam", "binary_crossentropy")
    >>> rates = slip.keras.LearningRates()
    >>> keys, labels = np.array([[1], [2]]), np.array([0, 1])
    >>> history = model.fit(keys, labels, callbacks=[rates], verbose=0)
    >>> "rows_learning_rate" in history.history
    True
    """

    def __repr__(self) -> str:
        return f"<LearningRates of {_described(self.model)}>"

    def set_model(self, model: Any) -> None:
        """Makes the tables of the model follow its optimizer."""
        super().set_model(model)
        for store in _stores_in(model):
            store.follow(getattr(model, "optimizer", None))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the learning rates of the next update to `logs`, see `rates_of`."""
        for store in _stores_in(self.model):
            if logs is not None:
                logs.update(rates_of(store))


def _described(model: Any) -> str:
    return "no model" if model is None else f"model {model.name!r}"


def rates_of(store: Any) -> dict[str, float]:
    """Returns the learning rates of the tables of a store, for logs.

    Returns:
        `{"rows_learning_rate": rate}` if the tables share a rate, else
        `{"rows_learning_rate/<table>": rate}`. The dictionary is empty if the store does not update
        its rows.
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


class SeesOtherCallbacks(keras.callbacks.Callback):
    """A callback with access to the other callbacks of the same `fit`.

    Keras 3 has no public API for that. The callback list calls `set_params` on each callback with a
    dictionary that belongs to a single `fit`. Therefore the callbacks with the same dictionary
    belong to the same `fit`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lists: list[list[Any]] = []

    def set_params(self, params: dict[str, Any]) -> None:
        """Stores the parameters and the callback lists that set them."""
        super().set_params(params)
        self._lists = _lists_that_call()

    def other_callbacks(self) -> list[Any]:
        """Returns all callbacks of the current or last `fit`, including this one.

        They are in the order of the callback list. The list is empty before the first `fit`.
        """
        members = [member for found in self._lists for member in found]
        found = {
            id(member): member
            for member in members
            if isinstance(member, keras.callbacks.Callback) and member.params is self.params
        }
        return list(found.values())


def _lists_that_call() -> list[list[Any]]:
    """Returns the callback lists on the call stack, outermost first."""
    found: list[list[Any]] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            found.insert(0, owner.callbacks)
        frame = frame.f_back
    return found


class RanksCallback(SeesOtherCallbacks):
    """Synchronizes a Keras model across ranks during `fit`.

    At the start, it broadcasts the floating-point weights of the model and the learning rates of
    the tables from rank 0. A model with `LossFeedback` then scales its loss, so that the averaged
    gradients are correct for batches of different sizes. `Slipstream.callback` includes this
    callback. Use this class for a `fit` without an engine. Every rank must pass the same number of
    batches to `fit`, see `distributed.pad_to_equal_steps`. With one rank, the callback only applies
    the deferred gradients of a `VariableStore` at the end of each epoch and logs the learning rates
    of the tables.

    Put it first in the list of callbacks. At the end of an epoch, later callbacks receive:

    - Metrics over the examples of all ranks, for training and validation, so that EarlyStopping and
      ReduceLROnPlateau decide equally on all ranks. The metric states are summed over the ranks.
      Metrics with a state that is not a sum remain local to each rank, with a warning (see
      `GlobalMetrics`). The logs of batches remain local as well, and so do logs that a custom
      `train_step` creates in addition to `model.metrics`. A rank that does not validate receives
      the validation metrics of the other ranks.
    - Tables without deferred gradients, so that ModelCheckpoint can save them on any rank. The
      validation of an epoch runs before its deferred gradients are applied.

    Embedding rows are not broadcast. The rows of replicated tables are compared at the start, which
    temporarily takes the memory of the largest table. If ranks load rows, they must load the same
    rows, as `distributed.CheckpointManager` does.

    Note: non-trainable state that depends on the batch (BatchNormalization) remains local to each
    rank, and an empty batch corrupts it.

    Example:

    >>> layer = slip.keras.EmbeddingCollection([slip.Table("user", 4), slip.Table("item", 4)])
    >>> model = slip.models.DLRM(layer, dense_features=0, top=[8, 1])
    >>> model.compile("adam", "binary_crossentropy")
    >>> ranks = slip.keras.RanksCallback(slip.distributed.SingleProcess(), layer.store)
    >>> data = tf.data.Dataset.from_tensors(({"keys": [[1, 5], [2, 7]]}, [0, 1]))
    >>> history = model.fit(data, callbacks=[ranks], verbose=0)

    Args:
        comm: The ranks.
        store: The store of the tables. Its rows are compared at the start, and its deferred
            gradients are exchanged at the end of each epoch.

    Raises:
        ValueError: `comm` is None, or `store` is not a store but, for example, a layer.
    """

    def __init__(self, comm: Communicator, store: Any) -> None:
        super().__init__()
        if not isinstance(store, TrackedStore):
            allowed = "a store. Pass `embeddings.store` of the embedding layer, or a VariableStore"
            raise invalid("store", store, type(self).__name__, allowed)
        if comm is None:
            allowed = (
                "a communicator. Pass slipstream_tf.distributed.init(), also in a single process"
            )
            raise invalid("comm", None, type(self).__name__, allowed)
        self._comm = comm
        self._store: Any = store
        self._metrics = GlobalMetrics(comm)
        self._is_training = False

    def __repr__(self) -> str:
        ranks = f"rank {self._comm.rank} of {self._comm.size}"
        return f"<RanksCallback on {ranks} for {self._store!r}>"

    def set_model(self, model: Any) -> None:
        """Makes the tables follow the optimizer before other callbacks change its rate."""
        super().set_model(model)
        self._store.follow(getattr(model, "optimizer", None))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the weights and compares the tables of the ranks.

        In a single process it only checks that the optimizer does not expect multiple ranks.

        Raises:
            ValueError: The optimizer is not a `DistributedOptimizer` of these ranks, or the rows of
                replicated tables or the numbers of updates of sharded tables differ between ranks.
        """
        comm, of_optimizer = self._comm, getattr(self.model.optimizer, "slipstream_comm", None)
        if comm.size == 1:
            if of_optimizer is not None and of_optimizer.size > 1:
                allowed = (
                    f"the communicator of the optimizer, which has {of_optimizer.size} ranks. Pass "
                    "it as `comm` to the embedding layer, or to Slipstream for a VariableStore"
                )
                place = f"{type(self).__name__} with 1 rank"
                raise invalid("comm", type(comm).__name__, place, allowed)
            return
        if of_optimizer is not comm:
            allowed = (
                "slipstream_tf.distributed.DistributedOptimizer(optimizer, comm) with the `comm` "
                "of the tables, because gradients must be averaged over the ranks"
            )
            name = type(self.model.optimizer).__name__
            raise invalid("optimizer", name, f"fit on {comm.size} ranks", allowed)
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
                require_same(comm, updates, "slipstream.updates", "the loaded rows")
        for index, rate in enumerate(self._store.rate_variables):
            name = f"slipstream.rows_learning_rate.{index}"
            rate.assign(comm.broadcast(tf.convert_to_tensor(rate), 0, "control", name))
        if isinstance(self.model, LossFeedback):
            self.model.train_with(comm)
        else:
            logging.warning(
                "%s does not derive from slipstream_tf.keras.LossFeedback. If batch sizes differ "
                "between ranks, examples of small batches have too much weight, and an empty batch "
                "has no valid loss. Derive the model from LossFeedback, or call "
                "slipstream_tf.distributed.scale_loss in its compute_loss.",
                type(self.model).__name__,
            )
        self._metrics.forget()
        self._is_training = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Discards prefetched keys that the previous epoch did not use."""
        self._discard_prefetched()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Saves the training metrics before the validation resets them."""
        if self._is_training and self._comm.size > 1:
            self._metrics.keep_training_state(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the metrics of all ranks and the learning rates to `logs`.

        Then applies and exchanges deferred gradients.
        """
        logs = {} if logs is None else logs
        if self._comm.size > 1:
            self._metrics.put_into(logs, self.model)
        logs.update(rates_of(self._store))
        self._flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Applies deferred gradients, so that all ranks end with the same rows."""
        self._is_training = False
        self._flush()
        self._discard_prefetched()

    def _flush(self) -> None:
        if isinstance(self._store, VariableStore):
            flush_deferred(self._store, self._store.optimizer or self.model.optimizer, self._comm)
        elif self._comm.size > 1:
            self._store.flush()

    def _discard_prefetched(self) -> None:
        if self._store.prefetches:
            self._store.discard_prefetched()


class SaturationCallback(RanksCallback):
    """Counts training steps for an engine and ends its windows.

    `Slipstream.callback` creates it. Put it first in the list of callbacks. Only the steps of
    `model.fit` count. `evaluate` and `predict` do not count. With `steps_per_execution` above 1, a
    window ends with the execution that fills it. This class also does the work of `RanksCallback`.
    In a single process, a `keras.callbacks.BackupAndRestore` in the same `fit` also saves the state
    of the engine.

    Example:

    >>> layer = slip.keras.EmbeddingCollection([slip.Table("user", 4), slip.Table("item", 4)])
    >>> model = slip.models.DLRM(layer, dense_features=0, top=[8, 1])
    >>> model.compile("adam", "binary_crossentropy")
    >>> slipstream = slip.Slipstream(layer, slip.DeferGradients())
    >>> data = tf.data.Dataset.from_tensors(({"keys": [[1, 5], [2, 7]]}, [0, 1]))
    >>> history = model.fit(data, callbacks=[slipstream.callback()], epochs=2, verbose=0)
    >>> slipstream.steps
    2

    Args:
        slipstream: The `Slipstream` that counts the steps.
        log_dir: Folder for TensorBoard events: scalars and a histogram per window, in the subfolder
            "slipstream" (`telemetry.tensorboard.WindowWriter`). None uses the folder of a
            `keras.callbacks.TensorBoard` in the same `fit`, if there is one. Only rank 0 writes.
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

    def __repr__(self) -> str:
        return f"<SaturationCallback of {self.slipstream!r}>"

    def __call__(self, log_dir: str | os.PathLike[str] | None = None) -> "SaturationCallback":
        """Returns a callback of the same engine that writes to `log_dir`.

        Args:
            log_dir: Folder for TensorBoard events, as in the constructor.
        """
        return SaturationCallback(self.slipstream, log_dir)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Marks the data that is read from now on as validation data."""
        self.slipstream.is_validating = True
        super().on_test_begin(logs)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Marks the data that is read from now on as training data."""
        self.slipstream.is_validating = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model and the callbacks and plans the steps.

        Raises:
            ValueError: The engine, the model, the optimizer and the callbacks do not match.
        """
        self.slipstream.is_validating = False
        refuse_scaled_gradients(self.model.optimizer, self.slipstream.settings.policies)
        others = self.other_callbacks()
        if self._fit is self.params:
            names = [type(self).__name__] * 2
            raise invalid("callbacks", names, "fit", "each callback once. Remove the repeated one")
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
            subsamples = self.slipstream.settings.subsamples_in_step
            self.model.subsample_with(self.slipstream.subsample if subsamples else None)

    def _begin_epochs(self) -> None:
        """Plans the number of training steps from the parameters of `fit`."""
        self._steps = self.params.get("steps")
        self._epochs = self.params.get("epochs", 1)
        self._is_planned = self.slipstream.plan.add_epochs(self._epochs, self._steps)
        self._is_first_epoch = True
        steps_are_given = self._steps is not None and self._steps != self.slipstream.max_batches
        self._watch.begin_fit(steps_are_given)

    def _open_writer(self) -> None:
        if self._writer is not None or self._comm.rank:
            return
        folder = self._log_dir
        for other in self.other_callbacks() if folder is None else ():
            if isinstance(other, keras.callbacks.TensorBoard):
                folder = other.log_dir
        if folder is not None:
            self._writer = WindowWriter(folder)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the counters of an epoch and discards unused prefetched keys."""
        self._steps_in_epoch = 0
        self._watch.begin_epoch()
        if self._is_first_epoch and epoch:
            # With `fit(initial_epoch=...)`, an earlier `fit` trained the first epochs.
            self.slipstream.plan.drop_epochs(epoch)
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the optimizer iterations before a multi-step execution."""
        # Read for each batch, because a later BackupAndRestore can change the iterations.
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
        """Counts steps that Keras did not report, then acts as `RanksCallback`.

        With `steps_per_execution` above 1, Keras may not report the end of a shorter last
        execution. Later callbacks receive the metrics of all ranks.
        """
        if self.model.steps_per_execution > 1:
            self._count_iterations()
        self._watch.end_epoch(epoch, self._steps is not None)
        if self._is_first_epoch and not self._is_planned and self._epochs > epoch + 1:
            # A fractional warm-up does not end while the plan is unknown, so that the first epoch
            # skipped no example and its length is the length of the data.
            self.slipstream.plan.add_epochs(self._epochs - epoch, self._steps_in_epoch)
        self._is_first_epoch = False
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the warning filter of `fit`, then acts as `RanksCallback`."""
        self._watch.end_fit()
        if isinstance(self.model, LossFeedback):
            # A later `fit` without this callback must train all examples.
            self.model.subsample_with(None)
        super().on_train_end(logs)

    def _count_iterations(self) -> None:
        # With steps_per_execution above 1, the meaning of `batch` depends on the Keras version.
        iterations = int(self.model.optimizer.iterations.numpy())
        self._step(iterations - self._iterations)
        self._iterations = iterations

    def _step(self, steps: int) -> None:
        self._steps_in_epoch += steps
        report = self.slipstream.step(steps)
        if report is not None and self._writer is not None:
            self._writer.write(report)


class ElasticCallback(keras.callbacks.Callback):
    """Counts the steps of `fit` for an `ElasticState`, which saves checkpoints periodically.

    Put it last in the list of callbacks, so that a checkpoint includes the work of the others.

    Example:

    >>> def train(state):  # Called by slip.distributed.run_elastic(train, directory).
    ...     data = slip.distributed.pad_to_equal_steps(state.remaining(batches), state.comm)
    ...     return model.fit(data, callbacks=[slip.keras.ElasticCallback(state)])

    Args:
        state: The `ElasticState` that `distributed.run_elastic` passes to the training function.
    """

    def __init__(self, state: ElasticState) -> None:
        super().__init__()
        self._state, self._before = state, 0

    def __repr__(self) -> str:
        ranks = f"rank {self._state.comm.rank} of {self._state.comm.size}"
        return f"<ElasticCallback on {ranks} of {_described(self.model)}>"

    def on_train_begin(self, logs: Any = None) -> None:
        """Stores the iterations of the optimizer at the start."""
        self._before = int(self.model.optimizer.iterations.numpy())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the steps of one execution of the train function."""
        now = self._before + 1
        if self.model.steps_per_execution > 1:
            now = int(self.model.optimizer.iterations.numpy())
        steps, self._before = now - self._before, now
        self._state.after_step(steps)
